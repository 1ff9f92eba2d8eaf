"""Fused Triton kernels for what lies between the matrix multiplications: one pass over memory instead of many.

    add_norm    norm(residual + dropout(x)), forward and backward
    add_norms   the same, followed by the norm at the start of the next sublayer
    norm        a norm alone
    embed_norm  LayerNorm of a sum of embeddings
    expand      activation(linear(x)), gated or not, with the bias and its gradient
    fused_linear_cross_entropy    cross-entropy over a vocabulary: logits stay in half precision and are overwritten
                                  by their gradient
    pool        one row per text from one row per token; inference only, also in float32

The kernels are in `fused_kernels.py`, their reference is `ops/torch/eager.py`, and `ops/dispatch.py` chooses. Random
numbers follow from `torch.cuda.manual_seed`, in recorded CUDA graphs too.

Where `fp8` is set on a norm module, an fp8 matrix multiplication reads its output: the kernels then also write the
quantized values of `fp8.py`, which the returned tensor carries as its attribute `fp8`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bertie.config import Activation
from bertie.ops.contracts import compute_dtype, needs_grad
from bertie.ops.torch import eager

Coded = tuple[Tensor, Tensor]  # e4m3 (T, K), and what each row of it is multiplied by, float32 (T, 1)

WIDEST = 8192  # of a row that a program holds as a whole
ALIGNED = 64  # logits of a row, rounded up: products of other sizes take up to twice as long
HALF = (torch.bfloat16, torch.float16)
KINDS = ("gelu", "gelu_tanh", "relu", "silu")  # activations that the programs know
# What was fastest on an H200 (python -m benchmarks.fused), there and back: values of a norm's tile of whole rows, and
# warps for rows of 1,024; values and warps of an activation's tile; and programs a processor that share the rows on a
# way back.
NORM_TILE, NORM_WARPS, NORM_SHARE = (8192, 8192), (4, 4), 16
TILE, TILE_WARPS, TILE_SHARE = (2048, 1024), (2, 4), 16
POOLS = ("max", "mean", "mean_sqrt_len_tokens", "weightedmean")  # what is pooled by a program
POOL_ROWS, POOL_BLOCK, POOL_WARPS = 16, 128, 1  # tokens read at once, columns and warps of a program


# --- residual, dropout, norm ---


def add_norm(x: Tensor, residual: Tensor, norm: nn.Module, dropout: float) -> Tensor:
    """As `eager.add_norm`."""
    if _is_layer_norm(norm):
        return _normed(x, residual, norm, dropout, False)[0]
    return eager.add_norm(x, residual, norm, dropout)


def add_norms(x: Tensor, residual: Tensor, post: nn.Module, pre: nn.Module, dropout: float) -> tuple[Tensor, Tensor]:
    """As `eager.add_norms`."""
    if isinstance(post, nn.Identity) and _is_layer_norm(pre):
        normed, total = _normed(x, residual, pre, dropout, True)
        assert total is not None
        return total, normed
    total = add_norm(x, residual, post, dropout)
    return total, pre(total)


def norm(x: Tensor, module: nn.Module) -> Tensor:
    """As `eager.norm`."""
    if _is_layer_norm(module) and not torch.is_autocast_enabled(x.device.type):
        return _normed(x, None, module, 0.0, False)[0]
    return eager.norm(x, module)


def _is_layer_norm(module: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """Whether the kernel computes what this module does; the others are `nn.Identity`."""
    return isinstance(module, nn.LayerNorm)


def _normed(
    x: Tensor, residual: Tensor | None, module: nn.LayerNorm, dropout: float, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """The norm of the sum, and with `keep` the sum."""
    given = (x, residual, module.weight, module.bias, module.eps, dropout, keep)
    if needs_grad(x, residual, module.weight, module.bias):
        both: tuple[Tensor, Tensor | None] = _AddNorm.apply(*given)  # type: ignore[no-untyped-call]
        return both
    codes = _room(module, len(x), x)
    out, total, *_ = _AddNorm.run(*given, learn=False, codes=codes)
    return _with(codes, out), total


def _room(module: nn.Module, rows: int, like: Tensor) -> Coded | None:
    """For the codes of what a norm returns, where they are wanted."""
    return room(rows, like.shape[1], like.device) if getattr(module, "fp8", False) else None


def room(rows: int, width: int, device: torch.device) -> Coded:
    """For codes, and not filled."""
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty(rows, 1, dtype=torch.float32, device=device)


def _with(codes: Coded | None, x: Tensor) -> Tensor:
    if codes is not None:
        x.fp8 = codes  # type: ignore[attr-defined]
    return x


def embed_norm(tables: Sequence[tuple[nn.Embedding, Tensor]], module: nn.Module) -> Tensor:
    """As `eager.embed_norm`, without gradients, of up to three tables."""
    if not _is_layer_norm(module) or needs_grad(*(table.weight for table, _ in tables), *module.parameters()):
        return eager.embed_norm(tables, module)
    return _embedded([table.weight for table, _ in tables], [rows for _, rows in tables], module)


def _embedded(weights: list[Tensor], rows: list[Tensor], module: nn.LayerNorm) -> Tensor:
    from bertie.ops.triton import fused_kernels as programs

    count, width = len(rows[0]), weights[0].shape[1]
    out = weights[0].new_empty(count, width)
    codes = _room(module, count, out)
    absent = [None] * (3 - len(weights))
    sizes = _norm_sizes(width, 0)
    with _launching(out):
        programs.embed_norm[(-(-count // sizes["TALL"]),)](
            *(*weights, *absent, *(one.contiguous() for one in rows), *absent, module.weight, module.bias, out),
            *(*(codes or (None, None)), count, width, module.eps),
            SECOND=len(weights) > 1,
            THIRD=len(weights) > 2,
            BIAS=module.bias is not None,
            CODES=codes is not None,
            **sizes,
        )
    return _with(codes, out)


class _AddNorm(torch.autograd.Function):
    """The norm, and with `keep` the sum that it is of."""

    @staticmethod
    def run(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        dropout: float,
        keep: bool,
        *,
        learn: bool,
        codes: Coded | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The two; and if its way back is to be gone: means, their counterparts, and what was drawn from."""
        from bertie.ops.triton import fused_kernels as programs

        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        rows, width = x.shape
        out = torch.empty_like(x)
        total = None
        if keep and residual is not None:  # in the wider of the two precisions, as torch adds
            total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
        mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) if learn else None for _ in range(2))
        # Drawn on the device, so that a recorded graph draws anew each time it is played.
        seed = torch.randint(1 << 62, (1,), device=x.device) if dropout else None
        with _launching(x):
            programs.add_norm_forward[(-(-rows // programs.ROWS),)](
                *(x, residual, weight, bias, out, total, mean, rstd, seed, *(codes or (None, None))),
                *(rows, width, eps, *_dropped(dropout)),
                RESIDUAL=residual is not None,
                BIAS=bias is not None,
                DROP=seed is not None,
                SUM=total is not None,
                KEEP=learn,
                CODES=codes is not None,
                **_norm_sizes(width, 0),
            )
        return out, total, mean, rstd, seed

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        dropout: float,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        out, total, mean, rstd, seed = _AddNorm.run(x, residual, weight, bias, eps, dropout, keep, learn=True)
        ctx.dropped, ctx.scale = _dropped(dropout)
        ctx.dtypes = x.dtype, x.dtype if residual is None else residual.dtype
        ctx.alone = residual is None
        known = x if residual is None else total
        parts = (x, residual, None) if known is None else (None, None, known)
        ctx.save_for_backward(*parts, weight, bias, mean, rstd, seed)
        return out, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor, sum_up: Tensor | None) -> Any:
        from bertie.ops.triton import fused_kernels as programs

        x, residual, total, weight, bias, mean, rstd, seed = ctx.saved_tensors
        up = up.contiguous()
        x, residual, total = (None if one is None else one.contiguous() for one in (x, residual, total))
        sum_up = None if sum_up is None or ctx.alone else sum_up.contiguous()
        rows, width = up.shape
        dtype, residual_dtype = ctx.dtypes
        down = torch.empty_like(up, dtype=residual_dtype)
        dx = torch.empty_like(up, dtype=dtype) if seed is not None else None
        count = min(-(-rows // programs.ROWS), _programs(up.device, NORM_SHARE))
        parts = torch.empty(2, count, width, dtype=torch.float32, device=up.device)
        with _launching(up):
            programs.add_norm_backward[(count,)](
                *(up, x, residual, total, sum_up, weight, mean, rstd, seed, dx, down, parts[0], parts[1]),
                *(rows, width, ctx.dropped, ctx.scale),
                DROP=seed is not None,
                SUM=total is not None,
                SUM_UP=sum_up is not None,
                **_norm_sizes(width, 1),
            )
        dweight, dbias = parts.sum(1)
        return (
            down.to(dtype) if dx is None else dx,
            None if ctx.alone else down,
            dweight.to(weight.dtype),
            None if bias is None else dbias.to(bias.dtype),
            *(None, None, None),
        )


def _norm_sizes(width: int, back: int) -> dict[str, int]:
    block = _power_of_2(width)
    tall = min(8, max(1, NORM_TILE[back] // block))
    warps = NORM_WARPS[back] * block // 1024
    if back and block < 1024:  # so that a column's sum over the rows of a tile is one thread's
        tall = max(1, min(tall, block // 128))
    elif block < 1024:
        warps = NORM_WARPS[back]
    return {"TALL": tall, "BLOCK": block, "num_warps": min(16, max(1, warps))}


def _dropped(dropout: float) -> tuple[int, float]:
    """Of 65,536 values of sixteen bits, how many stand for a dropped one; and what the rest is multiplied by."""
    dropped = round(dropout * 65536)
    return dropped, 65536 / (65536 - dropped)


# --- the first half of a feed-forward ---


def expand(x: Tensor, linear: nn.Module, activation: Activation, gated: bool) -> Tensor:
    """As `eager.expand`."""
    if not isinstance(linear, nn.Linear):  # a quantized layer
        return eager.expand(x, linear, activation, gated)
    learn = needs_grad(x, linear.weight, linear.bias)
    if not learn and not gated and linear.bias is not None and _in_the_product(x, linear, activation):
        return torch._addmm_activation(linear.bias, x, linear.weight.T, use_gelu=activation != "relu")
    y = F.linear(x, linear.weight)
    if learn:
        out: Tensor = _Activate.apply(y, linear.bias, activation, gated)  # type: ignore[no-untyped-call]
        return out
    return _Activate.run(y, linear.bias, activation, gated)


def _in_the_product(x: Tensor, linear: nn.Linear, activation: Activation) -> bool:
    """Whether the framework's product may end with the activation, before anything is rounded.

    Its GELU is the one by tanh, up to 5e-4 from the other: less than what bfloat16 loses where the product is written
    and read again, so that the result lies nearer to the exact one. In float16 that is not so.
    """
    if x.dtype != compute_dtype(x) or linear.weight.dtype != x.dtype:
        return False  # autocast would have to change them
    return activation in ("gelu_tanh", "relu") or (activation == "gelu" and x.dtype == torch.bfloat16)


class _Activate(torch.autograd.Function):
    BLOCK = 1024

    @staticmethod
    def run(x: Tensor, bias: Tensor | None, kind: str, gated: bool) -> Tensor:
        from bertie.ops.triton import fused_kernels as programs

        x = x.contiguous()
        rows, width = len(x), x.shape[1] // (2 if gated else 1)
        out = x.new_empty(rows, width)
        sizes = _tile_sizes(width, 0)
        with _launching(x):
            programs.activate_forward[(-(-rows // sizes["TALL"]), -(-width // sizes["BLOCK"]))](
                *(x, bias, out, rows, width), KIND=kind, GATED=gated, BIAS=bias is not None, **sizes
            )
        return out

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: str, gated: bool) -> Tensor:
        ctx.kind, ctx.gated = kind, gated
        ctx.save_for_backward(x, bias)
        return _Activate.run(x, bias, kind, gated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> Any:
        from bertie.ops.triton import fused_kernels as programs

        x, bias = ctx.saved_tensors
        x, up = x.contiguous(), up.contiguous()
        rows, width = up.shape
        down = torch.empty_like(x)
        sizes = _tile_sizes(width, 1)
        count = min(-(-rows // sizes["TALL"]), _programs(x.device, TILE_SHARE))
        sums = None if bias is None else torch.empty(count, x.shape[1], dtype=torch.float32, device=x.device)
        with _launching(x):
            programs.activate_backward[(count, -(-width // sizes["BLOCK"]))](
                *(up, x, bias, down, sums, rows, width),
                KIND=ctx.kind,
                GATED=ctx.gated,
                BIAS=bias is not None,
                **sizes,
            )
        return down, None if sums is None else sums.sum(0).to(bias.dtype), None, None


def _tile_sizes(width: int, back: int) -> dict[str, int]:
    """Of blocks that fill the width, as far as powers of two do."""
    block = min(_Activate.BLOCK, max(64, width & -width), _power_of_2(width))
    return {"TALL": max(1, TILE[back] // block), "BLOCK": block, "num_warps": TILE_WARPS[back]}


# --- cross-entropy over a vocabulary ---


def fused_linear_cross_entropy(
    x: Tensor, words: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor
) -> Tensor:
    """As `eager.linear_cross_entropy`."""
    total: Tensor = _FusedLinearCrossEntropy.apply(x.to(compute_dtype(x)), words, bias, targets, weights)  # type: ignore[no-untyped-call]
    return total


class _FusedLinearCrossEntropy(torch.autograd.Function):
    BLOCK = 4096

    @staticmethod
    def forward(ctx: Any, x: Tensor, words: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor) -> Tensor:
        from bertie.ops.triton import fused_kernels as programs

        vocab = len(words)
        room = -(-vocab // ALIGNED) * ALIGNED
        table = F.pad(words.to(x.dtype), (0, 0, 0, room - vocab))  # (V', D)
        logits = x @ table.T  # (N, V')
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        with _launching(x):
            programs.fused_linear_cross_entropy[(len(x),)](
                *(logits, bias, targets, weights, losses),
                VOCAB=vocab,
                STRIDE=room,
                GRAD=any(ctx.needs_input_grad),
                BIAS=bias is not None,
                BLOCK=min(_FusedLinearCrossEntropy.BLOCK, _power_of_2(room)),
                num_warps=8,
            )
        ctx.save_for_backward(x, words, bias, table, logits)  # which are the gradient now
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> Any:
        x, words, bias, table, down = ctx.saved_tensors
        vocab = len(words)
        with torch.autocast(x.device.type, enabled=False):
            scaled = (x * up).to(x.dtype)  # cheaper than to multiply the gradient of all logits
            dx = ((down @ table) * up).to(x.dtype)
            dwords = (down.T @ scaled)[:vocab].to(words.dtype)
            dbias = None if bias is None else (down.sum(0, dtype=torch.float32)[:vocab] * up).to(bias.dtype)
        return dx, dwords, dbias, None, None


# --- pooling ---


def pool(hidden: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    """(T, D) -> (B, D) each text's rows pooled by one of `POOLS` (nn/pooling.py has the plain expressions).

    Rows are added in order, in float32, independently of the other texts; an empty text gives zeros.
    """
    from bertie.ops.triton import fused_kernels as programs

    hidden = hidden.contiguous()
    texts, width = len(cu_seqlens) - 1, hidden.shape[1]
    out = torch.empty(texts, width, dtype=hidden.dtype, device=hidden.device)
    with _launching(hidden):
        programs.pool[(texts, -(-width // POOL_BLOCK))](
            *(hidden, cu_seqlens, out, width), MODE=mode, ROWS=POOL_ROWS, BLOCK=POOL_BLOCK, num_warps=POOL_WARPS
        )
    return out


# --- launching ---


def _launching(x: Tensor) -> Any:
    """Triton launches on the current device, which need not be that of x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _power_of_2(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << max(0, n - 1).bit_length()


@cache
def _programs(device: torch.device, share: int) -> int:
    """Programs that share the rows of a way back: several for each of a GPU's processors."""
    return share * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
