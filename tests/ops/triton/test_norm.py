"""Fused residual + dropout + LayerNorm and embeddings + LayerNorm against the eager reference, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.nn.norms import RMSNorm
from bertie.ops.triton import norm as triton_norm
from bertie.ops.triton.launch import next_power_of_2
from tests.ops.triton.helpers import DEVICE, TOLERANCE, assert_matches_eager, random_layer_norm, random_tensor

pytestmark = [
    pytest.mark.interpreted(native_on_gpu=True),
    pytest.mark.usefixtures("interpreter", "fused_backends", "nan_memory"),
]


@pytest.mark.parametrize(("rows", "width", "bias"), [(1, 8, True), (13, 24, False), (36, 100, True)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_add_norm(rows: int, width: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual = random_tensor(rows, width, dtype=dtype), random_tensor(rows, width, dtype=dtype)
    norm = random_layer_norm(width, bias, dtype)
    inputs = [x, residual, *norm.parameters()]
    assert_matches_eager(triton_norm, lambda ops: ops.add_norm(x, residual, norm, 0.0), inputs, dtype)


@pytest.mark.parametrize(("rows", "width", "bias"), [(1, 8, True), (13, 24, False), (36, 100, True)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_add_norms(rows: int, width: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both outputs, the sum and its norm, have gradients."""
    x, residual = random_tensor(rows, width, dtype=dtype), random_tensor(rows, width, dtype=dtype)
    norm = random_layer_norm(width, bias, dtype)
    inputs = [x, residual, *norm.parameters()]
    with monkeypatch.context() as patched:
        patched.setattr(norm, "forward", None)  # not called by the kernels
        both = triton_norm.add_norms(x, residual, nn.Identity(), norm, 0.0)
    assert_close(both[0], x + residual, **TOLERANCE[dtype])  # the interpreter truncates where a GPU rounds
    assert_matches_eager(
        triton_norm, lambda ops: torch.stack(ops.add_norms(x, residual, nn.Identity(), norm, 0.0)), inputs, dtype
    )
    for index in (0, 1):  # only one of the two outputs is used
        assert_matches_eager(
            triton_norm,
            lambda ops, index=index: ops.add_norms(x, residual, nn.Identity(), norm, 0.0)[index],
            [x, residual],
            dtype,
        )


