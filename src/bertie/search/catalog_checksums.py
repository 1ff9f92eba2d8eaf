"""Checksums of the SQLite catalog, since SQLite does not checksum its pages.

`index.checksums` starts with a record of the last transaction: its number, and the size and CRC-32
of the write-ahead log (WAL) up to it. The record is written after each transaction, alternating
between two slots, so that a failed write leaves the previous record intact. The CRC-32 of each page of
`index.sqlite` follows; these are replaced by an atomic rename after each checkpoint, which copies
pages from the log into `index.sqlite`. The order of operations keeps the files valid even if the
process is killed at any moment:

    commit        the log grows; the record
    checkpoint    the record; pages are copied; their checksums, on disk; the log is emptied; the record

Only the writer checkpoints: readers open the catalog read-only, and SQLite's own checkpoints are
disabled. A page is valid if its checksum is the recorded one, or that of a version in the log.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from bertie.data.atomic import atomic_rename
from bertie.errors import BertieError, CheckpointError

PAGE = 4096
MAGIC = b"bertie03"
WAL_HEADER = 32
FRAME = np.dtype([("page", ">u4"), ("commit", ">u4"), ("salts", "<u8"), ("checksum", "<u8"), ("content", f"V{PAGE}")])
CHECKPOINT_FRAMES = 4000  # the log is checkpointed at this size, or at a 16th of the catalog's pages if larger
BUSY_TIMEOUT = 60  # seconds
ATTEMPTS = 50  # to read while another process writes
READ_PAGES = 256  # pages per read


class LogState(IntEnum):
    """Checkpoint state of the log: still needed, being copied to the catalog, or copied.

    While it is being copied, pages of the catalog that are also in the log may be incomplete. Once
    copied, the log may be emptied or overwritten.
    """

    NEEDED, COPYING, COPIED = range(3)


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The last transaction: its number, and the log up to it."""

    id: bytes  # of the index, 16 bytes
    transactions: int = 0
    wal_salts: bytes = bytes(8)  # changed by SQLite whenever it restarts the log
    wal_size: int = 0
    wal_crc: int = 0
    state: LogState = LogState.NEEDED
    number: int = 0  # of the record

    LAYOUT: ClassVar = struct.Struct("<8s16sQ8sQIIQ")
    SIZE: ClassVar[int] = LAYOUT.size + 4

    def pack(self) -> bytes:
        """Serialize the record, with a checksum."""
        wal = (self.wal_salts, self.wal_size, self.wal_crc, self.state)
        data = self.LAYOUT.pack(MAGIC, self.id, self.transactions, *wal, self.number)
        return data + zlib.crc32(data).to_bytes(4, "little")

    @classmethod
    def unpack(cls, data: bytes) -> Self | None:
        """Read a record; None if it is corrupt."""
        if len(data) < cls.SIZE or zlib.crc32(data[: cls.LAYOUT.size]) != int.from_bytes(data[-4:], "little"):
            return None
        magic, id, transactions, salts, size, crc, state, number = cls.LAYOUT.unpack(data[: cls.LAYOUT.size])
        return cls(id, transactions, salts, size, crc, LogState(state), number) if magic == MAGIC else None


