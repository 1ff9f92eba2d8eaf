"""Metrics: the text format, histograms, several workers, and the values of a real server."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import orjson

from bertie.serve.metrics import SECONDS, Metric, Metrics
from bertie.serve.registry import Registry
from tests.serve.conftest import Start, until

LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\]|\\.)*",?)+)\})? (-?[0-9.e+-]+)')


def parse(text: str) -> dict[tuple[str, str], float]:
    """Parse the text format."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP [a-z_]+ .+|TYPE [a-z_]+ (counter|gauge|histogram))", line), line
            continue
        match = LINE.fullmatch(line)
        assert match, line
        found[match[1], match[2] or ""] = float(match[3])
    return found


def test_histograms_equal_a_plain_count() -> None:
    metrics, draw = Metrics(), random.Random(0)
    values = [draw.expovariate(2) for _ in range(1000)] + list(SECONDS)
    for value in values:
        metrics.request_seconds.add(value, "/embed")
    found = parse(metrics.text())
    for bound in SECONDS:
        key = ("bertie_request_seconds_bucket", f'endpoint="/embed",le="{bound:g}"')
        assert found[key] == sum(value <= bound for value in values)
    inside = 'endpoint="/embed"'
    assert found["bertie_request_seconds_bucket", f'{inside},le="+Inf"'] == len(values)
    assert found["bertie_request_seconds_count", inside] == len(values)
    assert abs(found["bertie_request_seconds_sum", inside] - sum(values)) < 1e-6


def test_labels_are_escaped() -> None:
    metrics = Metrics()
    metrics.requests.add(2, 'a"\\\nb', "200")
    assert r'endpoint="a\"\\\nb"' in metrics.text()
    parse(metrics.text())


def test_a_metric_has_one_value_per_label() -> None:
    metric = Metric("counter", "x", ("a",))
    metric.add(1, "x")
    metric.add(2, "x")
    metric.add(5, "y")
    assert metric.values == {("x",): [3.0], ("y",): [5.0]}


def test_workers_are_summed_and_dead_ones_keep_their_counters(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.requests.add(3, "/embed", "200")
    metrics.in_flight.set(1)
    metrics.save()
    assert [file.name for file in tmp_path.iterdir()] == [f"{os.getpid()}.json"]
    other = {
        "bertie_requests_total": [(("/embed", "200"), [4.0]), (("/tag", "200"), [1.0])],
        "bertie_requests_in_flight": [((), [7.0])],
    }
    (tmp_path / "1.json").write_bytes(orjson.dumps(other))  # alive
    (tmp_path / "99999999.json").write_bytes(orjson.dumps(other))  # dead
    found = parse(metrics.text())
    assert found["bertie_requests_total", 'endpoint="/embed",status="200"'] == 3 + 4 + 4
    assert found["bertie_requests_total", 'endpoint="/tag",status="200"'] == 2
    assert found["bertie_requests_in_flight", ""] == 1 + 7


def test_metrics_of_a_server(start: Start, small_folder: Path) -> None:
    metrics = Metrics()
    registry = Registry(
        {"small": small_folder / "bertie-small"}, devices=["cpu"], on_batch=metrics.count_batch, budget=2048
    )
    server = start(over=registry, metrics=metrics)
    for _ in range(3):
        server.post_json("/embed", {"inputs": ["a cat", "the dog ran on the mat"]})
    server.post_json("/tag", {"texts": "a cat"})
    server.post("/embed", {"inputs": []})
    server.client.get("/wp-login.php")
    until(lambda: metrics.batches.values == {(): [4.0]})  # which are counted after the response
    found = parse(server.client.get("/metrics").text)
    assert found["bertie_requests_total", 'endpoint="/embed",status="200"'] == 3
    assert found["bertie_requests_total", 'endpoint="/embed",status="400"'] == 1
    assert found["bertie_requests_total", 'endpoint="other",status="404"'] == 1  # unknown paths make no new labels
    assert found["bertie_request_seconds_count", 'endpoint="/embed"'] == 4
    assert found["bertie_queue_seconds_count", 'endpoint="/embed"'] == 3
    assert found["bertie_tokens_total", 'task="embed"'] == 3 * (4 + 8)
    assert found["bertie_tokens_total", 'task="tag"'] == 4
    assert found["bertie_padding_avoided_tokens_total", ""] == 3 * 4
    assert found["bertie_batches_total", ""] == found["bertie_batch_tokens_count", ""] == 4
    assert found["bertie_batch_tokens_sum", ""] == 3 * 12 + 4
    assert found["bertie_device_seconds_count", 'task="embed"'] == 3
    assert found["bertie_queue_tokens", 'model="small"'] == 0
    assert found["bertie_batch_budget_tokens", 'model="small"'] == 2048
    assert found["process_resident_memory_bytes", ""] > 1e6
    registry.close()
