"""Spans of requests, with OpenTelemetry's own exporter in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from bertie.errors import MissingPackageError
from bertie.serve.engine_client import EngineClient
from bertie.serve.registry import Registry
from bertie.serve.tracing import Tracing, wants_tracing
from tests.serve.conftest import Running, RunningEngine, Start, until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def exporter() -> Any:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    return memory.InMemorySpanExporter()


@pytest.fixture(scope="module", params=["one process", "front end and engine"])
def traced(
    exporter: Any,
    registry: Registry,
    start: Start,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Running]:
    engine, served = None, registry
    if request.param != "one process":
        engine = RunningEngine(registry, str(tmp_path_factory.mktemp("engine") / "engine.sock"))
        served = Registry(registry._sources, engines=EngineClient([engine.path]))
    running = start(over=served, tracing=Tracing(exporter))
    until(lambda: served.ready)
    yield running
    if engine is not None:
        engine.stop()


def spans(exporter: Any) -> dict[str, Any]:
    finished = {span.name: span for span in exporter.get_finished_spans()}
    exporter.clear()
    return finished


def test_a_request(traced: Running, exporter: Any) -> None:
    exporter.clear()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "my-id"}
    reply = traced.post("/embed", {"inputs": "a cat sat", "model": "embed"}, headers=headers)
    assert reply.status_code == 200
    found = spans(exporter)
    assert set(found) == {"POST /embed", "queue", "device"}
    root = found["POST /embed"]
    assert dict(root.attributes) == {
        "http.request.method": "POST",
        "http.route": "/embed",
        "http.response.status_code": 200,
        "bertie.request_id": "my-id",
        "bertie.model": "embed",
        "bertie.tokens.total": int(reply.headers["x-tokens-total"]),
        "bertie.tokens.computed": 5,
        "bertie.batch.tokens": 5,
    }
    assert root.kind.name == "SERVER"
    assert root.resource.attributes["service.name"] == "bertie"
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    for name in ("queue", "device"):
        assert found[name].parent.span_id == root.context.span_id
        assert root.start_time <= found[name].start_time <= found[name].end_time
    assert found["queue"].end_time == found["device"].start_time < found["device"].end_time <= root.end_time


def test_errors_and_unknown_paths(traced: Running, exporter: Any) -> None:
    exporter.clear()
    traced.post("/embed", {"input": 1})
    (span,) = spans(exporter).values()
    assert (span.attributes["http.response.status_code"], span.attributes["error.type"]) == (422, "invalid")
    traced.client.get("/secret/path")
    (span,) = spans(exporter).values()
    assert span.name == "GET"
    assert "secret" not in str(dict(span.attributes))
    traced.client.get("/health")
    assert not spans(exporter)


def test_a_trace_that_is_not_sampled_has_no_spans(traced: Running, exporter: Any) -> None:
    exporter.clear()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    traced.post_json("/embed", {"inputs": "a cat", "model": "embed"}, headers=headers)
    assert not spans(exporter)


def test_off_by_default(server: Running) -> None:
    assert server.app.tracing is None


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "search"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], on: bool) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wants_tracing() is on


def test_service_name_of_the_environment(monkeypatch: pytest.MonkeyPatch, exporter: Any) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "search")
    assert Tracing(exporter)._provider.resource.attributes["service.name"] == "search"


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'bertie\[tracing\]'"):
        Tracing()