@dataclass(frozen=True, slots=True)
class CatalogChecksums:
    """The contents of `index.checksums`: the last record, and the CRC-32 of each page."""

    record: CommitRecord
    pages: NDArray[np.uint32]
    is_intact: bool = True  # whether both records are valid

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Read the file; None if it is corrupt."""
        data, size = file.read_bytes(), CommitRecord.SIZE
        records = [CommitRecord.unpack(data[:size]), CommitRecord.unpack(data[size : 2 * size])]
        valid = [record for record in records if record is not None]
        body, end = data[2 * size : -4], data[-4:]
        if not valid or not body or len(body) % 4 or zlib.crc32(body) != int.from_bytes(end, "little"):
            return None
        return cls(max(valid, key=lambda record: record.number), np.frombuffer(body, np.uint32), len(valid) == 2)

    def write(self, file: Path) -> None:
        """Replace the file atomically and durably."""
        temporary = file.with_name(f"{file.name}.new")
        body = self.pages.tobytes()
        temporary.write_bytes(2 * self.record.pack() + body + zlib.crc32(body).to_bytes(4, "little"))
        atomic_rename(temporary, file)


def checksums_file(catalog: Path) -> Path:
    """Return the path of the checksums of a catalog."""
    return catalog.with_suffix(".checksums")


def seal_catalog(catalog: Path, id: bytes, transactions: int, target: Path) -> None:
    """Write the checksums of a catalog whose log is empty."""
    with closing(SharedFile(catalog)) as file:
        pages = np.array([crc for _, crc in file.page_checksums()], np.uint32)
    CatalogChecksums(CommitRecord(id, transactions), pages).write(target)


# --- writing ---


class CatalogRecorder:
    """Keeps the checksums up to date on the writer's side, and checkpoints the log."""

    def __init__(self, catalog: Path, db: sqlite3.Connection) -> None:
        self._file, self._db = checksums_file(catalog), db
        self._checksums = read_checksums(self._file)
        self._salts, self._end, self._crc = b"", 0, 0  # of the log up to the last recorded transaction
        self._logged: dict[int, int] = {}  # page -> CRC-32 of its last version in that part of the log
        db.execute("SELECT 1 FROM properties").fetchone()  # creates the log
        self._wal = os.open(_wal_file(catalog), os.O_RDONLY)
        self._target = os.open(self._file, os.O_WRONLY)
        self._is_behind = True  # whether pages were copied whose checksums are not written yet
        self.begin()  # including transactions that a killed writer did not record

    def close(self) -> None:
        """Close the files."""
        os.close(self._wal)
        os.close(self._target)

    def begin(self) -> None:
        """Prepare a transaction, which may overwrite the log if it was copied to the catalog."""
        if self._is_behind:
            try:
                self._checkpoint()
            except OSError as error:
                reason = error.strerror or str(error)
                raise BertieError(f"{self._file}: {reason}; everything that was committed is safe") from None

    def committed(self) -> None:
        """Record a transaction that was just committed."""
        with suppress(OSError, sqlite3.Error):  # the previous record is still valid
            self._follow_log()
            self._record()
        if self._end // FRAME.itemsize >= max(CHECKPOINT_FRAMES, self._pages // 16):
            self.checkpoint()

    def checkpoint(self) -> bool:
        """Copy the log into the catalog and empty it, if possible; return whether it is empty."""
        with suppress(OSError, sqlite3.Error):  # disk full: the log still has everything
            return self._checkpoint()
        return False

    def _checkpoint(self) -> bool:
        if os.fstat(self._wal).st_size:
            self._write_record(replace(self._checksums.record, state=LogState.COPYING))
            self._is_behind = True
            busy, frames, copied = self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if frames > 0:
                self._follow_log(WAL_HEADER + frames * FRAME.itemsize)
            if busy or frames != copied:  # a reader needs the old version of a page
                self._record()
                self._is_behind = False
                return False
            pages = np.zeros(self._pages, np.uint32)
            pages[: len(self._checksums.pages)] = self._checksums.pages
            if self._logged:
                pages[np.array(list(self._logged)) - 1] = list(self._logged.values())
            record = replace(self._new_record(), state=LogState.COPIED)
            CatalogChecksums(record, pages).write(self._file)
            self._checksums = CatalogChecksums(record, pages)
            new = os.open(self._file, os.O_WRONLY)
            os.close(self._target)
            self._target = new
        self._is_behind = False
        return self._truncate_log()

    def _truncate_log(self) -> bool:
        self._db.execute("PRAGMA busy_timeout = 0")  # do not wait for readers
        try:
            busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT * 1000}")
        if not busy:
            self._salts, self._end, self._crc, self._logged = b"", 0, 0, {}
            with suppress(OSError):  # the record already allows for an empty log
                self._record()
        return not busy

    @property
    def _pages(self) -> int:
        return max([len(self._checksums.pages), *self._logged])

    def _follow_log(self, end: int | None = None) -> None:
        """Read what was appended to the log, up to `end`, by default one transaction."""
        header = _read_range(self._wal, 0, WAL_HEADER)
        if header[16:24] != self._salts:  # the log was restarted
            self._salts, self._end, self._crc, self._logged = header[16:24], WAL_HEADER, zlib.crc32(header), {}
        data = _read_range(self._wal, self._end, os.fstat(self._wal).st_size if end is None else end)
        frames = _frames(data, self._salts)
        if end is None:  # frames after the commit frame are left over from a failed transaction
            commits = np.flatnonzero(frames["commit"])
            frames = frames[: int(commits[0]) + 1 if len(commits) else 0]
        self._logged.update(_versions(data, frames))
        self._crc = zlib.crc32(data[: len(frames) * FRAME.itemsize], self._crc)
        self._end += len(frames) * FRAME.itemsize

    def _record(self) -> None:
        self._write_record(self._new_record())

    def _new_record(self) -> CommitRecord:
        """Return the record of the current state."""
        sum_query = "SELECT sum(value) FROM properties WHERE name IN ('generation', 'layout')"
        (transactions,) = self._db.execute(sum_query).fetchone()
        old, salts = self._checksums.record, self._salts.ljust(8, b"\0")
        return CommitRecord(old.id, transactions, salts, self._end, self._crc, number=old.number)

    def _write_record(self, record: CommitRecord) -> None:
        """Overwrite the older of the two records."""
        record = replace(record, number=self._checksums.record.number + 1)
        data, offset = record.pack(), record.number % 2 * CommitRecord.SIZE
        while data:
            count = os.pwrite(self._target, data, offset)
            data, offset = data[count:], offset + count
        self._checksums = CatalogChecksums(record, self._checksums.pages)


