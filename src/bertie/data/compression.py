"""gzip, xz and zstd, by what a file begins with when reading and by its ending when writing.

Each chunk that is written is a gzip member, an xz stream or a zstd frame of its own: concatenated they are a valid
file, and one that is cut after any chunk is a valid file as well.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from bertie.errors import InputError, MissingPackageError

GZIP, XZ, ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"  # none is the beginning of UTF-8
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")
# A few bytes of xz or zstd may stand for megabytes, so that little is taken at a time.
_BITE = 1024


def open_decompressed(raw: io.BufferedReader, name: str) -> BinaryIO:
    """What is in a file, decompressed if it is compressed."""
    begin = raw.peek(6)[:6]
    if begin.startswith(GZIP):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if begin == XZ:
        lzma = _lzma()
        return io.BufferedReader(_Frames(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError), 1 << 16)
    if begin.startswith(ZSTD):
        zstd = _zstd()
        return io.BufferedReader(_Frames(raw, zstd.ZstdDecompressor, zstd.ZstdError), 1 << 16)
    if begin and name.endswith(COMPRESSED_SUFFIXES):
        raise InputError(f"{name} does not hold what its ending {name[name.rindex('.') :]} says")
    return raw


def compress(data: bytes, ending: str) -> bytes:
    """A member, stream or frame of its own. The same data give the same bytes: no time goes in."""
    if ending == ".gz":
        return gzip.compress(data, compresslevel=6, mtime=0)
    found: bytes = data
    if ending == ".xz":
        found = _lzma().compress(data)
    if ending == ".zst":
        found = _zstd().compress(data)
    return found


@contextmanager
def decompression_errors(name: str) -> Iterator[None]:
    """Damage is one error, whoever finds it."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{name} cannot be decompressed, it is damaged or cut short: {error}") from None


def check_codec(ending: str) -> None:
    """Fail now rather than at the first chunk."""
    if ending == ".xz":
        _lzma()
    if ending == ".zst":
        _zstd()


class _Zstandard:
    """The package zstandard, as Python 3.14's own module."""

    def __init__(self, package: Any) -> None:
        self.ZstdError = package.ZstdError
        # Files made by `zstd --overflow=31` need a window of 2 GiB.
        self.ZstdDecompressor = lambda: package.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self.compress = lambda data: package.ZstdCompressor().compress(data)


def _lzma() -> Any:
    try:
        import lzma
    except ImportError:  # a Python that was compiled where liblzma was not to be had
        raise MissingPackageError(".xz needs Python's own module lzma, which this Python was built without") from None
    return lzma


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


class _Frames(io.RawIOBase):
    """Frames (of xz: streams) one after the other.

    zstandard's own reader takes a file that is cut short for a whole one, and Python's lzma.open one whose second
    stream is damaged.
    """

    def __init__(self, raw: BinaryIO, decompressor: Callable[[], Any], error: type[Exception]) -> None:
        self._raw, self._decompressor, self._error = raw, decompressor, error
        self._frame: Any = None
        self._left, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._left or self._raw.read(_BITE)
            if not data:
                if self._frame is not None:
                    raise EOFError("its last part has no end")
                return 0
            self._frame = self._frame or self._decompressor()
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except self._error as error:
                raise EOFError(error) from None
            self._left = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size
