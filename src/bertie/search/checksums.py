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
    """Return the names of files that are missing or unreadable, or whose checksum differs."""
    with ThreadPoolExecutor(4) as pool:
        actual = pool.map(_checksum_if_readable, (folder / name for name in expected))
        pairs = zip(expected.items(), actual, strict=True)
        return [name for (name, checksum), computed in pairs if computed != tuple(checksum)]


def _checksum_if_readable(file: Path) -> tuple[int, int] | None:
    try:
        return _checksum(file)
    except PermissionError:
        raise
    except OSError:  # missing, or a disk error
        return None
