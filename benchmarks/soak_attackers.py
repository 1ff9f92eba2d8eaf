"""The attackers of the soak test: clients that send little and ask for much, stall, or never read.

They come from another address than the honest clients, and send a valid key of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from benchmarks.soak_cases import GARBAGE, POISON

if TYPE_CHECKING:
    from benchmarks.soak import Soak

ADDRESS = "127.0.0.66"  # all of 127.0.0.0/8 is this machine
STALLED = 512  # connections that send a few bytes of a body
UNREAD = 16  # connections that never read their reply
LONG_TEXT = "the quick brown fox jumps over the lazy dog and runs on " * 1200  # about 65,000 characters
UNION_BOMB = b'{"inputs": [' + b",".join([b"{}"] * 1_000_000) + b"]}"
MASK_BOMB = json.dumps({"texts": "[MASK] " * 1500, "top_k": 1000}).encode()
TOKENIZE_BOMB = json.dumps({"inputs": "a b c d " * 1_000_000}).encode()
BIG_REPLY = json.dumps({"inputs": ["word " * 2000] * 20}).encode()  # to /tokenize


@dataclass
class Attackers:
    """What attackers do, and a check of what they get: 2xx, 4xx, a refusal or a closed connection."""

    soak: Soak
    draw: random.Random = field(default_factory=lambda: random.Random(2))

    def actions(self) -> dict[str, tuple[float, Callable[[], Awaitable[None]]]]:
        """Each kind of attack, with the seconds between two of them."""
        return {
            "early disconnect": (0.5, self.disconnect),
            "slow sender": (1.5, self.slow_sender),
            "garbage": (0.7, self.garbage),
            "oversized": (2.0, self.oversized),
            "poisoned": (1.0, self.poisoned),
            "stalled body": (6.0, self.stalled_bodies),
            "unread reply": (5.0, self.unread_replies),
            "mask bomb": (2.5, self.mask_bomb),
            "union bomb": (3.0, self.union_bomb),
            "long text": (0.1, self.long_text),
            "tokenize bomb": (4.0, self.tokenize_bomb),
            "half-closed": (1.0, self.half_closed),
        }

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.soak.host, self.soak.port, local_addr=(ADDRESS, 0))

    def request(self, path: str, body: bytes) -> bytes:
        return self.soak.request(path, body, key=self.soak.attacker_key)

    async def send_raw(self, data: bytes, timeout: float = 60.0) -> str:
        """Send bytes and return the status of the response, "refused" or "disconnected"."""
        writer = None
        try:
            reader, writer = await self.connect()
            writer.write(data)
            return await self.soak.read_status(reader, timeout)
        except OSError:
            return "disconnected"
        finally:
            if writer is not None:
                writer.transport.abort()

    async def disconnect(self) -> None:
        """Disconnect before the response, or in the middle of the request."""
        case = self.draw.choice(self.soak.cases)
        data = self.request(case.path, case.body)
        with suppress(OSError):
            _, writer = await self.connect()
            writer.write(data if self.draw.random() < 0.7 else data[: len(data) // 2])
            await asyncio.sleep(self.draw.choice([0, 0.001, 0.01, 0.1]))
            writer.transport.abort()
        self.soak.counts["early disconnect"] += 1

    async def slow_sender(self) -> None:
        """Send slowly, and half of the time never finish."""
        case = self.draw.choice(self.soak.cases)
        data = self.request(case.path, case.body)
        endless, started = self.draw.random() < 0.5, time.monotonic()
        try:
            reader, writer = await self.connect()
            if endless:  # the body is shorter than announced
                writer.write(data[:-1])
            else:
                step = -(-len(data) // 10)
                for i in range(0, len(data), step):
                    writer.write(data[i : i + step])
                    await asyncio.sleep(0.2)
            status = await self.soak.read_status(reader, 60)
            writer.transport.abort()
        except OSError:
            status = "disconnected"
        self.soak.check_fault("slow sender", status)
        if endless and status == "200":
            self.soak.add_error("slow sender: answered an incomplete request")
        if endless and time.monotonic() - started > self.soak.read_timeout + 20:
            self.soak.add_error(f"slow sender: kept for {time.monotonic() - started:.0f} s")

    async def garbage(self) -> None:
        """Send bytes that are no valid request."""
        data = self.draw.choice([*GARBAGE, self.draw.randbytes(200) + b"\r\n\r\n"])
        self.soak.check_fault("garbage", await self.send_raw(data))

    async def oversized(self) -> None:
        """Announce or send a body over the limit."""
        head = self.request("/embed", b"").replace(b"Content-Length: 0\r\n\r\n", b"")
        if self.draw.random() < 0.5:
            status = await self.send_raw(head + b"Content-Length: 10000000000\r\n\r\n" + b"x" * 1000)
        else:
            chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
            status = await self.send_raw(
                head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * (2 * self.soak.max_body // 0x10000)
            )
        self.soak.check_fault("oversized", status)
        if status == "200":
            self.soak.add_error("oversized: accepted")

    async def poisoned(self) -> None:
        """Send a pathological text."""
        path = self.draw.choice(["/embed", "/classify", "/tag", "/fill"])
        body = self.draw.choice(POISON)
        body = body.replace(b'"texts"', b'"inputs"') if path == "/embed" else body
        self.soak.check_fault("poisoned", await self.send_raw(self.request(path, body)))

    async def stalled_bodies(self) -> None:
        """Open many connections that send headers and a few bytes of a body, and then wait."""
        data = self.request("/embed", b"x" * 1000)[:-990]
        writers = []
        for _ in range(STALLED):
            with suppress(OSError):
                _, writer = await self.connect()
                writer.write(data)
                writers.append(writer)
        await self.soak.sleep_while_attacking(5.0)
        for writer in writers:
            writer.transport.abort()
        self.soak.counts["stalled body"] += len(writers)

    async def unread_replies(self) -> None:
        """Ask for large replies, and never read them."""
        sockets = []
        for _ in range(UNREAD):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.setblocking(False)
            with suppress(OSError):
                connection.bind((ADDRESS, 0))
                await asyncio.get_running_loop().sock_connect(connection, (self.soak.host, self.soak.port))
                await asyncio.get_running_loop().sock_sendall(connection, self.request("/tokenize", BIG_REPLY))
            sockets.append(connection)
        await self.soak.sleep_while_attacking(10.0)
        for connection in sockets:
            connection.close()
        self.soak.counts["unread reply"] += len(sockets)

    async def mask_bomb(self) -> None:
        """A small request with a large reply."""
        self.soak.check_fault("mask bomb", await self.send_raw(self.request("/fill", MASK_BOMB)))

    async def union_bomb(self) -> None:
        """A body in which each item is wrong in every way."""
        status = await self.send_raw(self.request("/embed", UNION_BOMB))
        self.soak.check_fault("union bomb", status)
        if status == "200":
            self.soak.add_error("union bomb: accepted")

    async def tokenize_bomb(self) -> None:
        """8 MB of text."""
        self.soak.check_fault("tokenize bomb", await self.send_raw(self.request("/tokenize", TOKENIZE_BOMB)))

    async def long_text(self) -> None:
        """Texts of 65,000 characters, one at a time."""
        if self.soak.counts["long texts in flight"]:
            return
        self.soak.counts["long texts in flight"] = 1
        body = json.dumps({"inputs": [LONG_TEXT[self.draw.randrange(1000) :]]}).encode()
        self.soak.check_fault("long text", await self.send_raw(self.request("/embed", body)))
        self.soak.counts["long texts in flight"] = 0

    async def half_closed(self) -> None:
        """A client that ends its side of the connection after the request; it is honest, and must be answered."""
        case = self.draw.choice(self.soak.short_cases)
        body = b""
        try:
            reader, writer = await self.connect()
            writer.write(self.request(case.path, case.body))
            writer.write_eof()
            status = await self.soak.read_status(reader, 60)
            if status == "200":
                body = await asyncio.wait_for(reader.read(), 60)
            writer.transport.abort()
        except OSError:
            status = "disconnected"
        self.soak.check_fault("half-closed", status)
        if status == "disconnected" and not self.soak.after_kill:
            self.soak.add_error("half-closed: not answered")
        if status == "200" and (error := case.find_error(body)) is not None:
            self.soak.add_error(f"half-closed: {error}")


class AttackProcess:
    """The attackers in a process of their own: what they cost must not delay the honest clients."""

    def __init__(self, soak: Soak) -> None:
        context = get_context("spawn")
        soak.last_kill = context.Value("d", 0.0)
        self._results, target = context.Pipe(duplex=False)
        self._process = context.Process(target=_attack, args=(soak, target), daemon=True)
        self._process.start()
        target.close()

    def join(self, soak: Soak) -> None:
        """Wait for the end, and add what was counted."""
        if self._results.poll(120):
            counts, errors = self._results.recv()
            soak.counts.update(counts)
            soak.errors.update(errors)
        else:
            soak.add_error("the attackers hang")

    def kill(self) -> None:
        """End the process."""
        self._process.kill()


def _attack(soak: Soak, target: Any) -> None:
    async def run() -> None:
        actions = Attackers(soak).actions()
        chosen = [actions[name] for name in soak.attackers or actions]
        await asyncio.gather(*(soak.every(seconds, action, attack=True) for seconds, action in chosen))

    os.nice(19)  # attackers would run on other machines
    asyncio.run(run())
    target.send((soak.counts, soak.errors))
