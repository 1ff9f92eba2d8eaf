"""The fused programs against the plain expressions beside them, there and back: on the GPU, or interpreted without one.

Run by test_fused.py in a process of its own: what interprets Triton's programs must be told so before it is imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.config import Activation, EmbeddingConfig, HeadConfig, NormConfig
from bertie.nn.encoder import Encoder
from bertie.nn.linear import Fp8Linear, to_fp8
from bertie.nn.model import Model
from bertie.nn.norms import RMSNorm
from bertie.nn.pooling import Pooling
from bertie.ops import disable
from bertie.ops.torch import eager
from bertie.ops.triton import fp8, fused
from bertie.text.batch import Batch
from tests.ops.forced import forced
from tests.test_config import GOOD

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}


@pytest.fixture(autouse=True)
def _forced() -> Iterator[None]:
    torch.manual_seed(0)
    with forced("triton.fused"):
        yield


@pytest.fixture(autouse=True, scope="module")
def _rounding() -> Iterator[None]:
    """The interpreter's own way to e4m3 loses a carry: 127 becomes 64."""
    with pytest.MonkeyPatch.context() as patched:
        if HERE.type == "cpu":
            from triton.runtime import interpreter

            plain = interpreter._convert_float

            def convert(x: Any, given: Any, wanted: Any, rounding: Any) -> Any:
                if str(wanted) != "fp8e4nv":
                    return plain(x, given, wanted, rounding)
                return torch.tensor(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

            patched.setattr(interpreter, "_convert_float", convert)
        yield


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=HERE).to(dtype).requires_grad_()


def compared(call: Any, wanted: list[Tensor], dtype: torch.dtype) -> None:
    """Compare outputs and gradients of call(fused) and call(eager)."""
    fast = call(fused)
    upstream = torch.randn_like(fast, dtype=torch.float32).to(fast.dtype)
    ours = torch.autograd.grad(fast, wanted, upstream)
    slow = call(eager)
    theirs = torch.autograd.grad(slow, wanted, upstream.to(slow.dtype))
    assert fast.isfinite().all()
    for one, other in zip((fast, *ours), (slow, *theirs), strict=True):
        assert one.dtype == other.dtype
        scale = float(other.detach().float().abs().max())  # sums over rows are larger than what is summed
        near = NEAR[dtype]
        assert_close(one.float(), other.float(), atol=near["atol"] * max(1.0, scale), rtol=near["rtol"])


