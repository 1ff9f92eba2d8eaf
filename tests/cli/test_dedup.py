"""`bertie dedup`."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path

import pytest

import bertie
from bertie.cli import main

TEXTS = ["the cat sat on the mat", "a dog ran", "The cat sat, on the mat!", "find a cat", "a DOG ran"]


def write(name: str) -> None:
    rows = [{"id": i, "body": text} for i, text in enumerate(TEXTS)]
    if name.endswith(".parquet"):
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), name)
    elif name.endswith(".jsonl"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name.endswith(".txt"):
        Path(name).write_text("\n".join(TEXTS) + "\n")
    else:
        with open(name, "w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if name.endswith(".tsv") else ",")
            writer.writerows([("id", "body"), *((row["id"], row["body"]) for row in rows)])


def rows(name: str) -> list[str]:
    from bertie.data.readers import open_table

    table = open_table(name)
    assert table.columns == (("text",) if ".txt" in name else ("id", "body"))
    return [" ".join(str(value) for value in row.values()) for row in table.rows(table.columns)]


@pytest.mark.parametrize("suffix", ["txt", "csv", "tsv", "jsonl", "parquet"])
def test_kept_rows_are_in_the_format_of_the_input(here: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(f"in.{suffix}")
    assert main(["dedup", f"in.{suffix}", "-o", f"out.{suffix}", "--json"]) == 0
    everything = rows(f"in.{suffix}")
    assert rows(f"out.{suffix}") == [everything[i] for i in (0, 1, 3)]
    summary = json.loads(capsys.readouterr().out)
    assert summary == {
        "output": f"out.{suffix}",
        "duplicates": "out.duplicates.jsonl",
        "texts": 5,
        "kept": 3,
        "groups": 2,
    }
    groups = [json.loads(line) for line in Path("out.duplicates.jsonl").read_text().splitlines()]
    assert groups[0] == {
        "kept": 1,
        "text": TEXTS[0],
        "duplicates": [{"row": 3, "of": 1, "kind": "exact", "similarity": 1.0, "text": TEXTS[2]}],
    }


def test_semantic_is_that_of_python(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("in.jsonl")
    argv = ["dedup", "in.jsonl", "--method", "semantic", "--threshold", "0.5", "-m", models["embed"]]
    assert main([*argv, "--json"]) == 0
    groups = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = bertie.deduplicate(TEXTS, "semantic", threshold=0.5, embedder=bertie.Embedder(models["embed"]))
    assert [[item["row"] - 1 for item in group["duplicates"]] for group in groups] == [
        [item.index for item in group.duplicates] for group in expected.groups
    ]
    assert main([*argv, "-o", "out.jsonl"]) == 0
    assert len(rows("out.jsonl")) == len(expected.kept)
    assert sorted(path.name for path in here.iterdir()) == ["in.jsonl", "out.duplicates.jsonl", "out.jsonl"]


def test_embeddings_of_an_interrupted_run_are_used(
    models: dict[str, str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bertie.tasks import deduplicate

    write("in.jsonl")
    argv = ["dedup", "in.jsonl", "--method", "semantic", "-m", models["embed"], "-o", "out.jsonl"]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(deduplicate, "semantic_duplicates", interrupt)
        assert main(argv) == 130
    assert Path("out.jsonl.embeddings.npy.part").exists()
    assert main(argv) == 1
    assert "pass --resume" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(bertie.Embedder, "embed_each", lambda self, texts: iter(()))  # nothing is left to embed
        assert main([*argv, "--resume", "--threshold", "0.8"]) == 0
    assert not list(here.glob("*.part*"))
    assert main([*argv, "--resume"]) == 0
    assert "nothing to resume" in capsys.readouterr().err


def test_standard_input_and_texts(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = gzip.compress("\n".join(TEXTS).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["dedup", "-", "--method", "exact", "-o", "out.txt.gz", "--keep", "longest"]) == 0
    assert rows("out.txt.gz") == [TEXTS[1], TEXTS[2], TEXTS[3]]
    capsys.readouterr()
    assert main(["dedup", *TEXTS]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [tuple(line.split()[:2]) for line in out[1:]] == [
        ("1", "kept"),
        ("3", "exact"),
        ("2", "kept"),
        ("5", "exact"),
    ]


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["-o", "out.csv"], 1, "out.csv holds rows of the input, and must end in .jsonl or .ndjson"),
        (["-o", "none/out.jsonl"], 1, "there is no folder none"),
        (["-o", "in.jsonl"], 2, "in.jsonl is the input"),
        (["--threshold", "0.2"], 1, "must lie between 0.5 and 1"),
        (["--resume"], 2, "--resume needs --method semantic"),
        (["--memory", "0"], 2, "--memory 0"),
        (["--column", "text"], 1, "has no column 'text'"),
    ],
)
def test_errors(here: Path, argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    write("in.jsonl")
    assert main(["dedup", "in.jsonl", *argv]) == status
    assert message in capsys.readouterr().err


def test_outputs_are_not_replaced_unasked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("in.txt")
    Path("out.duplicates.jsonl").write_text("mine")
    assert main(["dedup", "in.txt", "-o", "out.txt"]) == 1
    assert "out.duplicates.jsonl already exists" in capsys.readouterr().err
    assert main(["dedup", "in.txt", "-o", "out.txt", "--overwrite"]) == 0


def test_compressed_parquet_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("in.parquet")
    Path("in.parquet.gz").write_bytes(gzip.compress(Path("in.parquet").read_bytes()))
    assert main(["dedup", "in.parquet.gz", "-o", "out.parquet"]) == 1
    assert "decompress the file first" in capsys.readouterr().err
    assert not list(here.glob("*out*"))
