"""Compressed bodies on a real port: the same replies, and limits on what they decompress to."""

from __future__ import annotations

import gzip
import threading
import zlib
from typing import Any

import httpx
import orjson
import pytest

from bertie.serve import http
from bertie.serve.api_errors import ApiError
from bertie.serve.compression import Decompressor, content_encoding, decompress
from bertie.serve.connections import ConnectionLimits
from bertie.serve.http import ServerSettings
from bertie.serve.limits import Limits
from tests.serve.conftest import Running, Start

TEXTS = {"inputs": ["a cat", "the dog ran"], "model": "embed"}
LONG = {"inputs": "the cat sat on the mat . " * 2000, "model": "embed"}  # small when compressed


def send(server: Running, data: bytes, encoding: str = "gzip", path: str = "/embed") -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return server.client.post(path, content=data, headers=headers)


@pytest.mark.parametrize("body", [TEXTS, LONG], ids=["small", "large"])
@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("X-GZIP", gzip.compress), ("deflate", zlib.compress)]
)
def test_same_reply(server: Running, body: dict[str, Any], encoding: str, compress: Any) -> None:
    reply = send(server, compress(orjson.dumps(body)), encoding)
    assert reply.status_code == 200, reply.text
    assert reply.json() == server.post_json("/embed", body)
    assert send(server, orjson.dumps(TEXTS), "identity").status_code == 200


def test_what_is_large_without_its_encoding_does_not_run_on_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, bool]] = []
    from bertie.serve.parsing import parse_body as parse

    def spy(model: Any, body: bytes, limits: Limits) -> Any:
        sizes.append((len(body), threading.current_thread() is server.thread))
        return parse(model, body, limits)

    monkeypatch.setattr(http, "parse_body", spy)
    compressed = gzip.compress(orjson.dumps(LONG))
    assert len(compressed) < http.SMALL_BODY < len(orjson.dumps(LONG))
    send(server, compressed)
    send(server, gzip.compress(orjson.dumps(TEXTS)))
    assert sizes == [(len(orjson.dumps(LONG)), False), (len(orjson.dumps(TEXTS)), True)]


@pytest.mark.parametrize("path", ["/embed", "/windows"])  # on the event loop and in a thread
def test_a_bomb_is_refused(strict: Running, path: str) -> None:
    bomb = gzip.compress(b" " * 1_000_000)
    assert len(bomb) < 2000
    reply = send(strict, bomb, path=path)
    assert (reply.status_code, "at most 2,000 bytes" in reply.text) == (413, True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"no gzip", "not valid gzip"),
        (gzip.compress(b"{}")[:-3], "its end is missing"),
        (b"", "its end is missing"),
        (gzip.compress(b"{}") + b"garbage", "more data after the end"),
        (gzip.compress(b"{}") + gzip.compress(b""), "more data after the end"),
        (gzip.compress(b"{}" * 100)[:-8] + bytes(8), "not valid gzip"),
    ],
    # ids of our own: gzip writes the time into its header, and every worker of pytest-xdist must collect the same tests
    ids=["not gzip", "truncated", "empty", "trailing garbage", "two members", "wrong checksum"],
)
def test_invalid_data(server: Running, data: bytes, words: str) -> None:
    for path in ("/embed", "/windows"):
        reply = send(server, data, path=path)
        assert reply.status_code == 400
        assert words in reply.json()["error"]


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", ""])
def test_other_encodings(server: Running, encoding: str) -> None:
    reply = send(server, b"{}", encoding)
    assert reply.status_code == 415
    assert reply.headers["accept-encoding"] == "gzip, deflate"
    assert "allowed: gzip, deflate" in reply.json()["error"]


def test_no_more_is_produced_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    produced: list[int] = []
    real = zlib.decompressobj

    class Spy:
        def __init__(self, bits: int) -> None:
            self._real = real(bits)

        def decompress(self, data: bytes, most: int) -> bytes:
            output = self._real.decompress(data, most)
            produced.append(len(output))
            return output

    monkeypatch.setattr(zlib, "decompressobj", Spy)
    assert decompress(gzip.compress(bytes(100_000_000)), "gzip", 1000) is None
    assert produced == [1001]


def test_all_bodies_together_have_a_limit(start: Start) -> None:
    holder, body = Decompressor(100, 150), gzip.compress(bytes(100))
    with holder.hold(body, "gzip") as data:
        assert (len(data), holder.held) == (100, 100)
        with pytest.raises(ApiError, match="too much memory"), holder.hold(body, "gzip"):
            pass
        with holder.hold(b"plain", None) as plain:
            assert plain == b"plain"
    assert holder.held == 0
    small = start(ServerSettings(connections=ConnectionLimits(request_bytes=20_000)))
    assert send(small, gzip.compress(orjson.dumps(LONG))).status_code == 429
    assert send(small, gzip.compress(orjson.dumps(TEXTS))).status_code == 200


def test_content_encoding() -> None:
    assert content_encoding(None) is None
    assert content_encoding(b" GZip ") == "gzip"
