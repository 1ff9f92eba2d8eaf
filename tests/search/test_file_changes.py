"""Added, modified and deleted files since the last read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bertie.errors import InputError, NotFoundError
from bertie.search.file_changes import FileChanges
from bertie.search.records import Document
from tests.search.documents import write


class Memory:
    """What a store knows of its documents."""

    def __init__(self) -> None:
        self.held: dict[str, Document] = {}

    def refresh(self, *paths: Path, stop: int | None = None, **options: Any) -> tuple[list[str], list[str], int]:
        known = [(one.id, one.source, one.version) for one in self.held.values()]
        changes = FileChanges(paths, known, **options)
        done = []
        for document in changes:
            if len(done) == stop:
                return done, [], changes.unchanged
            self.held[document.id] = document
            done.append(document.id)
        for name in changes.deleted:
            del self.held[name]
        assert changes.added + changes.changed == len(done)
        return done, changes.deleted, changes.unchanged


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files as they are opened."""
    seen: list[str] = []
    real = open

    def spy(path: Any, *rest: Any, **more: Any) -> Any:
        seen.append(os.path.basename(str(path)))
        return real(path, *rest, **more)

    monkeypatch.setattr("builtins.open", spy)
    return seen


def test_changes_of_files(tmp_path: Path, opens: list[str]) -> None:
    write(tmp_path, {"a.txt": "a", "b/c.txt": "c", "d.txt": "d"})
    store = Memory()
    assert store.refresh(tmp_path) == (["a.txt", "b/c.txt", "d.txt"], [], 0)
    opens.clear()
    assert store.refresh(tmp_path) == ([], [], 3)
    assert opens == [], "no file is read"
    (tmp_path / "a.txt").write_text("new")
    os.utime(tmp_path / "d.txt")
    assert store.refresh(tmp_path) == (["a.txt"], [], 2)
    assert opens == ["a.txt", "d.txt"], "the one that was only touched is read, and found the same"
    (tmp_path / "b/c.txt").unlink()
    write(tmp_path, {"e.txt": "e"})
    assert store.refresh(tmp_path) == (["e.txt"], ["b/c.txt"], 2)
    assert sorted(store.held) == ["a.txt", "d.txt", "e.txt"]


def test_a_change_within_a_clock_tick_is_detected(tmp_path: Path) -> None:
    store = Memory()
    for content in ("1", "2", "3"):
        (tmp_path / "a.txt").write_text(content)  # of the same size, within a tick of the clock or two
        assert store.refresh(tmp_path)[0] == ["a.txt"]


def test_changes_of_rows(tmp_path: Path, opens: list[str]) -> None:
    rows = [{"id": i, "text": f"text {i}"} for i in range(5)]

    def save(when: int) -> None:
        (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(tmp_path / "r.jsonl", ns=(when, when))

    save(1)
    store = Memory()
    assert len(store.refresh(tmp_path)[0]) == 5
    rows[1]["text"] = "new"
    del rows[2]
    rows.append({"id": 9, "text": "nine"})
    save(2)
    changed, gone, _ = store.refresh(tmp_path)
    assert {"r.jsonl#1", "r.jsonl#9"} <= set(changed) <= {"r.jsonl#1", "r.jsonl#9", "r.jsonl#4"}
    assert gone == ["r.jsonl#2"]
    opens.clear()
    assert store.refresh(tmp_path) == ([], [], 5)
    assert opens == []
    assert {name: one.text for name, one in store.held.items()} == {f"r.jsonl#{row['id']}": row["text"] for row in rows}


def test_an_interrupted_read_is_resumed(tmp_path: Path) -> None:
    write(tmp_path, {"r.csv": "text\n" + "".join(f"row {i}\n" for i in range(10))})
    store = Memory()
    assert len(store.refresh(tmp_path, stop=4)[0]) == 4
    assert store.refresh(tmp_path) == ([f"r.csv#{i}" for i in range(5, 11)], [], 4), "part of a file is not all of it"
    assert store.refresh(tmp_path) == ([], [], 10)


def test_other_options_read_files_again(tmp_path: Path) -> None:
    write(tmp_path, {"r.csv": "text,more\na,b\n"})
    store = Memory()
    store.refresh(tmp_path)
    assert store.refresh(tmp_path, text="more") == (["r.csv#1"], [], 0)
    assert store.held["r.csv#1"].text == "b"


def test_documents_of_unreadable_files_are_kept(tmp_path: Path) -> None:
    write(tmp_path, {"docs/a.txt": "a", "docs/b/c.txt": "c", "docs/r.csv": "text\none\ntwo\n", "elsewhere/x.txt": "x"})
    store = Memory()
    store.refresh(tmp_path / "docs")
    store.refresh(tmp_path / "elsewhere")
    assert len(store.held) == 5
    write(tmp_path, {"docs/a.txt": b"\xff\xff", "docs/r.csv": "text\none\ntwo,three\nfour\n"})
    with pytest.raises(InputError, match=r"a\.txt is not utf-8"):
        store.refresh(tmp_path / "docs")
    assert store.refresh(tmp_path / "docs", on_error="skip") == ([], [], 2)
    assert len(store.held) == 5
    with pytest.raises(NotFoundError):
        store.refresh(tmp_path / "moved")
    (tmp_path / "docs/a.txt").unlink()
    assert store.refresh(tmp_path / "docs", on_error="skip")[1] == ["a.txt"]
    assert "x.txt" in store.held


def test_conflicting_ids_are_rejected(tmp_path: Path) -> None:
    write(tmp_path, {"one/a.txt": "a", "two/a.txt": "another"})
    store = Memory()
    store.refresh(tmp_path / "one")
    with pytest.raises(
        InputError, match=r"two/a\.txt would get the document id 'a\.txt', which already exists \(from .*one/a\.txt"
    ):
        store.refresh(tmp_path / "two")
    (tmp_path / "one").rename(tmp_path / "three")
    assert store.refresh(tmp_path / "three") == (["a.txt"], [], 0), "it has moved"
    store.held["x.txt"] = Document("x.txt", "by hand")
    write(tmp_path, {"three/x.txt": "x"})
    with pytest.raises(InputError, match="added as a text"):
        store.refresh(tmp_path / "three")


def test_a_file_that_became_a_link_is_deleted(tmp_path: Path) -> None:
    write(tmp_path, {"docs/a.txt": "a", "docs/b.txt": "b", "docs/in/c.txt": "c", "other/secret.txt": "s"})
    memory = Memory()
    memory.refresh(tmp_path / "docs")
    (tmp_path / "docs/b.txt").unlink()
    (tmp_path / "docs/b.txt").symlink_to(tmp_path / "other/secret.txt")
    (tmp_path / "docs/in").rename(tmp_path / "moved")
    (tmp_path / "docs/in").symlink_to(tmp_path / "moved")
    assert memory.refresh(tmp_path / "docs") == ([], ["b.txt", "in/c.txt"], 1)
    assert memory.refresh(tmp_path / "docs", follow_symlinks=True) == (["b.txt", "in/c.txt"], [], 1)
    assert memory.refresh(tmp_path / "docs") == ([], ["b.txt", "in/c.txt"], 1)
