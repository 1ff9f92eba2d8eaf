"""The log: one JSON object per request, without texts unless enabled."""

from __future__ import annotations

import io
import json

from bertie.serve.http import ServerSettings
from bertie.serve.logs import Log
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
