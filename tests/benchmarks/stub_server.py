"""A server that behaves badly on purpose, for the tests of load generators."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter


class Stub:
    """A server that refuses every third request and disconnects at every tenth."""

    def __init__(self) -> None:
        self.seen: Counter[bytes] = Counter()
        self.statuses: Counter[int] = Counter()
        self.plain = False
        self.delay = 0.005
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def begin() -> None:
            self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
            ready.set()

        self.loop.create_task(begin())
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        assert ready.wait(10)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
                body = await reader.readexactly(size)
                self.seen[body] += 1
                number = sum(self.seen.values())
                await asyncio.sleep(self.delay)
                status = 200 if self.plain or number % 3 else 429
                if not self.plain and number % 10 == 0:
                    self.statuses[0] += 1
                    break
                self.statuses[status] += 1
                close = b"connection: close\r\n" if status == 429 else b""
                reply = b"HTTP/1.1 %d Fine\r\nContent-Length: 300\r\n%s\r\n" % (status, close)
                writer.write(reply + b"x" * 100)
                await asyncio.sleep(0)  # the rest in another packet
                writer.write(b"x" * 200)
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def end(self) -> None:
        self.server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
