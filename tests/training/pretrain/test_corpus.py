"""Corpora: building, filtering, resuming and reading them."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.data.journal import AlreadyComplete
from bertie.errors import CheckpointError, ConfigError, ExistsError, InputError, NotFoundError
from bertie.text.tokenizer import Tokenizer
from bertie.training.pretrain.corpus import Corpus, CorpusSettings, build_corpus, documents, read_titles, writing
from tests.training.pretrain.corpus_texts import SPECIALS, files, sentence, texts, tokenizer_of, write_text


def test_what_goes_in_comes_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    documents = [*texts(50), "[SEP] ba\n[MASK]ba"]
    made = build_corpus(
        [write_text(tmp_path / "a.txt", documents)], tokenizer, tmp_path / "out", CorpusSettings(shard_tokens=500)
    )
    assert len(made["shards"]) > 3
    result = Corpus.open(tmp_path / "out", tokenizer)
    assert len(result) == len(documents)
    for i, document in enumerate(documents):
        ids: list[int] = []
        starts = []
        for line in document.split("\n"):
            starts.append(len(ids))
            ids += tokenizer.encode(line, special=False).ids.tolist()
        assert result.document(i).tolist() == ids
        assert result.document(i).dtype == np.uint16
        assert result.lines(i).tolist() == starts
        assert result.word_starts(i).tolist() == [not tokenizer.token(one).startswith("##") for one in ids]
    assert result.tokens == made["tokens"] == sum(len(result.document(i)) for i in range(len(result)))
    assert made["lines"] == sum(document.count("\n") + 1 for document in documents)
    assert made["words"] == sum(int(result.word_starts(i).sum()) for i in range(len(result)))
    for i in (-1, len(result)):
        with pytest.raises(InputError, match=f"document {i} does not exist"):
            result.document(i)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    words = [*SPECIALS, *(f"w{i}" for i in range(70_000))]
    large = tokenizer_of(words)
    build_corpus([write_text(tmp_path / "a.txt", ["w3 w69999\nw65536"])], large, tmp_path / "out")
    result = Corpus.open(tmp_path / "out", large).document(0)
    assert result.dtype == np.uint32
    assert result.tolist() == [words.index(word) for word in ("w3", "w69999", "w65536")]


@pytest.mark.parametrize("kind", ["txt", "txt.zst", "jsonl", "jsonl.gz", "csv", "parquet", "folder", "several"])
def test_every_source(tokenizer: Tokenizer, tmp_path: Path, kind: str) -> None:
    documents = texts(20)
    want = tmp_path / "want"
    build_corpus([write_text(tmp_path / "plain.txt", documents)], tokenizer, want)
    sources = write_sources(tmp_path, documents, kind)
    build_corpus(sources, tokenizer, tmp_path / "out")
    for name in ("shard-00000.bin", "shard-00000.idx"):
        assert (tmp_path / "out" / name).read_bytes() == (want / name).read_bytes()


def write_sources(tmp_path: Path, documents: list[str], kind: str) -> list[str]:
    path = tmp_path / f"source.{kind}"
    rows = [{"id": i, "text": document} for i, document in enumerate(documents)]
    if kind == "txt":
        # However many blank lines there are, and whatever ends a line.
        path.write_bytes(("\n\n" + "\n \n\n".join(documents)).replace("\n", "\r\n").encode())
    elif kind == "txt.zst":
        zstandard = pytest.importorskip("zstandard")
        write_text(tmp_path / "x", documents)
        # A window of 256 MiB, as `zstd --overflow=28` makes it, which a reader must allow.
        how = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
        maker = zstandard.ZstdCompressor(compression_params=how).compressobj()
        path.write_bytes(maker.compress((tmp_path / "x").read_bytes()) + maker.flush())
    elif kind.startswith("jsonl"):
        import gzip

        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "text"])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        pandas = pytest.importorskip("pandas")
        pandas.DataFrame(rows).to_parquet(path)
    else:
        path.mkdir()
        (path / "b").mkdir()
        (path / ".hidden").mkdir()
        write_text(path / ".hidden" / "no.txt", ["ba"])
        write_text(path / "notes.md", ["ba"])
        parts = [write_text(path / "a.txt", documents[:7]), write_text(path / "b" / "c.txt", documents[7:])]
        return [str(path)] if kind == "folder" else parts
    return [str(path)]


def test_columns(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"title": "x", "body": "ba"}\n')
    with pytest.raises(InputError, match="no column 'text'"):
        build_corpus([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "out")
    made = build_corpus([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "other", CorpusSettings(column="body"))
    assert made["tokens"] == 1


def test_folder_without_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty holds no .txt"):
        build_corpus([str(tmp_path / "empty")], tokenizer, tmp_path / "out")


def test_a_document_without_end_goes_on_as_the_next(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_CHARACTERS", 10)
    made = build_corpus([write_text(tmp_path / "a.txt", ["ba da ga\nka la ma\nna pa"])], tokenizer, tmp_path / "out")
    assert (made["documents"], made["tokens"]) == (2, 8)


def test_short_documents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write_text(tmp_path / "a.txt", ["ba", "ba da", "badagakalama", "ba da ga ka la"])
    made = build_corpus([source], tokenizer, tmp_path / "out", CorpusSettings(min_characters=5, min_words=2))
    assert made["counts"]["short"] == 2
    assert made["documents"] == 2
    with pytest.raises(InputError, match="nothing is left of 4 documents"):
        build_corpus([source], tokenizer, tmp_path / "none", CorpusSettings(min_words=9))
    assert not (tmp_path / "none").exists()  # an error before the first shard leaves nothing behind


def test_half_characters(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ba"}\n{"text": "ba \\ud83d da"}\n')
    with pytest.raises(InputError, match=r"a.jsonl, row 2: a lone UTF-16 surrogate"):
        build_corpus([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "out", CorpusSettings(clean=()))
    assert build_corpus([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "good")["tokens"] == 3


def test_titles(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As WikiText spells them."""
    listed = tmp_path / "titles.tsv"
    listed.write_text("split\ttitle\ntest\tBa da ( 1999 ga )\nvalid\tKa , la\ntest\tBa 's\n")
    titles = read_titles(str(listed))
    assert titles == ["Ba da ( 1999 ga )", "Ka , la", "Ba 's"]
    listed.with_suffix(".txt").write_text("\n".join(titles) + "\n")
    assert read_titles(str(listed.with_suffix(".txt"))) == titles
    source = write_text(
        tmp_path / "a.txt", ["Ba da (1999 ga)\nmi", "Ba da\nmi", "Ka, la\nmi", "Mi\nKa, la", "Ba's\nla"]
    )
    counts = build_corpus([source], tokenizer, tmp_path / "out", exclude=titles)["counts"]
    assert (counts["excluded"], counts["kept"]) == (3, 2)
    assert counts["excluded_titles"] == ["Ba da (1999 ga)", "Ka, la", "Ba's"]