@pytest.mark.parametrize(("rows", "width", "bias"), [(1, 8, True), (13, 24, False), (36, 100, True)])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_add_norm(rows: int, width: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual = drawn(rows, width, dtype=dtype), drawn(rows, width, dtype=dtype)
    norm = normed(width, bias, dtype)
    wanted = [x, residual, *norm.parameters()]
    compared(lambda ops: ops.add_norm(x, residual, norm, 0.0), wanted, dtype)


@pytest.mark.parametrize(("rows", "width", "bias"), [(1, 8, True), (13, 24, False), (36, 100, True)])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_add_norms(rows: int, width: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum and its norm, each with a gradient of its own."""
    poisoned(monkeypatch)
    x, residual = drawn(rows, width, dtype=dtype), drawn(rows, width, dtype=dtype)
    norm = normed(width, bias, dtype)
    wanted = [x, residual, *norm.parameters()]
    with monkeypatch.context() as patched:
        patched.setattr(norm, "forward", None)  # the programs need it not
        both = fused.add_norms(x, residual, nn.Identity(), norm, 0.0)
    assert_close(both[0], x + residual, **NEAR[dtype])  # the interpreter cuts where a GPU rounds
    compared(lambda ops: torch.stack(ops.add_norms(x, residual, nn.Identity(), norm, 0.0)), wanted, dtype)
    for one in (0, 1):  # where only one of the two is used
        compared(lambda ops: ops.add_norms(x, residual, nn.Identity(), norm, 0.0)[one], [x, residual], dtype)  # noqa: B023


@pytest.mark.parametrize(("rows", "width", "bias"), [(1, 8, True), (13, 24, False), (36, 100, True)])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_norm(rows: int, width: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch)
    x, norm = drawn(rows, width, dtype=dtype), normed(width, bias, dtype)
    with monkeypatch.context() as patched:
        patched.setattr(norm, "forward", None)  # the program needs it not
        fused.norm(x, norm)
    compared(lambda ops: ops.norm(x, norm), [x, *norm.parameters()], dtype)
    scattered = x.detach().T.contiguous().T
    assert torch.equal(fused.norm(scattered, norm), fused.norm(x, norm))


def test_norm_is_for_layer_norms_outside_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would have torch's return single precision."""
    monkeypatch.setattr(fused._AddNorm, "run", None)
    x = drawn(3, 8)
    assert fused.norm(x, nn.Identity()) is x
    rms, plain = RMSNorm(8, 1e-6).to(HERE), nn.LayerNorm(8, device=HERE)
    assert torch.equal(fused.norm(x, rms), rms(x))
    with torch.autocast(HERE.type, torch.bfloat16):
        assert torch.equal(fused.norm(x, plain), plain(x))


@pytest.mark.parametrize(("tokens", "width", "bias"), [(1, 8, True), (13, 24, False), (36, 100, True)])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_embed_norm(
    dtype: torch.dtype, count: int, tokens: int, width: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(monkeypatch)
    norm = normed(width, bias, dtype)
    tables = [
        (nn.Embedding(size, width, device=HERE, dtype=dtype), torch.randint(size, (tokens,), device=HERE))
        for size in (50, 2, 7)[:count]
    ]
    with torch.no_grad():
        with monkeypatch.context() as patched:
            for part in (norm, *(table for table, _ in tables)):
                patched.setattr(part, "forward", None)  # the program needs them not
            fast = fused.embed_norm(tables, norm)
        wanted = F.layer_norm(sum(t.weight[at].float() for t, at in tables), (width,), eps=norm.eps)  # type: ignore[arg-type]
        wanted = wanted * norm.weight.float() + (norm.bias.float() if bias else 0.0)
    assert fast.dtype == dtype
    assert_close(fast.float(), wanted, **NEAR[dtype])


def near_codes(found: fused.Coded, x: Tensor) -> None:
    """x in eight bits, but for a step where it was rounded to half precision in between."""
    codes, scales = found
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (
        *(torch.float8_e4m3fn, x.shape, torch.float32, (len(x), 1)),
    )
    wanted, by = fp8.rounded(x)
    assert_close(scales, by, atol=0, rtol=1e-2)  # of what bfloat16 has rounded
    assert_close(codes.float(), wanted.float(), atol=2**-8, rtol=0.13)
    assert (codes.float() != wanted.float()).float().mean() < (0.2 if x.dtype == torch.bfloat16 else 0.02)
    assert (codes.float().abs().amax(1)[x.abs().amax(1) > 1e-12] == 448).all()


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (13, 48), (36, 100)])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_codes_of_norms(rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what each returns without them, to the bit; and only where somebody wants them."""
    poisoned(monkeypatch)
    x, residual = drawn(rows, width, dtype=dtype), drawn(rows, width, dtype=dtype)
    norm, plain = normed(width, True, dtype), normed(width, True, dtype)
    plain.load_state_dict(norm.state_dict())
    norm.fp8 = True  # type: ignore[assignment]
    table = nn.Embedding(5, width, device=HERE, dtype=dtype)
    at = torch.randint(5, (rows,), device=HERE)
    calls = {
        "norm": lambda one: fused.norm(x, one),
        "add_norm": lambda one: fused.add_norm(x, residual, one, 0.0),
        "add_norms": lambda one: fused.add_norms(x, residual, nn.Identity(), one, 0.0)[1],
        "embed_norm": lambda one: fused.embed_norm([(table, at), (table, at)], one),
    }
    with torch.no_grad():
        for call in calls.values():
            one, other = call(norm), call(plain)
            assert torch.equal(one, other)
            assert not hasattr(other, "fp8")
            assert fp8.coded(one) is one.fp8
            near_codes(one.fp8, one)
    assert not hasattr(fused.add_norm(x, residual, norm, 0.0), "fp8")  # it learns


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", fused.KINDS)
def test_codes_of_activations(kind: Activation, gated: bool, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch)
    for rows, width, tile in ((1, 16, 4096), (9, 40, 4096), (21, 100, 512)):
        monkeypatch.setattr(fp8, "TILE", tile)
        y, added = drawn(rows, width * (2 if gated else 1)).detach(), drawn(width * (2 if gated else 1)).detach()
        found = fp8.activate(y, added if bias else None, kind, gated)
        near_codes(found, eager.activate(y + added if bias else y, kind, gated))


def test_codes_of_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch)
    x = drawn(7, 48).detach()
    x[1], x[2], x[3, 5], x[4] = 0.0, 1e-9 * x[2], 1e5, 1e30 * x[4]
    near_codes(fp8.coded(x), x)
    near_codes(fp8.coded(x.T.contiguous().T), x)
    assert (fp8.coded(x)[0][1].float() == 0).all()


@pytest.mark.parametrize("change", [{}, {"pre_norm": True, "gated": True, "first_norm": False}], ids=["post", "pre"])
@torch.no_grad()
def test_an_encoder_in_eight_bits(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product but attention's last finds its codes; by the programs as by the plain expressions."""
    sizes: dict[str, Any] = {"width": 32, "head_width": 16, "ff_width": 48, "embeddings": EmbeddingConfig(width=32)}
    dtype = torch.bfloat16 if HERE.type == "cuda" else torch.float32
    encoder = Encoder(replace(GOOD, **sizes, **change)).to(HERE, dtype).eval()
    for parameter in encoder.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    batch = Batch.from_ids([[1, 2, 3], [4], [5, 6, 7, 8]]).to(HERE)
    exact = encoder(batch)
    to_fp8(encoder)
    made: list[str] = []
    program = fp8._programmed
    monkeypatch.setattr(fp8, "_programmed", lambda *call: made.append(call[2]) or program(*call))
    fast = encoder(batch)
    assert made == ["identity", "gelu"] * 2
    with disable("triton.fused"):
        slow = encoder(batch)
    assert not hasattr(slow, "fp8")
    assert sum(isinstance(one, Fp8Linear) for one in encoder.modules()) == 8
    for one, other, most in ((fast, slow, 0.05), (slow, exact, 0.08)):
        assert 0 < float((one - other).norm() / other.norm()) < most


@pytest.mark.parametrize("what", ["first", "last", "norm"])
def test_embed_norm_with_gradients_is_the_plain_expression(what: str) -> None:
    norm, at = normed(8, True), torch.tensor([4, 0], device=HERE)
    tables = [(nn.Embedding(5, 8, device=HERE).requires_grad_(False), at) for _ in range(2)]
    leaves = {"first": tables[0][0].weight, "last": tables[1][0].weight, "norm": norm.weight}
    norm.requires_grad_(False)
    assert not fused.embed_norm(tables, norm).requires_grad
    leaves[what].requires_grad_()
    (grad,) = torch.autograd.grad(fused.embed_norm(tables, norm).sin().sum(), leaves[what])
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("width", [24, 300, 1100])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_without_gradients_it_is_the_same_to_the_bit(dtype: torch.dtype, width: int) -> None:
    """And nothing is kept for a way back: of no module, nor where nothing is to be learnt."""
    x, residual, norm = drawn(13, width, dtype=dtype), drawn(13, width, dtype=dtype), normed(width, True, dtype)
    calls = {
        "norm": lambda *given: (fused.norm(given[0], norm),),
        "add_norm": lambda *given: (fused.add_norm(*given, norm, 0.0),),
        "add_norms": lambda *given: fused.add_norms(*given, nn.Identity(), norm, 0.0),
        "dropout": lambda *given: fused.add_norms(*given, nn.Identity(), norm, 0.3),
    }

    def call(name: str) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        return calls[name](x, residual)

    for name in calls:
        learnt = call(name)
        with torch.no_grad():
            read = call(name)
        norm.requires_grad_(False)
        x.requires_grad_(False)
        residual.requires_grad_(False)
        frozen = call(name)
        for parameter in (x, residual, *norm.parameters()):
            parameter.requires_grad_()
        for one, two, three in zip(learnt, read, frozen, strict=True):
            assert one.grad_fn is not None
            assert two.grad_fn is None
            assert three.grad_fn is None
            assert torch.equal(one, two)
            assert torch.equal(one, three)


@pytest.mark.parametrize("width", [24, 300, 1100])
def test_tiles_of_rows(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are taken at a time: the same is dropped, and the rest is alike, there and back."""
    x, residual, norm = drawn(21, width), drawn(21, width), normed(width, True)
    up = torch.randn(2, 21, width, device=HERE)

    def step() -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        both = fused.add_norms(x, residual, nn.Identity(), norm, 0.3)
        return *both, *torch.autograd.grad(both, (x, residual, *norm.parameters()), tuple(up))

    block = fused._power_of_2(width)
    found = []
    for tall in (1, 2, 4, 8):
        monkeypatch.setattr(fused, "NORM_TILE", (tall * block, tall * block))
        assert fused._norm_sizes(width, 0)["TALL"] == tall
        found.append(step())
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one == 0, two == 0)
            assert_close(one, two, atol=1e-5, rtol=1e-5)


def normed(width: int, bias: bool, dtype: torch.dtype = torch.float32) -> nn.LayerNorm:
    """A norm whose weights show."""
    norm = nn.LayerNorm(width, eps=1e-6, bias=bias, device=HERE, dtype=dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written to holds the worst."""
    for name in ("empty", "empty_like"):
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, plain=plain, **k: plain(*a, **k).fill_(torch.nan))


def test_add_norms_of_two_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under autocast: the sum stays single, what is read next is half."""
    x, residual, norm = drawn(9, 16, dtype=torch.bfloat16), drawn(9, 16), nn.LayerNorm(16, device=HERE)
    total, normed = fused.add_norms(x, residual, nn.Identity(), norm, 0.0)
    assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(total, x + residual)
    up = torch.randn(9, 16, device=HERE), torch.randn(9, 16, device=HERE).bfloat16()
    grads = torch.autograd.grad((total, normed), (x, residual, norm.weight), up)
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]
    plain = F.layer_norm(total.detach().requires_grad_(), (16,))
    assert_close(normed.float(), plain, atol=2e-2, rtol=2e-2)
    again = (x + residual).detach().requires_grad_()
    (wanted,) = torch.autograd.grad((again * 1.0, F.layer_norm(again, (16,))), again, (up[0], up[1].float()))
    assert_close(grads[1], wanted, atol=1e-5, rtol=1e-5)
    assert_close(grads[0], wanted.bfloat16())


def test_what_add_norms_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, norm = (
        torch.ones(13, 32, device=HERE, requires_grad=True),
        drawn(13, 32),
        nn.LayerNorm(32, device=HERE),
    )
    total, normed = fused.add_norms(x, residual, nn.Identity(), norm, 0.3)
    dx, dresidual = torch.autograd.grad((total, normed), (x, residual), (torch.randn_like(x), torch.randn_like(x)))
    kept = dx != 0
    assert 0.5 < kept.float().mean().item() < 0.9
    scale = 65536 / (65536 - round(0.3 * 65536))
    assert_close(total, residual + kept * scale)
    assert_close(normed, norm(total), atol=1e-5, rtol=1e-5)
    assert_close(dx, dresidual * kept * scale)


def test_add_norm_of_two_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under autocast: what is added is half, the first residual and the norm's weights are not."""
    x, residual, norm = drawn(9, 16, dtype=torch.bfloat16), drawn(9, 16), nn.LayerNorm(16, device=HERE)
    out = fused.add_norm(x, residual, norm, 0.0)
    assert out.dtype == torch.bfloat16
    upstream = torch.randn(9, 16, device=HERE).bfloat16()
    grads = torch.autograd.grad(out, (x, residual, norm.weight), upstream)
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]
    plain = F.layer_norm(residual + x.float(), (16,))
    assert_close(out.float(), plain, atol=2e-2, rtol=2e-2)
    assert_close(grads[1], torch.autograd.grad(plain, residual, upstream.float())[0], atol=1e-5, rtol=1e-5)


def test_what_add_norm_drops() -> None:
    rows, width, rate = 64, 256, 0.3
    x = torch.ones(rows, width, device=HERE, requires_grad=True)
    residual = drawn(rows, width)
    norm = nn.LayerNorm(width, device=HERE)
    out = fused.add_norm(x, residual, norm, rate)
    dx, dresidual = torch.autograd.grad(out, (x, residual), torch.randn_like(out))
    kept = dx != 0  # what is dropped on the way there has no gradient on the way back, and the other way round
    scale = 65536 / (65536 - round(rate * 65536))
    assert_close(out, F.layer_norm(residual + kept * scale, (width,)), atol=1e-5, rtol=1e-5)
    assert_close(dx, dresidual * kept * scale)
    share = kept.float().mean().item()
    assert abs(share - (1 - rate)) < 4 * math.sqrt(rate * (1 - rate) / kept.numel())
    # Rows and columns differ from each other: by as much as independent ones do.
    for one in (kept, kept.T):
        same = (one[:, None] == one[None]).float().mean(-1)[~torch.eye(len(one), dtype=torch.bool, device=HERE)]
        assert abs(same.mean().item() - (rate**2 + (1 - rate) ** 2)) < 0.02
        assert same.max().item() < 0.95


def test_the_seed_decides_what_is_dropped() -> None:
    x, residual, norm = drawn(3, 16), drawn(3, 16), nn.LayerNorm(16, device=HERE)

    def once(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.stack([fused.add_norm(x, residual, norm, 0.5) for _ in range(2)])

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))
    assert not torch.equal(*once(1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", fused.KINDS)
def test_expand(activation: Activation, gated: bool, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, width, dtype in ((9, 20, torch.float32), (9, 20, torch.bfloat16)):
        x = drawn(rows, 6, dtype=dtype)
        linear = nn.Linear(6, width, bias=bias, device=HERE, dtype=dtype)
        wanted = [x, *linear.parameters()]
        compared(lambda ops: ops.expand(x, linear, activation, gated), wanted, dtype)  # noqa: B023


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", fused.KINDS)
def test_expand_without_gradients(activation: Activation, gated: bool, bias: bool) -> None:
    """By the same program; or by the framework's product, which ends with the activation before it is rounded."""
    for dtype in NEAR:
        x, linear = drawn(9, 6, dtype=dtype), nn.Linear(6, 20, bias=bias, device=HERE, dtype=dtype)
        learnt = fused.expand(x, linear, activation, gated).detach()
        with torch.no_grad():
            read = fused.expand(x, linear, activation, gated)
        assert read.dtype == dtype
        if bias and not gated and fused._in_the_product(x, linear, activation):
            near = max(5e-4, NEAR[dtype]["atol"])  # of the two GELUs, a CPU's product ends with the other
            assert_close(read, learnt, atol=near, rtol=near)
        else:
            assert torch.equal(read, learnt)


def test_gelu_is_the_exact_one() -> None:
    """Within 1e-6 of that by erf in double precision, and so is its slope; beyond the largest values too."""
    x = torch.cat([torch.linspace(-12, 12, 24001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])]).to(HERE)[:, None]
    linear = nn.Linear(1, 1, device=HERE)  # which leaves all as it is
    with torch.no_grad():
        linear.weight.fill_(1.0)
        linear.bias.zero_()
    x.requires_grad_()
    out = fused.expand(x, linear, "gelu", gated=False)
    (slope,) = torch.autograd.grad(out.sum(), x)
    wide = x.detach().double().requires_grad_()
    exact = 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
    assert_close(out.double(), exact, atol=1e-6, rtol=1e-7)
    assert_close(slope.double(), torch.autograd.grad(exact.sum(), wide)[0], atol=1e-6, rtol=1e-7)
    far = torch.tensor([[-3e38], [3e38], [-1e4], [1e4]], device=HERE, requires_grad=True)
    out = fused.expand(far, linear, "gelu", gated=False)
    assert torch.equal(out.detach(), far.detach().clamp(min=0.0))
    assert torch.autograd.grad(out.sum(), far)[0].tolist() == [[0.0], [1.0], [0.0], [1.0]]


def test_expand_over_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused._Activate, "BLOCK", 16)
    x, linear = drawn(21, 6), nn.Linear(6, 2 * 40, device=HERE)
    compared(lambda ops: ops.expand(x, linear, "gelu", True), [x, *linear.parameters()], torch.float32)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("vocab", "block"), [(100, 4096), (64, 32)])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_surprise(vocab: int, block: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused._FusedLinearCrossEntropy, "BLOCK", block)
    x, words = drawn(7, 8, dtype=dtype), drawn(vocab, 8)
    added = drawn(vocab) if bias else None
    targets = torch.randint(vocab, (7,), device=HERE)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 0.0, 1.0], device=HERE)
    slow = F.cross_entropy(F.linear(x.float(), words, added), targets, reduction="none") @ weights
    fast = fused.fused_linear_cross_entropy(x, words, added, targets, weights)
    wanted = [x, words, *([] if added is None else [added])]
    assert_close(fast, slow, **NEAR[dtype])
    ours, theirs = (torch.autograd.grad(loss * 3.0, wanted) for loss in (fast, slow))
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        scale = float(other.float().abs().max())
        assert_close(one.float(), other.float(), atol=NEAR[dtype]["atol"] * max(1.0, scale), rtol=0)
    assert (ours[0][2] == 0).all()
    with torch.no_grad():
        assert_close(fused.fused_linear_cross_entropy(x, words, added, targets, weights), fast.detach())


