"""The engine process: one for each GPU, or one for all cores. It runs the jobs of all front ends in shared batches.

A front end sends token ids and gets outputs; this process neither tokenizes nor serves HTTP. Each model has its engine
with its queue. On a CPU an engine has worker threads, and the event loop only moves messages. On a GPU it has none: the
event loop launches its batches and polls the device while any of them runs (`Engine.advance`).
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from bertie.serve import messages
from bertie.serve.engine import Engine
from bertie.serve.lanes import QueuedJob
from bertie.serve.messages import Decoder, Kind, Stats
from bertie.serve.tickets import Closed, Ticket, current_ticket

if TYPE_CHECKING:
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.pipeline.pipeline import Executor
    from bertie.serve.registry import Registry, ServedModel

RELEASE_SECONDS = 30.0  # from reloading a model to closing the old one
STATUS_SECONDS = 0.1  # between two messages about the queues
CALL_THREADS = 2  # for functions of the checkpoint, such as attention weights
_NO_STATS = Stats(0.0, 0.0, 0, 0)


def references(checkpoint: Checkpoint, executor: Executor | None = None) -> dict[str, Any]:
    """The parts of a task, and of tasks inside it, that each process has of its own."""
    return {
        "executor": executor,
        "checkpoint": checkpoint,
        "model": checkpoint.model,
        "tokenizer": checkpoint.tokenizer,
        "sentence": checkpoint.sentence,
        "late_interaction": checkpoint.late_interaction,
    }


class EngineServer:
    """Runs the jobs of front ends. `registry`: the models."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._loop: asyncio.AbstractEventLoop | None = None
        self._front_ends: set[_FrontEnd] = set()
        self._done: deque[QueuedJob] = deque()
        self._scheduled = False
        self._advancing: set[Engine] = set()  # engines without threads that have something to do
        self._tasks: dict[tuple[ServedModel, bytes], Any] = {}  # by model and pickled task: shared by all front ends
        self._held: list[ServedModel] = []  # the current models, and those that front ends may still use; oldest first
        for name in registry:
            self._held.append(registry.acquire(name))
        self._calls = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="bertie-call")

    async def listen(self, path: str) -> asyncio.Server:
        """Accept front ends on a Unix socket."""
        self._loop = asyncio.get_running_loop()
        self._send_status()
        for served in self._held:
            self._activate(served)
        return await self._loop.create_unix_server(lambda: _FrontEnd(self), path)

    # --- models ---

    def reload(self) -> None:
        """Load all models again, in a thread; front ends are told, and may use the old ones for a while."""
        for name in self.registry:
            old = self.registry[name]
            self.registry.reload(name)
            self._held.append(self.registry.acquire(name))
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._announce)
            self._loop.call_soon_threadsafe(self._activate, self._held[-1])
            self._loop.call_soon_threadsafe(self._loop.call_later, RELEASE_SECONDS, self._release, old)

    def _announce(self) -> None:
        for front_end in self._front_ends:
            front_end.send(messages.encode_object(Kind.HELLO, 0, self.hello()))

    def _release(self, served: ServedModel) -> None:
        if served in self._held:
            self._held.remove(served)
            self._tasks = {known: task for known, task in self._tasks.items() if known[0] is not served}
            for front_end in self._front_ends:
                front_end.forget(served)
            served.release()

    def _send_status(self) -> None:
        assert self._loop is not None
        status = messages.encode_object(Kind.STATUS, 0, self.status())
        for front_end in self._front_ends:
            front_end.transport.write(status)
        self._loop.call_later(STATUS_SECONDS, self._send_status)

    def status(self) -> dict[str, Any]:
        """The state of each model's queue."""
        return {name: self.registry[name].engine.load() for name in self.registry}

    def hello(self) -> dict[str, Any]:
        """What a front end has to know of each model."""
        return {
            name: self.registry[name].describe() | {"version": self.registry[name].version} for name in self.registry
        }

    @property
    def pending(self) -> int:
        """Jobs that are not answered."""
        return sum(len(front_end.jobs) for front_end in self._front_ends)

    def task(self, model: str, version: str, data: bytes) -> tuple[ServedModel, Any]:
        """The task that a front end describes, and its model: if possible, of the files that the front end has read."""
        models = [served for served in self._held if served.name == model and served.version == version]
        served = models[-1] if models else self.registry[model]
        if (served, data) not in self._tasks:
            self._tasks[served, data] = messages.unpickle_with_references(data, references(served.checkpoint))
        return served, self._tasks[served, data]

    # --- jobs ---

    def submit(self, front_end: _FrontEnd, number: int, payload: memoryview) -> None:
        """Enqueue a job."""
        job = messages.decode_job(payload)
        if job.task not in front_end.tasks:  # its model was reloaded, and the front end has not noticed yet
            front_end.tasks[job.task] = self.task(*front_end.definitions[job.task])
        served, task = front_end.tasks[job.task]
        ticket = Ticket(deadline=job.deadline, owner=job.owner)
        assert isinstance(served.engine, Engine)
        queued = served.engine.make_job(ticket, task, job.windows, job.parameters, on_done=self._wake)
        queued.origin = (front_end, number)
        front_end.jobs[number] = queued
        try:
            served.engine.put(queued)
            self._activate(served)
        except Exception as error:
            front_end.jobs.pop(number, None)
            front_end.send(messages.encode_result(Kind.ERROR, number, _NO_STATS, error))

    def _activate(self, served: ServedModel) -> None:
        """Let an engine without threads run, after the messages that have arrived by now are read."""
        engine = served.engine
        if isinstance(engine, Engine) and not engine.workers and engine not in self._advancing:
            self._advancing.add(engine)
            if len(self._advancing) == 1:
                assert self._loop is not None
                self._loop.call_soon(self._advance)

    def _advance(self) -> None:
        self._advancing = {engine for engine in self._advancing if engine.advance()}
        if self._advancing:
            assert self._loop is not None
            self._loop.call_soon(self._advance)  # which looks at the sockets first

    def _wake(self, job: QueuedJob) -> None:
        """A job is done; called by any thread."""
        self._done.append(job)
        if not self._scheduled:  # one event for all jobs of a batch
            self._scheduled = True
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        """Send the outputs of all jobs that are done, together to each front end."""
        self._scheduled = False
        answers: dict[_FrontEnd, list[bytes]] = {}
        while self._done:
            job = self._done.popleft()
            front_end, number = job.origin
            if front_end.jobs.pop(number, None) is not None:
                answers.setdefault(front_end, []).append(_encode_answer(number, job))
        for front_end, parts in answers.items():
            front_end.send(b"".join(parts))

    def call(self, front_end: _FrontEnd, number: int, payload: memoryview) -> None:
        """Run a function of a checkpoint in a thread."""
        name, function, args, options = pickle.loads(payload)
        front_end.calls[number] = Ticket()
        call = partial(self.registry[name].call, function, *args, **options)
        self._calls.submit(self._run_call, front_end, number, call)

    def _run_call(self, front_end: _FrontEnd, number: int, call: Callable[[], Any]) -> None:
        started = time.perf_counter()
        reset = current_ticket.set(front_end.calls[number])
        try:
            value, kind = call(), Kind.OBJECT
        except Exception as error:
            value, kind = error, Kind.ERROR
        finally:
            current_ticket.reset(reset)
        stats = Stats(0.0, time.perf_counter() - started, 0, 0)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(front_end.finish_call, number, _encode_result(kind, number, stats, value))

    # --- front ends ---

    def connected(self, front_end: _FrontEnd) -> None:
        """Tell a new front end what is served."""
        self._front_ends.add(front_end)
        front_end.send(messages.encode_object(Kind.HELLO, 0, self.hello()))
        front_end.send(messages.encode_object(Kind.STATUS, 0, self.status()))

    def lost(self, front_end: _FrontEnd) -> None:
        """Cancel the jobs of a front end that is gone."""
        self._front_ends.discard(front_end)
        for ticket in [*(job.ticket for job in front_end.jobs.values()), *front_end.calls.values()]:
            ticket.cancelled.set()
        front_end.jobs.clear()

    async def drain(self, seconds: float) -> None:
        """Wait until all jobs are answered, then disconnect."""
        until = time.monotonic() + seconds
        while self.pending and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for front_end in list(self._front_ends):
            front_end.transport.close()
        for served in list(self._held):
            self._release(served)


