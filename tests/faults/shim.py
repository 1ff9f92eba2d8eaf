"""The library that injects faults into system calls: compile it, arm it, and read what it did."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
FILE_CALLS = ("open", "write", "sync", "rename", "unlink", "link", "truncate", "mkdir", "read")
KINDS = (*FILE_CALLS, "accept", "send", "recv")  # in the order of the C source


def compile_shim(folder: Path) -> Path | None:
    """Compile the library into a folder; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.uname().sysname != "Linux":
        return None
    library = folder / "shim.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


class _State(ctypes.Structure):
    _fields_ = (
        ("calls", ctypes.c_long),
        ("injected", ctypes.c_long),
        ("by_kind", ctypes.c_long * 16),
        ("first", ctypes.c_char * 512),
    )


@dataclass(frozen=True)
class ShimState:
    """How many calls were seen, of which kinds, how many faults were injected, and the first of these."""

    calls: int
    injected: int
    first: str
    by_kind: dict[str, int] = field(repr=False)


def is_loaded() -> bool:
    """Whether this process runs with the library."""
    return hasattr(ctypes.CDLL(None), "faults_configure")


def arm(settings: dict[str, object]) -> None:
    """Configure the library in this process: `settings` are the environment variables without FAULTS_."""
    for name in [name for name in os.environ if name.startswith("FAULTS_")]:
        del os.environ[name]
    os.environ.update({f"FAULTS_{name}": str(value) for name, value in settings.items()})
    ctypes.CDLL(None).faults_configure()


def state() -> ShimState:
    """The counters, which forked children share."""
    library = ctypes.CDLL(None)
    library.faults_state.restype = ctypes.POINTER(_State)
    page = library.faults_state().contents
    by_kind = dict(zip(KINDS, page.by_kind, strict=False))
    return ShimState(page.calls, page.injected, page.first.decode("utf-8", "replace"), by_kind)
