"""What lies between the matrix products of a training step, in one pass over memory each instead of many.

    add_norm    norm(residual + dropout(x)), there and back
    add_norms   the same, and the norm that the next part of a block begins with
    expand      activation(linear(x)), gated or not; the bias and its gradient on the way
    surprise    the cross-entropy over a vocabulary: logits stay in half precision, and give way to their gradient

On GPUs in half precision, with Triton, these are programs of our own (`fused_kernels.py`); everywhere else, the plain
expressions that stand beside them here. Random numbers follow from `torch.cuda.manual_seed`, in recorded graphs too.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bertie.config import Activation

enabled = True  # whether our own programs are used where they can be
sums = False  # whether they are for a residual sum and the norm after it, too; that has not run on a GPU yet

WIDEST = 8192  # of a row that a program holds as a whole
ALIGNED = 64  # logits of a row, rounded up: products of other sizes take up to twice as long
HALF = (torch.bfloat16, torch.float16)
KINDS = ("gelu", "gelu_tanh", "relu", "silu")  # activations that the programs know
# What was fastest on an H200 (python -m benchmarks.fused): warps of a norm's program for rows of up to 1,024, there and
# back; warps and rows of an activation's tile, there and back; programs a processor that share the rows on a way back.
NORM_WARPS, NORM_SHARE = (8, 4), 32
TILE_WARPS, TILE_ROWS, TILE_SHARE = (2, 4), (2, 1), 16


def takes(x: Tensor) -> bool:
    """Whether our own programs are to compute what follows from x."""
    return enabled and x.is_cuda and precision(x) in HALF and _has_triton()


def precision(x: Tensor) -> torch.dtype:
    """The precision in which a product of x is computed here."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


# --- residual, dropout, norm ---


def add_norm(x: Tensor, residual: Tensor, norm: nn.Module, dropout: float) -> Tensor:
    """norm(residual + dropout(x)): (T, D), (T, D) -> (T, D).

    >>> add_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]]), nn.LayerNorm(2), 0.0).round().tolist()
    [[1.0, -1.0]]
    """
    if takes(x) and isinstance(norm, nn.LayerNorm) and x.shape[-1] <= WIDEST:
        out: Tensor
        out, _ = _AddNorm.apply(x, residual, norm.weight, norm.bias, norm.eps, dropout, False)  # type: ignore[no-untyped-call]
        return out
    plain: Tensor = norm(residual + F.dropout(x, dropout))
    return plain


def add_norms(x: Tensor, residual: Tensor, post: nn.Module, pre: nn.Module, dropout: float) -> tuple[Tensor, Tensor]:
    """post(residual + dropout(x)), which is added to later, and pre of it, which is read next: (T, D) all.

    Mostly one of the two norms is `nn.Identity`.

    >>> x, residual = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]])
    >>> total, normed = add_norms(x, residual, nn.Identity(), nn.LayerNorm(2), 0.0)
    >>> total.tolist(), normed.round().tolist()
    ([[4.0, 2.0]], [[1.0, -1.0]])
    """
    alone = isinstance(post, nn.Identity) and isinstance(pre, nn.LayerNorm)
    if sums and alone and takes(x) and x.shape[-1] <= WIDEST:
        normed, total = _AddNorm.apply(x, residual, pre.weight, pre.bias, pre.eps, dropout, True)  # type: ignore[no-untyped-call]
        return total, normed
    total = add_norm(x, residual, post, dropout)
    return total, pre(total)