class _FrontEnd(asyncio.Protocol):
    """The connection to a front end."""

    transport: asyncio.Transport

    def __init__(self, server: EngineServer) -> None:
        self._server, self._decoder = server, Decoder()
        self.definitions: dict[int, tuple[str, str, bytes]] = {}  # of tasks: model, version, pickled task
        self.tasks: dict[int, tuple[ServedModel, Any]] = {}
        self.jobs: dict[int, QueuedJob] = {}
        self.calls: dict[int, Ticket] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # of a stream
        self._server.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.lost(self)

    def data_received(self, data: bytes) -> None:
        for kind, number, payload in self._decoder.feed(data):
            if kind is Kind.JOB:
                self._server.submit(self, number, payload)
            elif kind is Kind.TASK:
                self.definitions[number] = pickle.loads(payload)
                self.tasks[number] = self._server.task(*self.definitions[number])
            elif kind is Kind.CANCEL:
                if number in self.jobs:
                    self.jobs[number].ticket.cancelled.set()
                if number in self.calls:
                    self.calls[number].cancelled.set()
            elif kind is Kind.CALL:
                self._server.call(self, number, payload)

    def forget(self, served: ServedModel) -> None:
        """Drop the tasks of a model that was replaced; one that is asked for again is made of the new one."""
        self.tasks = {number: known for number, known in self.tasks.items() if known[0] is not served}

    def send(self, data: bytes) -> None:
        """Send messages."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def finish_call(self, number: int, data: bytes) -> None:
        """Send the result of a call."""
        self.calls.pop(number, None)
        self.send(data)


def _encode_answer(number: int, job: QueuedJob) -> bytes:
    ticket = job.ticket
    stats = Stats(ticket.queue_s, ticket.device_s, ticket.tokens, ticket.batch_tokens)
    if job.error is not None:
        return _encode_result(Kind.ERROR, number, stats, job.error)
    return messages.encode_outputs(number, stats, job.outputs)


def _encode_result(kind: Kind, number: int, stats: Stats, value: Any) -> bytes:
    try:
        return messages.encode_result(kind, number, stats, value)
    except Exception:  # an error of a library that cannot be pickled
        return messages.encode_result(Kind.ERROR, number, stats, RuntimeError(f"{type(value).__name__} in the engine"))


def closed() -> Closed:
    """The error of a request whose engine is gone."""
    return Closed("the engine has stopped; it is being restarted")
