"""The connection: malformed and smuggled requests, slow and vanished clients, refusals that arrive, pipelining."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from bertie.serve.http import ServerSettings
from bertie.serve.limits import Limits
from bertie.serve.protocol import HttpProtocol
from tests.serve.conftest import Running, Start, raw_headers, until

BODY = b'{"inputs":"a","model":"embed"}'
HEAD = raw_headers("/embed")[:-2]
POST = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@contextlib.contextmanager
def connect(server: Running, *, small_window: bool = False) -> Iterator[socket.socket]:
    with socket.socket() as raw:
        if small_window:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(20)
        raw.connect(("127.0.0.1", server.port))
        yield raw


def read(raw: socket.socket, wanted: int = 0) -> bytes:
    """What the server sends, until it closes the connection or has sent this many replies."""
    answer, end, replies = b"", 0, 0
    while piece := raw.recv(1 << 16):
        answer += piece
        while (body := answer.find(b"\r\n\r\n", end) + 4) > 3:
            length = re.search(rb"content-length: (\d+)", answer[end:body])
            if length is None or len(answer) < body + int(length[1]):
                break
            end, replies = body + int(length[1]), replies + 1
        if replies == wanted > 0:
            break
    return answer


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", answer)]


def exchange(server: Running, data: bytes, *, shut: bool = True) -> list[int]:
    """The statuses that the server answers with before it closes the connection."""
    with connect(server) as raw:
        raw.sendall(data)
        if shut:
            raw.shutdown(socket.SHUT_WR)
        return statuses(read(raw))


# --- requests that two servers may read differently ---

SMUGGLED = {
    "length and chunks": HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GET,
    "chunks and length": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n" + GET,
    "two lengths": HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
    "the same length twice": HEAD + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
    "a list of lengths": HEAD + b"content-length: 2, 2\r\n\r\n{}",
    "signed length": HEAD + b"content-length: +2\r\n\r\n{}",
    "negative length": HEAD + b"content-length: -2\r\n\r\n{}",
    "hexadecimal length": HEAD + b"content-length: 0x2\r\n\r\n{}",
    "overflowing length": HEAD + b"content-length: 18446744073709551618\r\n\r\n{}",
    "line folding": HEAD + b"x-a: b\r\n c\r\ncontent-length: 2\r\n\r\n{}",
    "folded encoding": HEAD + b"transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "bare line feeds": POST.replace(b"\r\n", b"\n"),
    "one bare line feed": HEAD + b"x-a: b\ncontent-length: 2\r\n\r\n{}",
    "space before the colon": HEAD + b"content-length : 2\r\n\r\n{}",
    "carriage return in a value": HEAD + b"x-a: b\rc\r\ncontent-length: 2\r\n\r\n{}",
    "NUL in a value": HEAD + b"x-a: b\0c\r\ncontent-length: 2\r\n\r\n{}",
    "unknown encoding": HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "compressed chunks": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunked is not the last": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "two encodings": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n",
    "negative chunk": CHUNKED + b"-1\r\n{}\r\n0\r\n\r\n",
    "chunk without its end": CHUNKED + b"2\r\n{}0\r\n\r\n",
    "two hosts": GET.replace(b"\r\n\r\n", b"\r\nhost: other\r\n\r\n"),
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "another scheme": GET.replace(b"/health", b"ftp://localhost/health"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
    "unknown version": GET.replace(b"1.1", b"1.2"),
    "CONNECT": GET.replace(b"GET /health", b"CONNECT localhost:80"),
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_ambiguous_requests_are_refused(server: Running, name: str) -> None:
    assert exchange(server, SMUGGLED[name] + GET, shut=False) == [400], "what follows is not answered"


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
def test_other_versions_are_refused(server: Running, version: bytes) -> None:
    assert exchange(server, GET.replace(b"1.1", version), shut=False) == [505]


def test_a_url_replaces_the_host(start: Start) -> None:
    server = start(ServerSettings(hosts=("localhost",)))
    get = b"GET http://%b/info HTTP/1.1\r\nhost: %b\r\n\r\n"
    assert exchange(server, get % (b"localhost", b"evil.example")) == [200]
    assert exchange(server, get % (b"evil.example", b"localhost")) == [403]
    assert exchange(server, get.replace(b"/info", b"") % (b"localhost:80", b"localhost")) == [200]


# --- sizes ---


@pytest.mark.parametrize(
    "data",
    [
        GET[:-2] + b"x-a: " + b"a" * 40_000 + b"\r\n\r\n",
        GET[:-2] + b"x-a: aaaaaaaa\r\n" * 101 + b"\r\n",
        GET.replace(b"/health", b"/" + b"a" * 40_000),
        GET[:-2] + b"x" * 40_000,
    ],
    ids=["one header", "many headers", "request line", "incomplete"],
)
def test_headers_are_limited_in_one_packet(server: Running, data: bytes) -> None:
    assert exchange(server, data, shut=False) == [431]
    assert exchange(server, GET + data, shut=False) == [200, 431], "in the order of the requests"


def test_chunk_extensions_and_trailers_are_limited(server: Running) -> None:
    chunk = b"%x\r\n%b\r\n" % (len(BODY), BODY)
    assert exchange(server, CHUNKED + chunk + b"0\r\nx-request-id: trailer\r\n\r\n" + GET) == [200, 200]
    assert not [line for line in server.lines if line.get("id") == "trailer"]
    for waste in (b"1;" + b"a" * 200_000, chunk + b"0\r\n" + b"x-a: b\r\n" * 20_000, b"1\r\n \r\n" * 40_000):
        assert exchange(server, CHUNKED + waste, shut=False) == [400]


@pytest.mark.parametrize("head", [HEAD + b"content-length: 20000000\r\n\r\n", CHUNKED], ids=["length", "chunked"])
def test_a_client_that_is_still_sending_reads_its_413(server: Running, head: bytes) -> None:
    piece = b"a" * 0x40000 if b"length" in head else b"40000\r\n" + b"a" * 0x40000 + b"\r\n"
    with connect(server) as raw:
        raw.sendall(head + piece * 76)  # all of it, before anything is read
        assert statuses(answer := read(raw)) == [413]
        assert b"connection: close" in answer


@pytest.mark.parametrize(("path", "kind", "status"), [("/embed", "text/plain", 415), ("/nothing", "text/plain", 404)])
def test_other_refusals_arrive_as_well(server: Running, path: str, kind: str, status: int) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: 6000000\r\n\r\n"
    with connect(server) as raw:
        raw.sendall(head.encode() + b"a" * 6_000_000)
        assert statuses(read(raw, 1)) == [status]


def test_discarding_ends(server: Running) -> None:
    with connect(server) as raw:
        raw.sendall(HEAD + b"content-length: 1000000000\r\n\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 1000:
                raw.sendall(b"a" * 1_000_000)
                sent += 1
    assert 64 <= sent < 200


# --- pipelining, 100-continue and other protocols ---


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    ids = [b"pipelined-%d" % i for i in range(300)]
    requests = [GET[:-2] + b"x-request-id: " + name + b"\r\n\r\n" for name in ids]
    requests[7] = POST.replace(b"\r\n\r\n", b"\r\nx-request-id: pipelined-7\r\n\r\n")
    with connect(server) as raw:
        raw.sendall(b"".join(requests))
        raw.shutdown(socket.SHUT_WR)
        answer = read(raw)
    assert re.findall(rb"x-request-id: (\S+)", answer) == ids
    assert exchange(server, POST * 3 + b"nonsense\r\n\r\n" + POST, shut=False) == [200, 200, 200, 400]


def test_few_pipelined_requests_are_parsed_ahead(server: Running, blocked: Any) -> None:
    with connect(server) as raw:
        raw.sendall(POST)
        until(lambda: len(blocked.tickets) == 1)
        raw.sendall(GET * 2000)
        (connection,) = [other for other in server.server.open.all() if isinstance(other, HttpProtocol) and other.held]
        until(lambda: connection.held > 60_000)
        assert len(connection._pipeline) < 64
        blocked.release.set()
        assert statuses(read(raw, 2001)) == [200] * 2001


def test_expect_continue(server: Running) -> None:
    head = HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    with connect(server) as raw:
        for _ in range(2):
            raw.sendall(head)
            assert raw.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
            raw.sendall(BODY)
            assert statuses(read(raw, 1)) == [200]
        # The client does not send its body now, so the connection cannot be used again.
        raw.sendall(head.replace(b"/embed", b"/nothing"))
        assert statuses(answer := read(raw)) == [404]
        assert b"connection: close" in answer


def test_a_request_for_another_protocol_is_answered(server: Running) -> None:
    upgrade = b"\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    assert exchange(server, GET.replace(b"\r\n\r\n", upgrade) + b"\0\1\2", shut=False) == [200]


# --- half-closed and vanished clients ---


def test_half_closed_clients_are_answered(server: Running, blocked: Any) -> None:
    with connect(server) as raw:
        raw.sendall(POST)
        raw.shutdown(socket.SHUT_WR)
        until(lambda: len(blocked.tickets) == 1)
        time.sleep(0.8)  # the server looks whether the client is still there
        assert not blocked.tickets[0].cancelled.is_set()
        blocked.release.set()
        answer = read(raw)
    assert statuses(answer) == [200]
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert orjson.loads(answer.partition(b"\r\n\r\n")[2])
    for data in (POST.replace(b"HTTP/1.1", b"HTTP/1.0"), GET):
        assert exchange(server, data) == [200]
    assert exchange(server, POST * 3 + GET) == [200] * 4
    assert exchange(server, POST[:-3]) == [], "an incomplete request has no answer"


def test_a_reset_cancels_a_pipelined_request(server: Running, blocked: Any) -> None:
    with connect(server) as raw:
        raw.sendall(POST + GET)
        until(lambda: len(blocked.tickets) == 1)
    until(blocked.tickets[0].cancelled.is_set)
    until(lambda: server.app.in_flight == 0)


# --- slow clients ---


def test_stalled_bodies_take_no_place(start: Start) -> None:
    server = start(ServerSettings(limits=Limits(requests=4)))
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(connect(server)).sendall(POST[:-10])
        until(lambda: len(server.server.open.all()) >= 40)
        replies = [httpx.post(f"{server.url}/embed", content=BODY, headers=JSON) for _ in range(20)]
        assert [reply.status_code for reply in replies] == [200] * 20
        assert server.app.in_flight == 0


JSON = {"content-type": "application/json"}


def test_replies_while_draining_close_the_connection(start: Start, blocked: Any) -> None:
    server = start()
    with connect(server) as idle, connect(server) as early, connect(server) as late:
        for raw in (idle, late):
            raw.sendall(GET)
            assert b"connection: close" not in read(raw, 1)
        early.sendall(POST)
        until(lambda: len(blocked.tickets) == 1)
        server.app.draining = True
        late.sendall(POST)  # a new request on an open connection
        until(lambda: len(blocked.tickets) == 2)
        blocked.release.set()
        for raw in (early, late):
            assert statuses(answer := read(raw)) == [200], "and then the connection is closed"
            assert b"connection: close" in answer
        idle.sendall(GET)
        assert statuses(read(idle)) == [503]


# --- random bytes ---


def test_random_requests_are_answered_or_closed(start: Start) -> None:
    from tests.serve.fuzz import run_http

    server = start(ServerSettings(deadline=5.0))
    seen = run_http(server.port, 400, seed=1)
    assert seen["200"] > 20
    assert seen["400"] > 50
    assert not [line for line in server.lines if line["event"] == "failed"]
    assert server.post("/embed", {"inputs": "a", "model": "embed"}).status_code == 200
    until(lambda: server.server.open.request_bytes == 0)
