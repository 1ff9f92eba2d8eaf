"""`bertie serve` under mixed load with faults, for as long as one likes.

    python -m benchmarks.soak --minutes 30 [--model FOLDER] [--json OUT.json]

Good clients ask for all that the model can do, and every reply is compared with what the local objects say. Meanwhile
others hang up, send slowly, send garbage, send too much, and once a second a poisoned text; one worker of several is
killed every so often, and the models are loaded anew. It must hold that

- every request that was accepted is answered once, and rightly; one whose worker was killed is asked again;
- what is refused is refused with 429 or 503 and a time to come back; there is no other 5xx;
- whoever does wrong gets a 4xx or is cut off, in good time;
- the memory of the worker that lives through it all is no larger in the last third than in the first, but for a tenth;
- at the end, SIGTERM ends the server with status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from benchmarks.serve import ROOT, environment
from benchmarks.serve_load import Link
from bertie.client import responses
from bertie.errors import BertieError

TOLERANCE = 1e-4
LABELS = ("love", "war")  # of which either may come first where they are as likely
KILL_WINDOW = 3.0  # seconds after a kill within which connections may break
READ_TIMEOUT = 5.0  # of the server, for slow senders
MAX_BODY = 1 << 20
WARM_UP = 60.0  # seconds in which memory may grow: threads start, allocators fill
GROWTH = 1.10  # of memory, from the first to the last third, at most; and this much for small ones:
SLACK = 24 << 20  # bytes


# --- what is asked, and what must come ---


@dataclass(frozen=True)
class Case:
    """A request, and what the local objects say to it."""

    path: str
    body: bytes
    read: Callable[[Any], Any]
    expected: Any

    def wrong(self, body: bytes) -> str | None:
        """What is wrong with a reply."""
        try:
            found = self.read(json.loads(body))
        except Exception as error:
            return f"{self.path}: unreadable reply ({error!r:.100})"
        return None if near(found, self.expected) else f"{self.path}: {found!r:.200} is not {self.expected!r:.200}"


def near(one: Any, two: Any) -> bool:
    """Equal but for roundings."""
    if is_dataclass(one) and not isinstance(one, type):
        return type(one) is type(two) and near(asdict(one), asdict(two))
    if isinstance(one, float) and isinstance(two, float):
        return abs(one - two) <= TOLERANCE * max(1.0, abs(two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(near(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(near, one, two))
    if hasattr(one, "tolist") and hasattr(two, "tolist"):
        return near(one.tolist(), two.tolist())
    return bool(one == two)


def cases(model: str | None, count: int = 24) -> list[Case]:
    """Requests for each task that the model has a head for, of short texts and of long ones."""
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.checkpoints.hub import default_model
    from bertie.tasks import Classifier, Embedder, MaskedLM, Reader, Reranker, Tagger, ZeroShot

    checkpoint = Checkpoint.load(model or default_model())
    draw = random.Random(0)
    words = (ROOT / "src" / "bertie" / "cli" / "tour.txt").read_text().split()

    def text() -> str:
        size, start = min(900, int(draw.lognormvariate(2.8, 1.0)) + 2), draw.randrange(len(words))
        return " ".join(words[start : start + size])

    found: list[Case] = []

    def add(path: str, body: dict[str, Any], read: Callable[[Any], Any], expected: Any) -> None:
        found.append(Case(path, json.dumps(body).encode(), read, expected))

    def some() -> list[str]:
        return [text() for _ in range(draw.choice([1, 1, 1, 2, 5]))]

    embedder = Embedder(checkpoint)
    for _ in range(count):
        texts = some()
        vectors = embedder.embed(texts)
        add("/embed", {"inputs": texts, "normalize": False}, list, vectors.tolist())
        unit = vectors / (vectors**2).sum(1, keepdims=True) ** 0.5
        add("/v1/embeddings", {"input": texts, "encoding_format": "base64"}, responses.parse_vectors, list(unit))
    for kind, add_some in (
        (Classifier, lambda task, t: add("/classify", {"texts": t}, responses.parse_classifications, task.classify(t))),
        (Tagger, lambda task, t: add("/tag", {"texts": t}, responses.parse_tags, task.tag(t))),
        (
            Reader,
            lambda task, t: add(
                "/answer",
                {"questions": [{"question": "Who was it?", "documents": one} for one in t]},
                responses.parse_answers,
                task.answer([("Who was it?", one) for one in t]),
            ),
        ),
        (
            Reranker,
            lambda task, t: add(
                "/v1/rerank",
                {"query": "Who was it?", "documents": t},
                lambda reply: [read for _, read in responses.parse_scores(reply)],
                [responses.read_counts(asdict(one)) for one in task.predict_each([("Who was it?", one) for one in t])],
            ),
        ),
        (
            ZeroShot,
            lambda task, t: add(
                "/classify",
                {"texts": t[:1], "labels": list(LABELS), "multi": True},
                lambda reply: [dict(sorted(one.scores.items())) for one in responses.parse_zero_shot(reply)],
                [dict(sorted(one.scores.items())) for one in task.classify(t[:1], LABELS, multi=True)],
            ),
        ),
    ):
        with suppress(BertieError):  # it has no such head
            task: Any = kind(checkpoint)
            for _ in range(count):
                add_some(task, some())  # type: ignore[no-untyped-call]
    with suppress(BertieError):
        filler = MaskedLM(checkpoint)
        for _ in range(count):
            texts = [f"{one} {filler.tokenizer.mask_token} {text()}" for one in some()]
            add("/fill", {"texts": texts}, responses.parse_masks, filler.fill(texts))
    draw.shuffle(found)
    return found


POISON = (
    b'{"texts": ["\\ud800"]}',
    b'{"texts": ["a\\u0000b\\u200b\\ufeff\\ufffe"]}',
    json.dumps({"texts": ["x" * 200_000]}).encode(),
    json.dumps({"texts": ["\u0301" * 20_000]}).encode(),
    json.dumps({"texts": ["[MASK]" * 2000]}).encode(),
    b'{"texts": [""]}',
    b'{"texts": []}',
    json.dumps({"texts": ["a", {"b": 1}]}).encode(),
    json.dumps({"texts": ["👩‍👩‍👧‍👦" * 3000]}).encode(),
    b'{"texts": ["\xff\xfe"]}',
)
GARBAGE = (
    b"\x00" * 100 + b"\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Type: application/json\r\n\r\n{{{",
    b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n\r\n{}",
    b"DELETE /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /tag HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
    b"GET /health HTTP/1.1\r\nX: " + b"y" * 40_000,
)


# --- the load ---


@dataclass
class Soak:
    """What has happened so far."""

    host: str
    port: int
    cases: Sequence[Case]
    parent: int
    until: float
    counts: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    kills: list[float] = field(default_factory=list)
    reloads: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)  # of the worker that is never killed
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    def problem(self, what: str) -> None:
        self.problems[what] += 1

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    @property
    def after_a_kill(self) -> bool:
        return any(time.monotonic() - KILL_WINDOW < kill for kill in self.kills)

    async def link(self) -> Link:
        _, made = await asyncio.get_running_loop().create_connection(Link, self.host, self.port)
        return made

    def request(self, path: str, body: bytes, name: str = "") -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"X-Request-Id: {name or 'x'}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def good_client(self, number: int) -> None:
        """Asks one thing after the other and looks at what comes."""
        made: Link | None = None
        asked = 0
        while not self.over:
            case = self.draw.choice(self.cases)
            answered = False
            while not answered:
                asked += 1
                name = f"good-{number}-{asked}"
                try:
                    if made is None or made.closed:
                        made = await self.link()
                    status = await asyncio.wait_for(made.send(self.request(case.path, case.body, name)), 60)
                except TimeoutError:
                    self.problem(f"{case.path}: no answer within 60 seconds")
                    made = None
                    break
                except OSError:
                    status = "hung up"
                answered = self.check_reply(case, made, status, name)
                if not answered:
                    await asyncio.sleep(self.draw.uniform(0.1, 0.5))
            await asyncio.sleep(self.draw.uniform(0.0, 0.02))

    def check_reply(self, case: Case, made: Link | None, status: str, name: str) -> bool:
        """Whether a request is done; if not, it is asked again."""
        if status == "hung up":
            if not self.after_a_kill:
                self.problem(f"{case.path}: hung up on, and no worker was killed")
            self.counts["asked again after a kill"] += 1
            return False
        assert made is not None
        if f"x-request-id: {name}".encode() not in made.head:
            self.problem(f"{case.path}: a reply to another request")
        if made.unasked:
            self.problem(f"{case.path}: answered twice")
        if status == "200":
            self.counts["answered"] += 1
            if (wrong := case.wrong(made.body)) is not None:
                self.problem(wrong)
            return True
        if status in ("429", "503") and b"\r\nretry-after: " in made.head:
            self.counts[f"refused with {status}"] += 1
            return False
        self.problem(f"{case.path}: status {status}, {made.body[:200]!r}")
        return True

    async def raw(self, data: bytes, timeout: float = 30.0) -> str:
        """Send something; the status that comes back, "refused" or "cut off"."""
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(data)
            status = await self.status(reader, timeout)
            writer.close()
        except OSError:
            return "cut off"
        return status

    async def status(self, reader: asyncio.StreamReader, timeout: float) -> str:
        """Of a reply; "refused" if it says when to come back, "cut off" if there is none."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), timeout)
        except asyncio.IncompleteReadError as broken:
            head = broken.partial
        except TimeoutError:
            return "timeout"
        announced = head[9:12] in (b"429", b"503") and b"\r\nretry-after: " in head
        return "refused" if announced else head[9:12].decode("latin-1") or "cut off"

    def wronged(self, what: str, status: str) -> None:
        """A wrong-doer's lot: 2xx, 4xx, to be refused or to be cut off."""
        self.counts[what] += 1
        if not (re.fullmatch("[24]..", status) or status in ("refused", "cut off")):
            self.problem(f"{what}: {status}")

    async def hang_up(self) -> None:
        """Leaves before the answer, or in the middle of the question."""
        case = self.draw.choice(self.cases)
        data = self.request(case.path, case.body)
        with suppress(OSError):
            _, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(data if self.draw.random() < 0.7 else data[: len(data) // 2])
            await asyncio.sleep(self.draw.choice([0, 0.001, 0.01, 0.1]))
            writer.transport.abort()
        self.counts["hung up"] += 1

    async def slow_sender(self) -> None:
        """Sends drop by drop, to an end or without one."""
        case = self.draw.choice(self.cases)
        data = self.request(case.path, case.body)
        endless, begun = self.draw.random() < 0.5, time.monotonic()
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            if endless:  # a head that promises more than comes
                writer.write(data[:-1])
            else:
                step = -(-len(data) // 10)
                for i in range(0, len(data), step):
                    writer.write(data[i : i + step])
                    await asyncio.sleep(0.2)
            status = await self.status(reader, 60)
            writer.close()
        except OSError:
            status = "cut off"
        self.wronged("slow sender", status)
        if endless and status == "200":
            self.problem("slow sender: answered without having asked")
        if endless and time.monotonic() - begun > READ_TIMEOUT + 20:
            self.problem(f"slow sender: held for {time.monotonic() - begun:.0f} s")

    async def garbage(self) -> None:
        """Sends what is no request, or none that makes sense."""
        data = self.draw.choice([*GARBAGE, self.draw.randbytes(200) + b"\r\n\r\n"])
        self.wronged("garbage", await self.raw(data))

    async def oversized(self) -> None:
        """Announces, or sends, more than is allowed."""
        head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        if self.draw.random() < 0.5:
            status = await self.raw(head + b"Content-Length: 10000000000\r\n\r\n" + b"x" * 1000)
        else:
            chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
            status = await self.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * (2 * MAX_BODY // 0x10000))
        self.wronged("oversized", status)
        if status == "200":
            self.problem("oversized: taken")

    async def poisoned(self) -> None:
        """Sends a text that might hurt."""
        path = self.draw.choice(["/embed", "/classify", "/tag", "/fill"])
        body = self.draw.choice(POISON)
        body = body.replace(b'"texts"', b'"inputs"') if path == "/embed" else body
        self.wronged("poisoned", await self.raw(self.request(path, body), 60))

    async def every(self, seconds: float, what: Callable[[], Awaitable[None]]) -> None:
        """Do something again and again, whether or not the last one is done."""
        under_way: set[asyncio.Future[None]] = set()
        while not self.over:
            pause = seconds * self.draw.uniform(0.7, 1.3)
            await asyncio.sleep(max(0.0, min(pause, self.until - time.monotonic())))
            if self.over:
                break
            task = asyncio.ensure_future(what())
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)

    def workers(self) -> list[int]:
        """Oldest first."""
        with suppress(OSError):
            children = Path(f"/proc/{self.parent}/task/{self.parent}/children").read_text().split()
            return sorted(map(int, children))
        return []

    async def kill(self) -> None:
        """The youngest worker, so that one lives through it all."""
        workers = self.workers()
        if len(workers) > 1:
            self.kills.append(time.monotonic())
            os.kill(workers[-1], signal.SIGKILL)

    async def reload(self) -> None:
        os.kill(self.parent, signal.SIGHUP)
        self.reloads += 1

    async def look(self) -> None:
        workers = self.workers()
        if workers:
            with suppress(OSError):
                pages = int(Path(f"/proc/{workers[0]}/statm").read_text().split()[1])
                self.memory.append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")))

    async def run(self, clients: int, kill_every: float, reload_every: float) -> None:
        """All of it, until it is over."""
        await asyncio.gather(
            *(self.good_client(number) for number in range(clients)),
            self.every(0.5, self.hang_up),
            self.every(1.5, self.slow_sender),
            self.every(0.7, self.garbage),
            self.every(2.0, self.oversized),
            self.every(1.0, self.poisoned),
            self.every(1.0, self.look),
            self.every(kill_every, self.kill),
            self.every(reload_every, self.reload),
        )

    def thirds(self) -> tuple[float, float]:
        """Median memory of the first and the last third, after the warm-up."""
        if not self.memory:
            return 0.0, 0.0
        begun = self.memory[0][0] + WARM_UP
        sizes = [size for at, size in self.memory if at > begun] or [size for _, size in self.memory]
        third = max(1, len(sizes) // 3)
        return statistics.median(sizes[:third]), statistics.median(sizes[-third:])


def soak(
    minutes: float,
    model: str | None = None,
    *,
    clients: int = 8,
    workers: int = 2,
    kill_every: float = 300.0,
    reload_every: float = 240.0,
) -> dict[str, Any]:
    """Start a server, plague it, and say what was wrong."""
    asked = cases(model)
    command = [sys.executable, "-m", "bertie", "serve", *([] if model is None else [f"model={model}"]), "--port", "0"]
    command += ["--workers", str(workers), "--read-timeout", str(READ_TIMEOUT), "--max-body", str(MAX_BODY)]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=log, text=True)
        assert server.stdout is not None
        hit = re.search(r"http://([\d.]+):(\d+)", server.stdout.readline())
        if hit is None:
            log.seek(0)
            raise SystemExit(f"bertie serve did not start: {log.read()[-2000:]}")
        begun = time.monotonic()
        one = Soak(hit[1], int(hit[2]), asked, server.pid, begun + 60 * minutes)
        try:
            asyncio.run(one.run(clients, kill_every, reload_every))
            seconds = time.monotonic() - begun
            server.send_signal(signal.SIGTERM)
            status: int | None = server.wait(60)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            server.kill()
        log.seek(0)
        lines = log.read().splitlines()
    if status != 0:
        one.problem(f"SIGTERM ended it with {status}")
    internal = [line for line in lines if '"problem":"internal"' in line or "Traceback" in line]
    for line in internal[:5]:
        one.problem(f"log: {line[:300]}")
    first, last = one.thirds()
    if last > first * GROWTH and last - first > SLACK:
        one.problem(f"memory grew from {first / 2**20:.0f} to {last / 2**20:.0f} MiB")
    if not one.counts["answered"]:
        one.problem("nothing was answered")
    return {
        "minutes": round(seconds / 60, 2),
        "cases": len(asked),
        "counts": dict(one.counts),
        "kills": len(one.kills),
        "reloads": one.reloads,
        "memory_mib": [round(first / 2**20, 1), round(last / 2**20, 1)],
        "memory_mib_by_time": [round(size / 2**20) for _, size in one.memory[:: max(1, len(one.memory) // 60)]],
        "problems": dict(one.problems.most_common(50)),
    }


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", help="a folder (the built-in model)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill-every", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--reload-every", type=float, default=240.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    how = {"clients": args.clients, "workers": args.workers}
    found = soak(args.minutes, args.model, kill_every=args.kill_every, reload_every=args.reload_every, **how)
    print(json.dumps(found, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
