"""Character encodings: by byte order mark, declaration or option, never by guessing."""

from __future__ import annotations

import codecs
import io
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from bertie.data.compression import decompression_errors, open_decompressed
from bertie.errors import InputError

# UTF-32 little-endian must come before UTF-16, whose mark is its prefix.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CHARSET = re.compile(rb"<(?:meta[^>]+charset|\?xml[^>]+encoding)\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]+)", re.IGNORECASE)
_READ_SIZE = 1 << 20


def decode(data: bytes, name: str, encoding: str | None, declared: str | None = None) -> str:
    """Decode by byte order mark, else as UTF-8, as declared, or as `encoding`."""
    marked = next((codec for mark, codec in BYTE_ORDER_MARKS if data.startswith(mark)), None)
    others = [] if marked else [codec for codec in (_browser_charset(declared), encoding) if codec]
    # 7-bit encodings such as ISO-2022-JP look like UTF-8 but for their escapes, and UTF-16 of
    # English but for its NULs.
    seven_bit = others and (b"\x1b" in data or b"\0" in data)
    attempts = [*others, "utf-8"] if seven_bit else [marked or "utf-8", *others]
    text: str | None = None
    for codec in attempts:
        try:
            text = data.decode(codec)
            break
        except UnicodeDecodeError as error:
            position = f"byte 0x{data[error.start]:02x} at offset {error.start}"
    if "\0" in (text or "") or (text is None and not marked and b"\0" in data):
        raise InputError(
            f"{name} is binary, not text (NUL at offset {data.find(0)}); exclude it, or pass its encoding with "
            "--encoding (encoding=) if it is UTF-16 without a byte order mark"
        )
    if text is None:
        raise InputError(
            f"{name} is not {' nor '.join(attempts)} ({position}); pass its encoding with --encoding (encoding=), such "
            "as cp1252"
        )
    return text


def _browser_charset(charset: str | None) -> str | None:
    """Return the encoding of a charset; Latin-1 and ASCII mean cp1252, as in browsers."""
    if charset is None or not is_encoding(charset):
        return None
    return "cp1252" if codecs.lookup(charset).name in ("iso8859-1", "ascii") else charset


def is_encoding(encoding: str) -> bool:
    """Return whether Python has a text encoding of this name."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding)  # unlike codecs.lookup, it rejects codecs that do not produce text
    except LookupError:
        return False
    return True


def declared_charset(page: bytes) -> str | None:
    """Return the charset that an HTML page declares."""
    match = _CHARSET.search(page[:2048])
    return match and match[1].decode()


@contextmanager
def utf8_copy(path: str, suffix: str, encoding: str | None) -> Iterator[str]:
    """Yield the path of a table in UTF-8: the file itself if it is, else a temporary copy."""
    if suffix == ".parquet":
        yield path
        return
    with open(path, "rb") as raw, decompression_errors(path):
        head = open_decompressed(raw, path).read(4)
    marks = ((mark, codec) for mark, codec in BYTE_ORDER_MARKS if codec != "utf-8-sig")
    marked = next((codec for mark, codec in marks if head.startswith(mark)), None)
    if marked is None and (encoding is None or _is_utf8(path)):
        yield path
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="", suffix=suffix) as copy:
        with open(path, "rb") as raw, decompression_errors(path):
            try:
                for piece in _decode_stream(open_decompressed(raw, path), marked or encoding or ""):
                    copy.write(piece)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path} is neither UTF-8 nor {marked or encoding} ({error.reason}); pass its encoding with "
                    "--encoding (encoding=)"
                ) from None
        copy.flush()
        yield copy.name


def _is_utf8(path: str) -> bool:
    try:
        with open(path, "rb") as raw, decompression_errors(path):
            for piece in _decode_stream(open_decompressed(raw, path), "utf-8"):
                if "\0" in piece or "\x1b" in piece:
                    return False
    except UnicodeDecodeError:
        return False
    return True


def _decode_stream(data: BinaryIO, encoding: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)()
    while piece := data.read(_READ_SIZE):
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)
