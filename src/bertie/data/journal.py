"""Resumable output files: a partial file with a journal, renamed atomically when complete.

`OUT.part` grows by whole chunks; the journal `OUT.part.json` has the number of rows and bytes that
are safe, and the settings of the run. Data are flushed to disk before the journal, so that the
journal never promises too much. To resume, the partial file is truncated to what the journal says.
Chunks depend on the input alone, so that the result does not depend on where a run was interrupted.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from bertie.data.atomic import lock_file
from bertie.data.writers import Writer
from bertie.errors import BertieError, ExistsError, InputError

COMMIT_INTERVAL = 0.25  # seconds between two commits: what a kill may lose


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


class ResumableFile:
    """A partial output file and its journal.

    The constructor only checks; `start` creates the file. Leaving the `with` block by an exception
    keeps what is safe.
    """

    def __init__(self, final: Path, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        self.final, self.settings = final, settings
        self.path = final.with_name(final.name + ".part")
        self.journal = final.with_name(final.name + ".part.json")
        self.rows = self._size = 0  # committed rows and bytes
        self._written = 0  # rows, including those not committed yet
        self._committed_at = time.monotonic()
        self._file: BinaryIO | None = None
        self._resume = resume
        self._check(overwrite)

    def _check(self, overwrite: bool) -> None:
        if self.final.is_dir():
            raise ExistsError(f"{self.final} is a folder; pass the name of a file")
        if not self.final.parent.is_dir():
            raise InputError(f"{self.final} cannot be written: there is no folder {self.final.parent}")
        if not os.access(self.final.parent, os.W_OK):
            raise InputError(f"{self.final} cannot be written: no permission in {self.final.parent.absolute()}")
        previous = self._read_journal()
        if self._resume and previous is not None:
            alternative = "pass --overwrite without --resume to start over"
            check_same_settings(self.path, previous["settings"], self.settings, alternative)
            self.rows, self._size = previous["rows"], previous["bytes"]
            return
        if self.final.exists() and not overwrite:
            if self._resume:
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
            rows, size, _ = journal["rows"], journal["bytes"], journal["settings"]
            actual = self.path.stat().st_size
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.journal} is corrupt ({error}); delete it to start over") from None
        if actual < size:
            raise InputError(f"{self.path} is shorter than its journal says ({rows:,} rows); delete both to start over")
        return journal

    def start(self, writer: Writer) -> None:
        """Open the partial file and truncate it to what is safe."""
        self._writer = writer
        try:
            file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}") from None
        lock_file(file, self.path)
        self._file = file
        if not self._size:  # an old journal must not vouch for a new partial file
            self.journal.unlink(missing_ok=True)
        self._file.truncate(self._size)
        self._file.seek(self._size)
        self._written = self.rows
        if not self._size:
            self._file.write(writer.header())

    def append(self, data: bytes, rows: int) -> None:
        """Append a chunk, and commit if the last commit is long enough ago."""
        assert self._file is not None
        self._file.write(data)
        self._written += rows
        if time.monotonic() - self._committed_at >= COMMIT_INTERVAL:
            self.commit()

    def commit(self) -> None:
        """Flush the data to disk, then replace the journal."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        entry = json.dumps({"settings": self.settings, "rows": self._written, "bytes": size}, indent=1)
        temporary = self.journal.with_name(self.journal.name + ".new")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(entry)
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
        self._file.close()
        self._file = None
        complete = self._writer.finalize(self.path, self.rows)
        os.replace(complete, self.final)
        # From here on the result is complete; a journal without a partial file is ignored.
        self.journal.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is None:
            return
        if error is not None:
            self._rollback(error)
        with suppress(OSError):  # the disk is still full
            self._file.close()
        self._file = None

    def _rollback(self, error: BaseException) -> None:
        """Keep what is committed, or nothing if there is none."""
        assert self._file is not None
        with suppress(OSError):  # such as a full disk, most likely the original error
            # A Ctrl-C may interrupt a chunk; errors of Bertie come between two chunks.
            if isinstance(error, BertieError) and self._written > self.rows:
                self.commit()
            self._file.truncate(self._size)
        if isinstance(error, OSError) and not error.filename:
            error.filename = str(self.path)
        if self.rows:
            error.add_note(f"{self.rows:,} rows are safe in {self.path}; --resume continues after them")
        else:
            self.path.unlink(missing_ok=True)
            self.journal.unlink(missing_ok=True)
