"""The token budget of a batch, and the batches that warm an engine up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.serve import batch_budget
from bertie.serve.batch_budget import measure_budget, warm_up
from bertie.text.batch import Batch


def test_the_budget_is_one_that_was_measured(models: dict[str, str]) -> None:
    measurement = measure_budget(Checkpoint.load(models["embed"], device="cpu").model, workers=1)
    assert measurement.budget in measurement.rates
    assert measurement.rate == measurement.rates[measurement.budget] > 0


def test_warm_up_repeats_each_size_until_it_is_recorded(models: dict[str, str]) -> None:
    model = Checkpoint.load(models["embed"], device="cpu").model
    seen: list[tuple[int, ...]] = []
    hidden = model.hidden

    def count(batch: Batch, head: str | None = None) -> object:
        seen.append(batch.lengths)
        return hidden(batch, head)

    model.hidden = count
    model.graphs.max_tokens = 3000
    list(warm_up(model))
    texts = {len(lengths) for lengths in seen if sum(lengths) <= 1024}
    assert texts >= set(batch_budget.WARM_TEXTS)
    tokens = sorted({sum(lengths) for lengths in seen if len(lengths) > 64 and min(lengths) == max(lengths)})
    assert tokens[-1] < 3000
    assert all(after <= 1.5 * before for before, after in zip([1024, *tokens], tokens, strict=False)), tokens
    assert all(seen.count(lengths) >= batch_budget.WARM_PASSES for lengths in set(seen))


def test_the_budget_of_a_gpu_does_not_depend_on_the_time_to_compile_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    clock = [0.0]

    def time_pass(model: object, tokens: int) -> float:
        seconds = 1e-3 + tokens * 1e-7 + (0.0 if tokens in seen else 5.0)
        seen.add(tokens)
        clock[0] += seconds
        return seconds

    monkeypatch.setattr(batch_budget, "time_pass", time_pass)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    measurement = measure_budget(gpu, workers=1)
    assert sorted(measurement.rates) == [4096, 8192, 16_384, 32_768, 65_536]
    assert measurement.budget == 65_536
