"""CRC-32 checksums of the files of a folder, to detect corruption."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Checksums = Mapping[str, tuple[int, int]]  # file name -> (size, CRC-32)


def compute_checksums(folder: Path) -> Checksums:
    """Return size and CRC-32 of each file in a folder."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    with ThreadPoolExecutor(4) as pool:
        return {file.name: checksum for file, checksum in zip(files, pool.map(_checksum, files), strict=True)}


def _checksum(file: Path) -> tuple[int, int]:
    size = crc = 0
    with file.open("rb") as f:
        while data := f.read(1 << 20):
            size, crc = size + len(data), zlib.crc32(data, crc)
    return size, crc


def corrupt_files(folder: Path, expected: Checksums) -> list[str]:
    """Return the names of files that are missing or whose checksum differs."""
    actual = compute_checksums(folder) if folder.is_dir() else {}
    return [name for name, checksum in expected.items() if actual.get(name) != tuple(checksum)]
