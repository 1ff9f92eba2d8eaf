"""Freed memory is returned to the system."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from bertie.serve.memory import trim_memory

PAGE = 4096


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is a function of glibc")
def test_free_pages_between_used_ones_are_returned() -> None:
    blocks = [bytearray(b"x" * 100_000) for _ in range(1000)]
    kept = blocks[::50]
    del blocks
    before = resident()
    trim_memory()
    assert before - resident() > 50_000_000
    assert all(len(block) == 100_000 for block in kept)
