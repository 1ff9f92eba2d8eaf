"""Chunks, batches and prefetching: the same results in order, whatever their sizes and the number of threads."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertie import Embedder, Tagger
from bertie.errors import InputError
from bertie.pipeline import pipeline
from bertie.pipeline.pipeline import Pipeline, prefetch
from bertie.text.batch import Batch
from tests.tasks.test_embed import folder, many
from tests.tasks.tiny import LABELS, document, save, sentences

__all__ = ["folder"]


def overlap(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Small chunks and batches, and so many tokenizer threads, as on a GPU."""
    monkeypatch.setattr(pipeline, "CHUNK_ITEMS", 7)
    monkeypatch.setattr(pipeline, "CPU_BATCH_TOKENS", 40)
    monkeypatch.setattr(pipeline, "TOKENIZER_THREADS", threads)
    monkeypatch.setattr(Pipeline, "_overlaps", lambda self, texts: True)
    monkeypatch.setattr("bertie.text.tokenizer.Tokenizer.is_compiled", lambda self, texts: False)


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
@pytest.mark.parametrize("prompt", [None, "query"])
def test_chunks_do_not_change_results(
    folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int, prompt: str | None
) -> None:
    texts, embedder = many(60), Embedder.load(folder)
    expected = list(embedder.embed_each(texts, prompt_name=prompt))
    assert {result.windows for result in expected} > {1, 2}
    overlap(monkeypatch, threads)
    results = list(embedder.embed_each(texts, prompt_name=prompt))
    for result, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result.vector, other.vector)
        assert (result.tokens_total, result.tokens_read, result.windows) == (
            other.tokens_total,
            other.tokens_read,
            other.windows,
        )
    np.testing.assert_array_equal(embedder.embed(texts, prompt_name=prompt), [result.vector for result in results])


@pytest.mark.parametrize("threads", [0, 2])
def test_an_invalid_text_fails_after_the_results_before_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    embedder = Embedder.load(folder)
    overlap(monkeypatch, threads)
    texts = [*many(18), "a\ud800", *many(30)]
    results, before = [], threading.active_count()
    with pytest.raises(InputError, match="text 18: character 1 is the lone surrogate"):
        results.extend(embedder.embed_each(texts))
    assert len(results) >= 7
    assert threading.active_count() == before


def test_an_abandoned_iterator_leaves_no_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlap(monkeypatch, 2)
    before = threading.active_count()
    results = Embedder.load(folder).embed_each(many(60))
    next(results)
    assert threading.active_count() > before
    del results
    assert threading.active_count() == before


def test_threads_are_for_slow_tokenizers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: the number of tokenizer threads, and whether results may come late."""
    seen: list[tuple[int, bool]] = []

    def spy(call: Any, items: Any, threads: int) -> Any:
        seen.append((threads, embedder.pipeline._overlaps(texts)))
        return iter(())

    monkeypatch.setattr(pipeline, "CHUNK_ITEMS", 3)
    monkeypatch.setattr(pipeline, "prefetch", spy)
    embedder = Embedder.load(folder)
    for device, compiled in (("cpu", True), ("meta", True), ("meta", False)):
        monkeypatch.setattr(type(embedder.model), "device", torch.device(device))
        monkeypatch.setattr(type(embedder.tokenizer), "is_compiled", lambda self, texts, c=compiled: c)
        for texts in (many(10), many(2), iter(many(10))):
            list(embedder.pipeline.chunks(embedder.inputs(texts, embedder.options()), texts))
    none = [(0, False)]
    assert seen == none * 3 + [(0, True), *none * 2] + [(pipeline.TOKENIZER_THREADS, True), *none * 2]


def test_prefetch_takes_nothing_early_without_threads() -> None:
    taken = []

    def items() -> Any:
        for i in range(5):
            taken.append(i)
            yield i

    results = prefetch(lambda i: i * i, items(), 0)
    assert next(results) == 0
    assert taken == [0]
    assert list(results) == [1, 4, 9, 16]


def test_batches_keep_to_the_token_budget(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of similar length share batches of at most the budget; `deterministic` gives each its own."""
    sizes: list[tuple[int, ...]] = []
    embedder = Embedder.load(folder)
    hidden = embedder.model.hidden
    monkeypatch.setattr(embedder.model, "hidden", lambda batch, head=None: sizes.append(batch.lengths) or hidden(batch))
    monkeypatch.setattr(pipeline, "CPU_BATCH_TOKENS", 30)
    expected = embedder.embed(many(50))
    assert max(map(sum, sizes)) <= 30
    assert max(map(len, sizes)) > 1
    sizes.clear()
    alone = Embedder(embedder.checkpoint, deterministic=True)
    np.testing.assert_array_equal(alone.embed(many(50)), expected)
    assert {len(lengths) for lengths in sizes} == {1}


def test_windows_and_parameters_reach_the_executor(tmp_path: Path) -> None:
    """What an executor gets is enough to compute the outputs: token ids, lengths, and small parameters."""
    tagger = Tagger.load(save(tmp_path, "wordpiece", "ForTokenClassification", labels=LABELS))
    texts = [*sentences(3), document(12)]
    expected = tagger.tag(texts, aggregation_strategy="none")
    calls: list[Any] = []

    class Executor:
        def admit(self, characters: int) -> AbstractContextManager[None]:
            assert characters == sum(map(len, texts))
            return nullcontext()

        def check(self) -> None:
            calls.append("check")

        def compute(self, task: Any, windows: Any, parameters: Any) -> list[Any]:
            calls.append((windows, parameters))
            with torch.inference_mode():
                outputs = []
                for ids in np.split(windows.ids, np.cumsum(windows.lengths)[:-1]):
                    batch = Batch.from_ids([ids])
                    outputs += list(task.outputs(tagger.model, tagger.model.hidden(batch, task.head), batch, None))
                return outputs

    tagger.pipeline.executor = Executor()
    assert tagger.tag(texts, aggregation_strategy="none") == expected
    (windows, parameters), *checks = calls
    assert set(checks) == {"check"}
    assert len(checks) == 2 * len(texts), "before each text is decoded, and before its first tokens"
    assert parameters is None
    assert len(windows) == sum(result.windows for result in expected) > 4
    assert windows.lengths.max() <= tagger.checkpoint.max_length
