"""The engine: shared batches give what each request gets alone; whatever breaks, all are answered."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from transformers import AutoConfig

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.model_spec import model_spec
from bertie.config import HeadConfig, HeadInfo
from bertie.errors import ConfigError, InputError
from bertie.nn.model import Model
from bertie.serve import batch_budget
from bertie.serve.engine import Engine
from bertie.serve.engine_stats import BatchStats
from bertie.serve.loop_runner import LoopRunner
from bertie.serve.tickets import Cancelled, Closed, Expired, Refused, Ticket, current_ticket
from bertie.tasks import Classifier, Embedder, MaskedLM, Reader, Reranker, Tagger
from bertie.text.batch import Batch
from bertie.text.encoding import Encodings
from tests.parity.tiny import TINY
from tests.serve.conftest import until
from tests.tasks.tiny import LABELS, document, save, sentences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("served"), "wordpiece", "ForMaskedLM")


@pytest.fixture
def checkpoint(folder: Path) -> Checkpoint:
    """Fresh for each test: some spoil it."""
    found = Checkpoint.load(folder)
    found.add_head("mood", HeadInfo("classify", {0: "bad", 1: "good", 2: "so"}, "single_label_classification"))
    found.add_head("names", HeadInfo("tag", dict(enumerate(LABELS))))
    found.add_head("spans", HeadInfo("answer"))
    found.add_head("rank", HeadInfo("classify", {0: "LABEL_0"}, task="rerank"))
    return found


@contextmanager
def running(model: Model, **options: Any) -> Iterator[Engine]:
    """With one worker unless asked otherwise, so that a gate holds all."""
    made = Engine(model, **{"budget": 512, "max_wait": 60.0, "workers": 1, **options})
    try:
        yield made
    finally:
        made.close(drain=False, timeout=10)


class Gate:
    """Holds the first pass until it is opened, so that all others wait and share the next batches."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        hidden = model.hidden

        def held(batch: Batch, head: str | None = None) -> torch.Tensor:
            self.entered.set()
            assert self.opened.wait(20)
            return hidden(batch, head)

        monkeypatch.setattr(model, "hidden", held)


