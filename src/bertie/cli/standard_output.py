"""Standard output that is named in its errors, so that a full disk or a closed pipe can be attributed to it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bertie.errors import InputError

NAME = "standard output"


class _Raw(io.FileIO):
    """A file descriptor with a name in errors. After an error, output is discarded and not retried at exit."""

    _failed = False

    def write(self, data: Any, /) -> int:
        if self._failed:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self._failed = True
            error.filename = NAME
            raise


@contextmanager
def standard_output() -> Iterator[None]:
    """Reject a closed standard output, name it in errors, and flush it before the interpreter exits."""
    if sys.stderr is None:  # closed; messages must not go to a file that was opened later
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    original = sys.stdout
    if original is None:
        # The next file to be opened would get its descriptor, and everything that is printed.
        raise InputError("standard output is closed; redirect it to a file or to /dev/null")
    if original is not sys.__stdout__ or not isinstance(original, io.TextIOWrapper):  # already redirected in Python
        yield
        return
    original.flush()
    raw = _Raw(original.fileno(), "w", closefd=False)
    stdout = io.TextIOWrapper(
        io.BufferedWriter(raw), original.encoding, original.errors, line_buffering=original.line_buffering
    )
    sys.stdout = stdout
    try:
        yield
    finally:
        sys.stdout = original
        stdout.flush()
