"""Fused residual + dropout + LayerNorm, and embeddings + LayerNorm: one pass over memory (`norm_kernels.py`).

The reference is `ops/torch/eager.py`. Random numbers follow from `torch.cuda.manual_seed`, in replayed CUDA graphs too.

Where `fp8` is set on a norm module, an fp8 GEMM reads its output: the kernels then also store the output in fp8 (see
`fp8.py`), which the returned tensor carries as its attribute `fp8`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bertie.ops.contracts import needs_grad
from bertie.ops.torch import eager
from bertie.ops.triton.launch import (
    Fp8Rows,
    device_guard,
    dropout_seed,
    dropout_threshold,
    empty_fp8,
    max_programs,
    next_power_of_2,
)

# Fastest on an H200 (python -m benchmarks.fused), forward and backward: elements of a tile of whole rows, warps for
# rows of 1,024, and programs per multiprocessor of the backward kernel.
TILE, WARPS, PROGRAMS = (8192, 8192), (4, 4), 16


def add_norm(x: Tensor, residual: Tensor, norm: nn.Module, dropout: float) -> Tensor:
    """As `eager.add_norm`."""
    if _is_layer_norm(norm):
        return _add_norm(x, residual, norm, dropout, False)[0]
    return eager.add_norm(x, residual, norm, dropout)


def add_norms(x: Tensor, residual: Tensor, post: nn.Module, pre: nn.Module, dropout: float) -> tuple[Tensor, Tensor]:
    """As `eager.add_norms`."""
    if isinstance(post, nn.Identity) and _is_layer_norm(pre):
        normed, total = _add_norm(x, residual, pre, dropout, True)
        assert total is not None
        return total, normed
    total = add_norm(x, residual, post, dropout)
    return total, pre(total)


def norm(x: Tensor, module: nn.Module) -> Tensor:
    """As `eager.norm`."""
    if _is_layer_norm(module) and not torch.is_autocast_enabled(x.device.type):
        return _add_norm(x, None, module, 0.0, False)[0]
    return eager.norm(x, module)


def embed_norm(tables: Sequence[tuple[nn.Embedding, Tensor]], module: nn.Module) -> Tensor:
    """As `eager.embed_norm`, for inference, with up to three tables."""
    from bertie.ops.triton import norm_kernels as kernels

    weights, ids = [table.weight for table, _ in tables], [rows.contiguous() for _, rows in tables]
    if not _is_layer_norm(module) or needs_grad(*weights, *module.parameters()):
        return eager.embed_norm(tables, module)
    rows, width = len(ids[0]), weights[0].shape[1]
    out = weights[0].new_empty(rows, width)
    fp8 = _fp8_output(module, out)
    absent = [None] * (3 - len(tables))
    blocks = _block_sizes(width, 0)
    with device_guard(out):
        kernels.embedding_norm_forward[(-(-rows // blocks["BLOCK_ROWS"]),)](
            *(*weights, *absent, *ids, *absent, module.weight, module.bias, out),
            *(*(fp8 or (None, None)), rows, width, module.eps),
            HAS_TABLE2=len(tables) > 1,
            HAS_TABLE3=len(tables) > 2,
            HAS_BIAS=module.bias is not None,
            STORE_FP8=fp8 is not None,
            **blocks,
        )
    return _attach_fp8(out, fp8)


def _is_layer_norm(module: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """Whether the kernel computes what this module does; the others are `nn.Identity`."""
    return isinstance(module, nn.LayerNorm)


def _add_norm(
    x: Tensor, residual: Tensor | None, module: nn.LayerNorm, dropout: float, return_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """The norm of residual + dropout(x), and with `return_sum` the sum."""
    arguments = (x, residual, module.weight, module.bias, module.eps, dropout, return_sum)
    if needs_grad(x, residual, module.weight, module.bias):
        outputs: tuple[Tensor, Tensor | None] = _AddNorm.apply(*arguments)  # type: ignore[no-untyped-call]
        return outputs
    fp8 = _fp8_output(module, x)
    out, total, *_ = _AddNorm.run(*arguments, training=False, fp8=fp8)
    return _attach_fp8(out, fp8), total


def _fp8_output(module: nn.Module, like: Tensor) -> Fp8Rows | None:
    return empty_fp8(len(like), like.shape[1], like.device) if getattr(module, "fp8", False) else None


def _attach_fp8(x: Tensor, fp8: Fp8Rows | None) -> Tensor:
    if fp8 is not None:
        x.fp8 = fp8  # type: ignore[attr-defined]
    return x


class _AddNorm(torch.autograd.Function):
    """norm(residual + dropout(x)), and with `return_sum` the sum itself."""

    @staticmethod
    def run(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        dropout: float,
        return_sum: bool,
        *,
        training: bool,
        fp8: Fp8Rows | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Output and sum; and for the backward pass mean, rstd and the dropout seed."""
        from bertie.ops.triton import norm_kernels as kernels

        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        rows, width = x.shape
        out = torch.empty_like(x)
        total = None
        if return_sum and residual is not None:  # in the wider of the two dtypes, as torch adds
            total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
        mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) if training else None for _ in range(2))
        seed = dropout_seed(dropout, x.device)
        with device_guard(x):
            kernels.residual_norm_forward[(-(-rows // kernels.ROWS_PER_PROGRAM),)](
                *(x, residual, weight, bias, out, total, mean, rstd, seed, *(fp8 or (None, None))),
                *(rows, width, eps, *dropout_threshold(dropout)),
                HAS_RESIDUAL=residual is not None,
                HAS_BIAS=bias is not None,
                DROPOUT=seed is not None,
                STORE_SUM=total is not None,
                STORE_STATS=training,
                STORE_FP8=fp8 is not None,
                **_block_sizes(width, 0),
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
        return_sum: bool,
    ) -> tuple[Tensor, Tensor | None]:
        out, total, mean, rstd, seed = _AddNorm.run(x, residual, weight, bias, eps, dropout, return_sum, training=True)
        ctx.dropout = dropout
        ctx.dtypes = x.dtype, x.dtype if residual is None else residual.dtype
        ctx.has_residual = residual is not None
        normalized = x if residual is None else total
        inputs = (x, residual, None) if normalized is None else (None, None, normalized)
        ctx.save_for_backward(*inputs, weight, bias, mean, rstd, seed)
        return out, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dsum: Tensor | None) -> Any:
        from bertie.ops.triton import norm_kernels as kernels

        x, residual, total, weight, bias, mean, rstd, seed = ctx.saved_tensors
        dout = dout.contiguous()
        x, residual, total = (None if saved is None else saved.contiguous() for saved in (x, residual, total))
        dsum = dsum.contiguous() if dsum is not None and ctx.has_residual else None
        rows, width = dout.shape
        dtype, residual_dtype = ctx.dtypes
        dresidual = torch.empty_like(dout, dtype=residual_dtype)
        dx = torch.empty_like(dout, dtype=dtype) if seed is not None else None
        programs = min(-(-rows // kernels.ROWS_PER_PROGRAM), max_programs(dout.device, PROGRAMS))
        partial_sums = torch.empty(2, programs, width, dtype=torch.float32, device=dout.device)
        with device_guard(dout):
            kernels.residual_norm_backward[(programs,)](
                *(dout, x, residual, total, dsum, weight, mean, rstd, seed, dx, dresidual, *partial_sums),
                *(rows, width, *dropout_threshold(ctx.dropout)),
                DROPOUT=seed is not None,
                HAS_SUM=total is not None,
                HAS_DSUM=dsum is not None,
                **_block_sizes(width, 1),
            )
        dweight, dbias = partial_sums.sum(1)
        return (
            dresidual.to(dtype) if dx is None else dx,
            dresidual if ctx.has_residual else None,
            dweight.to(weight.dtype),
            None if bias is None else dbias.to(bias.dtype),
            *(None, None, None),
        )


def _block_sizes(width: int, backward: int) -> dict[str, int]:
    block = next_power_of_2(width)
    rows = min(8, max(1, TILE[backward] // block))
    warps = WARPS[backward] * block // 1024
    if backward and block < 1024:  # one thread then sums a column over the rows of a tile
        rows = max(1, min(rows, block // 128))
    elif block < 1024:
        warps = WARPS[backward]
    return {"BLOCK_ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, warps))}
