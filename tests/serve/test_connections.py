"""Limits on the number of connections, on the bytes that they hold, and on their time and rate."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from bertie.serve.connections import ConnectionLimits, Connections, client_network
from bertie.serve.http import ServerSettings
from bertie.serve.limits import Limits
from bertie.serve.replies import Reply
from tests.serve.conftest import Running, Start, raw_headers, until
from tests.serve.test_protocol import GET, POST, connect, read, statuses

LARGE = 8_000_000  # bytes, more than the kernel buffers
GET_LARGE = GET.replace(b"/health", b"/large")


def with_large_replies(server: Running) -> Running:
    server.app._resources["/large"] = lambda: Reply(200, b"a" * LARGE)
    return server


@pytest.fixture(scope="module")
def crowded(start: Start) -> Running:
    """A server with few connections, and a second's grace."""
    limits = ConnectionLimits(connections=24, per_address=16, min_rate=1000, grace_seconds=1.0, write_seconds=4.0)
    return with_large_replies(start(ServerSettings(limits=Limits(requests=4), connections=limits)))


def read_bytes(raw: socket.socket, size: int) -> bytes:
    answer = bytearray()
    while len(answer) < size:
        answer += raw.recv(1 << 20)
    return bytes(answer)


def honest(server: Running) -> list[int]:
    """The status of a request on a new connection."""
    with connect(server) as raw:
        raw.sendall(POST.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        return statuses(read(raw))


@pytest.mark.parametrize("begin", [b"", b"POST /embed HT", POST[:-10], GET], ids=["empty", "headers", "body", "idle"])
def test_stalled_connections_make_room_for_honest_ones(crowded: Running, begin: bytes) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(60):  # of which the limit allows 16
            stack.enter_context(connect(crowded)).sendall(begin)
            assert honest(crowded) == [200]
        assert crowded.server.open.count <= 16


def test_an_evicted_client_is_told(crowded: Running) -> None:
    with connect(crowded) as first, contextlib.ExitStack() as stack:
        first.sendall(POST[:-10])
        for _ in range(16):
            stack.enter_context(connect(crowded)).sendall(POST[:-10])
        assert statuses(answer := read(first)) == [408]
        assert b"without free connections" in answer


def test_a_connection_with_a_request_in_flight_is_not_closed(crowded: Running, blocked: object) -> None:
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(connect(crowded))
        busy.sendall(POST)
        until(lambda: crowded.app.in_flight == 1)
        for _ in range(40):
            stack.enter_context(connect(crowded)).sendall(POST[:-10])
        blocked.release.set()  # type: ignore[attr-defined]
        assert statuses(read(busy, 1)) == [200]


def test_trickled_requests_are_refused_early(crowded: Running) -> None:
    for begin in (POST[:-20], GET[:-20]):
        with connect(crowded) as raw:
            raw.sendall(begin)
            started, answer = time.monotonic(), b""
            raw.settimeout(0.1)
            while not answer and time.monotonic() < started + 20:
                with contextlib.suppress(TimeoutError):
                    answer = raw.recv(4096)
                if not answer and begin == POST[:-20]:
                    raw.sendall(b" ")
            assert statuses(answer) == [408]
            assert time.monotonic() < started + 8, "long before --read-timeout and --header-timeout"


def test_a_body_above_the_minimum_rate_is_read(crowded: Running) -> None:
    body = b" " * 6000 + b'{"inputs":"a","model":"embed"}'
    with connect(crowded) as raw:
        raw.sendall(raw_headers("/embed", f"content-length: {len(body)}"))
        for at in range(0, len(body), 300):  # in two seconds, twice the grace
            raw.sendall(body[at : at + 300])
            time.sleep(0.1)
        assert statuses(read(raw, 1)) == [200]


def test_unread_replies_are_dropped(crowded: Running) -> None:
    before = crowded.server.open.dropped["write_timeout"]
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            raw = stack.enter_context(connect(crowded, small_window=True))
            raw.sendall(GET_LARGE * 5)
        until(lambda: crowded.server.open.reply_bytes > LARGE)
        until(lambda: crowded.server.open.dropped["write_timeout"] == before + 3)
        until(lambda: crowded.server.open.reply_bytes == 0)
        text = crowded.client.get("/metrics").text
        assert f'bertie_connections_dropped_total{{reason="write_timeout"}} {before + 3}' in text
        assert 'bertie_connection_bytes{direction="reply"} 0' in text
        with pytest.raises(ConnectionResetError):
            read(raw)
    until(lambda: not crowded.server.open.half_closed)


def test_no_request_is_parsed_before_the_reply_is_read(crowded: Running) -> None:
    """However many requests a client pipelines, one reply at a time is held for it."""
    count = len(crowded.lines)
    with connect(crowded, small_window=True) as raw:
        raw.sendall(GET_LARGE * 50)
        until(lambda: crowded.server.open.reply_bytes > 1_000_000)
        time.sleep(0.3)
        assert len(crowded.lines) == count + 1
        assert crowded.server.open.reply_bytes < 2 * LARGE
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        assert statuses(read_bytes(raw, 3 * LARGE))[:3] == [200] * 3


def test_the_slowest_readers_are_dropped_when_replies_take_too_much_memory(start: Start) -> None:
    limits = ConnectionLimits(reply_bytes=6 * LARGE)  # half of which are for one address
    server = with_large_replies(start(ServerSettings(connections=limits)))
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            raw = stack.enter_context(connect(server, small_window=True))
            raw.sendall(GET_LARGE)
            assert raw.recv(1, socket.MSG_PEEK)
        opened = server.server.open
        assert opened.dropped["reply_bytes"] >= 8
        assert opened.dropped["write_timeout"] == 0
        assert opened.reply_bytes <= 4 * LARGE
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        assert statuses(read_bytes(raw, LARGE)) == [200], "the newest reply stays"


def test_the_slowest_bodies_are_dropped_when_they_take_too_much_memory(start: Start) -> None:
    server = start(ServerSettings(connections=ConnectionLimits(request_bytes=2_000_000)))
    head = raw_headers("/embed", "content-length: 1000000")
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(4)]
        for raw in slow:
            raw.sendall(head + b" " * 900_000)
            time.sleep(0.1)
        assert statuses(answer := read(slow[0])) == [429]
        assert b"connection: close" in answer
        assert honest(server) == [200]
        until(lambda: server.server.open.request_bytes <= 2_000_000)
        slow[3].sendall(b" " * (100_000 - 30) + b'{"inputs":"a","model":"embed"}')
        assert statuses(read(slow[3], 1)) == [200]
    until(lambda: server.server.open.request_bytes == 0)
    until(lambda: server.server.open.count == 0)


def test_the_clock_stands_still_while_the_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Iterator[float] = iter([100.0, 100.1, 160.1, 160.2])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    opened = Connections(ConnectionLimits())
    for _ in range(3):
        opened.sweep()
    assert opened.now == pytest.approx(0.1 + 0.2 + 0.1)


def test_open_files_bound_the_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = ConnectionLimits(connections=10**9, per_address=10**9).fit_open_files()
    try:
        assert limits.connections < resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= hard
        assert limits.per_address == limits.connections
        assert ConnectionLimits(connections=20).fit_open_files() == ConnectionLimits(connections=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_networks() -> None:
    assert client_network(None) == ""
    assert client_network(("127.0.0.1", 1)) == "127.0.0.1"
    assert client_network(("2001:db8:1:2:3::4", 1)) == client_network(("2001:db8:1:2:ffff::", 9)) == "2001:db8:1:2::/64"
    assert client_network(("fe80::1%eth0", 1)) == "fe80::/64"
    assert socket.inet_aton(client_network(("::ffff:10.0.0.1", 1))) == b"\n\0\0\1"
