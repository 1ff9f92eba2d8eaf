"""What was freed is given back to the system."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from bertie.serve.memory import trim_memory

PAGE = 4096


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked")
def test_holes_between_what_is_used_are_given_back() -> None:
    blocks = [bytearray(b"x" * 100_000) for _ in range(1000)]
    kept = blocks[::50]
    del blocks
    before = resident()
    trim_memory()
    assert before - resident() > 50_000_000
    assert all(len(one) == 100_000 for one in kept)
