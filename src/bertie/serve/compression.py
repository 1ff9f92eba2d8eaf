"""Compressed request bodies, decompressed with a limit: a few bytes can stand for gigabytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from bertie.serve.api_errors import ApiError
from bertie.serve.limits import body_too_large

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # of zlib: 16 more for gzip's header and checksum
ALLOWED = "gzip, deflate"


def content_encoding(header: bytes | None) -> str | None:
    """The encoding of a body that must be decompressed; None: it need not be. An error if it is not supported."""
    name = "identity" if header is None else header.decode("latin-1").strip().lower()
    if name == "identity":
        return None
    if name not in _WINDOW_BITS:
        message = f"Content-Encoding {name[:40]!r} is not supported; allowed: {ALLOWED}"
        raise ApiError("unsupported_media_type", message, accept_encoding=ALLOWED)
    return name


def decompress(body: bytes, encoding: str, limit: int) -> bytes | None:
    """Decompress a whole body; None: it has more than `limit` bytes, of which no more than one is produced.

    >>> decompress(zlib.compress(b"text"), "deflate", 4), decompress(zlib.compress(b"texts"), "deflate", 4)
    (b'text', None)
    """
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        data = decompressor.decompress(body, limit + 1)
    except zlib.error:
        raise ApiError("invalid_encoding", f"the body is not valid {encoding}") from None
    if len(data) > limit:
        return None
    if not decompressor.eof:
        raise ApiError("invalid_encoding", f"the body is not valid {encoding}: its end is missing")
    if decompressor.unused_data:  # a second gzip member as well: many empty ones would cost more than their bytes
        raise ApiError("invalid_encoding", f"the body has more data after the end of its {encoding} stream")
    return data


class Decompressor:
    """Decompresses the bodies of all requests in threads; together they may take `total` bytes until their reply."""

    def __init__(self, limit: int, total: int) -> None:
        """`limit`: bytes of one body."""
        self.limit, self.total = limit, total
        self.held = 0
        self._lock = Lock()

    @contextmanager
    def hold(self, body: bytes, encoding: str | None) -> Iterator[bytes]:
        """The body without its encoding, counted until the end of the context."""
        if encoding is None:
            yield body
            return
        with self._lock:  # one at a time: what is decompressed and not counted yet is at most one body
            data = decompress(body, encoding, self.limit)
            if data is None:
                raise body_too_large(self.limit)
            if self.held + len(data) > self.total:
                raise ApiError("overloaded", "the bodies of all requests take too much memory", retry_after=1.0)
            self.held += len(data)
        try:
            yield data
        finally:
            with self._lock:
                self.held -= len(data)
