"""gzip and zstd, by what a file begins with when reading and by its ending when writing.

Each chunk that is written is a gzip member or a zstd frame of its own: concatenated they are a valid file, and one that
is cut after any chunk is a valid file as well.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from bertie.errors import InputError, MissingPackageError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"  # neither is the beginning of UTF-8
ENDINGS = (".gz", ".zst")
# A few bytes of zstd may stand for megabytes, so that little is taken at a time.
_BITE = 8192


def opened(raw: io.BufferedReader, name: str) -> BinaryIO:
    """What is in a file, decompressed if it is compressed."""
    begin = raw.peek(4)[:4]
    if begin.startswith(GZIP):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if begin == ZSTD:
        return io.BufferedReader(_ZstdReader(raw), 1 << 16)
    if begin and name.endswith(ENDINGS):
        raise InputError(f"{name} does not hold what its ending {name[name.rindex('.') :]} says")
    return raw


def compress(data: bytes, ending: str) -> bytes:
    """A member or frame of its own. The same data give the same bytes: no time goes in."""
    if ending == ".gz":
        return gzip.compress(data, compresslevel=6, mtime=0)
    if ending == ".zst":
        found: bytes = _zstd().compress(data)
        return found
    return data


@contextmanager
def decompressing(name: str) -> Iterator[None]:
    """Damage is one error, whoever finds it."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{name} cannot be decompressed, it is damaged or cut short: {error}") from None


def check(ending: str) -> None:
    """Fail now rather than at the first chunk."""
    if ending == ".zst":
        _zstd()


class _Zstandard:
    """The package zstandard, as Python 3.14's own module."""

    def __init__(self, package: Any) -> None:
        self.ZstdError = package.ZstdError
        # Files made by `zstd --long=31` need a window of 2 GiB.
        self.ZstdDecompressor = lambda: package.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self.compress = lambda data: package.ZstdCompressor().compress(data)


def _zstd() -> Any:
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        pass
    else:
        return zstd
    try:
        import zstandard
    except ImportError:
        raise MissingPackageError(".zst needs the package zstandard: pip install 'bertie[data]'") from None
    return _Zstandard(zstandard)


class _ZstdReader(io.RawIOBase):
    """Frames one after the other. zstandard's own reader takes a file that is cut short for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._zstd = raw, _zstd()
        self._frame: Any = None
        self._left, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._left or self._raw.read(_BITE)
            if not data:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return 0
            self._frame = self._frame or self._zstd.ZstdDecompressor()
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except self._zstd.ZstdError as error:
                raise EOFError(error) from None
            self._left = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size
