"""The engines as a front end sees them: an executor whose forward pass runs in another process.

Each front end is connected to every engine. A job goes to the engine with the fewest tokens in flight. If an engine
dies, its jobs fail at once, and the connection is made again as soon as it has been restarted.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from bertie.serve import messages
from bertie.serve.engine_load import EngineLoad
from bertie.serve.engine_server import closed, references
from bertie.serve.lanes import LONG_CHARACTERS, QueuedJob
from bertie.serve.loop_runner import current_runner
from bertie.serve.messages import Decoder, Job, Kind
from bertie.serve.tickets import Cancelled, Expired, Ticket, TokenLimitExceeded, current_ticket

if TYPE_CHECKING:
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.text.encoding import Encodings

RETRY_SECONDS = 0.05  # between two attempts to connect


class EngineConnection(asyncio.Protocol):
    """The connection to one engine, from the thread of the event loop; `send` may be called from any."""

    transport: asyncio.Transport | None = None

    def __init__(self, path: str) -> None:
        self.path = path
        self.models: dict[str, Any] = {}  # as the engine describes them
        self.loads: dict[str, EngineLoad] = {}  # of each model's queue
        self.tokens = 0  # in flight
        self.losses = 0  # of the connection
        self.tasks: set[int] = set()  # that the engine knows
        self.jobs: dict[int, QueuedJob] = {}
        self.on_hello: Callable[[dict[str, Any]], None] = lambda models: None
        self.closing = False
        self._decoder = Decoder()
        self._parts: list[bytes] = []  # to send at the end of this turn of the event loop
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Connect, and connect again whenever the connection is lost."""
        loop = self._loop = asyncio.get_running_loop()
        while not self.closing:
            try:
                await loop.create_unix_connection(lambda: self, self.path)
                while self.transport is not None:
                    await asyncio.sleep(RETRY_SECONDS)
            except OSError:  # the engine is being started
                await asyncio.sleep(RETRY_SECONDS)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A new engine knows no tasks yet."""
        self.transport = transport  # type: ignore[assignment]  # of a stream
        self._decoder = Decoder()
        self.tasks.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all jobs at once."""
        self.transport = None
        self.losses += 1
        jobs, self.jobs, self.tokens, self._parts = list(self.jobs.values()), {}, 0, []
        for job in jobs:
            end(job, closed())

    def data_received(self, data: bytes) -> None:
        """Take outputs, and wake those who wait for them."""
        for kind, number, payload in self._decoder.feed(data):
            if kind in (Kind.ROWS, Kind.OBJECT, Kind.ERROR):
                job = self.jobs.pop(number, None)
                if job is None:  # its caller gave up
                    continue
                self.tokens -= job.backlog
                stats, value = messages.decode_outputs(kind, payload)
                ticket = job.ticket
                ticket.queue_s += stats.queue_s
                ticket.device_s += stats.device_s
                ticket.tokens += stats.tokens
                ticket.batch_tokens = max(ticket.batch_tokens, stats.batch_tokens)
                if kind is Kind.ERROR:
                    end(job, value)
                elif job.unanswered:
                    job.outputs, job.unanswered = value, 0
                    job.done()
            elif kind is Kind.HELLO:
                self.models = pickle.loads(payload)
                self.on_hello(self.models)
            elif kind is Kind.STATUS:
                self.loads = pickle.loads(payload)

    def submit(self, number: int, job: QueuedJob, *parts: bytes) -> None:
        """Send a job; in the thread of the event loop."""
        if self.transport is None or self.transport.is_closing():
            end(job, closed())
            return
        self.jobs[number] = job
        self.tokens += job.backlog
        self.send(*parts)

    def send(self, *parts: bytes) -> None:
        """Send messages, together with those of other requests; in the thread of the event loop."""
        if not self._parts and self._loop is not None:
            self._loop.call_soon(self._flush)
        self._parts += parts

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"".join(parts))

    def call_in_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the thread of the event loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Disconnect; in the thread of the event loop."""
        self.closing = True
        if self.transport is not None:
            self.transport.close()


def end(job: QueuedJob, error: BaseException) -> None:
    """End a job with an error."""
    if job.unanswered:
        job.error, job.unanswered = error, 0
        job.done()


def _give_up(job: QueuedJob) -> None:
    """End a job that nobody waits for any more."""
    end(job, job.ticket.error())


class EngineClient:
    """All engines of a server. `connections` are served by an event loop (`run`)."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.connections = [EngineConnection(path) for path in paths]
        self._numbers = itertools.count(1)
        self._task_numbers: WeakKeyDictionary[Any, tuple[int, bytes]] = WeakKeyDictionary()
        self._by_data: dict[bytes, int] = {}
        self.greetings = 0  # of engines that were started or have reloaded a model
        self.versions: dict[str, str] = {}  # of the files that this process has read of each model
        self.on_reload: Callable[[str], object] = lambda name: None  # called in a thread when a model was reloaded
        for connection in self.connections:
            connection.on_hello = self._compare

    def _compare(self, models: dict[str, Any]) -> None:
        """Notice models that the engines have reloaded."""
        self.greetings += 1
        for name, model in models.items():
            if self.versions.setdefault(name, model["version"]) != model["version"]:
                self.versions[name] = model["version"]
                Thread(target=self.on_reload, args=(name,), name=f"reload-{name}", daemon=True).start()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connect to the engines."""
        self._running = [loop.create_task(connection.run()) for connection in self.connections]

    def close(self) -> None:
        """Disconnect."""
        for connection in self.connections:
            connection.close()

    def choose(self) -> EngineConnection:
        """The engine for the next job."""
        ready = [connection for connection in self.connections if connection.transport is not None]
        if not ready:
            raise closed()
        return min(ready, key=lambda connection: connection.tokens) if len(ready) > 1 else ready[0]

    def task_message(self, model: str, version: str, task: Any, checkpoint: Checkpoint) -> tuple[int, bytes]:
        """The number of a task, and the message that tells it to an engine."""
        known = self._task_numbers.get(task)
        if known is None:
            data = messages.pickle_with_references(task, references(checkpoint, task.pipeline.executor))
            payload = pickle.dumps((model, version, data), protocol=5)
            number = self._by_data.setdefault(payload, len(self._by_data))
            known = self._task_numbers[task] = number, messages.encode(Kind.TASK, number, payload)
        return known

    def next_number(self) -> int:
        """A number for a job."""
        return next(self._numbers)


class RemoteEngine:
    """One model of the engines, as an executor of pipelines. It has the methods of `Engine` that a server uses."""

    def __init__(self, client: EngineClient, name: str, checkpoint: Checkpoint, version: str) -> None:
        """`version`: of the files that the checkpoint was read from."""
        self._client, self._name, self._checkpoint = client, name, checkpoint
        self._version = client.versions[name] = version

    @property
    def version(self) -> int:
        """Of the weights, which an engine may have read again when it was restarted."""
        return self._client.greetings + sum(connection.losses for connection in self._client.connections)

    # --- the executor ---

    def compute(
        self, task: Any, windows: Encodings, parameters: Sequence[Any] | None = None, *, ticket: Ticket | None = None
    ) -> list[Any]:
        """Compute a task's outputs for windows, given by their token ids; see `Engine.compute`."""
        ticket = ticket or current_ticket.get() or Ticket()
        ticket.submitted_tokens += len(windows.ids)
        if ticket.max_tokens is not None and ticket.submitted_tokens > ticket.max_tokens:
            raise TokenLimitExceeded(f"a request may have at most {ticket.max_tokens:,} tokens in all its windows")
        if not len(windows.lengths):
            return []
        ticket.check()
        ticket.queued = ticket.queued or time.perf_counter()
        number, definition = self._client.task_message(self._name, self._version, task, self._checkpoint)
        job = Job(number, windows, parameters, ticket.deadline, ticket.owner)

        def message(id: int) -> bytes:
            return messages.encode_job(id, job)

        outputs: list[Any] = self._request(ticket, message, len(windows.ids), number, definition)
        return outputs

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function of the checkpoint in the engine's process."""
        ticket = current_ticket.get() or Ticket()
        value = (self._name, function, args, options)
        return self._request(ticket, lambda id: messages.encode_object(Kind.CALL, id, value), 0)

    def _request(
        self, ticket: Ticket, message: Callable[[int], bytes], tokens: int, task: int = -1, definition: bytes = b""
    ) -> Any:
        """Send a message, and wait for its answer."""
        connection, id, runner = self._client.choose(), self._client.next_number(), current_runner()
        job = QueuedJob(ticket, None, [tokens], on_done=None if runner is None else runner.wake)
        data = message(id)

        def send() -> None:
            if task >= 0 and task not in connection.tasks:
                connection.tasks.add(task)
                connection.submit(id, job, definition, data)
            else:
                connection.submit(id, job, data)

        if runner is not None:
            send()
            runner.wait(job, _give_up)
        else:
            connection.call_in_loop(send)
            if not self._wait(job, ticket):
                _give_up(job)
        if isinstance(job.error, Cancelled | Expired):
            connection.call_in_loop(connection.send, messages.encode(Kind.CANCEL, id))
        if job.error is not None:
            raise job.error
        return job.outputs

    @staticmethod
    def _wait(job: QueuedJob, ticket: Ticket) -> bool:
        """Wait in a thread, until the deadline or the disconnection of the client."""
        while not ticket.cancelled.is_set():
            left = sys.maxsize if ticket.deadline is None else ticket.deadline - time.monotonic()
            if left <= 0:
                return False
            if job.wait(min(left, 0.2)):
                return True
        return False

    def admit(self, characters: int) -> AbstractContextManager[None]:
        """A context to tokenize texts in: this process has nothing else to do for long ones."""
        if characters > LONG_CHARACTERS:
            ticket = current_ticket.get()
            self.load().check_long("" if ticket is None else ticket.owner)
        return nullcontext()

    def check(self) -> None:
        """Raise `Cancelled` or `Expired` if nobody waits for the result of this request any more."""
        ticket = current_ticket.get()
        if ticket is not None:
            ticket.check()

    # --- the server ---

    def load(self) -> EngineLoad:
        """The queue, as the engine last said; of several, that of the one with the least work."""
        connected = [connection.loads for connection in self._client.connections if connection.transport is not None]
        loads = [known[self._name] for known in connected if self._name in known]
        return min(loads, key=lambda load: load.waiting_tokens) if loads else EngineLoad()

    def describe(self) -> dict[str, Any]:
        """The model, as the engine described it."""
        for connection in self._client.connections:
            if self._name in connection.models:
                model: dict[str, Any] = connection.models[self._name]
                return model
        raise closed()

    def is_full(self, owner: str = "") -> bool:
        """Whether any new job of an owner would be refused, by what the engines last said."""
        return self.load().is_full(owner)

    @property
    def ready(self) -> bool:
        """Whether an engine is connected and accepts requests."""
        return any(c.transport is not None and self._name in c.models for c in self._client.connections)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Nothing to do: the engines belong to another process."""
