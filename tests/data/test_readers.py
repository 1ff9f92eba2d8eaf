"""Every format in, compressed and not; what is wrong with a file is said with its place."""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import json
import lzma
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from bertie.data.readers import InputTable, chunk_rows, open_table, text_cell
from bertie.errors import BertieError, BertieWarning, InputError, MissingPackageError, NotFoundError

TEXTS = ["the cat", "", 'with "quotes", commas\tand tabs', "zwei\nZeilen — ü 😀", "last"]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lambda data: lzma.compress(data, preset=0),  # a window of 256 KiB instead of 8 MiB
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def as_bytes(kind: str, rows: list[dict[str, Any]]) -> bytes:
    if kind == "txt":
        return "".join(row["text"] + "\n" for row in rows).encode()
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind == "parquet":
        file = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(rows), file)
        return file.getvalue()
    import csv

    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter="," if kind == "csv" else "\t")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def texts(table: InputTable, column: str = "text") -> list[str]:
    return [text_cell(table, number, row, column) for number, row in enumerate(table.rows([column]), 1)]


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("kind", ["txt", "csv", "tsv", "jsonl", "parquet"])
def test_formats_roundtrip(tmp_path: Path, kind: str, packed: str) -> None:
    wanted = [one for one in TEXTS if kind not in ("txt", "csv", "tsv") or (one and (kind != "txt" or "\n" not in one))]
    rows = [{"id": i, "text": one} for i, one in enumerate(wanted)]
    file = tmp_path / f"in.{kind}{packed}"
    file.write_bytes(PACK[packed](as_bytes(kind, rows)))
    table = open_table(str(file))
    assert table.columns == (("text",) if kind == "txt" else ("id", "text"))
    assert table.text_columns == ("text",)
    assert texts(table) == wanted
    assert table.fraction() == 1


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("kind", ["text", "csv", "tsv", "jsonl", "parquet"])
def test_standard_input(monkeypatch: pytest.MonkeyPatch, kind: Any, packed: str) -> None:
    data = PACK[packed](as_bytes({"text": "txt"}.get(kind, kind), [{"text": "a"}, {"text": "b"}]))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert texts(open_table("-", kind)) == ["a", "b"]


def test_windows_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "in.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo \xc2\x85 \xe2\x80\xa8 still two\r\n\r\nlast")
    assert texts(open_table(str(file))) == ["one", "two \x85 \u2028 still two", "", "last"]
    csv = tmp_path / "in.csv"
    csv.write_bytes(b"\xef\xbb\xbftext\r\none\r\n")
    assert texts(open_table(str(csv))) == ["one"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-16be", "utf-32be"])
@pytest.mark.parametrize("packed", PACK)
def test_byte_order_marks(tmp_path: Path, encoding: str, packed: str) -> None:
    wanted = [f"ü😀 {i}" for i in range(30_000)]
    mark = "\ufeff" if encoding.endswith("be") else ""
    for name, content in (("in.txt", wanted), ("in.csv", ["text", *wanted])):
        data = (mark + "".join(line + "\n" for line in content)).encode(encoding)
        (tmp_path / f"{name}{packed}").write_bytes(PACK[packed](data))
        assert texts(open_table(str(tmp_path / f"{name}{packed}"))) == wanted


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("in.csv", "id;text;label\n1;a, b;x\n", "semicolons"),
        ("in.csv", '"id";"text"\r\n1;"a, b"\r\n', "semicolons"),
        ("in.csv", "id\ttext\n1\ta, b\n", "tabs"),
        ("in.tsv", 'id,text\n1,"a, b"\n', "commas"),
        ("in.csv", "sep=;\nid;text\n1;a, b\n", "semicolons"),
        ("in.csv", "id|text\n1|a, b\n", "vertical bars"),
    ],
)
def test_another_separator_is_noticed_and_said(tmp_path: Path, name: str, data: str, said: str) -> None:
    (tmp_path / name).write_bytes(data.encode())
    with pytest.warns(BertieWarning, match=f"{name} is separated by {said}"):
        assert texts(open_table(str(tmp_path / name))) == ["a, b"]


