"""Hostile bodies: what parsing and refusing them takes, on every route and in every field.

    python -m tests.serve.hostile_bodies --count 30000

Prints a line of JSON for each field: the worst shape by CPU time relative to `json.loads`, and the worst growth of the
peak memory relative to the bytes of the body. It runs in a process of its own, whose peak is new.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from collections.abc import Iterator
from typing import Any

from bertie.serve.context import RequestContext
from bertie.serve.http import App
from bertie.serve.openapi import example
from bertie.serve.routes import Route, all_routes
from bertie.serve.tickets import Ticket

UNITS = {
    "objects": "{}",
    "nulls": "null",
    "booleans": "true",
    "numbers": "0.5",
    "huge numbers": "1e300",
    "negative numbers": "-1",
    "empty strings": '""',
    "empty lists": "[]",
    "lists of objects": "[{},{}]",
    "pairs": '["",""]',
    "documents": '{"text":0}',
}
POSTS = [route for route in all_routes() if route.method == "POST"]

REPEATS, FEW = 4, 3.0  # a ratio above `FEW` is measured again


def bodies(route: Route, field: str, count: int) -> Iterator[tuple[str, bytes]]:
    """The route's example with hostile values in one field."""
    rest = {name: value for name, value in example(route).items() if name != field}
    prefix = json.dumps(rest)[:-1] + (", " if rest else "") + f'"{field}": '
    for name, unit in UNITS.items():
        yield name, f"{prefix}[{','.join([unit] * count)}]}}".encode()
    for name, value in (
        ("nested lists", "[" * 500 + ",".join("0" * count) + "]" * 500),
        ("nested objects", '{"a":' * 500 + "0" + "}" * 500),
        ("rows", "[" + ",".join(["[" + ",".join(["{}"] * 200) + "]"] * (count // 200)) + "]"),
        ("keys", "{" + ",".join(f'"k{i}":0' for i in range(count)) + "}"),
        ("a long string", '"' + "x" * 10 * count + '"'),
        ("a long number", "1" * 300),
    ):
        yield name, f"{prefix}{value}}}".encode()
    others = "".join(f', "k{i}": 0' for i in range(count))
    yield "other keys", f"{prefix}0{others}}}".encode()
    again = f', "{field}": []' * count
    yield "the same key", f"{prefix}0{again}}}".encode()


class _NoModels(dict[str, Any]):
    """A registry without models: handlers fail as soon as they need one."""


def measure(count: int) -> Iterator[dict[str, Any]]:
    app = App(_NoModels())  # type: ignore[arg-type]
    gc.collect()
    gc.freeze()  # as the server does: no full collections of what was imported
    for route in POSTS:
        assert route.request is not None
        for field in dict.fromkeys((*route.request.model_fields, *example(route))):
            worst, growth = (0.0, ""), (0.0, "")
            for name, body in bodies(route, field, count):
                before = _peak()
                ratio, outcome = _cost(app, route, body)
                growth = max(growth, ((_peak() - before) / len(body), name))
                for _ in range(REPEATS):  # what else the machine does only adds to a time
                    if ratio < FEW:
                        break
                    ratio = min(ratio, _cost(app, route, body)[0])
                worst = max(worst, (ratio, f"{name}: {outcome}"))
            yield {"route": route.path, "field": field, "time": worst, "memory": growth}


def _cost(app: App, route: Route, body: bytes) -> tuple[float, str]:
    """The CPU time that a request takes, relative to `json.loads` of its body, and how it ends."""
    start = time.thread_time()
    json.loads(body)
    usual = time.thread_time() - start
    start = time.thread_time()
    try:
        app._execute(route, body, RequestContext(Ticket()))
        outcome = "accepted"
    except Exception as error:
        outcome = type(error).__name__
    return (time.thread_time() - start) / (usual + 1e-3), outcome


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30_000)
    for line in measure(parser.parse_args().count):
        print(json.dumps(line), flush=True)
