"""Limits on the size of requests and the time they take to arrive."""

from __future__ import annotations

import socket
import time
from typing import Any

import httpx

from tests.serve.conftest import Running, raw_headers, until


def test_large_bodies_are_refused_before_they_are_read(strict: Running) -> None:
    reply = strict.post("/embed", {"inputs": "a" * 3000})
    assert reply.status_code == 413
    assert reply.json() == {"error": "the body may have at most 2,000 bytes", "error_type": "Validation"}
    with socket.create_connection(("127.0.0.1", strict.port), timeout=10) as raw:  # which is never sent
        raw.sendall(raw_headers("/embed", "content-length: 99999999"))
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")

    def chunks() -> Any:
        for _ in range(100):
            yield b" " * 1000

    reply = httpx.post(f"{strict.url}/embed", content=chunks(), headers={"content-type": "application/json"})
    assert reply.status_code == 413


def test_slow_bodies_time_out(strict: Running) -> None:
    with socket.create_connection(("127.0.0.1", strict.port), timeout=10) as raw:
        raw.sendall(raw_headers("/embed", "content-length: 100") + b'{"inputs"')
        assert raw.recv(4096).startswith(b"HTTP/1.1 408")
        assert raw.recv(4096) in (b"", b'{"error":"the body did not arrive within 0.5 seconds","error_type":"Timeout"}')
    until(lambda: strict.app.in_flight == 0)


def test_slow_and_large_headers_are_refused(strict: Running, server: Running) -> None:
    for begin in (b"", b"POST /embed HTT", b"POST /embed HTTP/1.1\r\nhost: a\r\n"):
        with socket.create_connection(("127.0.0.1", strict.port), timeout=10) as raw:
            raw.sendall(begin)
            assert raw.recv(4096).startswith(b"HTTP/1.1 408")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n")
        answer = b""
        for _ in range(64):
            try:
                raw.sendall(b"x-a: " + b"a" * 2000 + b"\r\n")
                time.sleep(0.001)
            except OSError:
                break
        raw.settimeout(5)
        try:
            answer = raw.recv(100)
        except ConnectionResetError:
            return
        assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


def test_keep_alive(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        for _ in range(3):
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert raw.recv(4096).startswith(b"HTTP/1.1 200")
