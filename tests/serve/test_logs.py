"""The log: one JSON object per request, without texts unless enabled."""

from __future__ import annotations

import fcntl
import io
import json
import os

import pytest

from bertie.serve.http import ServerSettings
from bertie.serve.logs import MAX_WRITE, Log, LogWriter
from tests.serve.conftest import Running, Start


def test_logs_contain_no_texts(server: Running) -> None:
    name = "log-test-1"
    server.post("/tag", {"texts": "a private cat"}, headers={"x-request-id": name})
    (line,) = [one for one in server.lines if one.get("id") == name]
    assert {"time", "event", "method", "path", "status", "seconds", "tokens", "model"} <= set(line)
    assert (line["status"], line["path"], line["model"]) == (200, "/tag", "small")
    server.post("/fill", {"texts": "a private dog"})
    server.client.get("/private/cat")
    assert "private" not in server.log


def test_texts_are_logged_on_request(start: Start) -> None:
    server = start(ServerSettings(log_texts=True))
    server.post("/tag", {"texts": "a private cat"})
    assert "a private cat" in server.log


def test_exceptions_are_logged_without_their_messages() -> None:
    for traces in (False, True):
        out = io.StringIO()
        try:
            raise ValueError("a private text")
        except ValueError as error:
            Log(out, traces=traces).error("failed", error, id="7")
        line = json.loads(out.getvalue())
        assert (line["event"], line["error"], line["id"]) == ("failed", "ValueError", "7")
        assert ("private" in out.getvalue()) == traces


def test_a_closed_log_does_not_stop_the_server() -> None:
    out = io.StringIO()
    out.close()
    Log(out)("request", status=200)


def read_until(descriptor: int, ending: str) -> list[str]:
    """The lines up to the first that ends like this."""
    data = b""
    while not data.endswith(ending.encode() + b"\n"):
        data += os.read(descriptor, 1 << 16)
    return data.decode().splitlines()


def test_a_full_pipe_blocks_nothing_and_loses_nothing() -> None:
    reading, writing = os.pipe()
    size = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    writer = LogWriter(writing)
    wanted = [f"{number:0>99}" for number in range(5 * size // 100)]
    for line in wanted:
        writer.write(line + "\n")
    assert not writer.flush(0.05)  # which gives up as well
    assert read_until(reading, wanted[-1]) == wanted
    assert writer.flush(10)


def test_dropped_lines_are_counted() -> None:
    reading, writing = os.pipe()
    size = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"x" * (size - 1) + b"\n")
    writer = LogWriter(writing, max_pending=2000)
    for number in range(50):
        writer.write(f"{number:0>99}\n")
    _, *lines, last = read_until(reading, "}")
    assert [int(line) for line in lines] == list(range(20))
    assert json.loads(last).items() >= {"event": "log lines dropped", "lines": 30}.items()


def test_a_closed_pipe_does_not_stop_the_writer() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(writing)
    os.close(reading)
    for _ in range(3):
        writer.write("line\n")
        assert writer.flush(10)


def test_lines_are_collected_and_lines_of_processes_do_not_interleave(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    writer = LogWriter(writing)
    writes: list[bytes] = []
    write_all = writer._write_all

    def record(data: bytes) -> None:
        writes.append(data)
        write_all(data)

    monkeypatch.setattr(writer, "_write_all", record)
    lines = [f"{number:0>99}" for number in range(100)] + ["long" * 2000]
    for line in lines:
        writer.write(line + "\n")
    assert read_until(reading, lines[-1]) == lines
    assert len(writes) < 10
    assert all(len(data) <= MAX_WRITE or data.count(b"\n") == 1 for data in writes)
    assert all(data.endswith(b"\n") for data in writes)


def test_nothing_is_logged_after_the_last_event() -> None:
    out = io.StringIO()
    log = Log(out)
    log("ready")
    log.close("stopped", worker=1)
    log.error("reload failed", ValueError("a thread that outlives the server"))
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["ready", "stopped"]
