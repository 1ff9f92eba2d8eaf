"""LoRA against W + scale · BA written out, and what is left of it after merging: nothing but other numbers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bertie.errors import ConfigError
from bertie.nn.attention import QKV
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.training import lora
from tests.ops.forced import turn_off
from tests.training.test_optimizer import BATCH, loss_of, tiny

SHAPES = [
    "bert",
    "albert",
    "albert-groups",
    "modernbert",
    "deberta",
    "deberta-v2",
    "deberta-v3",
    "longformer",
    "eurobert",
]


def outputs(model: Model) -> Tensor:
    with torch.no_grad():
        return model.eval()(Batch.from_ids(BATCH), "classify")


def stirred(model: Model) -> Model:
    """Factors as training leaves them: B is no longer zero."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if lora.is_factor(name):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model


def matrices(model: Model) -> dict[str, nn.Linear | QKV]:
    return {name: part for name, part in model.encoder.blocks.named_modules() if isinstance(part, nn.Linear | QKV)}


@pytest.mark.parametrize("name", SHAPES)
def test_outputs_do_not_change_at_first_nor_when_merged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turn_off(monkeypatch, "native.encoder")  # it takes no parametrized weights, and rounds differently
    model = tiny(name)
    before = outputs(model)
    shapes = [(key, value.shape) for key, value in model.state_dict().items()]
    classes = [type(part) for part in model.modules()]
    untouched = {key: p.detach().clone() for key, p in model.named_parameters()}

    lora.add(model, rank=3, seed=1)
    assert lora.is_on(model)
    assert torch.equal(outputs(model), before)
    on = matrices(model)
    assert all(nn.utils.parametrize.is_parametrized(part, "weight") for part in on.values())

    stirred(model)
    during = outputs(model)
    assert not torch.allclose(during, before, atol=1e-3)
    weights = {key: part.weight.detach().clone() for key, part in on.items()}
    lora.merge(model)
    assert not lora.is_on(model)
    assert_close(outputs(model), during, atol=1e-6, rtol=0)
    assert [(key, value.shape) for key, value in model.state_dict().items()] == shapes
    assert [key for key, _ in model.named_parameters()] == list(untouched)
    assert [type(part) for part in model.modules()] == classes
    assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.grad is None for p in model.parameters())
    for key, parameter in model.named_parameters():
        part = key.removeprefix("encoder.blocks.").removesuffix(".weight")
        if part in weights and key.startswith("encoder.blocks."):
            assert torch.equal(parameter, weights[part])
            assert not torch.equal(parameter, untouched[key])
        else:
            assert torch.equal(parameter, untouched[key])
    lora.merge(model)  # once more does nothing
    assert torch.equal(outputs(model), outputs(model))


def test_adapted_matrices() -> None:
    assert {key.split(".", 1)[1] for key in matrices(tiny("bert"))} == {
        "attention.qkv",
        "attention.out",
        "ff.up",
        "ff.down",
    }
    assert {"0.attention.position_key", "0.attention.position_query"} < set(matrices(tiny("deberta")))
    assert "0.attention.global_qkv" in matrices(tiny("longformer"))
    model = tiny("eurobert")  # fewer key heads than query heads
    lora.add(model, rank=3)
    shapes = {
        key: tuple(p.shape) for key, p in model.named_parameters() if lora.is_factor(key) and ".0.attention.qkv" in key
    }
    assert shapes == {
        "encoder.blocks.0.attention.qkv.parametrizations.weight.0.a": (3, 3, 16),
        "encoder.blocks.0.attention.qkv.parametrizations.weight.0.b": (16 + 8 + 8, 3),
    }


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_the_factors(name: str) -> None:
    """dA = scale · Bᵀ·dW and dB = scale · dW·Aᵀ, part by part, with dW from a model that holds W + scale · BA."""
    rank, alpha = 2, 5.0
    model = tiny(name)
    plain = copy.deepcopy(model)
    lora.add(model, rank, alpha, seed=3)
    stirred(model)
    factors = dict(model.encoder.blocks.named_parameters())
    others = matrices(plain)
    with torch.no_grad():
        for key, part in others.items():
            a, b = (factors[f"{key}.parametrizations.weight.0.{one}"] for one in "ab")
            start = 0
            for piece, rows in enumerate(part.sizes if isinstance(part, QKV) else [part.out_features]):
                part.weight[start : start + rows] += alpha / rank * b[start : start + rows] @ a[piece]
                start += rows
            assert start == len(part.weight)
    assert_close(loss_of(model), loss_of(plain))
    loss_of(model).backward()
    loss_of(plain).backward()
    for key, part in others.items():
        a, b = (factors[f"{key}.parametrizations.weight.0.{one}"] for one in "ab")
        original = factors[f"{key}.parametrizations.weight.original"]
        assert not original.requires_grad
        assert original.grad is None
        whole = part.weight.grad
        if whole is None:  # of global tokens, which this head may not use
            assert a.grad is None
            continue
        assert a.grad is not None
        assert b.grad is not None
        start = 0
        for piece, rows in enumerate(part.sizes if isinstance(part, QKV) else [part.out_features]):
            mine = slice(start, start + rows)
            assert_close(a.grad[piece], alpha / rank * b[mine].T @ whole[mine], atol=1e-5, rtol=1e-4)
            assert_close(b.grad[mine], alpha / rank * whole[mine] @ a[piece].T, atol=1e-5, rtol=1e-4)
            start += rows
    outside = [p for key, p in model.named_parameters() if key.startswith("encoder.") and not lora.is_factor(key)]
    assert not any(p.requires_grad for p in outside)
    assert all(p.requires_grad for p in model.heads.parameters())


