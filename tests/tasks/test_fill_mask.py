"""Fill-mask: the most probable tokens, and what many masks with many candidates cost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertie.nn.heads import Head
from bertie.serve.engine import Engine
from bertie.serve.lanes import TURN, QueuedJob
from bertie.serve.tickets import Cancelled, Ticket, current_ticket
from bertie.tasks import MaskedLM, fill_mask
from bertie.text.batch import Batch
from tests.tasks.tiny import save, sentences

MASKS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("fill"), "wordpiece", "ForMaskedLM")


@pytest.fixture
def filler(folder: Path) -> MaskedLM:
    return MaskedLM.load(folder)


def masks(filler: MaskedLM, count: int) -> str:
    return f"{filler.tokenizer.mask_token} " * count


@pytest.mark.parametrize("top_k", [1, 3, 10**6])
def test_candidates_are_sorted_by_probability_then_by_id(
    filler: MaskedLM, monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    """Against a plain sort, with probabilities that are equal for many tokens."""
    size = filler.tokenizer.vocab_size
    rows: list[Any] = []

    def coarse(model: Any, masked: torch.Tensor) -> torch.Tensor:
        logits = torch.from_numpy(np.random.default_rng(len(rows)).integers(0, 4, (len(masked), size))).float()
        rows.extend(logits.softmax(-1).numpy())
        return logits

    monkeypatch.setattr(filler, "_logits", coarse)
    monkeypatch.setattr(fill_mask, "MASK_ROWS", 4)
    texts = [masks(filler, n) + text for n, text in zip((1, 7, 2), sentences(3), strict=True)]
    found = [mask for result in filler.fill(texts, top_k=top_k) for mask in result.masks]
    expected = [np.lexsort((np.arange(size), -row))[:top_k] for row in rows]
    got = [[candidate.id for candidate in mask.candidates] for mask in found]
    assert sorted(got) == sorted(best.tolist() for best in expected)
    for mask in found:
        scores = [candidate.score for candidate in mask.candidates]
        assert scores == sorted(scores, reverse=True)
        for candidate in mask.candidates[:20]:
            assert candidate.token == filler.tokenizer.token(candidate.id)  # type: ignore[arg-type]
            assert candidate.text == filler.tokenizer.decode([candidate.id], skip_special=False)  # type: ignore[list-item]


def test_requests_with_different_options_share_a_batch(filler: MaskedLM) -> None:
    mask, words = filler.tokenizer.mask_token, [filler.tokenizer.token(id) for id in (20, 31, 45)]
    inputs = [(f"the {mask} of", 1, None), (f"{mask} river {mask}", 4, None), (f"a {mask}", 4, words)]
    alone = [filler.fill([text], top_k=k, candidates=words)[0] for text, k, words in inputs]
    allowed = np.array([20, 31, 45])
    options = [fill_mask._Options(k, None if words is None else allowed) for _, k, words in inputs]
    chunks = [
        filler.pipeline.encode(list(fill_mask.text_inputs([text], "fill", option)))  # type: ignore[attr-defined]
        for (text, _, _), option in zip(inputs, options, strict=True)
    ]
    ids = [chunk.windows.ids for chunk in chunks]
    with torch.inference_mode():
        batch = Batch.from_ids(ids)
        queries = [query for chunk in chunks for query in filler.parameters(chunk)]
        outputs = filler.outputs(filler.model, filler.model.hidden(batch, filler.head), batch, queries)
    for chunk, output, expected in zip(chunks, outputs, alone, strict=True):
        result = filler.decode(chunk[0], [output])
        assert [[c.id for c in m.candidates] for m in result.masks] == [
            [c.id for c in m.candidates] for m in expected.masks
        ]


def test_the_cost_of_a_request_includes_its_candidates(filler: MaskedLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty masks with a thousand candidates each are no short request."""
    jobs: list[QueuedJob] = []
    engine = Engine(filler.model, budget=512, workers=1)
    try:
        put = engine.queue.put
        monkeypatch.setattr(engine.queue, "put", lambda job, **options: (jobs.append(job), put(job, **options))[1])
        filler.pipeline.executor = engine
        filler.fill([masks(filler, 20)], top_k=5)
        filler.fill([masks(filler, 40)], top_k=1000)
    finally:
        engine.close()
    few, many = (sum(job.costs) for job in jobs)
    assert few <= TURN
    assert many > TURN
    assert many > 40 * 1000 / 100, "in proportion to the candidates"


def test_a_cancelled_request_is_not_decoded(filler: MaskedLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are its candidates made after the forward pass, nor do all its masks reach the vocabulary."""
    engine = Engine(filler.model, budget=512, workers=1, max_wait=60)
    made, rows, threads = list[int](), list[int](), set[str]()
    candidate, logits = fill_mask.TokenCandidate, Head.vocabulary_logits  # type: ignore[attr-defined]
    ticket = Ticket()

    def make(*args: Any) -> Any:
        made.append(1)
        threads.add(threading.current_thread().name)
        return candidate(*args)

    def project(self: Head, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        if cancel_in_forward:
            ticket.cancelled.set()
        return logits(self, x, words)

    monkeypatch.setattr(fill_mask, "TokenCandidate", make)
    monkeypatch.setattr(Head, "vocabulary_logits", project)
    compute = engine.compute
    reset = current_ticket.set(ticket)
    try:
        filler.pipeline.executor = engine
        cancel_in_forward = False
        filler.fill([masks(filler, 30)], top_k=20)
        assert len(made) == 30 * 20
        assert threads == {threading.current_thread().name}, "not in a thread of the engine"
        made.clear()

        def cancelled(*args: Any, **options: Any) -> Any:
            outputs = compute(*args, **options)
            ticket.cancelled.set()
            return outputs

        with monkeypatch.context() as patch:
            patch.setattr(engine, "compute", cancelled)
            with pytest.raises(Cancelled):
                filler.fill([masks(filler, 30)], top_k=20)
        assert not made

        ticket = Ticket()
        current_ticket.set(ticket)
        rows.clear()
        cancel_in_forward = True
        with pytest.raises(Cancelled):
            filler.fill([masks(filler, MASKS)], top_k=20)
        assert sum(rows) <= 2 * fill_mask.MASK_ROWS, "work stops within a slice"
        assert not made
    finally:
        current_ticket.reset(reset)
        engine.close()
