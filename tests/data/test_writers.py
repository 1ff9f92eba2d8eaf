"""Every format out, read back by its usual reader; a part that is whole or not there."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from pyarrow import parquet

from bertie.data import journal
from bertie.data.journal import AlreadyComplete, ResumableFile
from bertie.data.progress import Progress
from bertie.data.writers import JsonlWriter, Schema, TableWriter, check_output_name, make_writer
from bertie.errors import ExistsError, InputError

SCHEMA: Schema = {
    "row": int,
    "id": str,
    "label": str,
    "score": float,
    "vector": [np.float32],
    "spans": [{"start": int, "text": str}],
}
RECORDS: list[dict[str, Any]] = [
    {
        "row": i,
        "id": None if i == 2 else f"n{i}",
        "label": 'ü "x",\ny\t😀',
        "score": i / 3,
        "vector": np.arange(4, dtype=np.float32) / 7 + i,
        "spans": [{"start": s, "text": "z"} for s in range(i)],
    }
    for i in range(5)
]
ASKED = {"model": "m", "input": "x"}


def written(folder: Path, name: str) -> Path:
    writer = make_writer(name, SCHEMA, 4)
    with ResumableFile(folder / name, ASKED, resume=False, overwrite=False) as part:
        part.start(writer)
        part.append(writer.encode(RECORDS[:2]), 2)
        part.append(writer.encode(RECORDS[2:]), 3)
        assert not (folder / name).exists()
        part.finish()
    assert [file.name for file in folder.iterdir()] == [name]
    return folder / name


def unpacked(file: Path) -> str:
    data = file.read_bytes()
    if file.suffix == ".gz":
        return gzip.decompress(data).decode()
    if file.suffix == ".xz":
        return lzma.decompress(data).decode()
    if file.suffix == ".zst":
        return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read().decode()
    return data.decode()


def plain(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"vector": record["vector"].tolist()}


@pytest.mark.parametrize("packed", ["", ".gz", ".xz", ".zst"])
def test_jsonl(tmp_path: Path, packed: str) -> None:
    text = unpacked(written(tmp_path, f"out.jsonl{packed}"))
    assert [json.loads(line) for line in text.splitlines()] == [plain(one) for one in RECORDS]


@pytest.mark.parametrize("packed", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kind", [".csv", ".tsv"])
def test_csv(tmp_path: Path, kind: str, packed: str) -> None:
    text = unpacked(written(tmp_path, f"out{kind}{packed}"))
    rows = list(csv.DictReader(io.StringIO(text), delimiter="," if kind == ".csv" else "\t"))
    assert [row["label"] for row in rows] == [one["label"] for one in RECORDS]
    assert [float(row["score"]) for row in rows] == [one["score"] for one in RECORDS]
    assert [json.loads(row["spans"]) for row in rows] == [one["spans"] for one in RECORDS]
    assert rows[2]["id"] == ""


def test_parquet(tmp_path: Path) -> None:
    table = parquet.read_table(written(tmp_path, "out.parquet"))
    assert table.to_pylist() == [plain(one) for one in RECORDS]
    assert str(table.schema.field("vector").type) == "list<element: float>"


def test_npy(tmp_path: Path) -> None:
    found = np.load(written(tmp_path, "out.npy"))
    assert found.dtype == np.float32
    assert np.array_equal(found, np.stack([one["vector"] for one in RECORDS]))


def test_npy_equals_numpy_save(tmp_path: Path) -> None:
    np.save(tmp_path / "theirs.npy", np.stack([one["vector"] for one in RECORDS]))
    (tmp_path / "x").mkdir()
    assert written(tmp_path / "x", "out.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()


@pytest.mark.parametrize("name", ["out", "out.json", "out.gz", "out.xz", "out.npy", "out.parquet.gz", "out.txt"])
def test_unknown_suffixes(name: str) -> None:
    with pytest.raises(InputError):
        check_output_name(name, embeddings=False)
    check_output_name("out.npy", embeddings=True)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv.gz", "out.jsonl.xz", "out.tsv.zst", "out.npy", "out.parquet"])
@pytest.mark.parametrize("cut", range(5))
def test_resume_after_any_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cut: int) -> None:
    """Stopped after each chunk, with half a chunk behind what is safe, as a kill leaves it."""
    monkeypatch.setattr(journal, "COMMIT_INTERVAL", 0)
    (tmp_path / "whole").mkdir()
    writer = make_writer(name, SCHEMA, 4)
    bodies = [writer.encode([record]) for record in RECORDS]
    with ResumableFile(tmp_path / "whole" / name, ASKED, resume=False, overwrite=False) as part:
        part.start(writer)
        for body in bodies:
            part.append(body, 1)
        part.finish()
    first = ResumableFile(tmp_path / name, ASKED, resume=False, overwrite=False)
    first.start(writer)
    for body in bodies[:cut]:
        first.append(body, 1)
    assert first._file is not None
    first._file.write(b"half")
    first._file.close()
    first.close()
    assert not (tmp_path / name).exists()
    with ResumableFile(tmp_path / name, ASKED, resume=True, overwrite=False) as part:
        assert part.rows == cut
        part.start(writer)
        for body in bodies[cut:]:
            part.append(body, 1)
        part.finish()
    assert (tmp_path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([name, "whole"])


def stopped(folder: Path) -> Path:
    part = ResumableFile(folder / "out.jsonl", ASKED, resume=False, overwrite=False)
    part.start(JsonlWriter())
    part.append(b"{}\n", 1)
    part.commit()
    assert part._file is not None
    part._file.close()
    part.close()
    return folder / "out.jsonl"


def test_resume_with_other_settings(tmp_path: Path) -> None:
    final = stopped(tmp_path)
    with pytest.raises(InputError, match="started with model='m', and now model='other'"):
        ResumableFile(final, ASKED | {"model": "other"}, resume=True, overwrite=False)
    with pytest.raises(InputError, match="started with more=None, and now more=1"):
        ResumableFile(final, ASKED | {"more": 1}, resume=True, overwrite=False)
    assert ResumableFile(final, dict(ASKED), resume=True, overwrite=False).rows == 1


def test_interrupted_output_is_not_overwritten(tmp_path: Path) -> None:
    final = stopped(tmp_path)
    with pytest.raises(ExistsError, match="1 rows of an interrupted run; pass --resume"):
        ResumableFile(final, ASKED, resume=False, overwrite=False)
    with ResumableFile(final, {"model": "other"}, resume=False, overwrite=True) as part:
        assert part.rows == 0
        part.start(JsonlWriter())
        part.finish()
    assert final.read_bytes() == b""


def test_overwrite_removes_the_old_journal(tmp_path: Path) -> None:
    """Else the old one would vouch for the new part's bytes."""
    final = stopped(tmp_path)
    part = ResumableFile(final, ASKED, resume=False, overwrite=True)
    part.start(JsonlWriter())
    assert part._file is not None
    part._file.write(b"new and longer\n")
    part._file.close()
    part.close()
    assert ResumableFile(final, ASKED, resume=True, overwrite=False).rows == 0


