"""Settings of glibc's allocator that keep resident memory low; no-ops with another libc."""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_ARENA_MAX = -8


def limit_arenas() -> None:
    """Let all threads share two malloc arenas: one per thread would each keep its peak."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def trim_memory() -> None:
    """Return free heap pages to the system; a reloaded model or one long text leaves many."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
