"""Fuzzing: mutate valid request bodies and send them to every endpoint.

    python -m tests.serve.fuzz --bodies 10000

Each must be answered in time, with a documented status, and without leaking paths or stack traces.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx

from bertie.serve.openapi import describe_api, example
from bertie.serve.routes import Route, all_routes

POSTS = [route for route in all_routes() if route.method == "POST"]
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, -0.0, 1e308, -1e308, 2**31, 2**63, -(2**63), 10**30),
    *("", " ", "\0", "\n", "a", "[MASK]", "[CLS]", "{}", "{0}", "{a.b}", "%s", "../../etc/passwd", "\u202e", "ﷺ" * 50),
    *(
        "👩‍👩‍👧" * 20,
        "a" * 5000,
        "a " * 3000,
        "é" * 100,
        "中文" * 300,
        "\ufeff",
        "<script>",
        "' OR 1=1 --",
        "embed",
        "small",
    ),
    *([], {}, [[]], [{}], [None], {"a": {}}, [""], ["a"] * 50, [[1, 2], [3]], [1, "a"], {"text": "a"}),
]
LEAKS = ("Traceback", 'File "', ".py", "site-packages", "object at 0x", "/tmp", "/home", "/root", "/work", "/usr")


def mutate(body: Any, draw: random.Random) -> Any:
    """Change one value somewhere in a body."""
    if isinstance(body, dict) and body and draw.random() < 0.9:
        changed = dict(body)
        key = draw.choice(list(changed))
        mutation = draw.randrange(5)
        if mutation == 0:
            del changed[key]
        elif mutation == 1:
            changed[draw.choice(["model", "head", "truncate", "overflow", "top_k", "k", "dimensions", key + "x"])] = (
                draw.choice(ODD_VALUES)
            )
        elif mutation == 2:
            changed[key] = draw.choice(ODD_VALUES)
        else:
            changed[key] = mutate(changed[key], draw)
        return changed
    if isinstance(body, list) and body and draw.random() < 0.9:
        at = draw.randrange(len(body))
        return draw.choice(
            [
                [*body[:at], mutate(body[at], draw), *body[at + 1 :]],
                body * draw.choice([0, 2, 7]),
                [*body[:at], draw.choice(ODD_VALUES)],
                body[at],
            ]
        )
    if isinstance(body, str) and body and draw.random() < 0.5:
        letters = list(body * draw.choice([1, 1, 40]))
        for _ in range(draw.randrange(1, 6)):
            letters[draw.randrange(len(letters))] = chr(draw.choice([draw.randrange(1, 0xD7FF), 0, 0xFFFF, 0x1F600]))
        return "".join(letters)
    return draw.choice(ODD_VALUES)


def encode(body: Any, draw: random.Random) -> bytes:
    """Encode a mutated body, usually as valid JSON."""
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        body = mutate(body, draw)
    data = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    if draw.random() < 0.15:
        at = draw.randrange(len(data) + 1)
        junk = draw.choice([b"", b"\xff", b"\0", b'"', b"{", b"\\ud800", b"NaN", draw.randbytes(4)])
        data = draw.choice([data[:at], data[:at] + junk + data[at:], data[at:], data * 2])
    return data


def bodies(count: int, seed: int) -> Iterator[tuple[Route, bytes]]:
    draw = random.Random(seed)
    for i in range(count):
        route = POSTS[i % len(POSTS)]
        yield route, encode(example(route), draw)


def documented_statuses(route: Route) -> set[int]:
    return {int(status) for status in describe_api()["paths"][route.path]["post"]["responses"]}


def run(url: str, count: int, seed: int = 0) -> Counter[int]:
    """Send mutated bodies, and raise on a wrong response."""
    seen: Counter[int] = Counter()
    allowed = {route.path: documented_statuses(route) for route in POSTS}
    with httpx.Client(base_url=url, timeout=60) as client:
        for route, body in bodies(count, seed):
            reply = client.post(route.path, content=body, headers={"content-type": "application/json"})
            details = f"{route.path} {body[:300]!r} -> {reply.status_code} {reply.text[:300]}"
            assert reply.status_code != 500, details
            assert reply.status_code in allowed[route.path], details
            answer = reply.json()
            if reply.status_code != 200:
                text = json.dumps(answer)
                sent = body.decode("utf-8", "replace")
                assert not [leak for leak in LEAKS if leak in text and leak not in sent], details
            seen[reply.status_code] += 1
            if not seen.total() % 1000:
                print(dict(sorted(seen.items())), file=sys.stderr)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="URL of a running server (one with the built-in model is started)")
    args = parser.parse_args()
    started = time.monotonic()
    if args.url:
        seen = run(args.url, args.bodies, args.seed)
    else:
        from bertie.serve.http import App, ServerSettings
        from bertie.serve.limits import Limits
        from bertie.serve.logs import Log
        from bertie.serve.registry import Registry
        from tests.serve.conftest import Running

        few = ServerSettings(limits=Limits(tokens=4096))  # long texts would take hours
        with open("/dev/null", "w") as nowhere:
            server = Running(App(Registry(), few, log=Log(nowhere)), nowhere)  # type: ignore[arg-type]
            seen = run(server.url, args.bodies, args.seed)
            server.stop()
    print(f"{sum(seen.values()):,} bodies in {time.monotonic() - started:.0f} s:", dict(sorted(seen.items())))


if __name__ == "__main__":
    sys.exit(main())
