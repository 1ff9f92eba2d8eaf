"""The masked-language-modelling loss, against logits of all tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from bertie.errors import NotFoundError
from bertie.text.batch import Batch
from bertie.training.pretrain.masked_lm import MaskedLMLoss
from bertie.training.pretrain.sentence_pairs import NextSentence
from tests.training.pretrain.masked_batches import MLM, OF_TEXT, RTD, built, step


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_equals_that_of_all_logits(tied: bool) -> None:
    """Written plainly: logits everywhere, a probability for each token, and a sum over the hidden ones."""
    model = built({"mlm": replace(MLM, tied=tied)})
    batch, rows, targets, _ = step()
    loss = MaskedLMLoss().loss(model, batch, rows, targets)
    chances = model(batch, "mlm").double().softmax(-1)  # (T, V)
    plain = -sum(torch.log(chances[row, target]) for row, target in zip(rows, targets, strict=True))
    assert_close(loss.double(), plain, atol=1e-4, rtol=0)

    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for got, wanted in zip(gradients, torch.autograd.grad(plain, list(model.parameters())), strict=True):  # type: ignore[arg-type]
        assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_only_masked_rows_have_a_gradient() -> None:
    model = built({"mlm": MLM})
    batch, rows, targets, _ = step()
    hidden = model.hidden(batch).detach().requires_grad_()
    MaskedLMLoss().loss(model, batch, rows, targets, hidden).backward()
    assert hidden.grad is not None
    moved = hidden.grad.abs().sum(-1) > 0
    assert moved.nonzero()[:, 0].tolist() == rows.tolist()


def test_words_that_do_not_occur_have_no_gradient() -> None:
    model = built({"mlm": replace(MLM, tied=False), "nsp": OF_TEXT})
    batch, rows, targets, _ = step(below=30)
    loss = MaskedLMLoss().loss(model, batch, rows, targets) + NextSentence().loss(
        model, batch, torch.tensor([0, 1, 1, 0])
    )
    loss.backward()
    grad = model.encoder.embeddings.words.weight.grad
    assert grad is not None
    moved = (grad.abs().sum(-1) > 0).nonzero()[:, 0].tolist()
    assert moved == sorted(set(batch.ids.tolist()))


def test_parts_of_a_step_add_up() -> None:
    model = built({"mlm": MLM})
    batch, rows, targets, _ = step(lengths=(9, 30))
    whole = MaskedLMLoss().loss(model, batch, rows, targets)
    parts = []
    for ids, inside, start in ((batch.ids[:9], rows < 9, 0), (batch.ids[9:], rows >= 9, 9)):
        part = Batch.from_ids([ids.numpy()])
        parts.append(MaskedLMLoss().loss(model, part, rows[inside] - start, targets[inside]))
    assert_close(sum(parts), whole, atol=1e-4, rtol=0)


def test_without_masked_tokens_the_loss_is_zero() -> None:
    model = built({"mlm": MLM})
    batch, rows, targets, _ = step()
    loss = MaskedLMLoss().loss(model, batch, rows[:0], targets[:0])
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_missing_head_is_refused() -> None:
    batch, rows, targets, _ = step()
    with pytest.raises(NotFoundError, match="'mlm'"):
        MaskedLMLoss().loss(built({"rtd": RTD}), batch, rows, targets)
