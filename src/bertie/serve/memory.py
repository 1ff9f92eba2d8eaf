"""Memory that glibc keeps though it was freed: little of it, and not for long. With another libc nothing is done."""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_ARENA_MAX = -8


def few_arenas() -> None:
    """Let all threads share two arenas: each keeps what it once held, and there would be many."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def give_back() -> None:
    """Return to the system what is free between what is used; a reloaded model, or one long text, leaves much."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
