"""The token budget of a batch, and the batches that warm an engine up."""

from __future__ import annotations

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
    warm_up(model)
    sizes = {(len(lengths), max(lengths)) for lengths in seen}
    assert {texts for texts, _ in sizes} == set(batch_budget.WARM_TEXTS)
    assert all(seen.count(lengths) >= batch_budget.WARM_PASSES for lengths in set(seen))
