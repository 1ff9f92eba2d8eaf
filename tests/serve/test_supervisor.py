"""The supervisor over tiny worker processes: stopped, hanging and dying ones, and what their clients see."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import bertie
from bertie.serve.supervisor import WorkerInfo, bertie_command
from bertie.serve.workers import bind_socket

# A worker answers each connection with its process id. "hang" blocks its event loop for ever, "exit" ends it.
WORKER = """
import os, select, time
from bertie.serve.supervisor import WorkerInfo

worker = WorkerInfo.from_environment()
if os.path.exists(os.environ.get("BROKEN", "")) and worker.number == 0:
    raise SystemExit(1)
sockets = [worker.socket, *worker.other_sockets]
worker.socket.listen(64)
while True:
    worker.beat()
    for ready in select.select(sockets[:1], [], [], 0.1)[0] or sockets[1:]:
        try:
            connection, _ = ready.accept()
        except OSError:
            continue
        connection.setblocking(True)
        command = connection.recv(100)
        if command == b"hang":
            time.sleep(1000)
        if command == b"exit":
            os._exit(1)
        connection.sendall(b"%d" % os.getpid())
        connection.close()
"""
SUPERVISOR = """
import sys
from bertie.serve.supervisor import Supervisor
from bertie.serve.workers import bind_socket

first = bind_socket("127.0.0.1", 0, shared=True)
port = first.getsockname()[1]
sockets = [first, bind_socket("127.0.0.1", port, shared=True)]
ready = lambda: print(port, flush=True)
command, timeout = [sys.executable, "-P", "-c", sys.argv[1]], float(sys.argv[2])
Supervisor(command, sockets, shutdown_seconds=1, on_ready=ready, timeout=timeout).run()
"""
WAIT = 60.0  # the machine may be busy


class Workers:
    """A supervisor process with two workers."""

    def __init__(self, broken: Path, timeout: float) -> None:
        """`broken`: while this file exists, the first worker cannot be started."""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SUPERVISOR, WORKER, str(timeout)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"BROKEN": str(broken)},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def ask(self, text: bytes = b"hello") -> bytes:
        """Send one word; b"" means that the connection was closed without an answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=WAIT) as connection:
            try:
                connection.sendall(text)
                return connection.recv(100)
            except ConnectionResetError:
                return b""

    def pids(self) -> set[int]:
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return set(map(int, listed.split()))

    def stop(self) -> str:
        self.process.terminate()
        return self.process.communicate(timeout=WAIT)[1]


@pytest.fixture
def workers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Workers]:
    running = Workers(tmp_path / "broken", timeout=getattr(request, "param", 30.0))
    yield running
    if running.process.poll() is None:
        running.process.terminate()
        running.process.communicate(timeout=WAIT)


def test_a_stopped_worker_is_continued(workers: Workers) -> None:
    before = workers.pids()
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    assert all(workers.ask() for _ in range(20))
    assert workers.pids() == before
    assert workers.stop().count('"process continued"') == 2


@pytest.mark.parametrize("workers", [2.0], indirect=True)
def test_a_hanging_worker_is_killed_and_its_clients_are_answered(workers: Workers) -> None:
    before = workers.pids()
    began = time.monotonic()
    assert workers.ask(b"hang") == b""  # closed when the worker is killed, not silent for ever
    assert time.monotonic() - began > 1.5  # but not before its time
    assert all(workers.ask() for _ in range(20))  # those that wait for the dead worker are answered by the other
    end = time.monotonic() + WAIT
    while len(workers.pids()) < 2 or workers.pids() == before:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert len(workers.pids() & before) == 1
    log = workers.stop()
    assert "no heartbeat for 2 seconds" in log
    assert workers.process.returncode == 0


def test_no_connection_is_lost_while_a_worker_is_restarted(workers: Workers) -> None:
    assert workers.ask(b"exit") == b""
    assert all(workers.ask() for _ in range(50))


def test_a_worker_that_cannot_be_restarted_does_not_stop_the_others(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    for pid in workers.pids():
        if '"number": 0' in Path(f"/proc/{pid}/environ").read_text():
            os.kill(pid, signal.SIGKILL)
    time.sleep(2.0)  # it fails once or twice
    assert all(workers.ask() for _ in range(20))
    (tmp_path / "broken").unlink()
    end = time.monotonic() + WAIT
    while len(workers.pids()) < 2:
        assert time.monotonic() < end
        assert workers.ask()
    log = workers.stop()
    assert 2 <= log.count('"process restarted"') <= 6  # with growing pauses
    assert workers.process.returncode == 0


def test_a_stopped_worker_does_not_delay_the_shutdown(workers: Workers) -> None:
    for pid in workers.pids():
        os.kill(pid, signal.SIGSTOP)
    workers.stop()
    assert workers.process.returncode == 0


def test_a_stop_while_a_worker_is_restarted() -> None:
    stop = "lambda event, **fields: os.kill(os.getpid(), signal.SIGTERM) if event == 'process restarted' else None"
    code = SUPERVISOR.replace("import sys", "import os, signal, sys").replace("timeout=timeout", f"log={stop}")
    argv = [sys.executable, "-P", "-c", code, WORKER, "2"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        with socket.create_connection(("127.0.0.1", int(supervisor.stdout.readline()))) as connection:
            connection.sendall(b"exit")
        assert supervisor.stderr is not None
        assert supervisor.stderr.read() == ""
        assert supervisor.wait(WAIT) == 0


def test_a_worker_that_cannot_start() -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    code = textwrap.dedent(
        f"""
        from bertie.serve.supervisor import Supervisor
        from bertie.serve.workers import bind_socket
        Supervisor({command!r}, [bind_socket("127.0.0.1", 0)], shutdown_seconds=1, on_ready=print).run()
        """
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=WAIT)
    assert "front-end 0 cannot be started: it exited with status 3" in done.stderr


def test_heartbeats_never_block() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with bind_socket("127.0.0.1", 0) as listener:
        worker = WorkerInfo(0, 1, None, [listener], writing)
        for _ in range(70_000):  # more than a pipe holds, while the supervisor is suspended
            worker.beat()
        os.close(reading)
        worker.beat()
        os.close(writing)
        worker.beat()  # the supervisor is gone, and so is the pipe


def test_the_command_runs_this_copy_and_nothing_of_the_current_folder(tmp_path: Path) -> None:
    for name in ("orjson", "json", "numpy", "argparse", "bertie", "uvicorn"):
        (tmp_path / f"{name}.py").write_text(f"open('imported-{name}', 'w')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(bertie_command("--version"), cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == f"bertie {bertie.__version__}", done.stderr
    assert not list(tmp_path.glob("imported-*"))
