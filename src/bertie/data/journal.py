"""A file that is whole or not there, and long work that can go on where it stopped.

`OUT.part` grows by whole chunks; `OUT.part.json` says how many rows and bytes of it are safe, and what was asked. The
part reaches the disk before the journal does, so that the journal never promises too much. Going on cuts the part to
what the journal says. Chunks depend on the input alone, so that it does not matter where a run stopped.
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

COMMIT_INTERVAL = 0.25  # seconds between two entries: what a kill may cost


class AlreadyComplete(Exception):
    """There is nothing left to do."""


def check_same_settings(path: Path, before: dict[str, Any], asked: dict[str, Any], instead: str) -> None:
    """Going on with something else than was begun would mix two results."""
    now = json.loads(json.dumps(asked))
    for key in {**now, **before}:
        if now.get(key) != before.get(key):
            raise InputError(
                f"{path} was made with {key}={before.get(key)!r:.200}, and now it is {now.get(key)!r:.200}; ask for "
                f"the same, or {instead}"
            )


class ResumableFile:
    """What there is of an output so far.

    Opening it only looks; `start` makes the file. Leaving the `with` by an error keeps what is safe.
    """

    def __init__(self, final: Path, asked: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        self.final, self.asked = final, asked
        self.path = final.with_name(final.name + ".part")
        self.journal = final.with_name(final.name + ".part.json")
        self.rows = self._size = 0
        self._written = 0
        self._at = time.monotonic()
        self._file: BinaryIO | None = None
        self._resume = resume
        self._check(overwrite)

    def _check(self, overwrite: bool) -> None:
        if self.final.is_dir():
            raise ExistsError(f"{self.final} is a folder; name a file in it")
        if not self.final.parent.is_dir():
            raise InputError(f"{self.final} cannot be written: there is no folder {self.final.parent}")
        if not os.access(self.final.parent, os.W_OK):
            raise InputError(f"{self.final} cannot be written: no permission in {self.final.parent.absolute()}")
        before = self._read()
        if self._resume and before is not None:
            check_same_settings(
                self.path, before["asked"], self.asked, "pass --overwrite without --resume to begin anew"
            )
            self.rows, self._size = before["rows"], before["bytes"]
            return
        if self.final.exists() and not overwrite:
            if self._resume:
                raise AlreadyComplete(
                    f"{self.final} is there, and nothing that was stopped: there is nothing to resume"
                )
            raise ExistsError(f"{self.final} is there already; pass --overwrite, or another name")
        if before is not None and not overwrite:
            raise ExistsError(
                f"{self.path} holds {before['rows']:,} rows of a run that was stopped; pass --resume to go on with "
                "it, or --overwrite to begin anew"
            )

    def _read(self) -> dict[str, Any] | None:
        """The journal, if there is one and the part still has all that it promises."""
        if not self.journal.exists() or not self.path.exists():  # killed before the first entry, or after the last
            return None
        try:
            found: dict[str, Any] = json.loads(self.journal.read_text("utf-8"))
            rows, size, _ = found["rows"], found["bytes"], found["asked"]
            have = self.path.stat().st_size
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.journal} is damaged ({error}); delete it to begin anew") from None
        if have < size:
            raise InputError(f"{self.path} is shorter than its journal says ({rows:,} rows); delete both to begin anew")
        return found

    def start(self, writer: Writer) -> None:
        """Open the part, as long as is safe."""
        self._writer = writer
        try:
            file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}") from None
        lock_file(file, self.path)
        self._file = file
        if not self._size:  # an old journal must not vouch for a new part
            self.journal.unlink(missing_ok=True)
        self._file.truncate(self._size)
        self._file.seek(self._size)
        self._written = self.rows
        if not self._size:
            self._file.write(writer.head())

    def append(self, data: bytes, rows: int) -> None:
        """Add a chunk, and enter it in the journal if the last entry is a while ago."""
        assert self._file is not None
        self._file.write(data)
        self._written += rows
        if time.monotonic() - self._at >= COMMIT_INTERVAL:
            self.commit()

    def commit(self) -> None:
        """Part first, then the journal."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        entry = json.dumps({"asked": self.asked, "rows": self._written, "bytes": size}, indent=1)
        fresh = self.journal.with_name(self.journal.name + ".new")
        with open(fresh, "w", encoding="utf-8") as file:
            file.write(entry)
            file.flush()
            os.fsync(file.fileno())
        # Noted before it is entered: a Ctrl-C between the two may not cut the part shorter than the journal says.
        self.rows, self._size, self._at = self._written, size, time.monotonic()
        os.replace(fresh, self.journal)

    def finish(self) -> None:
        """Give the file its name."""
        assert self._file is not None
        self.commit()
        self._file.close()
        self._file = None
        whole = self._writer.seal(self.path, self.rows)
        os.replace(whole, self.final)
        # From here on the result is there; a journal without its part says nothing any more.
        self.journal.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is None:
            return
        if error is not None:
            self._keep(error)
        with suppress(OSError):  # of a full disk, once more
            self._file.close()
        self._file = None

    def _keep(self, error: BaseException) -> None:
        """Leave behind what is safe and can be gone on with, or nothing."""
        assert self._file is not None
        with suppress(OSError):  # of a full disk, most likely the very error
            # A Ctrl-C may come in the middle of a chunk; our own errors come between two.
            if isinstance(error, BertieError) and self._written > self.rows:
                self.commit()
            self._file.truncate(self._size)
        if isinstance(error, OSError) and not error.filename:
            error.filename = str(self.path)
        if self.rows:
            error.add_note(f"{self.rows:,} rows are safe in {self.path}, --resume goes on after them")
        else:
            self.path.unlink(missing_ok=True)
            self.journal.unlink(missing_ok=True)
