"""Replaced-token detection: samples, labels, gradients and sharing of embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from bertie.errors import ConfigError, NotFoundError
from bertie.nn.model import Model
from bertie.training.pretrain.replaced_tokens import ReplacedTokenDetection, sample
from tests.training.pretrain.masked_batches import MLM, RTD, VOCAB, built, config, step


def two(sharing: Any = "tied") -> ReplacedTokenDetection:
    generator = built({"mlm": MLM}, width=8, depth=1)
    return ReplacedTokenDetection(generator, built({"rtd": RTD}, seed=1), sharing)


def test_samples_follow_the_softmax() -> None:
    logits = torch.tensor([1.0, -2.0, 0.5, 3.0, float("-inf")])
    drawn = sample(logits.expand(100_000, -1), torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=5) / len(drawn)
    wanted = logits.softmax(-1)
    assert share[4] == 0
    assert ((share - wanted).abs() <= 3 * (wanted * (1 - wanted) / len(drawn)).sqrt()).all()


def test_the_input_of_the_discriminator() -> None:
    both = two()
    batch, rows, targets, special = step()
    losses = both(batch, rows, targets, special, torch.Generator().manual_seed(1))
    again = both(batch, rows, targets, special, torch.Generator().manual_seed(1))
    assert torch.equal(losses.ids, again.ids)
    text = batch.ids.index_copy(0, rows, targets)
    assert torch.equal(losses.replaced, losses.ids != text)
    assert losses.replaced.any()
    others = torch.ones(len(text), dtype=torch.bool).index_fill(0, rows, False)
    assert torch.equal(losses.ids[others], text[others])
    assert torch.equal(losses.logits, both.discriminator(replace(batch, ids=losses.ids), "rtd")[:, 0])

    # A generator that is always right leaves nothing replaced.
    head = both.generator.head("mlm")
    assert head.bias is not None
    with torch.no_grad():
        head.bias.copy_(torch.full((VOCAB,), -1e4).index_fill(0, torch.tensor([7]), 1e4))
    certain = both(batch, rows, torch.full_like(targets, 7), special)
    assert not certain.replaced.any()


def test_special_tokens_have_no_gradient() -> None:
    both = two("none")
    batch, rows, targets, special = step()
    kept: list[torch.Tensor] = []

    def keep(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        args[0].retain_grad()
        kept.append(args[0])

    both.discriminator.head("rtd").register_forward_pre_hook(keep)
    both(batch, rows, targets, special).discriminator.backward()
    assert kept[0].grad is not None
    assert torch.equal(kept[0].grad.abs().sum(-1) > 0, ~special)


def gradients(both: ReplacedTokenDetection, loss: str) -> dict[str, float]:
    """How far each of the two tables of words is moved by one of the two losses."""
    batch, rows, targets, special = step()
    both.zero_grad()
    getattr(both(batch, rows, targets, special, torch.Generator().manual_seed(0)), loss).backward()
    generator = both.generator.encoder.embeddings.words.weight.grad
    own = dict(both.discriminator.named_parameters())
    delta = own.get(
        "encoder.embeddings.words.parametrizations.weight.original", own.get("encoder.embeddings.words.weight")
    )
    assert delta is not None
    return {
        name: 0.0 if g is None else float(g.abs().sum()) for name, g in (("generator", generator), ("own", delta.grad))
    }


def test_sharing() -> None:
    """Which loss trains which table."""
    for sharing in ("none", "gdes"):
        both = two(sharing)
        masked, found = gradients(both, "generator"), gradients(both, "discriminator")
        assert masked["generator"] > 0
        assert masked["own"] == 0
        assert found["generator"] == 0
        assert found["own"] > 0
    both = two("tied")
    assert both.discriminator.encoder.embeddings.words is both.generator.encoder.embeddings.words
    assert both.discriminator.encoder.embeddings.positions is both.generator.encoder.embeddings.positions
    assert gradients(both, "generator")["own"] > 0
    assert gradients(both, "discriminator")["generator"] > 0
    names = [name for name, _ in both.named_parameters()]
    assert not any("discriminator.encoder.embeddings.words" in name for name in names), "counted twice"


def test_gdes_starts_at_the_generators_table_and_follows_it() -> None:
    both = two("gdes")
    base, words = both.generator.encoder.embeddings.words, both.discriminator.encoder.embeddings.words
    assert torch.equal(words.weight, base.weight)
    with torch.no_grad():
        base.weight += 1
        words.parametrizations.weight.original += 0.5
    assert_close(words.weight, base.weight + 0.5)


@pytest.mark.parametrize("sharing", ["none", "tied", "gdes"])
def test_the_trained_discriminator_is_a_standalone_model(sharing: Any) -> None:
    both = two(sharing)
    optimizer = torch.optim.SGD(both.parameters(), lr=0.01)
    batch, rows, targets, special = step()
    first = None
    for _ in range(3):
        losses = both(batch, rows, targets, special, torch.Generator().manual_seed(0))
        total = both.total(losses, len(rows), float((~special).sum()))
        first = first or total.item()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    model = both.trained()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in built({"rtd": RTD}).named_parameters()]
    before = model(batch, "rtd")
    assert_close(before, both.discriminator(batch, "rtd"), atol=0, rtol=0)
    with torch.no_grad():
        for parameter in both.parameters():
            parameter.zero_()
    assert torch.equal(model(batch, "rtd"), before)


def test_a_state_can_be_saved_and_restored() -> None:
    one, other = two("gdes"), two("gdes")
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(torch.randn_like(parameter))
    other.load_state_dict(one.state_dict())
    batch, rows, targets, special = step()
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]
    a, b = (both(batch, rows, targets, special, draw) for both, draw in zip((one, other), draws, strict=True))
    assert torch.equal(a.discriminator, b.discriminator)
    assert torch.equal(a.generator, b.generator)


def test_models_that_cannot_share_embeddings_are_refused() -> None:
    generator = built({"mlm": replace(MLM, dense=8)}, width=8, embedding=8)
    for sharing in ("tied", "gdes"):
        with pytest.raises(ConfigError, match=r"words of the generator has \(60, 8\)"):
            ReplacedTokenDetection(generator, built({"rtd": RTD}), sharing)
    with pytest.raises(ConfigError, match="sharing='some'"):
        ReplacedTokenDetection(generator, built({"rtd": RTD}), "some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weight=0"):
        ReplacedTokenDetection(generator, built({"rtd": RTD}), "none", weight=0)
    with pytest.raises(NotFoundError, match="'rtd'"):
        ReplacedTokenDetection(generator, generator)
    small = Model(replace(config(), vocab=50), {"rtd": RTD})
    with pytest.raises(ConfigError, match="vocab=60"):
        ReplacedTokenDetection(generator, small, "none")
