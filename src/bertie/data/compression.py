"""gzip, xz and zstd: detected by magic number when reading, chosen by suffix when writing.

Each chunk is written as a separate gzip member, xz stream or zstd frame: concatenated they are a
valid file, and so is a file truncated after any chunk.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from bertie.errors import InputError, MissingPackageError

GZIP, XZ, ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"  # none is valid UTF-8
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")
_READ_SIZE = 1024  # a few bytes of xz or zstd may expand to megabytes


def open_decompressed(raw: io.BufferedReader, name: str) -> BinaryIO:
    """Return a stream of the decompressed content of a file."""
    magic = raw.peek(6)[:6]
    if magic.startswith(GZIP):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if magic == XZ:
        lzma = _lzma()
        return io.BufferedReader(_Frames(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError), 1 << 16)
    if magic.startswith(ZSTD):
        zstd = _zstd()
        return io.BufferedReader(_Frames(raw, zstd.ZstdDecompressor, zstd.ZstdError), 1 << 16)
    if magic and name.endswith(COMPRESSED_SUFFIXES):
        raise InputError(f"{name} is not a {name[name.rindex('.') :]} file, although its suffix says so")
    return raw


def compress(data: bytes, suffix: str) -> bytes:
    """Compress a chunk deterministically into a complete member, stream or frame."""
    if suffix == ".gz":
        return gzip.compress(data, compresslevel=6, mtime=0)
    compressed: bytes = data
    if suffix == ".xz":
        compressed = _lzma().compress(data)
    if suffix == ".zst":
        compressed = _zstd().compress(data)
    return compressed


@contextmanager
def decompression_errors(name: str) -> Iterator[None]:
    """Translate the errors of all decompressors."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{name} cannot be decompressed, it is corrupt or truncated: {error}") from None


def check_codec(suffix: str) -> None:
    """Fail now rather than at the first chunk if a codec is missing."""
    if suffix == ".xz":
        _lzma()
    if suffix == ".zst":
        _zstd()


class _Zstandard:
    """The package zstandard with the interface of Python 3.14's own module."""

    def __init__(self, package: Any) -> None:
        self.ZstdError = package.ZstdError
        # Files written by `zstd --long=31` need a window of 2 GiB.
        self.ZstdDecompressor = lambda: package.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self.compress = lambda data: package.ZstdCompressor().compress(data)


def _lzma() -> Any:
    try:
        import lzma
    except ImportError:  # a Python that was compiled without liblzma
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
    """A stream of concatenated frames (xz: streams) that detects truncation and corruption.

    zstandard's own reader accepts a truncated file, and Python's lzma.open one whose second stream
    is corrupt.
    """

    def __init__(self, raw: BinaryIO, decompressor: Callable[[], Any], error: type[Exception]) -> None:
        self._raw, self._decompressor, self._error = raw, decompressor, error
        self._frame: Any = None
        self._unused, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._unused or self._raw.read(_READ_SIZE)
            if not data:
                if self._frame is not None:
                    raise EOFError("the last frame is incomplete")
                return 0
            self._frame = self._frame or self._decompressor()
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except self._error as error:
                raise EOFError(error) from None
            self._unused = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size