def test_copies_are_reported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    documents = texts(30)
    long = sentence(random.Random(3), 100)
    source = write_text(tmp_path / "a.txt", [*documents, documents[4].upper(), long, long + " ba"])
    counts = build_corpus([source], tokenizer, tmp_path / "out", CorpusSettings(dedup="near"))["counts"]
    assert (counts["read"], counts["exact_duplicates"], counts["near_duplicates"], counts["kept"]) == (33, 1, 1, 31)
    exact, near = counts["examples"]
    assert (exact["document"], exact["of"], exact["title"]) == (31, 5, "BA 4")
    assert (near["document"], near["of"], near["kind"]) == (33, 32, "near")
    assert build_corpus([source], tokenizer, tmp_path / "all", CorpusSettings(dedup="none"))["documents"] == 33


# --- held out ---


def test_held_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    documents = texts(400)
    source = write_text(tmp_path / "a.txt", documents * 2)
    share = CorpusSettings(held_out=0.2, dedup="none", seed=3)
    made = build_corpus([source], tokenizer, tmp_path / "out", share)
    kept, held = Corpus.open(tmp_path / "out"), Corpus.open(tmp_path / "out" / "heldout", tokenizer)
    sides = [{tuple(one.document(i).tolist()) for i in range(len(one))} for one in (kept, held)]
    assert not sides[0] & sides[1]  # a text that is there twice is on one side
    assert len(kept) + len(held) == 800
    assert len(held) == made["counts"]["held_out"]
    assert abs(len(held) / 800 - 0.2) < 4 * np.sqrt(0.2 * 0.8 / 400)
    other = build_corpus([source], tokenizer, tmp_path / "other", CorpusSettings(held_out=0.2, dedup="none", seed=4))
    assert other["shards"] != made["shards"]