@pytest.mark.parametrize("data", ["text\na;b\n", "id,text\n1,a;b\n", '"a;x",text\n1,a;b\n', "sep=,\nid,text\n1,a;b\n"])
@pytest.mark.filterwarnings("error::bertie.errors.BertieWarning")
def test_a_semicolon_in_a_text_is_no_separator(tmp_path: Path, data: str) -> None:
    (tmp_path / "in.csv").write_text(data)
    assert texts(open_table(str(tmp_path / "in.csv"))) == ["a;b"]


def test_a_failed_read_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.txt").write_text("a\n")

    class Broken(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("bertie.data.readers.open_decompressed", lambda raw, name: Broken())
    with pytest.raises(OSError, match="Input/output error") as caught:
        open_table(str(tmp_path / "in.txt"))
    assert caught.value.filename == str(tmp_path / "in.txt")


def test_concatenated_compressed_members(tmp_path: Path) -> None:
    for packed in (".gz", ".xz", ".zst"):
        file = tmp_path / f"in.txt{packed}"
        file.write_bytes(PACK[packed](b"a\n") + PACK[packed](b"") + PACK[packed](b"b\nc"))
        assert texts(open_table(str(file))) == ["a", "b", "c"]


def test_a_long_field_is_read(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text("text\n" + "x" * 300_000 + "\n")
    assert len(texts(open_table(str(file)))[0]) == 300_000


def test_jsonl_of_strings(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('"one"\n\n"two"\n')
    assert texts(open_table(str(file))) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("in.txt", b"good\nb\xe9d\n", "in.txt, line 2 is not UTF-8 (byte 0xe9 at 1)"),
        ("in.csv", b"text\ngood\nb\xe9d\n", "line 3 is not UTF-8"),
        ("in.jsonl", b'{"text": "b\xe9d"}\n', "line 1 is not UTF-8"),
        ("in.txt", b"", "is empty"),
        ("in.csv", b"text\n", "is empty"),
        ("in.jsonl", b"\n\n", "is empty"),
        ("in.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("in.jsonl", b"[1]\n", "line 1 is list"),
        ("in.jsonl", b'{"text": "a"}\n{"text": null}\n', "row 2: no value in column 'text'"),
        ("in.jsonl", b'{"text": "a"}\n{"text": NaN}\n', "row 2: no value in column 'text'"),
        ("in.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', "row 2: no value in column 'text'"),
        ("in.jsonl", b'{"text": "a"}\n{"text": 3}\n', "row 2: int 3, not text, in column 'text'"),
        ("in.csv", b"id,text\n1,a\n2,\n", "row 2: no value in column 'text'"),
        ("in.csv", b"id,text\n1,a\n2,b,c\n", "row 2 (line 3) has 3 fields and the header 2"),
        ("in.csv", b"text,text\na,b\n", "duplicate column names"),
        ("in.csv", b'text\n"open\n', "line 2 is not valid CSV"),
        ("in.tsv", b'text\n"a"b\n', "line 2 is not valid TSV"),
        ("in.txt.gz", b"plain", "is not a .gz file"),
        ("in.txt.gz", gzip.compress(b"x\n" * 10_000, mtime=0)[:-20], "corrupt or truncated"),
        ("in.txt.xz", b"plain", "is not a .xz file"),
        ("in.txt.xz", lzma.compress(b"x\n" * 10_000)[:-20], "corrupt or truncated"),
        ("in.txt.xz", lzma.compress(b"x\n") + lzma.compress(b"y\n" * 10_000)[:-20], "corrupt or truncated"),
        ("in.txt.xz", lzma.compress(b"x\n") + b"more", "corrupt or truncated"),
        ("in.txt.zst", zstandard.compress(bytes(range(65, 91)) * 9_000)[:-9], "corrupt or truncated"),
        ("in.parquet", b"PAR1 and not more", "is not Parquet"),
        ("in.json", b"[]", "convert it to JSONL"),
        ("in.jsonl", b'{"text": "a"}\n{"text": "a", "id": 1, "text": "b"}\n', "line 2 has the key 'text' twice"),
        ("in.jsonl", b'{"text": "a", "more": [{"x": 1, "x": 2}]}\n', "line 1 has the key 'x' twice"),
        ("in.txt", "a cat\n".encode("utf-16le"), "looks like UTF-16LE without a byte order mark"),
        ("in.csv", "text\na\n".encode("utf-16be"), "iconv -f utf-16be -t utf-8"),
        ("in.jsonl", '{"text": 1}\n'.encode("utf-32le"), "looks like UTF-32LE"),
        ("in.txt", "a cat\n".encode("utf-32be"), "looks like UTF-32BE"),
        ("in.txt", "a cat\n".encode("utf-16") + b"x", "is not UTF-16, although its byte order mark says so"),
        ("in.txt", codecs.BOM_UTF16_LE + b"\x00\xd8a\x00", "is not UTF-16, although"),
    ],
)
def test_errors_name_the_row(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError) as caught:
        texts(open_table(str(tmp_path / name)))
    assert said in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_null_in_parquet(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": ["a", None]}), tmp_path / "in.parquet")
    with pytest.raises(InputError, match="row 2: no value in column 'text'"):
        texts(open_table(str(tmp_path / "in.parquet")))
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(InputError, match="is empty"):
        open_table(str(tmp_path / "none.parquet"))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        open_table(str(tmp_path / "none.txt"))
    with pytest.raises(InputError, match="is a folder"):
        open_table(str(tmp_path))


def test_column_selection(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text("id,stars,review,title\n1,5,good,x\n")
    with pytest.raises(
        InputError, match=r"no column 'text', only 'id', 'stars', 'review', 'title'; select one with --column"
    ):
        open_table(str(file)).column(["text"], None, "--column", only=True)
    with pytest.raises(InputError, match="no column 'body'"):
        open_table(str(file)).column(["text"], "body", "--column")
    assert open_table(str(file)).column(["text"], "title", "--column") == "title"
    file.write_text("id,stars,review\n1,5,good\n")
    assert open_table(str(file)).column(["text"], None, "--column", only=True) == "review"


@pytest.mark.parametrize(
    ("module", "name", "data"),
    [("pyarrow", "in.parquet", b"PAR1"), ("zstandard", "in.txt.zst", zstandard.compress(b"a"))],
)
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 has its own zstd")
def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=r"pip install 'bertie\[data\]'"):
        open_table(str(tmp_path / name))


def test_python_without_lzma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.txt.xz").write_bytes(lzma.compress(b"a"))
    monkeypatch.setitem(sys.modules, "lzma", None)
    with pytest.raises(MissingPackageError, match="module lzma"):
        open_table(str(tmp_path / "in.txt.xz"))


@pytest.mark.parametrize("name", ["in.txt", "in.csv.gz", "in.jsonl.xz", "in.jsonl.zst", "in.parquet"])
def test_memory_is_bounded(tmp_path: Path, name: str) -> None:
    rows = 200_000 if name in ("in.txt", "in.parquet") else 80_000  # tracing makes the others slow
    kind, _, packed = name.removeprefix("in.").partition(".")
    data = as_bytes(kind, [{"text": f"row {i} of many, and some more words to make it long"} for i in range(rows)])
    (tmp_path / name).write_bytes(PACK["." + packed if packed else ""](data))
    size = len(data)
    del data
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    table = open_table(str(tmp_path / name))
    count = arrow = 0
    for chunk in chunk_rows(((i, row, row["text"]) for i, row in enumerate(table.rows(["text"]))), 1024, 1 << 20):
        count += len(chunk)
        arrow = max(arrow, pa.total_allocated_bytes() - before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == rows
    assert peak + arrow < 6 << 20, (peak, arrow, size)


def test_chunks_depend_on_the_rows_alone() -> None:
    rows: list[tuple[int, dict[str, Any], str]] = [(i, {}, "x" * (i * 7919 % 400)) for i in range(1000)]
    whole = list(chunk_rows(rows, 64, 5000))
    assert [one for chunk in whole for one in chunk] == rows
    assert all(len(chunk) <= 64 for chunk in whole)
    for cut in range(len(whole)):
        done = sum(map(len, whole[:cut]))
        assert list(chunk_rows(rows[done:], 64, 5000)) == whole[cut:]


def test_errors_are_bertie_errors() -> None:
    assert issubclass(InputError, BertieError)
