"""Folders of arrays derived from passages, written atomically and checked when they are read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertie.data.draft_folder import draft_folder
from bertie.search.checksums import compute_checksums, corrupt_files

Arrays = Mapping[str, NDArray[Any]]
HEADER_BYTES = 128  # of a .npy file; one without data cannot be memory-mapped


def save_arrays(folder: Path, arrays: Arrays, owner: str, texts: Mapping[str, str] | None = None) -> None:
    """Write arrays, and texts by file name, atomically; `owner` identifies the index (and model) they belong to."""
    folder.parent.mkdir(exist_ok=True)
    with draft_folder(folder) as draft:
        for name, values in arrays.items():
            np.save(draft / name, values)
        for name, text in (texts or {}).items():
            (draft / name).write_text(text, encoding="utf-8")
        record = {"index": owner, "files": compute_checksums(draft)}
        (draft / "checksums.json").write_text(json.dumps({"checksum": _checksum(record), **record}))


def load_arrays(folder: Path, owner: str) -> dict[str, NDArray[Any]] | None:
    """Memory-map saved arrays; None if they are corrupt, or have another owner."""
    try:
        if corrupt_array_file(folder, owner):
            return None
        return {file.stem: _load(file) for file in folder.glob("*.npy")}
    except (OSError, ValueError):  # another process may be removing it
        return None


def _load(file: Path) -> NDArray[Any]:
    mode: Any = "r" if file.stat().st_size > HEADER_BYTES else None
    values: NDArray[Any] = np.load(file, mmap_mode=mode)
    return values


def corrupt_array_file(folder: Path, owner: str) -> str | None:
    """Return the name of the first corrupt file in a saved folder; None if all are intact."""
    try:
        record = json.loads((folder / "checksums.json").read_text())
        if record.pop("checksum") != _checksum(record) or record["index"] != owner:
            return "checksums.json"
        return next(iter(corrupt_files(folder, record["files"])), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "checksums.json"


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record).encode())