# --- reading ---


def read_checksums(file: Path) -> CatalogChecksums:
    """Read the checksums of a catalog, or raise an error that names the file."""
    for attempt in range(3):  # a read during a write may see half of it
        time.sleep(0.01 * attempt)
        try:
            checksums = CatalogChecksums.read(file)
        except OSError as error:
            raise _checksums_error(file, error.strerror or str(error)) from None
        if checksums is not None:
            return checksums
    raise _checksums_error(file, "checksum mismatch")


def verify_catalog(catalog: Path, file: SharedFile, *, strict: bool = False) -> CommitRecord:
    """Verify all pages of a catalog and its log, or raise an error; return the record.

    `strict` also rejects a corrupt record if the other one is valid. Another process may be
    writing: a mismatch is an error only if the checksums have not changed meanwhile.
    """
    checksums = read_checksums(checksums_file(catalog))
    suspects: Iterable[int] | None = None  # pages to read again
    for _ in range(ATTEMPTS):
        wrong = file.mismatches(checksums.pages, suspects)
        # The log is read after the pages, since it contains any versions copied to them meanwhile.
        log, reason = _read_log(_wal_file(catalog), checksums.record)
        if wrong:
            versions = set(_versions(log, _frames(log[WAL_HEADER:], log[16:24]), WAL_HEADER))
            incomplete = {page for page, _ in versions} if checksums.record.state is LogState.COPYING else set()
            valid = {page for page in wrong if page in incomplete or (page, wrong[page]) in versions}
            wrong = {page: crc for page, crc in wrong.items() if page not in valid}
        if not wrong and reason is None and (checksums.is_intact or not strict):
            return checksums.record
        before, checksums = checksums, read_checksums(checksums_file(catalog))
        if before.record == checksums.record and np.array_equal(before.pages, checksums.pages):
            break
        suspects = wrong
        time.sleep(0.01)
    if wrong:
        size = "" if file.pages == len(checksums.pages) else f"; {file.pages} pages instead of {len(checksums.pages)}"
        raise catalog_error(catalog, f"checksum mismatch in page {min(wrong)}{size}")
    if reason is not None:
        raise catalog_error(_wal_file(catalog), reason)
    raise _checksums_error(checksums_file(catalog), "checksum mismatch")


def verify_transactions(catalog: Path, record: CommitRecord, id: bytes, transactions: int) -> None:
    """Reject a log of another index, or one that lacks transactions."""
    wal = _wal_file(catalog)
    file = wal if wal.exists() and wal.stat().st_size else catalog
    if id != record.id:
        raise catalog_error(file, "it belongs to another index")
    if transactions < record.transactions:
        raise catalog_error(file, f"it ends with transaction {transactions} of {record.transactions}")


def _read_log(wal: Path, record: CommitRecord) -> tuple[bytes, str | None]:
    """Return the log, and why it is invalid (None if it is valid)."""
    try:
        log = wal.read_bytes()
    except FileNotFoundError:
        log = b""
    if record.state is LogState.COPIED and log[16:24] != record.wal_salts:  # emptied, or restarted
        return log, None
    if len(log) < record.wal_size:
        return log, f"{len(log)} bytes instead of {record.wal_size}"
    return log, None if zlib.crc32(log[: record.wal_size]) == record.wal_crc else "checksum mismatch"


