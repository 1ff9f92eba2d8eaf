"""OpenTelemetry spans of requests, configured by the standard OTEL_* environment variables.

A span is made when its request has been answered, from the times that are measured anyway. So nothing is traced while
a request runs, and spans cost a request without tracing one comparison.
"""

from __future__ import annotations

import os
import time
from threading import Thread
from typing import TYPE_CHECKING, Any

from bertie.errors import MissingPackageError

if TYPE_CHECKING:
    from bertie.serve.context import RequestContext
    from bertie.serve.exchange import Exchange

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
CLOSE_SECONDS = 5.0  # to send the last spans


def wants_tracing() -> bool:
    """Whether the environment names a collector of spans, and does not turn them off."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(os.environ.get(name) for name in ENDPOINTS)


class Tracing:
    """Makes the spans of requests. `exporter`: an OpenTelemetry exporter; by default OTLP over HTTP, in batches."""

    def __init__(self, exporter: Any = None) -> None:
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise MissingPackageError(f"tracing needs {error.name}: pip install 'bertie[tracing]'") from None
        from bertie._version import __version__

        attributes: dict[str, Any] = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "bertie"}
        self._provider = TracerProvider(resource=Resource.create(attributes))
        processor = BatchSpanProcessor(OTLPSpanExporter()) if exporter is None else SimpleSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("bertie.serve", __version__)
        self._extract, self._in_span = propagate.extract, trace.set_span_in_context
        self._kind, self._error = trace.SpanKind.SERVER, trace.Status(trace.StatusCode.ERROR)

    def record(self, exchange: Exchange, context: RequestContext, status: int, seconds: float) -> None:
        """Make the span of a request that took so many seconds, and those of its queue and its forward passes."""
        end = time.time_ns()
        start, ticket = end - int(seconds * 1e9), context.ticket
        route = exchange.path if context.known_path else None  # no other path: it may contain anything
        attributes = {
            "http.request.method": exchange.method if exchange.method in _METHODS else "_OTHER",
            "http.route": route,
            "http.response.status_code": status,
            "error.type": context.error_code,
            "bertie.request_id": ticket.id,
            "bertie.model": context.model or None,
            "bertie.tokens.total": context.read["tokens_total"] or None,
            "bertie.tokens.computed": ticket.tokens,
            "bertie.batch.tokens": ticket.batch_tokens or None,
        }
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers.items()}
        span = self._tracer.start_span(
            f"{attributes['http.request.method']} {route}" if route else str(attributes["http.request.method"]),
            context=self._extract(headers),
            kind=self._kind,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=start,
        )
        if status >= 500:
            span.set_status(self._error)
        if ticket.tokens and span.is_recording():
            # One after the other from when the first windows were queued. Of several batches, their sums.
            queued = start + max(0, int((ticket.queued - exchange.started) * 1e9))
            taken = queued + int(ticket.queue_s * 1e9)
            self._add_child(span, "queue", queued, taken)
            self._add_child(span, "device", taken, taken + int(ticket.device_s * 1e9))
        span.end(end)

    def _add_child(self, parent: Any, name: str, start: int, end: int) -> None:
        self._tracer.start_span(name, context=self._in_span(parent), start_time=start).end(end)

    def close(self) -> None:
        """Send the spans that are left; a collector that does not answer delays this only for a while."""
        thread = Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT")
