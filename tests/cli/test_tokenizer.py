"""`bertie tokenizer`: the same tokenizer from every kind of corpus, and errors that say what to do."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from bertie.cli import main
from bertie.text.tokenizer import Tokenizer
from bertie.text.tokenizer_training import train

TEXTS = ["the cat sat on the mat", "a cat and a dog", "  ", "dogs sat, cats ran"] * 3


@pytest.fixture(autouse=True)
def _here(here: Path) -> None:
    """Every test works in an empty folder."""


def write_corpus(name: str, column: str = "text", texts: list[str] = TEXTS) -> None:
    """Write a corpus."""
    rows = [{"n": i, column: text} for i, text in enumerate(texts)]
    data = "".join(f"{text}\n" for text in texts).encode()
    if ".jsonl" in name:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if ".csv" in name:
        data = (f"n,{column}\n" + "".join(f'{row["n"]},"{row[column]}"\n' for row in rows)).encode()
    if ".parquet" in name:
        table = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(rows), table)
        data = table.getvalue()
    if name.endswith(".gz"):
        data = gzip.compress(data)
    if name.endswith(".zst"):  # as `zstd --long=31` writes it
        options = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)
        frame = zstandard.ZstdCompressor(compression_params=options).compressobj()  # that knows no length beforehand
        data = frame.compress(data) + frame.flush()
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(data)


def train_files(*arguments: str) -> dict[str, bytes]:
    """Run bertie tokenizer train; return the files of the tokenizer."""
    assert main(["tokenizer", "train", *arguments, "-o", "out", "--overwrite", "--vocab-size", "60"]) == 0
    return {file.name: file.read_bytes() for file in Path("out").iterdir()}


EXPECTED = train(TEXTS, vocab_size=60).files()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl", "a.csv", "a.parquet", "a.parquet.gz"])
def test_formats(name: str) -> None:
    write_corpus(name)
    assert train_files(name) == EXPECTED


def test_columns_and_formats_by_name() -> None:
    write_corpus("a.csv", "body")
    assert train_files("a.csv") == EXPECTED  # the only one with texts
    write_corpus("b.jsonl", "body")
    assert train_files("b.jsonl", "--column", "body") == EXPECTED
    Path("b.jsonl").rename("wiki_00")
    assert train_files("wiki_00", "--column", "body", "--format", "jsonl") == EXPECTED


def test_several_files_and_folders() -> None:
    write_corpus("one/a.txt", texts=TEXTS[:4])
    write_corpus("one/deep/b.jsonl.gz", texts=TEXTS[4:7])
    write_corpus("c.csv", texts=TEXTS[7:])
    Path("one/README.md").write_text("no corpus")
    Path("one/.hidden.txt").write_text("no corpus")
    assert train_files("one", "c.csv") == EXPECTED
    Path("two").mkdir()
    Path("two/wiki_00").write_text("\n".join(TEXTS))
    assert train_files("two", "--format", "text") == EXPECTED


def test_standard_input() -> None:
    command = [sys.executable, "-m", "bertie", "tokenizer", "train", "-", "-o", "out", "--vocab-size", "60"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(command, input="\n".join(TEXTS).encode(), env=environment, check=True)
    assert Path("out/tokenizer.json").read_bytes() == EXPECTED["tokenizer.json"]


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus("a.txt")
    flags = "--kind bpe --style angles --lowercase --min-frequency 3 --special-token <x> --special-token <y>".split()
    flags += ["--max-length", "99"]
    assert main(["tokenizer", "train", "a.txt", "-o", "out", "--vocab-size", "290", "--json", *flags]) == 0
    options: dict[str, Any] = {"style": "angles", "lowercase": True, "min_frequency": 3, "max_length": 99}
    expected = train(TEXTS, "bpe", 290, special_tokens=["<x>", "<y>"], **options)
    assert {file.name: file.read_bytes() for file in Path("out").iterdir()} == expected.files()
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"output": "out", "kind": "BPE", "vocab_size": expected.vocab_size, "texts": 9, "characters": 165}
    assert (
        train_files("a.txt", "--cased", "--limit-alphabet", "9")
        == train(TEXTS, vocab_size=60, lowercase=False, limit_alphabet=9).files()
    )
    assert train_files("a.txt", "--kind", "unigram") == train(TEXTS, "unigram", 60).files()


@pytest.mark.parametrize("limit", [1, 22, 30, 10_000])
def test_limit(limit: int, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus("a.txt")
    texts, left = [], limit
    for text in TEXTS:
        if text.strip() and left:
            texts.append(text[:left])
            left -= len(texts[-1])
    assert (
        train_files("a.txt", "--limit-chars", str(limit), "--min-frequency", "1", "--json")
        == train(texts, vocab_size=60, min_frequency=1).files()
    )
    facts = json.loads(capsys.readouterr().out)
    assert (facts["characters"], facts["texts"]) == (limit - left, len(texts))


def test_too_little_text(capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus("a.txt")
    assert main(["tokenizer", "train", "a.txt", "-o", "out"]) == 0
    out, err = capsys.readouterr()
    size = Tokenizer.from_folder("out").vocab_size
    assert f"the corpus yields only {size} of 30,000 tokens" in err
    assert out == f"out: WordPiece, {size} tokens, from 9 texts with 165 characters\n"


def test_existing_output_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus("a.txt")
    before = train_files("a.txt")
    assert main(["tokenizer", "train", "nowhere.txt", "-o", "out"]) == 1
    assert "out already exists" in capsys.readouterr().err  # before the corpus is read
    assert {file.name: file.read_bytes() for file in Path("out").iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["a.txt"], 2, "-o/--output"),
        (["nowhere.txt", "-o", "out"], 1, "there is no file or folder nowhere.txt"),
        (["empty", "-o", "out"], 1, "the folder empty contains no file with a known suffix"),
        (["a.txt", "--vocab-size", "10", "-o", "out"], 1, "vocab_size leaves room for 10 tokens"),
        (["a.txt", "--vocab-size", "many", "-o", "out"], 2, "--vocab-size"),
        (["a.txt", "--limit-chars", "0", "-o", "out"], 2, "--limit-chars 0 must be at least 1"),
        (["-", "-", "-o", "out"], 2, "only once"),
        (["a.txt", "--column", "body", "-o", "out"], 1, "no column 'body'"),
        (["a.txt", "--lowercase", "--cased", "-o", "out"], 2, "not allowed with"),
    ],
)
def test_errors(arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus("a.txt")
    Path("empty").mkdir()
    try:
        code = main(["tokenizer", "train", *arguments])
    except SystemExit as end:
        code = end.code
    assert code == status
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not Path("out").exists()


def test_extend(capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus("a.txt")
    train_files("a.txt")
    capsys.readouterr()
    Path("new.txt").write_text("tachycardia\n" * 5 + "rare\n")
    assert main(["tokenizer", "extend", "out", "new.txt", "-o", "longer", "--json"]) == 0
    old, new = Tokenizer.from_folder("out"), Tokenizer.from_folder("longer")
    assert new.id("tachycardia") == old.vocab_size == new.vocab_size - 1
    assert json.loads(capsys.readouterr().out)["added"] == 1
    assert (
        main(["tokenizer", "extend", "out", "new.txt", "-o", "more", "--min-frequency", "1", "--new-tokens", "7"]) == 0
    )
    assert "2 of them new" in capsys.readouterr().out


def test_symbolic_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus("in/a.txt")
    write_corpus("outside/b.txt")
    Path("in/link").symlink_to(Path("outside").resolve())
    argv = ["tokenizer", "train", "in", "--vocab-size", "60", "--json"]
    assert main([*argv, "-o", "without"]) == 0
    printed = capsys.readouterr()
    assert "skipped in/link: it is a symbolic link" in printed.err
    assert main([*argv, "-o", "with", "--follow-symlinks"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == 2 * json.loads(printed.out)["texts"]
