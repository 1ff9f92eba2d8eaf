"""An engine without threads, as on a GPU: `advance` launches batches and collects those that are done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import InputError
from bertie.serve import engine as engine_module
from bertie.serve.engine import Engine
from bertie.serve.forward_pass import is_lost
from bertie.serve.lanes import QueuedJob
from bertie.serve.tickets import Closed, Ticket
from bertie.tasks import Embedder
from tests.tasks.tiny import document, save, sentences


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return Embedder(Checkpoint.load(save(tmp_path_factory.mktemp("served"), "wordpiece", "ForMaskedLM")))


@pytest.fixture
def engine(embedder: Embedder) -> Iterator[Engine]:
    made = Engine(embedder.model, budget=512, max_wait=60.0, workers=0)
    yield made
    made.close(drain=False)


class Device:
    """Batches are done when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = 0  # batches
        self.launched: list[list[QueuedJob]] = []
        launch = Engine._launch

        def record(engine: Engine, model: Any, slices: Any, long: bool) -> Any:
            running = launch(engine, model, slices, long)
            number = len(self.launched)
            self.launched.append([part.job for part in slices])
            running.launched = type("Event", (), {"query": lambda _: number < self.done})()
            return running

        monkeypatch.setattr(Engine, "_launch", record)


def submit(engine: Engine, embedder: Embedder, text: str) -> QueuedJob:
    chunk = embedder.pipeline.encode(list(embedder.inputs([text], embedder.options())))
    job = engine.make_job(Ticket(), embedder, chunk.windows, embedder.parameters(chunk), on_done=lambda job: None)
    engine.put(job)
    return job


def test_jobs_that_wait_share_a_batch(engine: Engine, embedder: Embedder) -> None:
    texts = sentences(6)
    expected = embedder.embed(texts)
    assert not engine.advance(), "nothing to do"
    jobs = [submit(engine, embedder, text) for text in texts]
    while engine.advance():
        pass
    assert_array_equal(np.stack([job.outputs[0] for job in jobs]), expected)
    assert engine.stats().batches == 1
    assert engine.ready


