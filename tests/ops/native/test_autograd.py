"""The compiled training kernels beside PyTorch's operations: outputs and gradients, on ragged batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bertie.config import Causal, Full, Pattern, Rotary, Sliding
from bertie.nn.norms import RMSNorm
from bertie.ops.contracts import AttentionInputs
from bertie.ops.native import autograd, encoder, training
from bertie.ops.torch import eager, grouped_attention

LEVELS = range(min(2, encoder.instruction_level() or 0) + 1) if training.library() is not None else range(0)
TOLERANCE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
LENGTHS = ((1,), (13, 1, 2, 33, 32), (97, 5, 130, 12))

pytestmark = pytest.mark.skipif(training.library() is None, reason="no compiler was here when the package was built")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(training, "instruction_level", lambda: request.param)
    return int(request.param)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def assert_same(fast: Callable[[], Any], slow: Callable[[], Any], inputs: Sequence[Tensor]) -> None:
    """The same outputs, and the same gradients of their sum with random weights."""
    results = []
    for function in (fast, slow):
        outputs = function()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((out * random(*out.shape, seed=7 + i).detach()).sum() for i, out in enumerate(outputs))
        results.append([*outputs, *torch.autograd.grad(loss, inputs)])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, **TOLERANCE)


def heads(tokens: int, count: int, kv_heads: int, width: int) -> list[Tensor]:
    """Leaves, and views of one projection as an encoder has them."""
    sizes = [count, kv_heads, kv_heads]
    fused = random(tokens, sum(sizes), width)
    return [fused, *torch.split(fused, sizes, dim=1)]


def inputs_for(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], pattern: Pattern, dropout: float = 0.0
) -> Any:
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return AttentionInputs(q, k, v, lengths, ends, 0.3, pattern, dropout=dropout)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("pattern", "shape"),
    [
        *((Full(), (2, 2, 32)), (Full(), (4, 2, 10)), (Sliding(3), (2, 2, 64)), (Sliding(40), (3, 1, 33))),
        *((Causal(), (4, 2, 10)), (Causal(), (1, 1, 32)), (Causal(0), (2, 2, 16)), (Causal(37), (3, 1, 33))),
    ],
    ids=str,
)
def test_attention(level: int, lengths: tuple[int, ...], pattern: Pattern, shape: tuple[int, int, int]) -> None:
    fused, q, k, v = heads(sum(lengths), *shape)
    call = inputs_for(q, k, v, lengths, pattern)
    assert autograd.attention_accepts(call)
    assert_same(
        lambda: autograd.attend(call),
        lambda: grouped_attention.attend(q, k, v, lengths, scale=0.3, pattern=pattern),
        [fused],
    )


def test_attention_dropout(level: int) -> None:
    """Values that are unit vectors make the dropped weights visible; with them the plain expression must agree."""
    n, rate = 20, 0.25
    q, k, v = (random(2 * n, 2, 32, seed=seed) for seed in range(3))

    def attend(values: Tensor) -> Tensor:
        torch.manual_seed(5)
        return autograd.attend(inputs_for(q, k, values, (n, n), Full(), rate))

    unit = torch.zeros(2 * n, 2, 32)
    unit[torch.arange(2 * n), :, torch.arange(2 * n) % n] = 1.0
    texts = [slice(0, n), slice(n, 2 * n)]
    dropped = attend(unit).detach()  # (2n, H, 32): the weights of the keys of the own text

    def reference() -> Tensor:
        out = []
        for text in texts:
            weights = torch.softmax(torch.einsum("ihd,jhd->hij", q[text], k[text]) * 0.3, -1)
            factors = dropped[text, :, :n].transpose(0, 1).ne(0) / (1 - rate)
            out.append(torch.einsum("hij,jhd->ihd", weights * factors, v[text]))
        return torch.cat(out)

    assert_same(lambda: attend(v), reference, [q, k, v])
    assert 0.1 < (dropped[:, :, :n] == 0).float().mean() < 0.4
    torch.manual_seed(6)
    assert not torch.equal(attend(v), autograd.attend(inputs_for(q, k, v, (n, n), Full(), rate)))


@pytest.mark.parametrize("shape", [(7, 2, 32), (40, 3, 10)])
def test_rotary(level: int, shape: tuple[int, int, int]) -> None:
    fused, q, k, _ = heads(shape[0], shape[1], 1, shape[2])
    positions = torch.arange(shape[0])
    cos, sin = eager.rotary_tables(Rotary((100.0,)), positions, shape[2])[100.0]
    assert_same(lambda: autograd.apply_rotary(q, k, cos, sin), lambda: eager.apply_rotary(q, k, cos, sin), [fused])


@pytest.mark.parametrize(("rows", "width", "bias"), [(1, 8, True), (13, 24, False), (70, 100, True)])
def test_norms(level: int, rows: int, width: int, bias: bool) -> None:
    x, residual = random(rows, width), random(rows, width, seed=1)
    norm = nn.LayerNorm(width, bias=bias)
    for i, parameter in enumerate(norm.parameters()):
        parameter.data = random(width, seed=2 + i).detach()
    inputs = [x, residual, *norm.parameters()]
    for post, pre in ((norm, nn.Identity()), (nn.Identity(), norm)):
        assert_same(
            lambda post=post, pre=pre: autograd.add_norms(x, residual, post, pre, 0.0),
            lambda post=post, pre=pre: eager.add_norms(x, residual, post, pre, 0.0),
            inputs,
        )
    assert_same(
        lambda: autograd.add_norms(x, residual, nn.Identity(), norm, 0.0)[0] * 1.0,  # only the sum is used
        lambda: eager.add_norms(x, residual, nn.Identity(), norm, 0.0)[0] * 1.0,
        [x, residual],
    )
    assert_same(lambda: autograd.norm(x, norm), lambda: eager.norm(x, norm), [x, *norm.parameters()])
    rms = RMSNorm(width, 1e-6)
    assert torch.equal(autograd.norm(x, rms), rms(x))  # PyTorch's


def test_norm_dropout(level: int) -> None:
    rate, (rows, width) = 0.3, (50, 100)
    norm, zeros, ones = nn.LayerNorm(width), torch.zeros(rows, width), torch.ones(rows, width)
    x, residual = random(rows, width), random(rows, width, seed=1)

    def seeded(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return autograd.add_norms(x, residual, nn.Identity(), norm, rate)

    factors = seeded(ones, zeros)[0].detach()
    assert_close(factors.unique(), torch.tensor([0.0, 1 / (1 - rate)]))
    assert abs((factors == 0).float().mean() - rate) < 0.02
    assert_close((factors == 0).float().mean(0), torch.full((width,), rate), atol=0.3, rtol=0)  # every column
    assert_same(
        lambda: seeded(x, residual),
        lambda: eager.add_norms(x * factors, residual, nn.Identity(), norm, 0.0),
        [x, residual, *norm.parameters()],
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", training.ACTIVATIONS)
def test_activation(level: int, activation: Any, gated: bool) -> None:
    linear = nn.Linear(5, 42)
    nn.init.normal_(linear.weight, std=0.5)
    x = random(37, 5)
    assert_same(
        lambda: autograd.linear_activation(x, linear, activation, gated),
        lambda: eager.linear_activation(x, linear, activation, gated),
        [x, linear.weight, linear.bias],
    )


def test_threads_do_not_matter() -> None:
    """To the bit, gradients of norms included."""
    threads, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            torch.manual_seed(0)
            x, norm = random(100, 64), nn.LayerNorm(64)
            _, q, k, v = heads(100, 2, 2, 16)
            attended = autograd.attend(inputs_for(q, k, v, (60, 40), Full(), 0.1))
            out = autograd.add_norm(x, attended.flatten(1).repeat(1, 2), norm, 0.1)
            results.append([out, *torch.autograd.grad(out.pow(3).sum(), [x, *norm.parameters()])])
        finally:
            torch.set_num_threads(threads)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