@pytest.mark.parametrize("large", [300.0, float("nan"), float("inf")])
def test_a_row_without_weight_adds_nothing(large: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(2, 4)
    with torch.no_grad():
        x[1] = large
    words, targets = drawn(70, 4), torch.tensor([3, 0], device=HERE)

    def step(weights: list[float]) -> tuple[Tensor, Tensor]:
        loss = fused.fused_linear_cross_entropy(x, words, None, targets, torch.tensor(weights, device=HERE))
        return loss, torch.autograd.grad(loss, x)[0]

    loss, grad = step([1.0, 0.0])
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert (grad[1] == 0).all()
    # And what has weight is not made finite by force.
    assert step([1.0, 1.0])[0].isfinite().item() == math.isfinite(large)


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_a_model_of_fused_parts(gated: bool, pre_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = replace(GOOD, activation="gelu", gated=gated, pre_norm=pre_norm)
    model = Model(
        cfg,
        {"mlm": HeadConfig(kind="vocabulary", outputs=50, dense=8, activation="gelu", norm=NormConfig(), tied=True)},
    ).to(HERE)
    batch = Batch.from_ids([[1, 2, 3], [4], [5, 6, 7, 8]]).to(HERE)
    targets, weights = torch.randint(50, (8,), device=HERE), torch.rand(8, device=HERE)

    def step() -> tuple[Tensor, ...]:
        words = model.encoder.embeddings.words.weight
        loss = model.head("mlm").fused_linear_cross_entropy(model.hidden(batch), words, targets, weights)
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    fast = step()
    with disable("triton.fused"):
        slow = step()
    for one, other in zip(fast, slow, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-4)
    logits = model(batch, "mlm").float()
    assert_close(slow[0], F.cross_entropy(logits, targets, reduction="none") @ weights, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(HERE.type != "cuda", reason="graphs are a GPU's")
def test_a_recorded_graph_draws_by_the_seed() -> None:
    x, residual, norm = drawn(64, 32, dtype=torch.bfloat16), drawn(64, 32), nn.LayerNorm(32, device=HERE)

    def step() -> tuple[Tensor, ...]:
        out = fused.add_norm(x, residual, norm, 0.5)
        return out, *torch.autograd.grad(out.float().sin().sum(), (x, residual))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()

    def played(seed: int) -> list[Tensor]:
        torch.cuda.manual_seed(seed)
        graph.replay()
        return [one.clone() for one in made]

    once, other, again = played(1), played(2), played(1)
    torch.cuda.manual_seed(1)
    for one, two, three, unrecorded in zip(once, other, again, step(), strict=True):
        assert torch.equal(one, three)
        assert not torch.equal(one, two)
        assert torch.equal(one, unrecorded)


def test_a_model_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the products all is half; what is trained stays single, and learns the same."""
    cfg = replace(GOOD, dropout=0.1)
    model = Model(cfg, {"mlm": HeadConfig(kind="vocabulary", outputs=50, dense=8, norm=NormConfig(), tied=True)}).to(
        HERE
    )
    batch = Batch.from_ids([[1, 2, 3], [4]]).to(HERE)
    targets, weights = torch.randint(50, (4,), device=HERE), torch.ones(4, device=HERE)
    words = model.encoder.embeddings.words.weight
    for training in (True, False):
        model.train(training)
        with torch.autocast(HERE.type, torch.bfloat16, cache_enabled=False):
            hidden = model.hidden(batch)
            loss = model.head("mlm").fused_linear_cross_entropy(hidden, words, targets, weights)
            grads = torch.autograd.grad(loss, list(model.parameters()))
        assert hidden.dtype == torch.bfloat16
        assert loss.dtype == torch.float32
        assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)
    with disable("triton.fused"):
        plain = model.head("mlm").fused_linear_cross_entropy(model.hidden(batch), words, targets, weights)
    assert_close(loss, plain, atol=0, rtol=2e-2)
    for one, other in zip(grads, torch.autograd.grad(plain, list(model.parameters())), strict=True):
        assert_close(one, other, atol=0.05 * max(0.1, float(other.abs().max())), rtol=0)


POOLED = [1, 2, 0, 17, 129, 300, 0, 0]  # tokens; recorded batches have texts of none, between others and behind all


def pooled_plainly(hidden: Tensor, mode: str) -> Tensor:
    """Of one text, as it is defined."""
    n = torch.arange(1, len(hidden) + 1, dtype=hidden.dtype, device=HERE)[:, None]
    if not len(hidden):
        return hidden.new_zeros(hidden.shape[1])
    if mode == "max":
        return hidden.max(dim=0).values
    if mode == "weightedmean":
        return (hidden * n).sum(0) / n.sum()
    return hidden.sum(0) / (len(hidden) if mode == "mean" else math.sqrt(len(hidden)))


@pytest.mark.parametrize("width", [5, 200])
@pytest.mark.parametrize("mode", fused.POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_pooled(dtype: torch.dtype, mode: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch)
    hidden = drawn(sum(POOLED), width, dtype=dtype).detach()
    ends = torch.tensor([0, *POOLED], device=HERE).cumsum(0).int()
    fast = fused.pool(hidden, ends, mode)
    assert (fast.dtype, fast.shape) == (dtype, (len(POOLED), width))
    slow = torch.stack([pooled_plainly(one, mode) for one in hidden.double().split(POOLED)])
    near = {torch.float32: 2e-6, torch.float16: 2e-3}[dtype]  # a rounding, of values of up to 5
    assert_close(fast.double(), slow, atol=near, rtol=near)
    scattered = hidden.T.contiguous().T
    assert torch.equal(fused.pool(scattered, ends, mode), fast)
    for one, found in zip(hidden.split(POOLED), fast, strict=True):  # wherever it lies
        alone = fused.pool(one, torch.tensor([0, len(one)], device=HERE).int(), mode)
        assert torch.equal(alone[0], found)


@pytest.mark.parametrize("mode", fused.POOLS)
def test_pooled_whatever_neighbours_hold(mode: str) -> None:
    """And what is no number in a text is not hidden."""
    hidden = drawn(40, 8).detach()
    ends = torch.tensor([0, 3, 3, 20, 40], device=HERE).int()
    wanted = fused.pool(hidden, ends, mode)
    hidden[1], hidden[39] = torch.nan, torch.inf
    found = fused.pool(hidden, ends, mode)
    assert torch.equal(found[1:3], wanted[1:3])
    assert found[0].isnan().all()
    assert not found[3].isfinite().any()


@pytest.mark.parametrize("modes", ["max", ("mean", "weightedmean"), fused.POOLS], ids=str)
def test_pooling_by_the_program(modes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ends alone: what the host says of lengths may be bounds. With prompts left out, by the plain expressions."""
    batch = Batch.from_ids([[1] * n for n in (3, 1, 18)]).to(HERE)
    ends = F.pad(batch.cu_seqlens, (0, 2), value=22)
    roomy = replace(batch, cu_seqlens=ends, lengths=(32,) * 5)
    hidden = drawn(22, 6).detach()
    with disable("triton.fused.pooling"):
        wanted = Pooling(modes)(hidden.double(), roomy)
        skipped = Pooling(modes, include_prompt=False)(hidden, batch, [1, 0, 2])
    assert torch.equal(Pooling(modes, include_prompt=False)(hidden, batch, [1, 0, 2]), skipped)
    monkeypatch.setattr(Batch, "text_of_token", None)
    if HERE.type == "cpu":
        monkeypatch.setattr(
            Pooling, "means", lambda self, hidden, batch: fused.pool(hidden, batch.cu_seqlens, "mean").numpy()
        )
    for pool in (Pooling(modes), Pooling(modes, include_prompt=False)):
        assert_close(pool(hidden, roomy).double(), wanted, atol=2e-6, rtol=2e-6)
