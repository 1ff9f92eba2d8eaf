"""Resumable output files: a partial file with a journal, renamed atomically when complete.

`OUT.part` grows by whole chunks; the journal `OUT.part.json` has the number of rows and bytes that
are safe, their checksum, a digest of the input rows that they were computed from, and the settings
of the run. Data are flushed to disk before the journal, so that the journal never promises too much.
To resume, the partial file is truncated to what the journal says. Chunks depend on the input alone,
so that the result does not depend on where a run was interrupted.

One process writes at a time: `OUT.part.lock` is locked before any of these files is looked at, and
until the last of them is gone.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from bertie.data.atomic import PathLock, fsync, named_errors
from bertie.data.writers import Writer
from bertie.errors import BertieError, ExistsError, InputError

COMMIT_INTERVAL = 0.25  # seconds between two commits: what a kill may lose
START_OVER = "pass --overwrite without --resume to start over"
_BLOCK = 1 << 20  # bytes read at a time


class AlreadyComplete(Exception):
    """The output is complete: there is nothing to resume."""


def check_same_settings(path: Path, before: dict[str, Any], now: dict[str, Any], alternative: str) -> None:
    """Reject a resumed run with other settings, which would mix two results."""
    now = json.loads(json.dumps(now))
    for key in {**now, **before}:
        if now.get(key) != before.get(key):
            raise InputError(
                f"{path} was started with {key}={before.get(key)!r:.200}, and now {key}={now.get(key)!r:.200}; use the "
                f"same settings, or {alternative}"
            )


class RowDigest:
    """A digest of the input rows consumed so far. It does not depend on how they are grouped."""

    def __init__(self) -> None:
        self._hash = _new_hash()

    def update(self, values: Iterable[str]) -> None:
        """Add the values of rows."""
        text = "".join([f"{len(value)}:{value}" for value in values])
        self._hash.update(text.encode("utf-8", "surrogatepass"))

    def hexdigest(self) -> str:
        """Return the digest of all values so far."""
        return self._hash.hexdigest()


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


class ResumableFile:
    """A partial output file and its journal, locked from the constructor to the end of the `with` block.

    The constructor only checks; `start` creates the file. Leaving the `with` block by an exception
    keeps what is safe.
    """

    def __init__(self, final: Path, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        self.final, self.settings = final, settings
        self.path = final.with_name(final.name + ".part")
        self.journal = final.with_name(final.name + ".part.json")
        self.rows = self._size = 0  # committed rows and bytes
        self.consumed = ""  # the digest of the input of the committed rows
        self._written, self._pending = 0, ""  # the same, including rows not committed yet
        self._header = 0  # bytes that precede the rows; the checksum starts after them
        self._checksum = _new_hash()
        self._committed_at = time.monotonic()
        self._file: BinaryIO | None = None
        self._resume = resume
        if final.is_dir():
            raise ExistsError(f"{final} is a folder; pass the name of a file")
        if not final.parent.is_dir():
            raise InputError(f"{final} cannot be written: there is no folder {final.parent}")
        if not os.access(final.parent, os.W_OK):
            raise InputError(f"{final} cannot be written: no permission in {final.parent.absolute()}")
        self._lock = PathLock(final.with_name(final.name + ".part.lock"), final)
        try:
            self._check(overwrite)
        except BaseException:
            self.close()
            raise

    def _check(self, overwrite: bool) -> None:
        previous = self._read_journal()
        if self._resume and previous is not None:
            check_same_settings(self.path, previous["settings"], self.settings, START_OVER)
            self._verify(previous)
            self.rows, self._size, self.consumed = previous["rows"], previous["bytes"], previous["input"]
            self._header = previous["header"]
            return
        if self.final.exists() and not overwrite:
            if self._resume:
                self.journal.unlink(missing_ok=True)  # killed after the rename
                raise AlreadyComplete(f"{self.final} is complete: there is nothing to resume")
            raise ExistsError(f"{self.final} already exists; pass --overwrite, or another name")
        if previous is not None and not overwrite:
            raise ExistsError(
                f"{self.path} contains {previous['rows']:,} rows of an interrupted run; pass --resume to resume it, or "
                "--overwrite to start over"
            )

    def _read_journal(self) -> dict[str, Any] | None:
        """Return the journal, if it exists and the partial file is as long as it says."""
        if not self.journal.exists() or not self.path.exists():  # killed before the first commit, or after the last
            return None
        try:
            journal: dict[str, Any] = json.loads(self.journal.read_text("utf-8"))
            rows, header, size = (int(journal[key]) for key in ("rows", "header", "bytes"))
            _ = journal["settings"].items(), str(journal["checksum"]), str(journal["input"])
            if not 0 <= header <= size or rows < 0:
                raise ValueError(f"{header=}, {size=}, {rows=}")
            actual = self.path.stat().st_size
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{self.journal} is corrupt ({error}); delete it to start over") from None
        if actual < size:
            raise InputError(f"{self.path} is shorter than its journal says ({rows:,} rows); delete both to start over")
        return journal

    def _verify(self, journal: dict[str, Any]) -> None:
        """Compare the committed rows with their checksum."""
        with open(self.path, "rb") as file:
            file.seek(journal["header"])
            left = journal["bytes"] - journal["header"]
            while left and (block := file.read(min(left, _BLOCK))):
                self._checksum.update(block)
                left -= len(block)
        if self._checksum.hexdigest() != journal["checksum"]:
            raise InputError(
                f"{self.path} is corrupt: its {journal['rows']:,} rows differ from the checksum in its journal; "
                f"{START_OVER}"
            )

    def start(self, writer: Writer) -> None:
        """Open the partial file and truncate it to what is safe."""
        self._writer, header = writer, writer.header()
        if self._size and len(header) != self._header:
            raise InputError(f"{self.path} has a header of {self._header} bytes, and now {len(header)}; {START_OVER}")
        try:
            self._file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}") from None
        if not self._size:  # an old journal must not vouch for a new partial file
            self.journal.unlink(missing_ok=True)
        self._header, self._written, self._pending = len(header), self.rows, self.consumed
        with named_errors(self.path):
            self._file.truncate(self._size)
            self._file.write(header)  # also on resume: a run killed while it finished has another header
            self._file.seek(max(self._size, self._header))

    def append(self, data: bytes, rows: int, consumed: str = "") -> None:
        """Append a chunk that was computed from so many input rows; commit if the last commit is long enough ago.

        `consumed` is the digest of all input rows up to the end of this chunk.
        """
        assert self._file is not None
        with named_errors(self.path):
            self._file.write(data)
        self._checksum.update(data)
        self._written += rows
        self._pending = consumed
        if time.monotonic() - self._committed_at >= COMMIT_INTERVAL:
            self.commit()

    def commit(self) -> None:
        """Flush the data to disk, then replace the journal."""
        assert self._file is not None
        with named_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            size = self._file.tell()
        checked = {"header": self._header, "bytes": size, "checksum": self._checksum.hexdigest()}
        entry = {"settings": self.settings, "rows": self._written, **checked, "input": self._pending}
        temporary = self.journal.with_name(self.journal.name + ".new")
        with named_errors(temporary), open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps(entry, indent=1))
            file.flush()
            os.fsync(file.fileno())
        # Updated first: after a Ctrl-C in between, the file must not be truncated below what the
        # journal says.
        self.rows, self._size, self._committed_at = self._written, size, time.monotonic()
        os.replace(temporary, self.journal)

    def finish(self) -> None:
        """Complete the file and rename it."""
        assert self._file is not None
        self.commit()
        with named_errors(self.path):
            self._file.close()
        self._file = None
        if self.path.stat().st_size != self._size:
            raise InputError(f"{self.path} was changed by another program while it was written; {START_OVER}")
        complete = self._writer.finalize(self.path)
        os.replace(complete, self.final)
        fsync(self.final.parent)
        # From here on the result is complete; a journal without a partial file is ignored.
        self.journal.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._rollback(error)
        if self._file is not None:
            with suppress(OSError):  # the disk is still full
                self._file.close()
            self._file = None
        self.close()

    def _rollback(self, error: BaseException) -> None:
        """Keep what is committed, or nothing if there is none."""
        if self._file is not None:
            with suppress(OSError):  # such as a full disk, most likely the original error
                # A Ctrl-C may interrupt a chunk; errors of Bertie come between two chunks.
                if isinstance(error, BertieError) and self._written > self.rows:
                    self.commit()
                self._file.truncate(self._size)
        self.journal.with_name(self.journal.name + ".new").unlink(missing_ok=True)
        if self.rows and self.path.exists():
            error.add_note(f"{self.rows:,} rows are safe in {self.path}; --resume continues after them")
        elif self._file is not None:
            self.path.unlink(missing_ok=True)
            self.journal.unlink(missing_ok=True)
