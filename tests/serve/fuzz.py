"""Fuzzing: mutate valid request bodies and send them to every endpoint; mutate the bytes of whole exchanges.

    python -m tests.serve.fuzz --bodies 10000 --exchanges 10000

Each must be answered in time, with a documented status, and without leaking paths or stack traces.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
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


HEADER_LINES = [
    *(
        b"content-length: 14",
        b"content-length: 3",
        b"content-length: 99999",
        b"content-length : 14",
        b"content-length:",
    ),
    *(b"transfer-encoding: chunked", b"transfer-encoding: gzip", b"expect: 100-continue", b"connection: close"),
    *(b"connection: upgrade\r\nupgrade: h2c", b" folded", b"host: other", b"x-request-timeout: nan", b"x" * 40_000),
    *(b"x-a: " + b"a" * 3000, b"\xff: \xff", b"authorization: Bearer x", b"content-type: text/plain", b"x-a:\0", b":"),
]
STARTS = [
    b"POST /embed HTTP/1.1",
    b"GET /info HTTP/1.1",
    b"POST / HTTP/1.0",
    b"POST http://localhost/tokenize HTTP/1.1",
]
HTTP_STATUSES = {100, 200, 400, 404, 405, 408, 413, 415, 422, 424, 429, 431, 503, 505}


def exchange(draw: random.Random) -> bytes:
    """One or more requests, with mutations of the start line, the headers, the framing and single bytes."""
    body = b'{"inputs":"a"}'
    parts = []
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        lines = [draw.choice(STARTS), b"host: localhost", b"content-type: application/json"]
        sent = body
        if draw.random() < 0.3:
            lines.append(b"transfer-encoding: chunked")
            sizes = [b"e", b"e", b"0e;a=b", b"f", b"-1", b"ffffffffffffffffff", b"3"]
            sent = (
                draw.choice(sizes) + b"\r\n" + body + b"\r\n" + draw.choice([b"0\r\n\r\n", b"0\r\nx-a: b\r\n\r\n", b""])
            )
        else:
            lines.append(b"content-length: 14")
        for _ in range(draw.choice([0, 0, 1, 2])):
            lines.insert(draw.randrange(1, len(lines) + 1), draw.choice(HEADER_LINES))
        parts.append(b"\r\n".join([*lines, b"", sent]))
    data = bytearray(b"".join(parts))
    for _ in range(draw.choice([0, 0, 0, 1, 2, 20])):
        at = draw.randrange(len(data))
        data[at : at + draw.choice([0, 1, 1, 5])] = draw.choice([b"", b"\n", b"\r", b" ", b"\0", draw.randbytes(1)])
    return bytes(data)


def run_http(port: int, count: int, seed: int = 0) -> Counter[str]:
    """Send mutated exchanges, and raise if one is answered wrongly, or neither answered nor closed."""
    draw, seen = random.Random(seed), Counter[str]()
    for _ in range(count):
        data = exchange(draw)
        with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
            answer = b""
            try:
                cut = draw.randrange(len(data) + 1)  # two packets
                raw.sendall(data[:cut])
                raw.sendall(data[cut:])
                raw.shutdown(socket.SHUT_WR)
                while piece := raw.recv(1 << 16):
                    answer += piece
            except TimeoutError:
                raise AssertionError(f"no answer to {data[:500]!r}") from None
            except OSError:
                seen["reset"] += 1
        statuses = re.findall(rb"^HTTP/1\.1 (\d{3}) [A-Z]|[^\n]HTTP/1\.1 (\d{3}) [A-Z]", answer)
        found = [int(first or second) for first, second in statuses]
        assert set(found) <= HTTP_STATUSES, f"{data[:500]!r} -> {answer[:500]!r}"
        assert bool(found) == bool(answer), f"{data[:500]!r} -> {answer[:500]!r}"
        seen.update(str(status) for status in found or ["closed"])  # type: ignore[list-item]
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--exchanges", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="URL of a running server (one with the built-in model is started)")
    args = parser.parse_args()
    started = time.monotonic()
    if args.url:
        seen = run(args.url, args.bodies, args.seed)
        print(dict(run_http(httpx.URL(args.url).port or 80, args.exchanges, args.seed)))
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
            print(dict(run_http(server.port, args.exchanges, args.seed)))
            server.stop()
    print(f"{sum(seen.values()):,} bodies in {time.monotonic() - started:.0f} s:", dict(sorted(seen.items())))


if __name__ == "__main__":
    sys.exit(main())