def test_alpha_is_twice_the_rank() -> None:
    states = []
    for alpha in (None, 6.0, 3.0):
        model = tiny("bert")
        lora.add(model, 3, alpha, seed=1)
        states.append(outputs(stirred(model)))
    assert torch.equal(states[0], states[1])
    assert not torch.allclose(states[0], states[2], atol=1e-3)


def test_the_seed_determines_the_factors() -> None:
    def factors(seed: int) -> list[Tensor]:
        model = tiny("bert")
        state = torch.get_rng_state()
        lora.add(model, 2, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return [p for key, p in model.named_parameters() if lora.is_factor(key)]

    torch.manual_seed(0)
    one = factors(5)
    torch.manual_seed(99)
    again, other = factors(5), factors(6)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    drawn = [p for p in one if p.ndim == 3]
    assert len({float(p.detach().sum()) for p in drawn}) == len(drawn)  # no two alike
    assert all(bool((p == 0).all()) for p in one if p.ndim == 2)
    assert all(float(p.detach().abs().max()) <= p.shape[-1] ** -0.5 for p in drawn)


@pytest.mark.parametrize("name", ["bert", "albert", "deberta-v2"])
def test_saving_and_loading_with_factors(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    lora.add(model, 2, seed=1)
    stirred(model)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = tiny(name, std=0.1)
    lora.add(other, 2, seed=7)
    assert not torch.allclose(outputs(other), outputs(model), atol=1e-3)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(outputs(other), outputs(model))
    twin = copy.deepcopy(model)
    lora.merge(other)
    lora.merge(twin)
    assert lora.is_on(model)
    assert all(torch.equal(a, b) for a, b in zip(twin.state_dict().values(), other.state_dict().values(), strict=True))
    tiny(name).load_state_dict(other.state_dict())


def test_autocast_trains_the_merged_weights() -> None:
    model = tiny("bert")
    lora.add(model, 2)
    stirred(model)
    with torch.autocast("cpu", torch.bfloat16):
        during = [part.weight.detach() for part in matrices(model).values()]
    lora.merge(model)
    assert all(torch.equal(a, b.weight) for a, b in zip(during, matrices(model).values(), strict=True))


def test_in_half_precision() -> None:
    model = tiny("bert").to(torch.bfloat16)
    lora.add(model, 2)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    lora.merge(stirred(model))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_what_is_refused() -> None:
    model = tiny("bert")
    for rank in (0, -1, 17):
        with pytest.raises(ConfigError, match=f"lora={rank} must be a rank from 1 to 16"):
            lora.add(model, rank)
    assert not lora.is_on(model)
    assert all(p.requires_grad for p in model.parameters())
    lora.add(model, 16)
    with pytest.raises(ConfigError, match="already"):
        lora.add(model, 2)
