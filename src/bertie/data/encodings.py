"""UTF-16 and UTF-32 read as UTF-8: by their byte order mark; without one they are recognized and refused."""

from __future__ import annotations

import codecs
import io
from typing import Any, BinaryIO

from bertie.errors import InputError

# UTF-32 first: its little-endian mark starts with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Which bytes of four ASCII characters are NUL.
_NULS = {
    "utf-16le": (0, 1) * 4,
    "utf-16be": (1, 0) * 4,
    "utf-32le": (0, 1, 1, 1) * 2,
    "utf-32be": (1, 1, 1, 0) * 2,
}
_READ_SIZE = 1 << 16


def open_utf8(data: BinaryIO, name: str) -> BinaryIO:
    """Return the stream as UTF-8."""
    start: bytes = data.peek(8)[:8] if hasattr(data, "peek") else b""
    for mark, encoding in _MARKS:
        if start.startswith(mark):
            return io.BufferedReader(_Transcoded(data, encoding, name), _READ_SIZE)
    for encoding, nuls in _NULS.items():
        if len(start) >= 4 and tuple(int(not byte) for byte in start) == nuls[: len(start)]:
            raise InputError(
                f"{name} looks like {encoding.upper()} without a byte order mark; convert the file, for example with "
                f"iconv -f {encoding} -t utf-8"
            )
    return data


class _Transcoded(io.RawIOBase):
    """A stream of UTF-8 from one of UTF-16 or UTF-32."""

    def __init__(self, data: BinaryIO, encoding: str, name: str) -> None:
        self._data, self._encoding, self._name = data, encoding, name
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._ready, self._read = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._data.read(_READ_SIZE)
            try:
                self._ready = memoryview(self._decoder.decode(block, final=not block).encode("utf-8"))
            except UnicodeError as error:
                raise InputError(
                    f"{self._name} is not {self._encoding.upper()}, although its byte order mark says so: "
                    f"{getattr(error, 'reason', error)} after {self._read:,} bytes"
                ) from None
            self._read += len(block)
            if not block:
                break
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size
