"""Compiled shared libraries, stored beside the modules that load them, and independent of Python's version.

build_libraries.py compiles them when the package is built, and records the error of a failed build.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

SUFFIX = ".dll" if sys.platform == "win32" else ".so"
PACKAGE = Path(__file__).parent
RECORD = PACKAGE / "_compiled.json"


def library_path(module: str, name: str) -> Path:
    """The path of a module's compiled library; `module` is the `__file__` of the module."""
    return Path(module).with_name(f"{name}{SUFFIX}")


def load_library(module: str, name: str, abi: str) -> ctypes.CDLL | None:
    """Load a library; None if it was not built, cannot be loaded, or was built from other sources.

    `abi` is a function that only libraries with the expected C interface have.
    """
    path = library_path(module, name)
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # for another platform
        return None
    return library if hasattr(library, abi) else None


def build_error(module: str, name: str) -> str:
    """Why a library was not built; "" if that is not known."""
    try:
        errors = json.loads(RECORD.read_text(encoding="utf-8"))
        place = library_path(module, name).with_suffix("").relative_to(PACKAGE.parent).as_posix()
        return str(errors.get(place, ""))
    except (OSError, ValueError, AttributeError):
        return ""
