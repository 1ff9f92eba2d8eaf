"""`bertie serve --unix`: one process and several front ends on a Unix socket, and the file's life."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest

import bertie
from bertie.cli import serve as serve_verb
from bertie.cli.main import build_parser, main
from bertie.errors import ConfigError
from bertie.serve.workers import bind_unix_socket, unix_socket

WAIT = 120.0  # seconds; the machine may be busy


class UnixServer:
    """A server process on a Unix socket."""

    def __init__(self, path: Path, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bertie", "serve", "--unix", str(path), "--grace", "0", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(bertie.__file__).parents[1])},
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any-host", timeout=WAIT
        )

    def stop(self) -> str:
        self.client.close()
        self.process.terminate()
        return self.process.communicate(timeout=WAIT)[1]


@pytest.fixture(params=[(), ("--workers", "2")], ids=["one process", "front ends"])
def server(request: pytest.FixtureRequest, tmp_path: Path, models: dict[str, str]) -> Iterator[UnixServer]:
    with socket.socket(socket.AF_UNIX) as stale:  # of a server that was killed
        stale.bind(str(tmp_path / "bertie.sock"))
    running = UnixServer(tmp_path / "bertie.sock", models["embed"], "--batch-tokens", "512", *request.param)
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.communicate()


def test_serve(server: UnixServer, tmp_path: Path) -> None:
    path = tmp_path / "bertie.sock"
    url, _, rest = server.line.partition(" ")
    assert rest.startswith("is ready after"), server.process.communicate()
    assert unquote(url.removeprefix("http+unix://")) == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for _ in range(30):
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=WAIT) as client:
            reply = client.post("http://localhost/embed", json={"inputs": "a cat"})
            assert reply.status_code == 200, reply.text
    assert server.client.get("/health").status_code == 200, "any Host: web pages cannot reach the socket"
    if len(children := Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()) == 3:
        for pid in children:  # a front end that is killed or stopped does not take the socket with it
            if '"front-end", "number": 0' in Path(f"/proc/{pid}/environ").read_text():
                os.kill(int(pid), signal.SIGKILL)
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=WAIT) as client:
                assert client.get("http://localhost/health").status_code == 200
            if len(Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()) == 3:
                break
    log = server.stop()
    assert server.process.returncode == 0, log
    assert not path.exists()


def test_files(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with unix_socket(path) as first:
        first.listen()
        with pytest.raises(ConfigError, match="another server listens there"):
            bind_unix_socket(path)
        os.unlink(path)
        second = bind_unix_socket(path)
    assert os.path.exists(path), "the file of another server stays"
    second.close()
    with unix_socket(path):
        pass
    assert not os.path.exists(path)
    (tmp_path / "file").touch()
    for name, words in ((str(tmp_path / "file"), "not a socket"), ("x" * 200, "too long"), ("/nowhere/a", "No such")):
        with pytest.raises(ConfigError, match=words):
            bind_unix_socket(name)


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--host", "0.0.0.0"], ["--port", "9000"]):
        assert main(["serve", "--unix", "a.sock", *args]) == 2
        assert "pass only one" in capsys.readouterr().err
    parsed = build_parser().parse_args(["serve", "--unix", "a.sock", "--cache-mb", "5", "--trace"])
    parsed.models, parsed.model = [], None
    argv = serve_verb._worker_argv(parsed, 8080)
    assert argv[argv.index("--unix") + 1] == "a.sock"
    assert argv[argv.index("--cache-mb") + 1] == "5"
    assert "--trace" in argv
    assert main(["serve", "--cache-mb", "-1"]) == 2