def test_batches_in_flight(engine: Engine, embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    jobs = []
    for _ in range(4):
        jobs.append(submit(engine, embedder, "the river"))
        assert engine.advance()
    assert device.launched == [[jobs[0]], [jobs[1]]], "two, and the rest shares the next one"
    assert not any(job.unanswered == 0 for job in jobs)
    device.done = 1
    engine.advance()
    assert [job.unanswered for job in jobs] == [0, 1, 1, 1]
    assert device.launched[2:] == [[jobs[2], jobs[3]]]
    device.done = 3
    assert not engine.advance()
    assert not any(job.unanswered for job in jobs)


def test_a_batch_grows_while_a_larger_one_runs(
    engine: Engine, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    first = [submit(engine, embedder, "the river") for _ in range(3)]
    engine.advance()
    assert device.launched == [first]
    second = []
    for _ in range(2):
        second.append(submit(engine, embedder, "the river"))
        engine.advance()
        assert len(device.launched) == 1, "smaller than the first one"
    second.append(submit(engine, embedder, "the river"))
    engine.advance()
    assert device.launched == [first, second]
    device.done = 1
    last = submit(engine, embedder, "the river")
    engine.advance()
    assert device.launched == [first, second]
    device.done = 2
    engine.advance()
    assert device.launched == [first, second, [last]], "nothing runs any more"
    device.done = 3
    engine.advance()
    assert not any(job.unanswered for job in (*first, *second, last))


def test_short_and_long_jobs_alternate(engine: Engine, embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are of either kind, one batch of each is in flight."""
    device = Device(monkeypatch)
    long = [submit(engine, embedder, document(400, seed)) for seed in range(2)]
    short = []
    for _ in range(8):
        short.append(submit(engine, embedder, "the river"))
        engine.advance()
        device.done += 1
    kinds = ["long" if batch[0] in long else "short" for batch in device.launched]
    assert kinds[:8] == ["short", "long"] * 4
    device.done = 10**6
    while engine.advance():
        pass
    assert not any(job.unanswered or job.error for job in (*long, *short))


def test_errors_reach_their_requests(engine: Engine, embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = embedder.model.hidden

    def fail(batch: Any, head: Any = None) -> torch.Tensor:
        if len(batch) > 1:
            raise torch.OutOfMemoryError("out of memory")
        states = hidden(batch, head)
        return states if len(batch.ids) != bad else states * float("nan")

    texts = ["the river", "a novel", "the river and a novel"]
    bad = len(embedder.tokenizer.encode(texts[2]))
    monkeypatch.setattr(embedder.model, "hidden", fail)
    jobs = [submit(engine, embedder, text) for text in texts]
    while engine.advance():
        pass
    assert [job.error is None for job in jobs] == [True, True, False]
    assert isinstance(jobs[2].error, InputError)
    monkeypatch.setattr(embedder.model, "hidden", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    job = submit(engine, embedder, "a novel")
    while engine.advance():
        pass
    assert isinstance(job.error, KeyboardInterrupt)
    assert engine.ready


@pytest.mark.parametrize("usable", [True, False])
def test_a_device_that_cannot_be_used_any_more(
    engine: Engine, embedder: Embedder, monkeypatch: pytest.MonkeyPatch, usable: bool
) -> None:
    """Then every call of CUDA fails in this process: the requests are told, and it is replaced by another one."""

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda = torch.device("cuda")
    monkeypatch.setattr(engine_module, "is_lost", lambda _, error: is_lost(cuda, error))
    monkeypatch.setattr(embedder.model, "hidden", fail)
    monkeypatch.setattr("torch.cuda.synchronize", (lambda _: None) if usable else fail)
    jobs = [submit(engine, embedder, text) for text in ("the river", document(400, 0))]
    while engine.advance():
        pass
    assert engine.ready == usable
    assert all(job.error is not None for job in jobs)
    monkeypatch.setattr("torch.cuda.synchronize", fail)
    assert not is_lost(cuda, InputError("of a request"))
    assert not is_lost(cuda, torch.OutOfMemoryError("of a batch"))


@pytest.mark.parametrize("drain", [True, False])
def test_closing(embedder: Embedder, monkeypatch: pytest.MonkeyPatch, drain: bool) -> None:
    engine = Engine(embedder.model, budget=16, workers=0)
    jobs = [submit(engine, embedder, text) for text in sentences(5)]
    engine.close(drain=drain)
    assert all(job.error is None if drain else isinstance(job.error, Closed) for job in jobs)
    assert not engine.ready
    with pytest.raises(Closed):
        submit(engine, embedder, "too late")

    stuck = Engine(embedder.model, budget=16, workers=0)
    Device(monkeypatch)
    job = submit(stuck, embedder, "the river")
    stuck.advance()
    began = time.monotonic()
    stuck.close(timeout=0.1)
    assert time.monotonic() - began < 5
    assert isinstance(job.error, Closed), "the device has not answered"


def test_the_warm_up_runs_between_batches(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def warm_up(model: Any) -> Iterator[None]:
        for number in range(3):
            steps.append(f"pass {number}")
            yield

    monkeypatch.setattr(engine_module, "warm_up", warm_up)
    engine = Engine(embedder.model, budget=512, workers=0)
    engine.warm, engine._passes_to_warm = False, engine._warm_up()
    assert engine.advance()
    assert not engine.load().warm
    submit(engine, embedder, "the river").on_done = lambda job: steps.append("batch")
    while engine.advance():
        pass
    assert steps == ["pass 0", "batch", "pass 1", "pass 2"]
    assert engine.load().warm
    engine.close()

    device = Device(monkeypatch)
    steps.clear()
    engine = Engine(embedder.model, budget=512, workers=0)
    engine.warm, engine._passes_to_warm = False, engine._warm_up()
    submit(engine, embedder, "the river")
    assert engine.advance()
    assert engine.advance()
    assert steps == ["pass 0"], "a batch is in flight: the second pass has to wait"
    monkeypatch.setattr(engine_module, "WARM_SECONDS", 0.0)
    for _ in range(3):
        engine.advance()
    assert len(steps) == 3
    assert engine.load().warm
    device.done = 1
    assert not engine.advance()
    engine.close()

    steps.clear()
    engine = Engine(embedder.model, budget=512, workers=0)
    engine.warm, engine._passes_to_warm = False, engine._warm_up()
    engine.finish_warm_up()
    assert len(steps) == 3, "in a thread that loads the model again"
    assert engine.load().warm
    assert not engine.advance()
    engine.close()
