"""The corpus: what goes in comes out, copies do not, a kill changes no byte, and each token is read once an epoch."""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertie.data.journal import AlreadyComplete
from bertie.errors import CheckpointError, ConfigError, ExistsError, InputError, NotFoundError
from bertie.text.tokenizer import Tokenizer
from bertie.training.pretrain import cleaning, dedup
from bertie.training.pretrain.cleaning import clean_text, normalize_words
from bertie.training.pretrain.corpus import Corpus, CorpusSettings, build_corpus, documents, read_titles, writing
from bertie.training.pretrain.dedup import Deduplicator, minhash_signature
from bertie.training.pretrain.packing import SPECIAL_TOKENS, PackedCorpus, first_fit

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [a + b for a in "bdgklmnprst" for b in "aeiou"]


def tokenizer_of(words: list[str]) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens([word for word in SPECIALS if word in vocab])
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of([*SPECIALS, ".", ",", *PIECES, *(f"##{piece}" for piece in PIECES)])


def sentence(draw: random.Random, words: int) -> str:
    return " ".join("".join(draw.choices(PIECES, k=draw.randint(1, 4))) for _ in range(words)) + "."


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents of a title and some paragraphs."""
    draw = random.Random(seed)
    return [
        "\n".join([f"Ba {i}", *(sentence(draw, draw.randint(1, 30)) for _ in range(draw.randint(1, 6)))])
        for i in range(count)
    ]


def write_text(path: Path, documents: list[str]) -> str:
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return str(path)


def files(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}


# --- what is stored ---


def test_what_goes_in_comes_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    documents = [*texts(50), "[SEP] ba\n[MASK]ba"]
    made = build_corpus(
        [write_text(tmp_path / "a.txt", documents)], tokenizer, tmp_path / "out", CorpusSettings(shard_tokens=500)
    )
    assert len(made["shards"]) > 3
    found = Corpus.open(tmp_path / "out", tokenizer)
    assert len(found) == len(documents)
    for i, document in enumerate(documents):
        ids: list[int] = []
        starts = []
        for line in document.split("\n"):
            starts.append(len(ids))
            ids += tokenizer.encode(line, special=False).ids.tolist()
        assert found.document(i).tolist() == ids
        assert found.document(i).dtype == np.uint16
        assert found.lines(i).tolist() == starts
        assert found.word_starts(i).tolist() == [not tokenizer.token(one).startswith("##") for one in ids]
    assert found.tokens == made["tokens"] == sum(len(found.document(i)) for i in range(len(found)))
    assert made["lines"] == sum(document.count("\n") + 1 for document in documents)
    assert made["words"] == sum(int(found.word_starts(i).sum()) for i in range(len(found)))
    for i in (-1, len(found)):
        with pytest.raises(InputError, match=f"document {i} does not exist"):
            found.document(i)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    words = [*SPECIALS, *(f"w{i}" for i in range(70_000))]
    large = tokenizer_of(words)
    build_corpus([write_text(tmp_path / "a.txt", ["w3 w69999\nw65536"])], large, tmp_path / "out")
    found = Corpus.open(tmp_path / "out", large).document(0)
    assert found.dtype == np.uint32
    assert found.tolist() == [words.index(word) for word in ("w3", "w69999", "w65536")]


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


# --- cleaning ---


def test_cleaning() -> None:
    raw = "  Cafe\u0301\u00a0 is \x00open \r\n\n * * * \nLine\x0btwo\ufeff"
    assert clean_text(raw, ()) == "  Cafe\u0301\u00a0 is \x00open \r\n * * * \nLine\x0btwo\ufeff"
    assert clean_text(raw, ("spaces", "controls", "nfc")) == "Café is open\n* * *\nLine two"
    assert clean_text(raw, cleaning.CLEANERS) == "Café is open\nLine two"
    with pytest.raises(InputError, match=r"clean=.'html'."):
        clean_text("", ["html"])


@given(st.text())
def test_cleaning_twice_is_cleaning_once(text: str) -> None:
    once = clean_text(text, cleaning.CLEANERS)
    assert clean_text(once, cleaning.CLEANERS) == once


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


# --- copies ---


def runs(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def jaccard(a: set[tuple[str, ...]], b: set[tuple[str, ...]]) -> float:
    return len(a & b) / len(a | b)


def edited(words: list[str], edits: int, draw: random.Random) -> list[str]:
    words = list(words)
    for i in draw.sample(range(len(words)), edits):
        words[i] = f"new{draw.random()}"
    return words


def test_signatures_estimate_jaccard() -> None:
    draw = random.Random(0)
    errors = []
    for edits in (0, 1, 2, 5, 10, 20, 40) * 20:
        a = [f"w{draw.randrange(5000)}" for _ in range(200)]
        b = edited(a, edits, draw)
        true = jaccard(runs(a), runs(b))
        estimate = float((minhash_signature(" ".join(a).encode()) == minhash_signature(" ".join(b).encode())).mean())
        errors.append((estimate - true) / max(np.sqrt(true * (1 - true) / dedup.HASHES), 1e-9))
        if edits == 0:
            assert estimate == 1.0
    spread = np.array(errors)
    assert np.abs(spread).max() < 5
    assert abs(spread.mean()) < 5 / np.sqrt(len(spread))
    assert 0.7 < spread[spread != 0].std() < 1.3


@pytest.mark.parametrize("block", [4, 4096])
def test_near_copies_are_found(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """By comparing each with each. The same are found when all lie in sorted arrays."""
    monkeypatch.setattr(dedup, "BLOCK", block)
    draw = random.Random(1)
    documents: list[list[str]] = []
    for _ in range(120):
        new = [f"w{draw.randrange(3000)}" for _ in range(draw.randint(100, 200))]
        documents += [new, edited(draw.choice(documents or [new]), draw.choice([1, 1, 7, 8, 30]), draw)]
    copies = Deduplicator("near")
    kept: list[int] = []
    sure = 0
    shingles = [runs(words) for words in documents]
    for i, words in enumerate(documents):
        near = {j: jaccard(shingles[i], shingles[j]) for j in kept}
        found = copies.check(" ".join(words), i)
        best = max(near.values(), default=0.0)
        if best > 0.9:
            sure += 1
            assert found is not None
        if best < 0.65:
            assert found is None
        if found is None:
            kept.append(i)
        else:
            assert found.kind == "near"
            assert found.of in kept
            assert found.similarity == pytest.approx(near[found.of], abs=0.15)
    assert sure > 20
    assert len(kept) > 80


def test_exact_copies() -> None:
    said = ["Ba da.", "ba DA", "ba  da!", "da ba", "…", "—", "कि", "का"]
    kinds = [Deduplicator("exact")] * len(said)
    found = [copies.check(normalize_words(text), i) for i, (copies, text) in enumerate(zip(kinds, said, strict=True))]
    assert [one.of if one else None for one in found] == [None, 0, 0, None, None, None, None, None]
    none = Deduplicator("none")
    assert [none.check("ba", i) for i in range(2)] == [None, None]


def test_copies_take_no_more_memory_than_allowed() -> None:
    copies = Deduplicator("near", memory=10 * dedup.NEAR_BYTES)
    for i in range(10):
        assert copies.check(f"document {i}", i) is None
    assert copies.check("document 3", 10) is not None
    with pytest.raises(InputError, match="use exact deduplication"):
        copies.check("one more", 11)


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
    honest, writes = writing.atomic_write, 0

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
    honest = writing.atomic_write
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
    honest = writing.atomic_write

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
    with pytest.raises(InputError, match=r"settings.dedup='exact', and now it is 'none'"):
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
    ("wrong", "said"),
    [
        ({"held_out": 1.0}, "held_out=1.0"),
        ({"dedup": "fuzzy"}, "dedup='fuzzy'"),
        ({"shard_tokens": 0}, "shard_tokens=0"),
        ({"min_words": -1}, "min_words=-1"),
        ({"clean": ("html",)}, "clean="),
    ],
)
def test_wrong_settings(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        CorpusSettings(**wrong)


# --- packing ---


def corpus_of(lengths: list[int], tokenizer: Tokenizer, folder: Path, shard_tokens: int = 100) -> Corpus:
    """Documents of these lengths in tokens, no two alike."""
    draw = random.Random(0)
    documents = []
    for length in lengths:
        words, left = [], length
        while left:
            pieces = min(left, draw.randint(1, 3))
            words.append("".join(draw.choices(PIECES, k=pieces)))
            left -= pieces
        documents.append(" ".join(words))
    with (folder / "a.jsonl").open("w") as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)
    build_corpus(
        [str(folder / "a.jsonl")], tokenizer, folder / "out", CorpusSettings(dedup="none", shard_tokens=shard_tokens)
    )
    return Corpus.open(folder / "out", tokenizer)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=25),
    max_length=st.integers(3, 30),
    more=st.integers(0, 60),
    seed=st.integers(0, 1 << 40),
)
def test_every_token_once(
    tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    max_length: int,
    more: int,
    seed: int,
) -> None:
    of = corpus_of(lengths, tokenizer, tmp_path_factory.mktemp("packed"))
    assert of.lengths.tolist() == lengths
    packed = PackedCorpus(of, max_length + more, max_length, seed)
    end = 0
    for epoch in range(2):
        begin, end = end, end + packed.steps(epoch)
        seen = [np.zeros(length, np.int64) for length in lengths]
        for n in range(begin, end):
            assert packed.locate(n) == (epoch, n - begin)
            pieces = packed.step(n)
            assert pieces
            assert sum(b - a + SPECIAL_TOKENS for _, a, b in pieces) <= packed.budget
            for document, a, b in pieces:
                assert 0 < b - a <= max_length - SPECIAL_TOKENS
                seen[document][a:b] += 1
            check_batch(packed, n)
        assert all((one == 1).all() for one in seen)
    # Any step, asked for first, is the same.
    n = seed % end
    assert PackedCorpus(of, max_length + more, max_length, seed).step(n) == packed.step(n)


def check_batch(packed: PackedCorpus, n: int) -> None:
    """Against one piece after the other."""
    of = packed.corpus
    ids, words = [], []
    lengths = []
    for document, a, b in packed.step(n):
        ids += [of.cls_id, *of.document(document)[a:b].tolist(), of.sep_id]
        starts = of.word_starts(document)[a:b].tolist()
        words += [True, True, *starts[1:], True]
        lengths.append(b - a + SPECIAL_TOKENS)
    flat, cu, special, begin = packed.batch(n)
    assert flat.tolist() == ids
    assert [b - a for a, b in pairwise(cu.tolist())] == lengths
    assert special.tolist() == [one in (of.cls_id, of.sep_id) for one in ids]
    assert begin.tolist() == words


def test_documents_without_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """They are there, that a resumed build may count them, and are never read; a shard may have no other."""
    source = write_text(tmp_path / "a.txt", ["ba", "\ufffd", "da ga", "\ufffd", "\ufffd"])
    made = build_corpus([source], tokenizer, tmp_path / "out", CorpusSettings(shard_tokens=1, dedup="none"))
    assert [shard["tokens"] for shard in made["shards"]] == [1, 2, 0]
    of = Corpus.open(tmp_path / "out")
    assert [len(of.document(i)) for i in range(5)] == [len(of.word_starts(i)) for i in range(5)] == [1, 0, 2, 0, 0]
    assert of.lines(4).tolist() == []
    packed = PackedCorpus(of, 5, 5, 0)
    assert sorted(packed.step(0) + packed.step(1)) == [(0, 0, 1), (2, 0, 2)]
    check_batch(packed, 0)
    build_corpus([write_text(tmp_path / "b.txt", ["\ufffd"])], tokenizer, tmp_path / "none")
    with pytest.raises(InputError, match="holds no tokens"):
        PackedCorpus(Corpus.open(tmp_path / "none"), 5, 5, 0)


def test_spelled_special_tokens_are_special(tokenizer: Tokenizer, tmp_path: Path) -> None:
    build_corpus([write_text(tmp_path / "a.txt", ["ba [SEP] zzz bada"])], tokenizer, tmp_path / "out")
    ids, cu, special, words = PackedCorpus(Corpus.open(tmp_path / "out"), 20, 20, 0).batch(0)
    assert [tokenizer.token(one) for one in ids] == "[CLS] ba [SEP] [UNK] ba ##da [SEP]".split()
    assert special.tolist() == [True, False, True, True, False, False, True]
    assert words.tolist() == [True, True, True, True, True, False, True]
    assert cu.tolist() == [0, 7]


@pytest.mark.parametrize(("budget", "max_length"), [(4096, 128), (4096, 512), (2048, 1024)])
def test_steps_are_full(budget: int, max_length: int) -> None:
    """Documents as long as those of an encyclopedia, and short ones, cut to the max_length."""
    rng = np.random.default_rng(0)
    whole = np.concatenate([rng.lognormal(7, 1, 400), rng.lognormal(4, 1, 400)]).astype(np.int64) + 1
    room = max_length - SPECIAL_TOKENS
    sizes = [size for n in whole.tolist() for size in [room] * (n // room) + [n % room] if size]
    pieces = rng.permutation(np.array(sizes, np.int32)) + SPECIAL_TOKENS
    order, cuts = first_fit(pieces, budget)
    assert sorted(order.tolist()) == list(range(len(pieces)))
    steps = np.add.reduceat(pieces[order], cuts[:-1])
    assert steps.max() <= budget
    assert steps[:-1].mean() > 0.99 * budget


@given(st.lists(st.integers(3, 40), min_size=1, max_size=60), st.integers(40, 90))
def test_first_fit(sizes: list[int], budget: int) -> None:
    """As the textbook has it: each goes to the first bin that has room."""
    bins: list[list[int]] = []
    for i, size in enumerate(sizes):
        for one in bins:
            if sum(sizes[j] for j in one) + size <= budget:
                one.append(i)
                break
        else:
            bins.append([i])
    order, cuts = first_fit(np.array(sizes, np.int32), budget)
    assert [order[a:b].tolist() for a, b in pairwise(cuts.tolist())] == bins


def test_seeds_and_epochs_give_other_orders(tokenizer: Tokenizer, tmp_path: Path) -> None:
    of = corpus_of([9] * 60, tokenizer, tmp_path, shard_tokens=1 << 20)
    one, other = (PackedCorpus(of, 44, 11, seed) for seed in (1, 2))
    assert one.steps() == 15
    assert one.utilization() == 1.0
    orders = [[packed.step(n) for n in range(a, a + 15)] for packed in (one, other) for a in (0, 15)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert orders[0] == [PackedCorpus(of, 44, 11, 1).step(n) for n in range(15)]


def test_wrong_packing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    of = corpus_of([5], tokenizer, tmp_path)
    with pytest.raises(InputError, match="max_length=2"):
        PackedCorpus(of, 10, 2, 0)
    with pytest.raises(InputError, match="budget=10"):
        PackedCorpus(of, 10, 11, 0)
    with pytest.raises(InputError, match="step -1"):
        PackedCorpus(of, 11, 11, 0).step(-1)
    bare = tokenizer_of(["[UNK]", "ba"])
    build_corpus([write_text(tmp_path / "b.txt", ["ba"])], bare, tmp_path / "bare")
    with pytest.raises(ConfigError, match="no \[CLS\] or \[SEP\] token"):
        PackedCorpus(Corpus.open(tmp_path / "bare"), 10, 10, 0)
