"""Damaged files of a local index: each is named, and none changes a result."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from bertie.errors import CheckpointError
from bertie.search import catalog_checksums, local_store
from bertie.search.index import Index
from bertie.search.local_catalog import restore_checksums
from bertie.search.local_store import LocalStore
from tests.search import damage

pytest.importorskip("faiss")


@pytest.fixture(scope="module", params=["closed", "killed"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index that was closed, or that a kill left with a write-ahead log."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_store, "SEGMENT_ROWS", 64)
        store = damage.build(folder / "index", close=False)
        shutil.copytree(folder / "index", folder / "copy")
        store.close()
    wal = folder / "copy" / "index.sqlite-wal"
    assert wal.stat().st_size > 100_000
    assert not (folder / "index" / wal.name).exists()
    return folder / ("index" if request.param == "closed" else "copy")


@pytest.mark.parametrize("verify", [False, True])
def test_bit_flips(whole: Path, tmp_path: Path, verify: bool) -> None:
    """Damage to the BM25 index, which is derived, is repaired; when one verifies, it is named as well."""
    counts = damage.flip_bits(whole, tmp_path / "copy", 100, seed=int(verify), verify=verify)
    if verify:
        assert counts == Counter({"named": 100})
    else:
        assert counts.keys() == {"named", "same results"}


@pytest.mark.parametrize("harm", ["empty", "half", "longer", "missing"])
def test_sizes(whole: Path, tmp_path: Path, harm: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    reference = damage.read_all(folder, verify=True)
    for file in damage.index_files(whole):
        damaged, content = folder / file.relative_to(whole), file.read_bytes()
        if harm == "missing":
            damaged.unlink()
        else:
            damaged.write_bytes({"empty": b"", "half": content[: len(content) // 2], "longer": content + b"\1"}[harm])
        result = damage.outcome(lambda: damage.read_all(folder, verify=True), reference, damaged)
        # A byte after the last transaction of the log is the beginning of the next one.
        harmless = harm == "longer" and file.name == "index.sqlite-wal"
        if not (harm == "missing" and file.name == "index.sqlite"):
            assert result == ("same results" if harmless else "named"), file.name
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)


def test_files_of_another_index(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_store, "SEGMENT_ROWS", 64)
    live = damage.build(tmp_path / "other", offset=100, close=False)
    shutil.copytree(tmp_path / "other", tmp_path / "foreign")
    live.close()
    folder, reference = tmp_path / "copy", None
    for file in damage.index_files(tmp_path / "foreign"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        reference = reference or damage.read_all(folder)
        damaged = folder / file.relative_to(tmp_path / "foreign")
        if damaged.exists() and damaged.read_bytes() == file.read_bytes():
            continue
        shutil.copy(file, damaged)
        result = damage.outcome(lambda: damage.read_all(folder), reference, damaged)
        if file.name == "index.checksums":
            assert f"{folder / 'index.sqlite'}" in result
        else:
            assert result == ("same results" if "lexical" in str(file) else "named"), (file.name, result)
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "lexical")
    shutil.copytree(tmp_path / "foreign" / "lexical", folder / "lexical")  # a valid one of other texts
    with pytest.raises(CheckpointError, match=r"lexical.*checksums\.json is corrupt"):
        damage.read_all(folder, verify=True)
    assert damage.read_all(folder) == reference


def test_extra_and_swapped_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_store, "SEGMENT_ROWS", 20)
    with LocalStore.create(tmp_path / "i", damage.D, {}) as store:
        for number in range(3):
            store.commit([damage.document(f"d{number}", 24, number)])
    reference = damage.read_all(tmp_path / "i")
    one, two = sorted((tmp_path / "i" / "segments").iterdir())[:2]
    for name in ("vectors.npy", "keys.npy"):
        a, b = (one / name).read_bytes(), (two / name).read_bytes()
        (one / name).write_bytes(b)
        (two / name).write_bytes(a)
        with pytest.raises(CheckpointError, match=f"{one.name}/{name} is corrupt"):
            LocalStore.open(tmp_path / "i")
        (one / name).write_bytes(a)
        (two / name).write_bytes(b)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    with pytest.raises(CheckpointError, match="is corrupt"):
        LocalStore.open(tmp_path / "i")
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    (one / "extra.npy").write_bytes(b"x")
    (tmp_path / "i" / "segments" / "file").write_bytes(b"x")
    (tmp_path / "i" / "segments" / "77").mkdir()
    (tmp_path / "i" / "notes.txt").write_bytes(b"x")
    assert damage.read_all(tmp_path / "i", verify=True) == reference
    with LocalStore.open(tmp_path / "i") as store:
        store.commit([], ["d0"])
        assert {file.name for file in (tmp_path / "i" / "segments").iterdir()} == {"1", "2", "3", "file"}


def test_log_of_the_past(tmp_path: Path) -> None:
    """A log that lacks the last transactions is not taken for the whole."""
    with LocalStore.create(tmp_path / "i", damage.D, {}) as store:
        store.commit([damage.document("a", 3, 1)])
        shutil.copytree(tmp_path / "i", tmp_path / "early")
        store.commit([damage.document("b", 3, 2)])
        shutil.copytree(tmp_path / "i", tmp_path / "late")
    early, wal = tmp_path / "early", "index.sqlite-wal"
    assert damage.read_all(early)[0] == 3
    for folder in (tmp_path / "late", tmp_path / "i"):
        shutil.copy(early / wal, folder / wal)
        with pytest.raises(CheckpointError, match=f"{wal} is corrupt"):
            LocalStore.open(folder)


def test_lost_checksums_are_restored(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    reference = damage.read_all(folder)
    (folder / "index.checksums").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"index\.checksums is corrupt.*bertie index --rebuild"):
        LocalStore.open(folder)
    restore_checksums(folder)
    assert damage.read_all(folder, verify=True) == reference
    # But not where the catalog itself is damaged.
    (folder / "index.checksums").unlink()
    catalog = bytearray((folder / "index.sqlite").read_bytes())
    catalog[4096:8192] = bytes(4096)
    (folder / "index.sqlite").write_bytes(catalog)
    with pytest.raises(CheckpointError, match=r"index\.sqlite is corrupt"):
        restore_checksums(folder)


def test_rows_that_contradict_each_other(tmp_path: Path) -> None:
    """What another program wrote, with checksums made to fit."""
    for number, statement in enumerate(
        (
            "DELETE FROM passages WHERE key = 2",
            "UPDATE passages SET text = 'other' WHERE key = 2",
            "INSERT INTO tombstones VALUES (3)",
            "DELETE FROM pending WHERE key = 1",
        )
    ):
        folder = tmp_path / str(number)
        with LocalStore.create(folder, damage.D, {}) as store:
            store.commit([damage.document("a", 4, 1)])
        with closing(sqlite3.connect(folder / "index.sqlite", isolation_level=None)) as db:
            db.execute(statement)
        with pytest.raises(CheckpointError, match=r"index\.sqlite is corrupt"):
            LocalStore.open(folder)
        (folder / "index.checksums").unlink()
        restore_checksums(folder)
        with LocalStore.open(folder) as store, pytest.raises(CheckpointError, match=r"index\.sqlite is corrupt"):
            Index(store).verify()


def test_kill_during_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is valid after each write of a commit and a checkpoint, and the next writer goes on from it."""
    with LocalStore.create(tmp_path / "i", damage.D, {}) as store:
        copies: list[Path] = []

        def copying(call: Callable[..., object]) -> Callable[..., object]:
            def wrapper(*arguments: object) -> object:
                shutil.copytree(tmp_path / "i", tmp_path / f"{len(copies)}")
                copies.append(tmp_path / f"{len(copies)}")
                return call(*arguments)

            return wrapper

        store.commit([damage.document("a", 3, 1)])
        monkeypatch.setattr(catalog_checksums, "CHECKPOINT_FRAMES", 1)
        monkeypatch.setattr(os, "pwrite", copying(os.pwrite))
        monkeypatch.setattr(os, "replace", copying(os.replace))
        recorder = catalog_checksums.CatalogRecorder
        monkeypatch.setattr(recorder, "_truncate_log", copying(recorder._truncate_log))
        store.commit([damage.document("b", 3, 2)])
        monkeypatch.undo()
        shutil.copytree(tmp_path / "i", tmp_path / "end")
        copies.append(tmp_path / "end")
    assert len(copies) == 6
    for folder in copies:
        with LocalStore.open(folder) as copy:
            assert copy.generation == len(copy) // 3 == 2
            copy.verify()
            copy.commit([damage.document("c", 3, 3)])
            copy.verify()
        with LocalStore.open(folder) as copy:
            copy.verify()
            assert len(copy) == 9


def test_readers_never_raise_false_alarms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening verifies, however the writer commits and checkpoints meanwhile."""
    monkeypatch.setattr(catalog_checksums, "CHECKPOINT_FRAMES", 20)
    monkeypatch.setattr(local_store, "SEGMENT_ROWS", 30)
    folder = tmp_path / "i"
    LocalStore.create(folder, damage.D, {}).close()
    child = os.fork()
    if not child:
        try:
            store = LocalStore.open(folder)
            for number in range(60):
                store.commit([damage.document(f"d{number % 9}", 5, number)], [f"d{number % 7}"])
                store.optimize(full=number % 11 == 0)
            store.close()
            os._exit(0)
        except BaseException:
            os._exit(1)
    opened, status = 0, (0, 0)
    while status == (0, 0):
        with LocalStore.open(folder) as store:
            store.verify()
            opened += 1
        status = os.waitpid(child, os.WNOHANG)
    assert status == (child, 0)
    assert opened > 3
