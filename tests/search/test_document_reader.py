"""Documents from files, folders and tables."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bertie.errors import InputError, NotFoundError
from bertie.search.document_reader import read_documents
from tests.search.documents import read, refused, write

# --- files and folders ---


def test_folder(tmp_path: Path) -> None:
    write(
        tmp_path, {"b.txt": "two", "a/z.md": "# One #\n\ntext", "a/b/c.rst": "Deep\n====\n\ntext", ".hidden.txt": "no"}
    )
    write(tmp_path, {".git/x.txt": "no", "a/x.py": "no", "B.TXT": "upper", "empty.txt": ""})
    skips: list[tuple[str, str]] = []
    found = list(read_documents(tmp_path, on_skip=lambda *one: skips.append(one)))
    assert [one.id for one in found] == ["B.TXT", "a/b/c.rst", "a/z.md", "b.txt", "empty.txt"]
    assert [one.metadata.get("title") for one in found] == [None, "Deep", "One", None, None]
    assert [one.text for one in found][-2:] == ["two", ""]
    assert found[3].source == str(tmp_path / "b.txt")
    assert [name for name, _ in skips] == [str(tmp_path / "a/x.py")]
    assert "its suffix is none of .txt" in skips[0][1]


def test_files_by_name(tmp_path: Path) -> None:
    write(tmp_path, {"a/notes": "plain", "b/c.txt": "c"})
    found = read(tmp_path / "a/notes", tmp_path / "b", tmp_path / "b/c.txt")
    assert {name: one.text for name, one in found.items()} == {"notes": "plain", "c.txt": "c"}, "no file twice"
    write(tmp_path, {"a/c.txt": "another"})
    with pytest.raises(InputError, match=r"a/c\.txt and .*b/c\.txt would both get the document id 'c\.txt'"):
        read(tmp_path / "a", tmp_path / "b")


def test_links(tmp_path: Path) -> None:
    write(tmp_path, {"docs/a.txt": "a", "other/b.txt": "b"})
    (tmp_path / "docs/self").symlink_to(tmp_path / "docs")
    (tmp_path / "docs/up").symlink_to(tmp_path)
    (tmp_path / "docs/out").symlink_to(tmp_path / "other")
    assert list(read(tmp_path / "docs", follow_symlinks=True)) == ["a.txt", "out/b.txt"]
    (tmp_path / "docs/up").unlink()
    (tmp_path / "docs/lost.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(InputError, match=r"lost\.txt is a broken symbolic link"):
        read(tmp_path / "docs", follow_symlinks=True)
    assert list(read(tmp_path / "docs", on_error="skip", follow_symlinks=True)) == ["a.txt", "out/b.txt"]


def test_links_are_not_followed_unless_asked(tmp_path: Path) -> None:
    write(tmp_path, {"docs/a.txt": "a", "docs/in/c.txt": "c", "other/secret.txt": "s"})
    (tmp_path / "docs/folder").symlink_to(tmp_path / "other")
    (tmp_path / "docs/file.txt").symlink_to(tmp_path / "other/secret.txt")
    (tmp_path / "docs/in/loop").symlink_to(tmp_path / "docs")
    (tmp_path / "docs/lost.txt").symlink_to(tmp_path / "nowhere.txt")
    skips: dict[str, str] = {}
    found = read(tmp_path / "docs", on_skip=skips.__setitem__)
    assert list(found) == ["a.txt", "in/c.txt"]
    assert sorted(skips) == [str(tmp_path / "docs" / name) for name in ("file.txt", "folder", "in/loop", "lost.txt")]
    assert all("symbolic link" in reason and "--follow-symlinks" in reason for reason in skips.values())
    (tmp_path / "given").symlink_to(tmp_path / "docs")  # what the user names is followed
    assert list(read(tmp_path / "given")) == ["a.txt", "in/c.txt"]
    assert list(read(tmp_path / "docs/file.txt")) == ["file.txt"]
    write(tmp_path, {"links/x": ""})
    (tmp_path / "links/y.txt").symlink_to(tmp_path / "other/secret.txt")
    with pytest.raises(InputError, match=r"no readable file, and 1 symbolic links are not followed"):
        read(tmp_path / "links")


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no such file or folder: .*nowhere"):
        read_documents(tmp_path / "nowhere", on_error="skip")
    for folder in (tmp_path / "empty", tmp_path / "useless"):
        folder.mkdir()
    write(tmp_path, {"useless/x.py": ""})
    for name in ("empty", "useless"):
        with pytest.raises(InputError, match=rf"the folder .*{name} contains no readable file; suffixes: \.txt"):
            list(read_documents(tmp_path / name, on_error="skip"))
    os.mkfifo(tmp_path / "pipe.txt")
    refused(tmp_path / "pipe.txt", "is not a regular file")
    with pytest.raises(InputError, match=r"is JSON; convert it to JSONL"):
        list(read_documents(write(tmp_path, {"a.json": "[]"}) / "a.json"))
    with pytest.raises(InputError, match="paths is empty"):
        read_documents([])


def test_wrong_options(tmp_path: Path) -> None:
    for options, message in (
        ({"encoding": "klingon"}, "encoding='klingon' is unknown"),
        ({"encoding": "base64"}, "encoding='base64' is unknown"),
        ({"on_error": "ignore"}, "on_error='ignore' must be 'raise' or 'skip'"),
        ({"metadata": "year"}, "metadata='year' must be a list of columns"),
    ):
        with pytest.raises(InputError, match=message):
            read_documents(tmp_path, **options)  # type: ignore[arg-type]


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As told by the system: whoever runs the tests may be allowed everything."""
    write(tmp_path, {"a.txt": "a", "closed/b.txt": "b", "secret.txt": "c"})
    listdir, real = os.listdir, open

    def no_listdir(path: str) -> list[str]:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    def no_open(path: Any, *rest: Any, **more: Any) -> Any:
        if str(path).endswith("secret.txt"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "listdir", no_listdir)
    monkeypatch.setattr("builtins.open", no_open)
    with pytest.raises(InputError, match=r"the folder .*closed cannot be read: Permission denied"):
        read(tmp_path)
    refused(tmp_path / "secret.txt", r"secret\.txt cannot be read: Permission denied")
    assert list(read(tmp_path, on_error="skip")) == ["a.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission_for_real(tmp_path: Path) -> None:
    path = write(tmp_path, {"a.txt": "a"}) / "a.txt"
    path.chmod(0)
    refused(path, "cannot be read: Permission denied")


def test_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    try:
        (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    except OSError:
        pytest.skip("this file system takes no such names")
    with pytest.raises(InputError, match=r"caf\\udce9\.txt': the file name is not UTF-8"):
        read(tmp_path)


# --- rows ---

ROWS = [
    {"id": "x", "text": "one", "year": 1999, "tags": ["a"], "ok": True, "none": None},
    {"id": 7, "text": "two", "p": 0.5},
]


def test_jsonl(tmp_path: Path) -> None:
    write(tmp_path, {"a/r.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS)})
    found = read(tmp_path)
    assert {name: dict(one.metadata) for name, one in found.items()} == {
        "a/r.jsonl#x": {"path": "a/r.jsonl", "year": 1999, "ok": True},
        "a/r.jsonl#7": {"path": "a/r.jsonl", "p": 0.5},
    }
    found = read(tmp_path, metadata=["year"], title="id")
    assert [dict(one.metadata) for one in found.values()] == [
        {"path": "a/r.jsonl", "year": 1999},
        {"path": "a/r.jsonl"},
    ]
    with pytest.raises(InputError, match=r"row 1: column 'tags' contains a list; metadata must be scalar values"):
        read(tmp_path, metadata=["tags"])


def test_csv(tmp_path: Path) -> None:
    write(tmp_path, {"r.csv": 'name,body,k\nA,"one,\ntwo",5\nB,three,\n', "s.tsv": "body\nx\n"})
    found = read(tmp_path, text="body")
    assert {name: (one.text, dict(one.metadata)) for name, one in found.items()} == {
        "r.csv#1": ("one,\ntwo", {"path": "r.csv", "name": "A", "k": "5"}),
        "r.csv#2": ("three", {"path": "r.csv", "name": "B"}),
        "s.tsv#1": ("x", {"path": "s.tsv"}),
    }
    found = read(tmp_path / "r.csv", text="body", id="name", title="k", metadata=[])
    assert {name: dict(one.metadata) for name, one in found.items()} == {
        "r.csv#A": {"path": "r.csv", "title": "5"},
        "r.csv#B": {"path": "r.csv"},
    }


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from datetime import date

    from pyarrow import parquet

    table = pa.table({"_id": ["a", "b"], "text": ["one", "two"], "day": [date(2020, 1, 2), None], "v": [[1.0], [2.0]]})
    parquet.write_table(table, tmp_path / "r.parquet")
    found = read(tmp_path)
    assert {name: dict(one.metadata) for name, one in found.items()} == {
        "r.parquet#a": {"path": "r.parquet", "day": "2020-01-02"},
        "r.parquet#b": {"path": "r.parquet"},
    }


def test_wrong_columns(tmp_path: Path) -> None:
    write(
        tmp_path, {"r.csv": "name,body\nA,one\nB,two\n", "dup.csv": "id,text\nA,one\nA,two\nB,three\n", "empty.csv": ""}
    )
    refused(
        tmp_path / "r.csv", r"r\.csv has no column 'content', only 'name', 'body'.*text= \(--column\)", text="content"
    )
    refused(tmp_path / "r.csv", r"r\.csv has no column 'year', only", text="body", metadata=["year"])
    refused(tmp_path / "r.csv", r"r\.csv has no column 'key', only", text="body", id="key")
    refused(tmp_path / "empty.csv", r"empty\.csv is empty")
    with pytest.raises(InputError, match=r"dup\.csv, row 2: duplicate id 'A' in column 'id'"):
        read(tmp_path / "dup.csv")
    assert list(read(tmp_path / "dup.csv", on_error="skip")) == ["dup.csv#A", "dup.csv#B"], "only that row is left out"


def test_wrong_rows(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"r.jsonl": '{"text": "a"}\n{"text": null}\n{"text": "\\ud800"}\n{"text": "d"}\n{broken\n{"text": "f"}\n'},
    )
    skips: list[str] = []
    found = read(tmp_path, on_error="skip", on_skip=lambda _, reason: skips.append(reason))
    assert list(found) == ["r.jsonl#1", "r.jsonl#4"]
    assert [one.partition("r.jsonl, ")[2].split(" ")[:2] for one in skips] == [
        ["row", "2:"],
        ["row", "3:"],
        ["line", "5"],
    ]
    assert not any("@" in one.version for one in found.values()), "not all was read: next time it is read again"
    with pytest.raises(InputError, match="row 2: no value in column 'text'"):
        read(tmp_path)