class _AddNorm(torch.autograd.Function):
    """The norm, and with `keep` the sum that it is of."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        dropout: float,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        from bertie.kernels import fused_kernels as programs

        x, residual = x.contiguous(), residual.contiguous()
        rows, width = x.shape
        out = torch.empty_like(x)
        # In the wider of the two precisions, as torch adds.
        total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype)) if keep else None
        mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        # Drawn on the device, so that a recorded graph draws anew each time it is played.
        seed = torch.randint(1 << 62, (1,), device=x.device) if dropout else None
        block = _power_of_2(width)
        ctx.dropped, ctx.scale = _dropped(dropout)
        with _launching(x):
            programs.add_norm_forward[(-(-rows // programs.ROWS),)](
                *(x, residual, weight, bias, out, total, mean, rstd, seed, rows, width, eps, ctx.dropped, ctx.scale),
                BIAS=bias is not None,
                DROP=seed is not None,
                SUM=keep,
                BLOCK=block,
                num_warps=_warps(block, NORM_WARPS[0]),
            )
        ctx.dtypes = x.dtype, residual.dtype
        parts = (None, None, total) if keep else (x, residual, None)
        ctx.save_for_backward(*parts, weight, bias, mean, rstd, seed)
        return out, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor, sum_up: Tensor | None) -> Any:
        from bertie.kernels import fused_kernels as programs

        x, residual, total, weight, bias, mean, rstd, seed = ctx.saved_tensors
        up = up.contiguous()
        sum_up = None if sum_up is None else sum_up.contiguous()
        rows, width = up.shape
        dtype, residual_dtype = ctx.dtypes
        down = torch.empty_like(up, dtype=residual_dtype)
        dx = torch.empty_like(up, dtype=dtype) if seed is not None else None
        count = min(-(-rows // programs.ROWS), _programs(up.device, NORM_SHARE))
        parts = torch.empty(2, count, width, dtype=torch.float32, device=up.device)
        block = _power_of_2(width)
        with _launching(up):
            programs.add_norm_backward[(count,)](
                *(up, x, residual, total, sum_up, weight, mean, rstd, seed, dx, down, parts[0], parts[1]),
                *(rows, width, ctx.dropped, ctx.scale),
                DROP=seed is not None,
                SUM=total is not None,
                BLOCK=block,
                num_warps=_warps(block, NORM_WARPS[1]),
            )
        dweight, dbias = parts.sum(1)
        return (
            down.to(dtype) if dx is None else dx,
            down,
            dweight.to(weight.dtype),
            None if bias is None else dbias.to(bias.dtype),
            *(None, None, None),
        )


def _dropped(dropout: float) -> tuple[int, float]:
    """Of 65,536 values of sixteen bits, how many stand for a dropped one; and what the rest is multiplied by."""
    dropped = round(dropout * 65536)
    return dropped, 65536 / (65536 - dropped)


# --- the first half of a feed-forward ---


def expand(x: Tensor, linear: nn.Module, activation: Activation, gated: bool) -> Tensor:
    """activation(linear(x)): (T, D) -> (T, F). If it is gated, the first F of 2F pass it and multiply the second.

    >>> linear = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.constant_(linear.weight, 3.0)
    >>> expand(torch.ones(1, 1), linear, "relu", gated=True).tolist()
    [[9.0]]
    """
    if takes(x) and isinstance(linear, nn.Linear) and activation in KINDS:
        out: Tensor = _Activate.apply(F.linear(x, linear.weight), linear.bias, activation, gated)  # type: ignore[no-untyped-call]
        return out
    from bertie.nn.norm import activation as function

    y: Tensor = linear(x)
    if gated:
        act, factor = y.chunk(2, dim=-1)  # (T, 2F) -> (T, F), (T, F)
        return function(activation)(act) * factor
    return function(activation)(y)


class _Activate(torch.autograd.Function):
    BLOCK = 1024

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: str, gated: bool) -> Tensor:
        from bertie.kernels import fused_kernels as programs

        x = x.contiguous()
        rows, width = len(x), x.shape[1] // (2 if gated else 1)
        out = x.new_empty(rows, width)
        ctx.kind, ctx.gated = kind, gated
        ctx.block = min(_Activate.BLOCK, _power_of_2(width))
        with _launching(x):
            programs.activate_forward[(-(-rows // TILE_ROWS[0]), -(-width // ctx.block))](
                *(x, bias, out, rows, width),
                KIND=kind,
                GATED=gated,
                BIAS=bias is not None,
                TALL=TILE_ROWS[0],
                BLOCK=ctx.block,
                num_warps=TILE_WARPS[0],
            )
        ctx.save_for_backward(x, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> Any:
        from bertie.kernels import fused_kernels as programs

        x, bias = ctx.saved_tensors
        up = up.contiguous()
        rows, width = up.shape
        down = torch.empty_like(x)
        count = min(-(-rows // TILE_ROWS[1]), _programs(x.device, TILE_SHARE))
        sums = None if bias is None else torch.empty(count, x.shape[1], dtype=torch.float32, device=x.device)
        with _launching(x):
            programs.activate_backward[(count, -(-width // ctx.block))](
                *(up, x, bias, down, sums, rows, width),
                KIND=ctx.kind,
                GATED=ctx.gated,
                BIAS=bias is not None,
                TALL=TILE_ROWS[1],
                BLOCK=ctx.block,
                num_warps=TILE_WARPS[1],
            )
        return down, None if sums is None else sums.sum(0).to(bias.dtype), None, None


# --- cross-entropy over a vocabulary ---


def surprise(x: Tensor, words: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor) -> Tensor:
    """() the sum over N of weight · cross-entropy of a target in logits x·words + bias.

    x (N, D), words (V, D), bias (V,), targets (N,), weights (N,) in float32. A row of weight 0 adds nothing to it or
    to its gradient, whatever it holds.

    >>> none = torch.zeros(1, 3)
    >>> surprise(none, torch.ones(10, 3), None, torch.tensor([7]), torch.tensor([2.0])).exp().round()     # 10²
    tensor(100.)
    """
    if takes(x):
        total: Tensor = _Surprise.apply(x.to(precision(x)), words, bias, targets, weights)  # type: ignore[no-untyped-call]
        return total
    logits = F.linear(x, words, bias)
    with torch.autocast(x.device.type, enabled=False):
        logits = torch.where(weights[:, None] > 0, logits.float(), 0.0)
        return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()


class _Surprise(torch.autograd.Function):
    BLOCK = 4096

    @staticmethod
    def forward(ctx: Any, x: Tensor, words: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor) -> Tensor:
        from bertie.kernels import fused_kernels as programs

        vocab = len(words)
        room = -(-vocab // ALIGNED) * ALIGNED
        table = F.pad(words.to(x.dtype), (0, 0, 0, room - vocab))  # (V', D)
        logits = x @ table.T  # (N, V')
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        with _launching(x):
            programs.surprise[(len(x),)](
                *(logits, bias, targets, weights, losses),
                VOCAB=vocab,
                STRIDE=room,
                GRAD=any(ctx.needs_input_grad),
                BIAS=bias is not None,
                BLOCK=min(_Surprise.BLOCK, _power_of_2(room)),
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


# --- launching ---


def _launching(x: Tensor) -> Any:
    """Triton launches on the current device, which need not be that of x."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _power_of_2(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def _warps(block: int, narrow: int) -> int:
    """Of a program that holds a row of `block`, where one of up to 1,024 has `narrow`."""
    return min(16, narrow * max(1, block // 1024))


@cache
def _programs(device: torch.device, share: int) -> int:
    """Programs that share the rows of a way back: several for each of a GPU's processors."""
    return share * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
