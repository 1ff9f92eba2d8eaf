"""Servers under test, the loads that are offered to them, single queries, and the plot."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from benchmarks.serve_plot import latency_plot
from benchmarks.serve_servers import Running, Target, environment, is_warming_up, request_bodies

from benchmarks import serve, serve_infinity
from tests.benchmarks.stub_server import Stub


def test_targets_have_the_endpoint_of_their_server() -> None:
    names = ("bertie", "bertie:/embeddings", "infinity", "batched")
    targets = [Target.parse(name) for name in names]
    assert [target.path for target in targets] == ["/embed", "/embeddings", "/embeddings", "/embed"]
    assert [str(target) for target in targets] == list(names)
    with pytest.raises(SystemExit, match="/nowhere"):
        Target.parse("bertie:/nowhere")


def test_requests_have_the_fields_of_their_endpoint() -> None:
    texts = ["a", "b", "c", "d", "größer"]
    bodies = [json.loads(body) for body in request_bodies(texts, 2)]
    assert bodies == [{"inputs": ["a", "b"]}, {"inputs": ["c", "d"]}]
    assert json.loads(request_bodies(texts)[-1]) == {"inputs": "größer"}
    assert json.loads(request_bodies(texts, path="/embeddings")[0]) == {"input": "a", "model": "model"}


def test_a_server_that_is_warming_up() -> None:
    class Reply(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self) -> None:
            self.send_response(self.status if self.path == "/ready" else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Reply) as listener:
        url = f"http://127.0.0.1:{listener.server_port}"
        for status, warming in ((503, True), (200, False), (404, False)):  # the last: an older version
            Reply.status = status
            thread = Thread(target=listener.handle_request)
            thread.start()
            assert is_warming_up(url) == warming
            thread.join()
    assert is_warming_up(url), "nobody listens"


def test_infinity_does_not_see_the_packages_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert "elsewhere" in environment()["PYTHONPATH"]
    assert "elsewhere" not in environment(packages=False)["PYTHONPATH"]


def test_cpu_time_includes_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    code = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {burn!r} + 'print(1, flush=True); "
    code += "time.sleep(60)'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        running = Running("stub", "", process)
        try:
            assert process.stdout is not None
            process.stdout.readline()  # the child has used 0.3 s
            parent, child = running.pids()
            assert parent == process.pid
            assert running.cpu_by_process()[child] >= 0.25
            assert running.cpu_seconds() >= 0.25
            assert {pid for pid, _ in running.cpu_by_thread()} == {parent, child}
            assert running.resident_bytes() > 1 << 20
        finally:
            for pid in reversed(running.pids()):
                subprocess.run(["kill", str(pid)], check=True)


def test_loads_are_shares_of_each_capacity_and_the_same_for_all() -> None:
    points = serve.plan_loads({"fast": 200.0, "slow": 50.0}, [20, 40, 80, 160])
    shares = [point for point in points if point["kind"] == "share"]
    assert [point["offered"] for point in shares if point["server"] == "slow"] == [12.5, 25, 37.5, 50, 100]
    assert [point["server"] for point in shares[:4]] == ["fast", "slow", "fast", "slow"]
    absolute = {
        name: [point["offered"] for point in points if point["kind"] == "absolute" and point["server"] == name]
        for name in ("fast", "slow")
    }
    assert absolute == {"fast": [20, 40, 80, 160], "slow": [20, 40, 80]}, "up to the first beyond the capacity"
    default = serve.plan_loads({"fast": 200.0, "slow": 50.0})
    assert max(point["offered"] for point in default if point["kind"] == "absolute") == 200


def measured(p50: float | None, refused: int = 0) -> dict[str, Any]:
    point = {"server": "bertie", "kind": "share", "share": 0.5, "offered": 10.0}
    times = {"p50_ms": p50, "p95_ms": p50, "p99_ms": p50, "refused_p99_ms": None}
    return (
        point | times | {"rate": 10.0, "answered": 90, "refused": refused, "failed": {"timeout": 1} if refused else {}}
    )


def test_loads_are_summarized_by_medians() -> None:
    row = serve.summarize([measured(5.0), measured(9.0), measured(6.0, 19)])
    assert row["p50_ms"] == 6.0
    assert row["refused"] == 19 / 290
    assert row["failed"] == 1 / 290
    assert serve.summarize([measured(None)])["p50_ms"] is None


def test_single_queries_on_one_connection(stub: Stub) -> None:
    stub.plain = True
    bodies = request_bodies(["one", "two"])
    with serve.keep_alive(stub.url, "/embed", bodies) as send:
        times = send(5)
    assert len(times) == 5
    assert min(times) >= stub.delay
    assert stub.seen == {bodies[0]: 3, bodies[1]: 2}
    stub.plain = False
    with serve.keep_alive(stub.url, "/embed", bodies) as send, pytest.raises(SystemExit, match="429"):
        send(3)


def test_the_plot_shows_all_points() -> None:
    rows = [
        {
            "server": server,
            "offered": load,
            "p50_ms": 4.0 * load / 10,
            "p99_ms": None if load > 100 else 3.0 * load,
            "refused": 0.3 if load > 100 else 0.0,
            "failed": 0.0,
        }
        for server in ("bertie", "infinity")
        for load in (10.0, 50.0, 180.0)
    ]
    svg = latency_plot(rows, {"infinity": "infinity-emb"})
    root = ElementTree.fromstring(svg)
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 10
    assert sum(circle.get("fill") == "#fff" for circle in circles) == 2, "hollow where requests were refused"
    assert "infinity-emb" in svg
    heights = {float(circle.get("cy", "nan")) for circle in circles}
    assert all(0 < height < 400 for height in heights)


def test_settings_of_infinity_are_arguments() -> None:
    setting = serve_infinity.with_processes(serve_infinity.with_batch(serve_infinity.BEST, 16), 3)
    words = setting.arguments()
    assert json.loads(words[words.index("--settings") + 1])["batch_size"] == 16
    assert words[-2:] == ["--processes", "3"]
    assert len({setting.name for setting in serve_infinity.SETTINGS}) == len(serve_infinity.SETTINGS)
    onnx = next(setting for setting in serve_infinity.SETTINGS if setting.engine["engine"] == "optimum")
    assert onnx.model("folder").endswith("-onnx")
    assert serve_infinity.BEST.model("folder") == "folder"