def test_complete_output(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("{}\n")
    with pytest.raises(ExistsError, match="--overwrite"):
        ResumableFile(tmp_path / "out.jsonl", ASKED, resume=False, overwrite=False)
    with pytest.raises(AlreadyComplete):
        ResumableFile(tmp_path / "out.jsonl", ASKED, resume=True, overwrite=False)
    # Killed between the naming of the file and the end of the journal.
    (tmp_path / "out.jsonl.part.json").write_text("{}")
    with pytest.raises(AlreadyComplete):
        ResumableFile(tmp_path / "out.jsonl", ASKED, resume=True, overwrite=False)


def test_corrupt_journal(tmp_path: Path) -> None:
    final = stopped(tmp_path)
    os.truncate(tmp_path / "out.jsonl.part", 1)
    with pytest.raises(InputError, match="shorter than its journal says"):
        ResumableFile(final, ASKED, resume=True, overwrite=False)
    (tmp_path / "out.jsonl.part.json").write_text("{")
    with pytest.raises(InputError, match="is corrupt"):
        ResumableFile(final, ASKED, resume=True, overwrite=False)


def test_concurrent_writers_are_rejected(tmp_path: Path) -> None:
    with ResumableFile(tmp_path / "out.jsonl", ASKED, resume=False, overwrite=False) as one:
        one.start(JsonlWriter())
        one.append(b"{}\n", 1)
        for resume in (False, True):
            with pytest.raises(InputError, match=r"out\.jsonl is being written by another process"):
                ResumableFile(tmp_path / "out.jsonl", ASKED, resume=resume, overwrite=not resume)
        one.finish()
    assert (tmp_path / "out.jsonl").read_bytes() == b"{}\n"


@pytest.mark.parametrize("error", [InputError("x"), KeyboardInterrupt(), RuntimeError("bug")])
def test_an_error_keeps_committed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(journal, "COMMIT_INTERVAL", 0)

    def fail() -> None:
        with ResumableFile(tmp_path / "out.jsonl", ASKED, resume=False, overwrite=False) as part:
            part.start(JsonlWriter())
            part.append(b"{}\n", 1)
            assert part._file is not None
            part._file.write(b"half")
            raise error

    with pytest.raises(type(error)) as caught:
        fail()
    assert any("--resume continues" in note for note in caught.value.__notes__)
    assert (tmp_path / "out.jsonl.part").read_bytes() == b"{}\n"


def test_an_error_before_the_first_commit_leaves_no_file(tmp_path: Path) -> None:

    def fail() -> None:
        with ResumableFile(tmp_path / "out.jsonl", ASKED, resume=False, overwrite=False) as part:
            part.start(JsonlWriter())
            raise InputError("x")

    with pytest.raises(InputError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_table_alignment() -> None:
    table = TableWriter(("row", "text"))
    assert table.text([(1, "a\nb"), (10, "x" * 100)]).splitlines() == [
        "row  text",
        "1    a b",
        "10   " + "x" * 59 + "…",
    ]
    assert table.text([(1000, 0.5)]) == "1000  0.5000\n"


class Terminal(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._is = terminal

    def isatty(self) -> bool:
        return self._is


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    clock = [0.0]
    monkeypatch.setattr("bertie.data.progress.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("bertie.data.progress.TICK", 1000.0)  # only updates are displayed
    file, done = Terminal(terminal), [0.0]
    with Progress("embed", lambda: done[0], initial=1000, file=file) as progress:
        for second in range(1, 31):
            clock[0], done[0] = second, 0.5 + second / 100
            progress.update(100)
    out = file.getvalue()
    assert out.count("\x1b[K") == (31 if terminal else 0)
    assert " 52%  1:36 left  1,200 rows  100/s" in out if terminal else "embed: 1,100 rows" in out
    assert out.rstrip().endswith("embed: 4,000 rows in 0:30, 100/s")
    assert "left" in out


def test_no_progress_for_short_work() -> None:
    file = Terminal(True)
    with Progress("embed", lambda: 0.5, file=file) as progress:
        progress.update(10)
    assert file.getvalue() == ""