def together(engine: Engine, gate: Gate, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each call gives, or its error, when all but the first wait for the model at the same time."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        first = pool.submit(outcome, calls[0])
        assert gate.entered.wait(20)
        rest = [pool.submit(outcome, call) for call in calls[1:]]
        until = time.monotonic() + 20
        while len(engine.queue) < len(rest) and time.monotonic() < until:
            time.sleep(0.002)
        gate.opened.set()
        return [one.result(60) for one in (first, *rest)]


def texts(count: int) -> list[str]:
    """Short ones and long ones."""
    return [document(12, i) if i % 5 == 4 else one for i, one in enumerate(sentences(count, seed=1))]


def test_shared_batches_give_the_results_of_each_task_alone(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = texts(10)
    embedder, mood, names = Embedder(checkpoint), Classifier(checkpoint, head="mood"), Tagger(checkpoint, head="names")
    spans, rank, filler = Reader(checkpoint, head="spans"), Reranker(checkpoint, head="rank"), MaskedLM(checkpoint)
    calls: list[Callable[[], Any]] = []
    for text in several:
        calls += [
            lambda text=text: list(embedder.embed_each([text])),
            lambda text=text: mood.classify([text]),
            lambda text=text: names.tag([text], aggregation_strategy="none"),
            lambda text=text: spans.answer([("Who wrote?", text)], top_k=3),
            lambda text=text: rank.rerank("the river", [text, several[0]]),
            lambda text=text: filler.fill([f"{text} the [MASK] of", "a [MASK]"], top_k=4),
        ]
    alone = [call() for call in calls]
    ran: list[BatchStats] = []
    with running(checkpoint.model, on_batch=ran.append) as engine:
        for task in (embedder, mood, names, spans, rank, filler):
            task.pipeline.executor = engine
        found = together(engine, Gate(checkpoint.model, monkeypatch), calls)
        stats = engine.stats()
    for one, expected in zip(found, alone, strict=True):
        assert_same(one, expected)
    assert stats.batches < len(calls) / 2
    assert stats.requests == len(calls)
    assert max(len(one.tasks) for one in ran) == 6, "one pass for all tasks"
    assert sum(one.tokens for one in ran) == stats.tokens == sum(stats.task_tokens.values())
    assert sum(stats.task_s.values()) == pytest.approx(stats.device_s)
    assert stats.padding_avoided == sum(one.padding_avoided for one in ran) > 0
    assert (stats.waiting_tokens, stats.waiting_requests, stats.failed) == (0, 0, 0)


def assert_same(found: Any, expected: Any) -> None:
    """Equal but for the rounding of numbers."""
    assert type(found) is type(expected), found
    if isinstance(expected, float | np.ndarray):
        assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, dict):
        assert_same(list(found.items()), list(expected.items()))
    elif hasattr(expected, "__slots__"):
        for name in expected.__slots__:
            assert_same(getattr(found, name), getattr(expected, name))
    else:
        assert found == expected


def test_an_error_of_one_task_reaches_its_request_only(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fussy(Classifier):
        def parameters(self, chunk: Any) -> Any:
            return ["poison" in text.input.texts[0] for text in chunk for _ in text.windows]

        def outputs(self, model: Any, hidden: Any, batch: Any, parameters: Any) -> Any:
            if any(parameters):
                raise ValueError("poisoned")
            return super().outputs(model, hidden, batch, parameters)

    several = texts(12)
    several[7] = "the poison of Jane"
    several[9] = "poison " + document(12)
    fussy, embedder = Fussy(checkpoint, head="mood"), Embedder(checkpoint)
    plain = Classifier(checkpoint, head="mood").classify(several)
    vectors = embedder.embed(several)
    with running(checkpoint.model) as engine:
        fussy.pipeline.executor = embedder.pipeline.executor = engine
        calls = [lambda text=text: fussy.classify([text])[0] for text in several]
        calls += [lambda text=text: embedder.embed([text])[0] for text in several]
        found = together(engine, Gate(checkpoint.model, monkeypatch), calls)
        for i in range(12):
            if i in (7, 9):
                assert isinstance(found[i], ValueError)
                assert str(found[i]) == "poisoned"
            else:
                assert_same(found[i], plain[i])
            assert_allclose(found[12 + i], vectors[i], atol=1e-5)
        assert engine.stats().failed > 0
        assert engine.ready


def test_out_of_memory_is_retried_in_halves(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, sizes = checkpoint.model.hidden, list[int]()

    def small(batch: Batch, head: str | None = None) -> torch.Tensor:
        sizes.append(len(batch.ids))
        if len(batch.ids) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden(batch, head)

    embedder = Embedder(checkpoint)
    several = [*sentences(10), document(12), *sentences(3, seed=4)]
    several = [text for text in several if len(embedder.tokenizer.encode(text)) <= 40 or len(text) > 400]
    at = next(i for i, text in enumerate(several) if len(text) > 400)  # its windows are larger than there is room for
    expected = embedder.embed(several)
    monkeypatch.setattr(checkpoint.model, "hidden", small)
    with running(checkpoint.model) as engine:
        embedder.pipeline.executor = engine
        found = together(
            engine,
            Gate(checkpoint.model, monkeypatch),
            [lambda text=text: embedder.embed([text])[0] for text in several],
        )
        assert max(sizes) > 80
        for i, one in enumerate(found):
            if i == at:
                assert isinstance(one, torch.OutOfMemoryError)
            else:
                assert_allclose(one, expected[i], atol=1e-5)


def test_non_finite_outputs_fail_only_their_request(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder, names = Embedder(checkpoint), Tagger(checkpoint, head="names")
    several = [*sentences(6), "mountain history"]
    bad = set(embedder.tokenizer.encode("mountain history", special=False).ids.tolist())
    clean = [i for i, text in enumerate(several) if not bad & set(embedder.tokenizer.encode(text).ids.tolist())]
    assert len(clean) >= 2
    vectors, tags = embedder.embed(several), names.tag(several, aggregation_strategy="none")
    for value in (float("nan"), float("inf")):
        with torch.no_grad():
            checkpoint.model.encoder.embeddings.words.weight[sorted(bad)] = value
        with running(checkpoint.model) as engine, monkeypatch.context() as patch:
            embedder.pipeline.executor = names.pipeline.executor = engine
            calls = [lambda text=text: embedder.embed([text])[0] for text in several]
            calls += [lambda text=text: names.tag([text], aggregation_strategy="none")[0] for text in several]
            found = together(engine, Gate(checkpoint.model, patch), calls)
        for i in range(len(several)):
            if i in clean:
                assert_allclose(found[i], vectors[i], atol=1e-5)
                assert_same(found[len(several) + i], tags[i])
            else:
                assert isinstance(found[i], InputError)
                assert "text 0: the model's outputs are not finite" in str(found[i])


def test_ids_outside_the_vocabulary(checkpoint: Checkpoint) -> None:
    embedder = Embedder(checkpoint)
    good, wrong = (embedder.tokenizer.encode_flat([text]) for text in ("a river", "a novel"))
    wrong.ids[1] = 10**6
    with running(checkpoint.model) as engine:
        with pytest.raises(InputError):
            engine.compute(embedder, wrong)
        assert len(engine.compute(embedder, good)) == 1


def test_workers_survive_any_error(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = Embedder(checkpoint)
    expected = embedder.embed(["the river"])
    with running(checkpoint.model) as engine:
        embedder.pipeline.executor = engine
        for error in (KeyboardInterrupt, SystemExit, RuntimeError, MemoryError):
            with monkeypatch.context() as patch:
                patch.setattr(checkpoint.model, "hidden", raising(error))
                with pytest.raises(error):
                    embedder.embed(["the river", "a novel"])
        with monkeypatch.context() as patch:
            patch.setattr(engine, "on_batch", raising(ZeroDivisionError))
            assert_allclose(embedder.embed(["the river"]), expected, atol=1e-5)
        assert engine.ready
        assert_allclose(embedder.embed(["the river"]), expected, atol=1e-5)


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_tickets(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = Embedder(checkpoint)
    with running(checkpoint.model) as engine:
        embedder.pipeline.executor = engine
        mine = Ticket("mine")
        token = current_ticket.set(mine)
        found = list(embedder.embed_each([document(12), "the river"]))
        current_ticket.reset(token)
        tokens = sum(len(embedder.tokenizer.encode(text)) for text in ("the river",))
        assert mine.tokens > 48 + tokens, "several windows of the first, with special tokens each"
        assert mine.batch_tokens <= mine.tokens
        assert mine.device_s > 0
        assert mine.queue_s >= 0
        assert found[0].windows > 1

        gate = Gate(checkpoint.model, monkeypatch)
        late, gone = Ticket(deadline=time.monotonic() + 0.2), Ticket()

        def held(ticket: Ticket) -> BaseException | None:
            current_ticket.set(ticket)
            try:
                embedder.embed(["a novel"])
            except Exception as error:
                return error
            return None

        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(held, late)
            assert gate.entered.wait(20)
            second = pool.submit(held, gone)
            assert isinstance(first.result(20), Expired), "though the model is still at work"
            gone.cancelled.set()
            gate.opened.set()
            assert isinstance(second.result(20), Cancelled)
        assert gone.tokens == 0, "it cost nothing"


def test_a_full_queue_refuses_requests(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = Embedder(checkpoint)
    expected = embedder.embed(sentences(40))
    with running(checkpoint.model, max_wait=1.0) as engine:
        engine.queue.expect(100.0, least=0)
        embedder.pipeline.executor = engine
        gate = Gate(checkpoint.model, monkeypatch)
        with ThreadPoolExecutor(41) as pool:
            pool.submit(embedder.embed, ["the river"])
            assert gate.entered.wait(20)
            rest = [pool.submit(embedder.embed, [text]) for text in sentences(40)]
            while not engine.stats().refused:
                time.sleep(0.002)
            gate.opened.set()
            errors = [one.exception(30) for one in rest]
        refused = [error for error in errors if error is not None]
        assert refused
        assert len(refused) < 40
        assert all(isinstance(error, Refused) and error.retry_after > 0 for error in refused)
        for one, error, vector in zip(rest, errors, expected, strict=True):
            if error is None:
                assert_allclose(one.result()[0], vector, atol=1e-5)
        assert engine.stats().refused == len(refused)


def test_short_requests_are_answered_while_windows_of_long_ones_run(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with a single worker, and however many long ones there are."""
    embedder = Embedder(checkpoint)
    short, long = sentences(8), [document(400, seed) for seed in range(3)]
    expected = embedder.embed(short)
    hidden, held, release = checkpoint.model.hidden, threading.Event(), threading.Event()

    def slow(batch: Batch, head: str | None = None) -> torch.Tensor:
        if len(batch.ids) > 200:  # of a long request
            held.set()
            assert release.wait(20)
        return hidden(batch, head)

    monkeypatch.setattr(checkpoint.model, "hidden", slow)
    with running(checkpoint.model) as engine, ThreadPoolExecutor(4) as pool:
        embedder.pipeline.executor = engine
        try:
            waiting = [pool.submit(embedder.embed, [text]) for text in long]
            assert held.wait(20)
            for text, vector in zip(short, expected, strict=True):
                assert_allclose(pool.submit(embedder.embed, [text]).result(10)[0], vector, atol=1e-5)
            assert not any(one.done() for one in waiting)
        finally:
            release.set()
        assert all(len(one.result(60)) == 1 for one in waiting), "and the long ones finish"


def test_long_texts_are_refused_before_they_are_tokenized(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = Embedder(checkpoint)
    long = document(400)
    with running(checkpoint.model, max_wait=1.0) as engine, ThreadPoolExecutor(8) as pool:
        engine.queue.expect(100.0, least=0)
        embedder.pipeline.executor = engine
        gate = Gate(checkpoint.model, monkeypatch)
        first = pool.submit(embedder.embed, [long])
        assert gate.entered.wait(20)
        encoded = list[int]()
        encode = embedder.tokenizer.encode_flat
        monkeypatch.setattr(
            embedder.tokenizer, "encode_flat", lambda items, **options: encoded.append(1) or encode(items, **options)
        )
        for _ in range(5):
            with pytest.raises(Refused):
                embedder.embed([long])
        assert not encoded
        gate.opened.set()
        assert len(first.result(60)) == 1


@pytest.mark.parametrize("drain", [True, False])
def test_closing(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, drain: bool) -> None:
    embedder = Embedder(checkpoint)
    engine = Engine(checkpoint.model, budget=16, workers=1)
    embedder.pipeline.executor = engine
    gate = Gate(checkpoint.model, monkeypatch)
    with ThreadPoolExecutor(6) as pool:
        rest = [pool.submit(embedder.embed, [text]) for text in sentences(5)]
        assert gate.entered.wait(20)
        while len(engine.queue) < 5 - engine.workers:
            time.sleep(0.002)
        closing = pool.submit(engine.close, drain=drain)
        while not engine.queue.closed:
            time.sleep(0.002)
        gate.opened.set()
        closing.result(30)
        errors = [one.exception(30) for one in rest]
    if drain:
        assert errors == [None] * 5
    else:
        assert sum(isinstance(error, Closed) for error in errors) == 5 - engine.workers
    assert not engine.ready
    with pytest.raises(Closed):
        embedder.embed(["too late"])


def test_closing_does_not_wait_for_a_hanging_device(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = Embedder(checkpoint)
    engine = Engine(checkpoint.model, budget=512, workers=1)
    embedder.pipeline.executor = engine
    gate = Gate(checkpoint.model, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        hung = pool.submit(embedder.embed, ["the river"])
        assert gate.entered.wait(20)
        engine.close(timeout=0.05)
        assert isinstance(hung.exception(20), Closed)
        gate.opened.set()


def test_replicas(checkpoint: Checkpoint, folder: Path) -> None:
    replica = Checkpoint.load(folder)
    for name in ("mood", "names", "spans", "rank"):
        replica.add_head(name, checkpoint.heads[name])
    used: set[int] = set()
    for model in (checkpoint.model, replica.model):
        model.encoder.register_forward_hook(lambda module, *_: used.add(id(module)))
    names = Tagger(checkpoint, head="names")
    several = sentences(60)
    expected = names.tag(several, aggregation_strategy="none")
    used.clear()
    with running(checkpoint.model, replicas=[replica.model], budget=32) as engine:
        names.pipeline.executor = engine
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda text: names.tag([text], aggregation_strategy="none")[0], several))
    assert used == {id(checkpoint.model.encoder), id(replica.model.encoder)}
    assert_same(found, expected)


def test_several_workers(checkpoint: Checkpoint) -> None:
    """Windows of one request may be read by different ones at the same time."""
    embedder, names = Embedder(checkpoint), Tagger(checkpoint, head="names")
    several = [document(40, seed) for seed in range(6)] + sentences(30)
    vectors, tags = embedder.embed(several), names.tag(several, aggregation_strategy="none")
    with running(checkpoint.model, workers=4, budget=64) as engine:
        embedder.pipeline.executor = names.pipeline.executor = engine
        with ThreadPoolExecutor(12) as pool:
            found = list(
                pool.map(
                    lambda text: (embedder.embed([text])[0], names.tag([text], aggregation_strategy="none")[0]), several
                )
            )
        assert engine.stats().windows > 3 * len(several)
    assert_allclose([vector for vector, _ in found], vectors, atol=1e-5)
    assert_same([tagged for _, tagged in found], tags)


class _Bare:
    """As much of a task as the engine needs."""

    def __init__(self, model: Model, head: str | None) -> None:
        self.model, self.head = model, head

    def output_costs(self, windows: Encodings, parameters: Any) -> None:
        return None

    def outputs(self, model: Model, hidden: torch.Tensor, batch: Batch, parameters: Any) -> Any:
        if self.head is None:
            return [one.numpy() for one in hidden.split(list(batch.lengths))]
        rows = model.head(self.head)(hidden, batch, model.encoder.embeddings.words.weight)
        return list(rows.numpy())


def test_heads_with_their_own_global_tokens_get_their_own_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with global tokens, where each head wants others to be global."""
    tiny = TINY["longformer"]
    raw = json.loads(AutoConfig.for_model(tiny.model_type, **tiny.config).to_json_string())
    encoder = model_spec(raw, None).encoder
    torch.manual_seed(0)
    first = HeadConfig(kind="text", outputs=3, pooling="first", globals="first")
    model = Model(encoder, {"first": first, "plain": HeadConfig(kind="text", outputs=3, pooling="mean")}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    tasks: list[Any] = [_Bare(model, "first"), _Bare(model, "plain"), _Bare(model, None)]
    draw = np.random.default_rng(0)
    read = [Batch.from_ids([draw.integers(3, 60, size=n)]) for n in (5, 20, 31, 12)]

    def flat(batch: Batch) -> Encodings:
        ids = batch.ids.numpy()
        return Encodings(ids, 0 * ids, np.array([len(ids)]))

    with torch.inference_mode():
        expected = [[task.outputs(model, model.hidden(one, task.head), one, None)[0] for one in read] for task in tasks]
        shared = tasks[0].outputs(model, model.hidden(read[1]), read[1], None)[0]
    with running(model) as engine:
        calls = [lambda task=task, one=one: engine.compute(task, flat(one))[0] for task in tasks for one in read]
        found = together(engine, Gate(model, monkeypatch), calls)
    for one, wanted in zip(found, [row for rows in expected for row in rows], strict=True):
        assert_allclose(one, wanted, atol=1e-5)
    assert not np.allclose(expected[0][1], shared), "a pass for all would have been wrong"


def test_the_budget_is_the_smallest_near_the_best_rate(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    took = {512: 0.012, 1024: 0.016, 2048: 0.030, 4096: 0.058, 8192: 0.2}
    passes: list[int] = []

    def fake(model: Model, tokens: int) -> float:
        passes.append(batch_budget.SAMPLE * tokens)
        return took.get(passes[-1], 0.0) / batch_budget.SAMPLE  # 0: the warm-up

    monkeypatch.setattr(batch_budget, "time_pass", fake)
    with running(checkpoint.model, budget=None) as engine:
        assert engine.measurement is not None
        # 2048 tokens max_length 68,267 a second, 4096 max_length 70,621: within 5 %, so that the smaller one is taken.
        assert engine.budget == engine.measurement.budget == 2048
        assert max(passes) == 8192, "and when it gets worse, no more are tried"
        for lane in (engine.queue.short, engine.queue.long):
            assert lane.rate == pytest.approx(2048 / 0.030 * engine.workers)
            assert lane.room == pytest.approx(60 * lane.rate)
            assert lane.least == 2 * 2048 * engine.workers
    with pytest.raises(ConfigError, match="budget=-1"):
        Engine(checkpoint.model, budget=-1)


def test_measuring_the_budget(checkpoint: Checkpoint) -> None:
    with running(checkpoint.model, budget=None) as engine:
        assert engine.measurement is not None
        assert engine.budget in engine.measurement.rates
        assert engine.queue.short.rate > 0
        assert engine.queue.short.room >= engine.queue.short.least > 0


def test_the_rate_is_measured_with_full_batches(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = Embedder(checkpoint)
    with running(checkpoint.model, budget=64) as engine:
        embedder.pipeline.executor = engine
        for text in sentences(5):
            embedder.embed([text])
        assert engine.queue.short.rate == 0.0, "small ones say nothing"
        calls = [lambda text=text: embedder.embed([text]) for text in sentences(40)]
        together(engine, Gate(checkpoint.model, monkeypatch), calls)
        assert engine.queue.short.rate > 0


def test_no_job_is_kept_alive(checkpoint: Checkpoint) -> None:
    """No request's windows or outputs outlive it."""
    from bertie.serve.lanes import QueuedJob

    def jobs() -> list[QueuedJob]:
        gc.collect()
        return [found for found in gc.get_objects() if isinstance(found, QueuedJob)]

    earlier = {id(job) for job in jobs()}  # of other tests, whose servers may still run
    embedder = Embedder(checkpoint)
    with running(checkpoint.model) as engine:
        embedder.pipeline.executor = engine
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda text: embedder.embed([text]), sentences(40)))
        until(lambda: not {id(job) for job in jobs()} - earlier, 30)


def on_event_loop(engine: Engine, calls: Sequence[Callable[[], Any]]) -> tuple[list[Any], list[str]]:
    """Start all calls at once on an event loop; their results, and the threads of the forward passes."""
    threads: list[str] = []
    hidden = engine.model.hidden

    def recorded(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return hidden(*args)

    async def main() -> list[Any]:
        runner, results = LoopRunner(asyncio.get_running_loop()), dict[int, Any]()
        for number, call in enumerate(calls):
            runner.run(partial(attempt, call), partial(results.__setitem__, number))
        while len(results) < len(calls):
            await asyncio.sleep(0.001)
        return [results[number] for number in range(len(calls))]

    until(lambda: engine.queue.is_empty)  # a worker ends its batch after the request has been answered
    with patch.object(engine.model, "hidden", recorded):
        return asyncio.run(main()), threads


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def test_a_request_that_is_alone_runs_on_the_event_loop(checkpoint: Checkpoint) -> None:
    embedder = Embedder(checkpoint)
    texts = ["a cat", "the dog ran", "a"]
    expected = [embedder.embed([text]) for text in texts]
    with running(checkpoint.model) as engine:
        embedder.pipeline.executor = engine
        calls = [partial(embedder.embed, [text]) for text in texts]
        (result,), threads = on_event_loop(engine, calls[:1])
        assert threads == ["bertie-cpu-short-0"], "how long it takes is not known yet"
        assert_array_equal(result, expected[0])
        engine.queue.expect(1e6, least=512)
        (result,), threads = on_event_loop(engine, calls[:1])
        assert threads == ["MainThread"]
        assert_array_equal(result, expected[0])
        results, threads = on_event_loop(engine, calls)
        assert threads[0] == "bertie-cpu-short-0", "several that arrive together share a batch"
        assert len(threads) <= 2, "in which at least two of them are"
        assert_array_equal(results, expected)
        engine.queue.expect(100.0, least=512)
        assert on_event_loop(engine, calls[:1])[1] == ["bertie-cpu-short-0"], "it would take longer than 0.01 s"
        until(lambda: engine.queue.is_empty)
        assert engine.stats().requests == 6


def test_an_error_of_a_request_that_is_alone_is_its_own(checkpoint: Checkpoint) -> None:
    embedder = Embedder(checkpoint)
    with running(checkpoint.model) as engine:
        embedder.pipeline.executor = engine
        engine.queue.expect(1e6, least=512)
        with patch.object(Embedder, "outputs", side_effect=ValueError("spoiled")):
            (error,), threads = on_event_loop(engine, [partial(embedder.embed, ["a cat"])])
        assert isinstance(error, ValueError)
        (result,), _ = on_event_loop(engine, [partial(embedder.embed, ["a cat"])])
        assert result.shape == (1, embedder.dimension)
        assert set(threads) == {"MainThread"}