@pytest.mark.parametrize(("rows", "width", "bias"), [(1, 8, True), (13, 24, False), (36, 100, True)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_norm(rows: int, width: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, norm = random_tensor(rows, width, dtype=dtype), random_layer_norm(width, bias, dtype)
    with monkeypatch.context() as patched:
        patched.setattr(norm, "forward", None)  # not called by the kernel
        triton_norm.norm(x, norm)
    assert_matches_eager(triton_norm, lambda ops: ops.norm(x, norm), [x, *norm.parameters()], dtype)
    strided = x.detach().T.contiguous().T
    assert torch.equal(triton_norm.norm(strided, norm), triton_norm.norm(x, norm))


def test_norm_falls_back_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """For other modules than LayerNorm, and under autocast, where torch's returns float32."""
    monkeypatch.setattr(triton_norm._AddNorm, "run", None)
    x = random_tensor(3, 8)
    assert triton_norm.norm(x, nn.Identity()) is x
    rms, plain = RMSNorm(8, 1e-6).to(DEVICE), nn.LayerNorm(8, device=DEVICE)
    assert torch.equal(triton_norm.norm(x, rms), rms(x))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert torch.equal(triton_norm.norm(x, plain), plain(x))


@pytest.mark.parametrize(("tokens", "width", "bias"), [(1, 8, True), (13, 24, False), (36, 100, True)])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_embed_norm(
    dtype: torch.dtype, count: int, tokens: int, width: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = random_layer_norm(width, bias, dtype)
    tables = [
        (nn.Embedding(size, width, device=DEVICE, dtype=dtype), torch.randint(size, (tokens,), device=DEVICE))
        for size in (50, 2, 7)[:count]
    ]
    with torch.no_grad():
        with monkeypatch.context() as patched:
            for part in (norm, *(table for table, _ in tables)):
                patched.setattr(part, "forward", None)  # not called by the kernel
            fast = triton_norm.embed_norm(tables, norm)
        expected = F.layer_norm(sum(t.weight[at].float() for t, at in tables), (width,), eps=norm.eps)
        expected = expected * norm.weight.float() + (norm.bias.float() if bias else 0.0)
    assert fast.dtype == dtype
    assert_close(fast.float(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("what", ["first", "last", "norm"])
def test_embed_norm_with_gradients_falls_back_to_eager(what: str) -> None:
    norm, at = random_layer_norm(8, True), torch.tensor([4, 0], device=DEVICE)
    tables = [(nn.Embedding(5, 8, device=DEVICE).requires_grad_(False), at) for _ in range(2)]
    leaves = {"first": tables[0][0].weight, "last": tables[1][0].weight, "norm": norm.weight}
    norm.requires_grad_(False)
    assert not triton_norm.embed_norm(tables, norm).requires_grad
    leaves[what].requires_grad_()
    (grad,) = torch.autograd.grad(triton_norm.embed_norm(tables, norm).sin().sum(), leaves[what])
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("width", [24, 300, 1100])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_inference_equals_training_bit_for_bit(dtype: torch.dtype, width: int) -> None:
    """And records nothing for a backward pass, without gradients or with frozen inputs."""
    x, residual, norm = (
        random_tensor(13, width, dtype=dtype),
        random_tensor(13, width, dtype=dtype),
        random_layer_norm(width, True, dtype),
    )
    calls = {
        "norm": lambda *arguments: (triton_norm.norm(arguments[0], norm),),
        "add_norm": lambda *arguments: (triton_norm.add_norm(*arguments, norm, 0.0),),
        "add_norms": lambda *arguments: triton_norm.add_norms(*arguments, nn.Identity(), norm, 0.0),
        "dropout": lambda *arguments: triton_norm.add_norms(*arguments, nn.Identity(), norm, 0.3),
    }

    def call(name: str) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        return calls[name](x, residual)

    for name in calls:
        trained = call(name)
        with torch.no_grad():
            read = call(name)
        norm.requires_grad_(False)
        x.requires_grad_(False)
        residual.requires_grad_(False)
        frozen = call(name)
        for parameter in (x, residual, *norm.parameters()):
            parameter.requires_grad_()
        for one, two, three in zip(trained, read, frozen, strict=True):
            assert one.grad_fn is not None
            assert two.grad_fn is None
            assert three.grad_fn is None
            assert torch.equal(one, two)
            assert torch.equal(one, three)


@pytest.mark.parametrize("width", [24, 300, 1100])
def test_rows_per_tile(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dropout mask does not depend on the tile size, nor do outputs and gradients."""
    x, residual, norm = random_tensor(21, width), random_tensor(21, width), random_layer_norm(width, True)
    dout = torch.randn(2, 21, width, device=DEVICE)

    def step() -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        both = triton_norm.add_norms(x, residual, nn.Identity(), norm, 0.3)
        return *both, *torch.autograd.grad(both, (x, residual, *norm.parameters()), tuple(dout))

    block = next_power_of_2(width)
    actual = []
    for tall in (1, 2, 4, 8):
        monkeypatch.setattr(triton_norm, "TILE", (tall * block, tall * block))
        assert triton_norm._block_sizes(width, 0)["BLOCK_ROWS"] == tall
        actual.append(step())
    for other in actual[1:]:
        for one, two in zip(actual[0], other, strict=True):
            assert torch.equal(one == 0, two == 0)
            assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_add_norms_of_mixed_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under autocast: the residual stream stays float32, the normalized output is bfloat16."""
    x, residual, norm = (
        random_tensor(9, 16, dtype=torch.bfloat16),
        random_tensor(9, 16),
        nn.LayerNorm(16, device=DEVICE),
    )
    total, normed = triton_norm.add_norms(x, residual, nn.Identity(), norm, 0.0)
    assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(total, x + residual)
    dout = torch.randn(9, 16, device=DEVICE), torch.randn(9, 16, device=DEVICE).bfloat16()
    grads = torch.autograd.grad((total, normed), (x, residual, norm.weight), dout)
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]
    plain = F.layer_norm(total.detach().requires_grad_(), (16,))
    assert_close(normed.float(), plain, atol=2e-2, rtol=2e-2)
    again = (x + residual).detach().requires_grad_()
    (expected,) = torch.autograd.grad((again * 1.0, F.layer_norm(again, (16,))), again, (dout[0], dout[1].float()))
    assert_close(grads[1], expected, atol=1e-5, rtol=1e-5)
    assert_close(grads[0], expected.bfloat16())


def test_add_norms_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, norm = (
        torch.ones(13, 32, device=DEVICE, requires_grad=True),
        random_tensor(13, 32),
        nn.LayerNorm(32, device=DEVICE),
    )
    total, normed = triton_norm.add_norms(x, residual, nn.Identity(), norm, 0.3)
    dx, dresidual = torch.autograd.grad((total, normed), (x, residual), (torch.randn_like(x), torch.randn_like(x)))
    kept = dx != 0
    assert 0.5 < kept.float().mean().item() < 0.9
    scale = 65536 / (65536 - round(0.3 * 65536))
    assert_close(total, residual + kept * scale)
    assert_close(normed, norm(total), atol=1e-5, rtol=1e-5)
    assert_close(dx, dresidual * kept * scale)


def test_add_norm_of_mixed_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under autocast: x is bfloat16, the first residual and the norm's weights are float32."""
    x, residual, norm = (
        random_tensor(9, 16, dtype=torch.bfloat16),
        random_tensor(9, 16),
        nn.LayerNorm(16, device=DEVICE),
    )
    out = triton_norm.add_norm(x, residual, norm, 0.0)
    assert out.dtype == torch.bfloat16
    upstream = torch.randn(9, 16, device=DEVICE).bfloat16()
    grads = torch.autograd.grad(out, (x, residual, norm.weight), upstream)
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]
    plain = F.layer_norm(residual + x.float(), (16,))
    assert_close(out.float(), plain, atol=2e-2, rtol=2e-2)
    assert_close(grads[1], torch.autograd.grad(plain, residual, upstream.float())[0], atol=1e-5, rtol=1e-5)


def test_add_norm_dropout() -> None:
    rows, width, rate = 64, 256, 0.3
    x = torch.ones(rows, width, device=DEVICE, requires_grad=True)
    residual = random_tensor(rows, width)
    norm = nn.LayerNorm(width, device=DEVICE)
    out = triton_norm.add_norm(x, residual, norm, rate)
    dx, dresidual = torch.autograd.grad(out, (x, residual), torch.randn_like(out))
    kept = dx != 0  # the backward pass drops what the forward pass dropped
    scale = 65536 / (65536 - round(rate * 65536))
    assert_close(out, F.layer_norm(residual + kept * scale, (width,)), atol=1e-5, rtol=1e-5)
    assert_close(dx, dresidual * kept * scale)
    share = kept.float().mean().item()
    assert abs(share - (1 - rate)) < 4 * math.sqrt(rate * (1 - rate) / kept.numel())
    # Masks of two rows, or columns, agree as often as independent ones.
    for one in (kept, kept.T):
        same = (one[:, None] == one[None]).float().mean(-1)[~torch.eye(len(one), dtype=torch.bool, device=DEVICE)]
        assert abs(same.mean().item() - (rate**2 + (1 - rate) ** 2)) < 0.02
        assert same.max().item() < 0.95


def test_dropout_follows_the_seed() -> None:
    x, residual, norm = random_tensor(3, 16), random_tensor(3, 16), nn.LayerNorm(16, device=DEVICE)

    def once(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.stack([triton_norm.add_norm(x, residual, norm, 0.5) for _ in range(2)])

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))
    assert not torch.equal(*once(1))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_dropout_in_a_cuda_graph_follows_the_seed() -> None:
    x, residual, norm = (
        random_tensor(64, 32, dtype=torch.bfloat16),
        random_tensor(64, 32),
        nn.LayerNorm(32, device=DEVICE),
    )

    def step() -> tuple[Tensor, ...]:
        out = triton_norm.add_norm(x, residual, norm, 0.5)
        return out, *torch.autograd.grad(out.float().sin().sum(), (x, residual))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()

    def replay(seed: int) -> list[Tensor]:
        torch.cuda.manual_seed(seed)
        graph.replay()
        return [one.clone() for one in made]

    once, other, again = replay(1), replay(2), replay(1)
    torch.cuda.manual_seed(1)
    for one, two, three, eager_result in zip(once, other, again, step(), strict=True):
        assert torch.equal(one, three)
        assert not torch.equal(one, two)
        assert torch.equal(one, eager_result)
