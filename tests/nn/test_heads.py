"""A head's cross-entropy is that of its outputs, whether or not these are kept."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.config import HeadConfig, NormConfig
from bertie.nn.model import Model
from bertie.text.batch import Batch
from tests.test_config import GOOD

HEADS = {
    "tied": HeadConfig(kind="vocabulary", outputs=50, dense=8, activation="gelu", norm=NormConfig(), tied=True),
    "bare": HeadConfig(kind="vocabulary", outputs=50, tied=True, output_bias=False),
    "own": HeadConfig(kind="vocabulary", outputs=50, dense=6, activation="tanh", dropout=0.4),
}


@pytest.mark.parametrize("name", HEADS)
def test_fused_linear_cross_entropy_equals_that_of_the_logits(name: str) -> None:
    torch.manual_seed(0)
    model = Model(GOOD, {name: HEADS[name]}).train()
    batch = Batch.from_ids([[1, 2, 3], [4, 5]])
    words, rows = model.encoder.embeddings.words.weight, torch.tensor([0, 1, 4])
    targets, weights = torch.tensor([7, 49, 0]), torch.tensor([1.0, 0.5, 0.0])

    def grads(loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    hidden = model.hidden(batch)[rows]
    torch.manual_seed(1)  # for what is dropped before the outputs
    got = model.head(name).fused_linear_cross_entropy(hidden, words, targets, weights)
    ours = grads(got)
    hidden = model.hidden(batch)[rows]
    torch.manual_seed(1)
    logits = model.head(name)(hidden, batch, words)
    assert logits.shape == (3, 50)
    expected = sum(w * -torch.log_softmax(row, -1)[t] for row, t, w in zip(logits, targets, weights, strict=True))
    assert_close(got, expected)
    assert_close(got, F.cross_entropy(logits[:2], targets[:2], reduction="none") @ weights[:2])
    for one, other in zip(ours, grads(torch.as_tensor(expected)), strict=True):
        assert_close(one, other)


def test_rows_of_weight_zero_are_ignored() -> None:
    model = Model(GOOD, {"mlm": HEADS["tied"]}).eval()
    hidden = torch.randn(2, GOOD.width)
    words, targets = model.encoder.embeddings.words.weight, torch.tensor([3, 9])
    alone = model.head("mlm").fused_linear_cross_entropy(hidden[:1], words, targets[:1], torch.ones(1))
    hidden[1] = torch.nan
    assert_close(model.head("mlm").fused_linear_cross_entropy(hidden, words, targets, torch.tensor([1.0, 0.0])), alone)
