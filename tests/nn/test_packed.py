"""Frozen layers in the compiled encoder while the layers above are trained: the same outputs, gradients and weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.config import Full, NormConfig, Rotary
from bertie.nn import packed
from bertie.nn.encoder import Encoder
from bertie.ops import disable
from bertie.ops.native import encoder as native
from bertie.recipe import Recipe
from bertie.text.batch import Batch
from bertie.training.loop import Trainer
from tests.training import tiny

pytestmark = pytest.mark.skipif(native.instruction_level() is None, reason="there is no compiled encoder")
BATCH = Batch.from_ids([[2, 5, 6, 7, 3], [2, 8, 3], [2, 5, 6, 7, 3], [4], list(range(1, 20))])
MODERN: dict[str, Any] = {
    "pre_norm": True,
    "gated": True,
    "positions": (Rotary((100.0,) * 3),),
    "norm": NormConfig(bias=False),
}


def encoder(frozen: int, **changes: Any) -> Encoder:
    """Three layers, of which the lowest are frozen."""
    torch.manual_seed(0)
    cfg = replace(tiny.model().config, layer_map=(0, 1, 2), patterns=(Full(),) * 3, **changes)
    made = Encoder(cfg).train()
    for number in range(frozen):
        made.blocks[number].requires_grad_(False)
    made.embeddings.requires_grad_(False)
    made.freeze(frozen)
    return made


def gradients(subject: Encoder) -> list[Tensor]:
    out = subject(BATCH)
    weights = [weight for weight in subject.parameters() if weight.requires_grad]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad((out * weight).sum(), weights)]


@pytest.mark.parametrize("changes", [{}, MODERN], ids=["bert", "modern"])
@pytest.mark.parametrize("frozen", [1, 2])
def test_frozen_layers(frozen: int, changes: dict[str, Any]) -> None:
    subject = encoder(frozen, **changes)
    with disable("native.encoder"):
        slow = gradients(subject)
        assert not packed._cache.get(subject)
    for _ in range(2):  # computed, and read from what was kept
        for one, other in zip(gradients(subject), slow, strict=True):
            assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert len(packed._cache[subject][frozen].outputs) == 4  # one text comes twice


def test_a_frozen_layer_that_changes_is_computed_again() -> None:
    subject = encoder(2)
    before = subject(BATCH)
    with torch.no_grad():
        subject.blocks[0].ff.up.weight.mul_(1.5)
    after = subject(BATCH)
    assert not torch.equal(before, after)
    with disable("native.encoder"):
        assert_close(after, subject(BATCH), atol=1e-5, rtol=1e-5)


def test_layers_above_do_not_pack_again() -> None:
    subject = encoder(2)
    subject(BATCH)
    kept = packed._cache[subject][2]
    with torch.no_grad():
        subject.blocks[2].ff.up.weight.mul_(1.5)
    subject(BATCH)
    assert packed._cache[subject][2] is kept


def test_memory_is_limited_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "FROZEN_BYTES", 500)  # six tokens
    subject = encoder(2)
    first, second = subject(BATCH), subject(BATCH)
    assert torch.equal(first, second)
    assert len(packed._cache[subject][2].outputs) == 1
    subject.freeze(0)
    assert 2 not in packed._cache[subject]


def test_modes() -> None:
    """What is frozen stays in evaluation mode while the rest trains."""
    subject = encoder(2)
    parts = (subject.embeddings, *subject.blocks)
    assert [part.training for part in parts] == [False, False, False, True]
    subject.eval()
    subject.train()
    assert [part.training for part in parts] == [False, False, False, True]
    subject.freeze(0)
    assert all(part.training for part in parts)


def test_shared_blocks_are_not_frozen_in_part() -> None:
    cfg = replace(tiny.model().config, layer_map=(0, 0), patterns=(Full(), Full()))
    subject = Encoder(cfg)
    subject.freeze(1)
    assert subject.frozen_layers == 0
    subject.freeze(2)
    assert subject.frozen_layers == 2


@pytest.mark.parametrize("freeze", [1, "encoder"])
def test_a_training_run(freeze: Any) -> None:
    """The same weights as with the plain layers, with dropout in the layers above and in the head."""
    weights = []
    for off in ((), ("native.encoder",)):
        model = tiny.model(dropout=0.2)
        recipe = Recipe(freeze=freeze, epochs=2, lr=1e-2, batch_size=8, seed=3)
        with disable(*off):
            Trainer(model, [tiny.source(24)], recipe, progress=False).run()
        # The gradient of key biases is rounding alone: the softmax does not depend on them.
        weights.append({name: x for name, x in model.state_dict().items() if not name.endswith("qkv.bias")})
        assert model.encoder.frozen_layers == 0
    assert_close(weights[0], weights[1], atol=1e-4, rtol=1e-4)