# --- killed and gone on with ---


class Killed(BaseException):
    pass


def test_killed_at_any_write(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "TOKENIZE_BLOCK", 700)
    source = write_text(tmp_path / "a.txt", [*texts(40), *texts(5)])
    how = CorpusSettings(held_out=0.2, dedup="near", shard_tokens=1200)
    whole = build_corpus([source], tokenizer, tmp_path / "whole", how)
    assert len(whole["shards"]) > 2
    want = files(tmp_path / "whole")
    assert "heldout/corpus.json" in want
    honest, writes = writing.atomic_write, 0  # type: ignore[attr-defined]

    def dying(path: Path, content: bytes) -> None:
        nonlocal writes
        writes -= 1
        if writes == 0:
            path.with_name(f".{path.name}.draft").write_bytes(content[: len(content) // 2])
            raise Killed
        honest(path, content)

    monkeypatch.setattr(writing, "atomic_write", dying)
    for at in range(2, 100):
        writes, out = at, tmp_path / f"at{at}"
        try:
            build_corpus([source], tokenizer, out, how)
        except Killed:
            writes = -1
            with pytest.raises(NotFoundError, match=r"--resume|make it"):
                Corpus.open(out)
            assert build_corpus([source], tokenizer, out, how, resume=True) == whole
            assert files(out) == want
        else:
            break
    assert at > 10


def test_killed_again_and_again(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run makes one more shard, and no shard is made twice."""
    source = write_text(tmp_path / "a.txt", texts(40))
    how = CorpusSettings(shard_tokens=400)
    build_corpus([source], tokenizer, tmp_path / "whole", how)
    honest = writing.atomic_write  # type: ignore[attr-defined]
    made: Counter[str] = Counter()

    def dying(path: Path, content: bytes) -> None:
        honest(path, content)
        made[path.name] += 1
        if path.name == "build.json" and sum(made.values()) % 4 == 0:  # after a shard's two files
            raise Killed

    monkeypatch.setattr(writing, "atomic_write", dying)
    runs = 0
    while not (tmp_path / "out" / "corpus.json").exists():
        runs += 1
        try:
            build_corpus([source], tokenizer, tmp_path / "out", how, resume=True)
        except Killed:
            continue
    assert runs > 4
    assert {count for name, count in made.items() if name.startswith("shard")} == {1}
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.fixture
def stopped(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A source, and a folder with some of its shards."""
    monkeypatch.setattr(writing, "TOKENIZE_BLOCK", 700)
    source = write_text(tmp_path / "a.txt", texts(40))
    honest = writing.atomic_write  # type: ignore[attr-defined]

    def dying(path: Path, content: bytes) -> None:
        if path.name == "shard-00003.bin":
            raise KeyboardInterrupt
        honest(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "atomic_write", dying)
        with pytest.raises(KeyboardInterrupt) as caught:
            build_corpus([source], tokenizer, tmp_path / "out", CorpusSettings(shard_tokens=400))
    assert "3 shards are saved" in caught.value.__notes__[0]
    return source, tmp_path / "out"


def test_other_settings_do_not_go_on(tokenizer: Tokenizer, stopped: tuple[str, Path]) -> None:
    source, out = stopped
    with pytest.raises(ExistsError, match="pass --resume"):
        build_corpus([source], tokenizer, out, CorpusSettings(shard_tokens=400))
    with pytest.raises(InputError, match=r"settings.dedup='exact', and now settings.dedup='none'"):
        build_corpus([source], tokenizer, out, CorpusSettings(shard_tokens=400, dedup="none"), resume=True)
    with pytest.raises(InputError, match=r"tokenizer.fingerprint="):
        build_corpus([source], tokenizer_of([*SPECIALS, "ba"]), out, CorpusSettings(shard_tokens=400), resume=True)
    with pytest.raises(InputError, match="titles="):
        build_corpus([source], tokenizer, out, CorpusSettings(shard_tokens=400), exclude=["Ba 3"], resume=True)


def test_changed_sources_do_not_go_on(tokenizer: Tokenizer, stopped: tuple[str, Path]) -> None:
    source, out = stopped
    text = Path(source).read_text()
    Path(source).write_text(text + "\nba\n")
    with pytest.raises(InputError, match="sources="):
        build_corpus([source], tokenizer, out, CorpusSettings(shard_tokens=400), resume=True)
    first = text.split("\n")[1]
    Path(source).write_text(text.replace(first, first[::-1], 1))  # of the same size
    with pytest.raises(InputError, match="the sources differ from those"):
        build_corpus([source], tokenizer, out, CorpusSettings(shard_tokens=400), resume=True)


def test_a_shard_that_was_lost_is_made_again(tokenizer: Tokenizer, stopped: tuple[str, Path], tmp_path: Path) -> None:
    source, out = stopped
    lost = out / "shard-00001.bin"
    lost.write_bytes(lost.read_bytes()[:-2])
    build_corpus([source], tokenizer, out, CorpusSettings(shard_tokens=400), resume=True)
    build_corpus([source], tokenizer, tmp_path / "whole", CorpusSettings(shard_tokens=400))
    assert files(out) == files(tmp_path / "whole")
    with pytest.raises(AlreadyComplete, match="nothing to resume"):
        build_corpus([source], tokenizer, out, CorpusSettings(shard_tokens=400), resume=True)
    with pytest.raises(ExistsError, match="holds a corpus already"):
        build_corpus([source], tokenizer, out, CorpusSettings(shard_tokens=400))


def test_a_folder_of_something_else(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write_text(tmp_path / "a.txt", texts(2))
    with pytest.raises(ExistsError, match="is not a corpus"):
        build_corpus([source], tokenizer, tmp_path, resume=True)


def test_broken_corpora(tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(NotFoundError, match="bertie corpus"):
        Corpus.open(out)
    build_corpus([write_text(tmp_path / "a.txt", texts(5))], tokenizer, out)
    with pytest.raises(ConfigError, match="another tokenizer"):
        Corpus.open(out, tokenizer_of([*SPECIALS, "ba"]))
    index = out / "shard-00000.idx"
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"shard-00000.idx has"):
        Corpus.open(out)
    index.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        Corpus.open(out)
    about = json.loads((out / "corpus.json").read_text())
    (out / "corpus.json").write_text(json.dumps(about | {"format": 2}))
    with pytest.raises(CheckpointError, match="format=2"):
        Corpus.open(out)
    (out / "corpus.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        Corpus.open(out)


@pytest.mark.parametrize(
    ("wrong", "output"),
    [
        ({"held_out": 1.0}, "held_out=1.0"),
        ({"dedup": "fuzzy"}, "dedup='fuzzy'"),
        ({"shard_tokens": 0}, "shard_tokens=0"),
        ({"min_words": -1}, "min_words=-1"),
        ({"clean": ("html",)}, "clean="),
    ],
)
def test_wrong_settings(wrong: dict[str, Any], output: str) -> None:
    with pytest.raises(InputError, match=output):
        CorpusSettings(**wrong)


def test_two_builds_of_the_same_corpus(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is started while the first one writes a shard, and refused."""
    source, settings = write_text(tmp_path / "a.txt", texts(40)), CorpusSettings(shard_tokens=400)
    whole = build_corpus([source], tokenizer, tmp_path / "whole", settings)
    write, refused = writing.BuildJournal.write, []

    def write_and_start_another(journal: writing.BuildJournal) -> None:
        write(journal)
        if len(refused) < 2 and any(journal.shards.values()):
            refused.append(len(refused))
            with pytest.raises(InputError, match="out is being written by another process"):
                build_corpus([source], tokenizer, tmp_path / "out", settings, resume=len(refused) == 1)

    monkeypatch.setattr(writing.BuildJournal, "write", write_and_start_another)
    assert build_corpus([source], tokenizer, tmp_path / "out", settings) == whole
    assert len(refused) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out", "whole"]