def _read_range(descriptor: int, start: int, end: int) -> bytes:
    """Read a range of a file in full; a single `pread` may return less."""
    parts = []
    while start < end and (data := os.pread(descriptor, end - start, start)):
        parts.append(data)
        start += len(data)
    return b"".join(parts) if len(parts) != 1 else parts[0]


def _frames(data: bytes, salts: bytes) -> NDArray[Any]:
    """Return the frames of a log (without its header) that were written since its last restart."""
    frames = np.frombuffer(data[: len(data) // FRAME.itemsize * FRAME.itemsize], FRAME)
    stale = np.flatnonzero(frames["salts"] != int.from_bytes(salts, "little"))
    return frames[: stale[0]] if len(stale) else frames


def _versions(data: bytes, frames: NDArray[Any], start: int = 0) -> Iterator[tuple[int, int]]:
    """Iterate over the page numbers of frames, which begin at offset `start` of the data, and the pages' CRC-32."""
    view = memoryview(data)[start:]
    for row, page in enumerate(frames["page"].tolist()):
        yield page, zlib.crc32(view[(row + 1) * FRAME.itemsize - PAGE : (row + 1) * FRAME.itemsize])


class SharedFile:
    """A catalog as a plain file.

    When a process closes a file, it loses all its locks on that file, including those of SQLite.
    The descriptor is therefore shared, and closed with the last user: code that opens a connection
    closes its `SharedFile` after it.
    """

    _lock = threading.Lock()
    _descriptors: ClassVar[dict[tuple[int, int], tuple[int, int]]] = {}  # inode -> descriptor, users

    def __init__(self, path: Path) -> None:
        with self._lock:
            status = path.stat()
            self._inode = (status.st_dev, status.st_ino)
            if self._inode in self._descriptors:
                self._descriptor, users = self._descriptors[self._inode]
            else:
                self._descriptor, users = os.open(path, os.O_RDONLY), 0
            self._descriptors[self._inode] = self._descriptor, users + 1

    def close(self) -> None:
        """Close the file, unless it has other users."""
        with self._lock:
            descriptor, users = self._descriptors.pop(self._inode)
            if users > 1:
                self._descriptors[self._inode] = descriptor, users - 1
            else:
                os.close(descriptor)

    @property
    def pages(self) -> int:
        """The number of pages, of which the last may be incomplete."""
        return -(-os.fstat(self._descriptor).st_size // PAGE)

    def page_checksums(self) -> Iterator[tuple[int, int]]:
        """Iterate over the numbers of all pages, from 1, and their CRC-32."""
        first = 1
        while data := _read_range(self._descriptor, (first - 1) * PAGE, (first - 1 + READ_PAGES) * PAGE):
            view = memoryview(data)
            for start in range(0, len(data), PAGE):
                yield first + start // PAGE, zlib.crc32(view[start : start + PAGE])
            first += -(-len(data) // PAGE)

    def mismatches(self, expected: NDArray[np.uint32], suspects: Iterable[int] | None) -> dict[int, int]:
        """Return the CRC-32 (-1 if missing) of the pages that differ from `expected`, among `suspects` or all pages."""
        if suspects is None:
            actual = dict(self.page_checksums())
            missing = [*range(len(actual) + 1, len(expected) + 1)]
        else:
            data = {page: _read_range(self._descriptor, (page - 1) * PAGE, page * PAGE) for page in suspects}
            actual = {page: zlib.crc32(content) for page, content in data.items() if content}
            missing = [page for page, content in data.items() if not content and page <= len(expected)]
        right = expected.tolist()
        wrong = {page: crc for page, crc in actual.items() if page > len(right) or crc != right[page - 1]}
        return wrong | dict.fromkeys(missing, -1)


def catalog_error(file: Path, reason: str) -> CheckpointError:
    """Return the error for a corrupt file of a catalog."""
    return CheckpointError(
        f"{file} is corrupt ({reason}); restore a backup of {file.parent}, or remove it and rebuild the index from its "
        "documents"
    )


def _checksums_error(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is corrupt ({reason}); if nothing else is, `bertie index --rebuild -o {file.parent}` restores it"
    )


def _wal_file(catalog: Path) -> Path:
    return catalog.with_name(f"{catalog.name}-wal")
