"""Encodings: byte order marks, charsets, options, and no guessing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.search.documents import read, refused, write

TEXT = "Grüße aus Köln, sagte Zoë."


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_byte_order_marks_and_utf8(tmp_path: Path, encoding: str) -> None:
    write(tmp_path, {"a.txt": TEXT.encode(encoding), "b.csv": f'text,x\r\n"{TEXT}",1\r\n'.encode(encoding)})
    assert [one.text for one in read(tmp_path).values()] == [TEXT, TEXT]
    found = read(tmp_path, encoding="cp1252")
    assert [one.text for one in found.values()] == [TEXT, TEXT], "it is known for what it is"


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16-le", "iso2022_jp", "shift_jis"])
def test_encoding_option(tmp_path: Path, encoding: str) -> None:
    text = "日本語" if "j" in encoding else "Grüße – “so”"
    rows = {"a.jsonl": json.dumps({"text": text}, ensure_ascii=False) + "\n", "a.csv": f"text\n{text}\n"}
    write(tmp_path, {"a.txt": text.encode(encoding), **{name: raw.encode(encoding) for name, raw in rows.items()}})
    write(tmp_path, {"utf8.txt": "ünïcode", "utf8.csv": "text\nünïcode\n"})
    found = {name: one.text for name, one in read(tmp_path, encoding=encoding).items()}
    assert found == {
        "a.csv#1": text,
        "a.jsonl#1": text,
        "a.txt": text,
        "utf8.csv#1": "ünïcode",
        "utf8.txt": "ünïcode",
    }, "a folder may hold both"


def test_encodings_are_not_guessed(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.txt": TEXT.encode("cp1252"),
            "mixed.txt": b"ok \xc3\xa9 " * 1000 + b"caf\xe9 ole",
            "b.csv": b"text\n\xe9\n",
        },
    )
    refused(tmp_path / "a.txt", r"a\.txt is not utf-8 \(byte 0xfc at offset 2\); pass its encoding with --encoding")
    refused(tmp_path / "mixed.txt", r"mixed\.txt is not utf-8 \(byte 0xe9 at offset 6003\)")
    refused(tmp_path / "b.csv", r"b\.csv, line 2 is not UTF-8")
    refused(tmp_path / "a.txt", r"not utf-8 nor shift_jis", encoding="shift_jis")
    refused(tmp_path / "b.csv", r"b\.csv is neither UTF-8 nor ascii", encoding="ascii")


def test_binary(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"a.txt": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff\xfe", "b.md": b"text \0 text", "c.txt": "ab".encode("utf-16-le")},
    )
    refused(tmp_path / "a.txt", r"a\.txt is binary, not text \(NUL at offset 8\)")
    refused(tmp_path / "a.txt", r"a\.txt is binary", encoding="latin-1")
    refused(tmp_path / "b.md", r"b\.md is binary, not text \(NUL at offset 5\)")
    refused(tmp_path / "c.txt", r"UTF-16 without a byte order mark")


def test_compressed(tmp_path: Path) -> None:
    whole = gzip.compress(b"# Title\n\ntext")
    write(
        tmp_path,
        {"a.md.gz": whole, "b.csv.gz": gzip.compress("text\nÄ\n".encode("cp1252")), "c/cut.txt.gz": whole[:-6]},
    )
    found = read(tmp_path / "a.md.gz", tmp_path / "b.csv.gz", encoding="cp1252")
    assert {name: one.text for name, one in found.items()} == {"a.md.gz": "# Title\n\ntext", "b.csv.gz#1": "Ä"}
    assert found["a.md.gz"].metadata["title"] == "Title"
    refused(tmp_path / "c/cut.txt.gz", "cannot be decompressed, it is corrupt or truncated")
