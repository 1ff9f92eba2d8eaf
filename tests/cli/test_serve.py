"""`bertie serve` as a process: startup, signals, workers, keys, usage errors."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

import bertie
from bertie.cli import serve as serve_verb
from bertie.cli.main import build_parser, main

COMMAND = [sys.executable, "-P", "-m", "bertie"]
WAIT = 120.0  # seconds; the machine may be busy
PIPE_BYTES = 4096  # the smallest


class Process:
    """A server process."""

    def __init__(self, *args: str, folder: Path | None = None) -> None:
        source = str(Path(bertie.__file__).parents[1])
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", "--grace", "0", "--batch-tokens", "512", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": source},
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        # Nobody reads the log before the end, so that the pipe is full after a few requests.
        fcntl.fcntl(self.process.stderr, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        line = self.process.stdout.readline()
        match = re.match(r"(http://\S+:\d+) is ready after", line)
        if match is None:
            self.process.kill()
            raise AssertionError(f"{line!r} {self.process.communicate()[1]}")
        self.url = match[1]

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=WAIT, **options)

    def stop(self, sig: int = signal.SIGTERM) -> list[dict[str, Any]]:
        """Stop the server gracefully and return its log."""
        self.process.send_signal(sig)
        _, err = self.process.communicate(timeout=WAIT)
        assert self.process.returncode == 0, err
        return [json.loads(line) for line in err.splitlines()]


Serve = Callable[..., Process]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    running: list[Process] = []

    def begin(*args: str, folder: Path | None = None) -> Process:
        running.append(Process(*args, folder=folder))
        return running[-1]

    yield begin
    for server in running:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def receive(connection: socket.socket) -> HTTPResponse:
    """Read a whole reply."""
    response = HTTPResponse(connection)
    response.begin()
    response.read()
    return response


def test_startup_reload_and_shutdown(serve: Serve, models: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.symlink_to(models["embed"])
    server = serve(f"one={folder}", models["tag"])
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]] == ["one", "tag"]
    before = server.post("/embed", {"inputs": "a cat", "model": "one"}).json()
    assert httpx.get(f"{server.url}/info", headers={"host": "evil.example"}).status_code == 403
    folder.unlink()
    folder.symlink_to(models["fill"])  # another encoder
    server.process.send_signal(signal.SIGHUP)
    until(lambda: server.post("/embed", {"inputs": "a cat", "model": "one"}).json() != before)
    folder.unlink()
    server.process.send_signal(signal.SIGHUP)  # which fails: the loaded model stays
    after = server.post("/embed", {"inputs": "a cat", "model": "one"})
    assert after.status_code == 200
    lines = server.stop()
    events = [line["event"] for line in lines]
    assert events[0] == "ready"
    assert events[-1] == "stopped"
    assert "reloaded" in events
    assert models["embed"] not in json.dumps(lines)


def test_requests_are_answered_while_nobody_reads_the_log(serve: Serve, models: dict[str, str]) -> None:
    """By a server with disabled backends, which /info does not list."""
    server = serve(models["embed"], "--disable", "native.encoder", "--disable", "cuda_graphs")
    count = 2 * PIPE_BYTES // 128
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for number in range(count):
            reply = client.get("/info", headers={"x-request-id": f"{number:0>128}"})
            backends = {(row["operation"], row["backend"]) for row in reply.json()["dispatch"]["embed"]}
            assert ("encoder", "native.encoder") not in backends
    logged = [int(line["id"]) for line in server.stop() if line["event"] == "request"]
    assert logged == list(range(count))


def test_requests_in_flight_are_answered_before_shutdown(serve: Serve, models: dict[str, str]) -> None:
    server = serve(models["embed"])
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"inputs": "a cat"})
    head = f"POST /embed HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    request = f"{head}\r\n{body}".encode()
    with ExitStack() as stack:
        raws = [stack.enter_context(socket.create_connection((host, int(port)), timeout=WAIT)) for _ in range(3)]
        raws[2].sendall(request)
        assert receive(raws[2]).status == 200
        begun = [len(request) - 5, 20, 20]  # within the body, within the headers, and of a second request
        for raw, size in zip(raws, begun, strict=True):
            raw.sendall(request[:size])
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        for raw, size in zip(raws, begun, strict=True):
            raw.sendall(request[size:])
            reply = receive(raw)
            assert (reply.status, reply.headers["connection"]) == (200, "close")
    server.stop()


def test_a_killed_worker_is_restarted(serve: Serve, models: dict[str, str]) -> None:
    server = serve(models["embed"], "--workers", "2")
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    first = set(children.read_text().split())
    assert len(first) == 3, "two front ends and an engine"
    wanted = server.post("/embed", {"inputs": "a cat"}).json()
    victim = min(pid for pid in first if role(pid) == "front-end")
    first.remove(victim)
    os.kill(int(victim), signal.SIGKILL)
    until(lambda: len(now := set(children.read_text().split())) == 3 and victim not in now)
    answered = 0
    for _ in range(50):
        try:
            assert server.post("/embed", {"inputs": "a cat"}).json() == wanted
            answered += 1
        except httpx.TransportError:  # a connection to the killed worker
            time.sleep(0.05)
    assert answered > 40
    count = re.search(
        r'requests_total\{endpoint="/embed",status="200"\} (\d+)', httpx.get(f"{server.url}/metrics").text
    )
    assert count is not None
    server.process.send_signal(signal.SIGTERM)
    server.process.communicate(timeout=WAIT)
    assert server.process.returncode == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in first))


def role(pid: str) -> str:
    """Whether a process is a front end or an engine."""
    variable = next(
        part for part in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if part.startswith(b"BERTIE_WORKER=")
    )
    name: str = json.loads(variable.partition(b"=")[2])["role"]
    return name


def test_a_killed_engine_is_restarted(serve: Serve, models: dict[str, str]) -> None:
    """Meanwhile requests are answered with 503, at once."""
    server = serve(models["embed"], "--workers", "2")
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    wanted = server.post("/embed", {"inputs": "a cat"}).json()
    assert httpx.get(f"{server.url}/ready").status_code == 200
    (victim,) = [pid for pid in children.read_text().split() if role(pid) == "engine"]
    os.kill(int(victim), signal.SIGKILL)
    statuses = set()
    end = time.monotonic() + WAIT
    while (reply := server.post("/embed", {"inputs": "a cat"})).status_code != 200 or 503 not in statuses:
        statuses.add(reply.status_code)
        assert time.monotonic() < end
        time.sleep(0.02)
    assert statuses <= {200, 503}
    assert reply.json() == wanted
    server.process.send_signal(signal.SIGTERM)
    server.process.communicate(timeout=WAIT)
    assert server.process.returncode == 0


def test_workers_import_nothing_of_the_current_folder_and_answer_after_a_stop(
    serve: Serve, models: dict[str, str], tmp_path: Path
) -> None:
    for name in ("orjson", "json", "numpy", "httptools", "socket"):
        (tmp_path / f"{name}.py").write_text(f"open('imported-{name}', 'w')")
    server = serve(models["embed"], "--workers", "2", folder=tmp_path)
    assert not list(tmp_path.glob("imported-*"))
    wanted = server.post("/embed", {"inputs": "a cat"}).json()
    pids = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(server.post, "/embed", {"inputs": "a cat"}) for _ in range(24)]
        os.kill(int(pids[0]), signal.SIGSTOP)
        replies += [pool.submit(server.post, "/embed", {"inputs": "a cat"}) for _ in range(24)]
        assert all(reply.result().json() == wanted for reply in replies)
    events = [line["event"] for line in server.stop()]
    assert events.count("process continued") == 1
    assert events.count("stopped") == 3


def test_keys(serve: Serve, models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    keys = {}
    for name in ("alice", "bob"):
        assert main(["serve", "--new-key", name, "--api-key-file", str(file)]) == 0
        keys[name] = capsys.readouterr().out.strip()
    lines = file.read_text().splitlines(keepends=True)
    server = serve(models["embed"], "--host", "0.0.0.0", "--api-key-file", str(file), "--workers", "2")
    url = server.url.replace("0.0.0.0", "127.0.0.1") + "/info"
    client = httpx.Client(timeout=WAIT)

    def statuses(name: str) -> set[int]:
        """Of several connections, which reach both workers."""
        headers = {"authorization": f"Bearer {keys[name]}", "connection": "close"}
        return {client.get(url, headers=headers).status_code for _ in range(12)}

    assert httpx.get(url).status_code == 401
    assert statuses("alice") == statuses("bob") == {200}
    file.write_text(lines[0])
    server.process.send_signal(signal.SIGHUP)
    until(lambda: statuses("bob") == {401})
    assert statuses("alice") == {200}
    file.write_text(lines[1])  # noticed without a signal
    until(lambda: statuses("alice") == {401} and statuses("bob") == {200})
    events = [line["event"] for line in server.stop(signal.SIGINT)]
    assert events.count("keys reloaded") >= 4


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--host", "0.0.0.0"], "--no-auth"),
        (["--port", "99999"], "--port 99999 must lie between 0 and 65535"),
        (["--new-key", "bob"], "--api-key-file"),
        (["--workers", "0"], "--workers 0"),
        (["--max-body-bytes", "-1"], "--max-body-bytes -1"),
        (["--deadline", "0"], "--deadline 0.0"),
        (["--max-connections", "0"], "--max-connections 0"),
        (["--write-timeout", "-1"], "--write-timeout -1.0"),
        (["--worker-timeout", "0.5"], "--worker-timeout 0.5"),
        (["--disable", "magic"], "--disable magic"),
        (["--deterministic", "--batch-tokens", "512"], "--deterministic"),
    ],
)
def test_usage_errors(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *args]) == 2
    assert words in capsys.readouterr().err


def test_startup_errors(models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--api-key-file", str(tmp_path / "none")]) == 1
    assert "no key file" in capsys.readouterr().err
    assert main(["serve", "--port", "0", str(tmp_path / "no-model")]) == 1
    assert "no-model" in capsys.readouterr().err
    assert main(["serve", "--port", "0", models["embed"], models["embed"]]) == 1
    assert "the name 'embed'" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert "choose another --port" in capsys.readouterr().err


def test_search_over_an_index(serve: Serve, models: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    from bertie.search.index import Index

    with Index.create(tmp_path / "index", models["embed"], chunk_size=20) as index:
        index.add(["a cat sat on the mat", "the dog ran", "find a dog : the cat"])
        wanted = index.search("the dog", k=2)
    server = serve(models["rerank"], "--index", str(tmp_path / "index"))  # the model of the index is served, too
    found = server.post("/search", {"queries": ["the dog", "mat"], "k": 2}).json()
    assert [hit["text"] for hit in found["results"][0]["hits"]] == [hit.text for hit in wanted]
    assert found["results"][0]["hits"][0]["score"] == pytest.approx(wanted[0].score, abs=1e-5)
    assert (found["model"], found["passages"], found["results"][0]["tokens_read"]) == ("embed", 3, 2)
    assert server.post("/search", {"queries": "dog", "rerank": True, "mode": "dense"}).status_code == 200
    assert server.post("/search", {"queries": "dog", "where": {"year >=": 3}}).json()["results"][0]["hits"] == []
    assert server.post("/ask", {"questions": "dog"}).status_code == 424  # no model here answers questions
    assert str(tmp_path) not in httpx.get(f"{server.url}/about").text
    server.stop()


def test_workers_get_the_arguments_of_the_command_line() -> None:
    """Also while a command runs, which adds to its arguments."""
    argv = ["serve", "a=b", "--workers", "2", "--allow-host", "x", "--allow-host", "y", "--deadline", "7"]
    args = build_parser().parse_args(argv)
    with ExitStack() as args.cleanup:
        again = build_parser().parse_args(serve_verb._worker_argv(args, 81))
    assert vars(again) | {"port": None, "cleanup": None} == vars(args) | {"port": None, "cleanup": None}
