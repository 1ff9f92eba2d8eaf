"""The token budget of a batch, and the batches that warm an engine up."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.ops.cuda_graphs import ForwardGraphs, graph_size
from bertie.serve import batch_budget
from bertie.serve.batch_budget import measure_budget, warm_up
from bertie.text.batch import Batch
from bertie.text.encoding import Encodings


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
    rooms = sorted({graph_size(lengths, model.config.max_length).tokens for lengths in seen})
    assert rooms[0] == 64
    assert 2000 < rooms[-1] <= 3000
    assert all(after <= 64 + 1.5 * before for before, after in pairwise(rooms)), rooms
    assert max(map(max, seen)) <= model.config.max_length
    assert all(seen.count(lengths) >= batch_budget.WARM_PASSES for lengths in set(seen))


class _Sizes(ForwardGraphs):
    """Which batches are replayed, without a GPU."""

    def replays(self, lengths: Sequence[int]) -> bool:
        ids, recorded = np.zeros(sum(lengths), np.int64), len(self)
        batch = Batch.select(Encodings(ids, ids, np.array(lengths)))
        recording = self._get(("hidden", graph_size(lengths, 512)), Mock(), batch)
        return recording is not None and len(self) == recorded

    def _add(self, key: Any, run: Any, batch: Any) -> Any:
        self._recordings[key] = Mock(used=self._passes)
        return self._recordings[key]


@pytest.mark.parametrize("median", [9, 35, 150], ids=["queries", "sentences", "paragraphs"])
@pytest.mark.parametrize("most", [8, 40, 120])
def test_a_warm_server_replays_almost_all_batches(median: float, most: int) -> None:
    """Else its first seconds would be spent on recording, and on passes that take long to launch."""
    graphs = _Sizes(16384, batch_budget.MAX_GRAPHS, batch_budget.RECORD_AFTER, max_spare=batch_budget.MAX_SPARE)
    for lengths in batch_budget._warm_up_batches(graphs.max_tokens, 512):
        for _ in range(batch_budget.WARM_PASSES):
            graphs.replays(lengths)
    assert 30 < len(graphs) < batch_budget.MAX_GRAPHS / 2
    draw = random.Random(0)
    batches = []
    while len(batches) < 1000:
        lengths = [int(draw.lognormvariate(math.log(median), 0.6)) for _ in range(draw.randint(1, most))]
        lengths = [min(512, max(4, length)) for length in lengths]
        if sum(lengths) <= graphs.max_tokens:
            batches.append(lengths)
    assert sum(map(graphs.replays, batches)) > 950


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
