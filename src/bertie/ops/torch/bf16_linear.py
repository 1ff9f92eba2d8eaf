"""Linear layers in bf16 on a CPU: mixed precision for training where the CPU multiplies bf16 matrices faster.

`torch.autocast` would also compute everything between two linear layers in bf16, which the compiled kernels do not
support, and round what need not be rounded. Here only the operands and results of GEMMs are rounded; weights,
activations, norms, attention, losses and gradients stay in float32.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from bertie.ops.native import encoder

TRIAL_SECONDS = 60.0
MIN_ROWS = 16  # fewer are bound by reading the weights, which would be rounded first


_TRIAL = """
import torch
for rows, columns in ((64, 768), (768, 64)):
    x = torch.ones(rows, columns, dtype=torch.bfloat16)
    assert torch.mm(x, x.t())[0, 0] == columns and torch.mm(x.t(), x)[0, 0] == rows
"""


@cache
def is_supported() -> bool:
    """Whether this CPU multiplies bf16 matrices faster than those of float32 (AVX512_BF16), and torch does so.

    Both are tried in another process: on some CPUs that report the instructions, torch's kernels kill the process.
    """
    if not encoder.bf16_is_faster():
        return False
    try:
        subprocess.run([sys.executable, "-I", "-c", _TRIAL], capture_output=True, timeout=TRIAL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


class Bf16Linear(TorchFunctionMode):
    """Within this context, `F.linear` and `nn.Linear` multiply float32 tensors on a CPU as bf16."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace `F.linear`, where it applies."""
        if func is F.linear and not kwargs and _accepts(args[0], args[1]):
            return _Linear.apply(args[0], args[1], args[2] if len(args) > 2 else None)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _accepts(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dim() == 2
        and len(x) >= MIN_ROWS
        and len(weight) >= MIN_ROWS
        and x.device.type == "cpu"
        and type(weight) in (Tensor, torch.nn.Parameter)
        and x.dtype == weight.dtype == torch.float32
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rounded, matrix = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(rounded, matrix)
        out = torch.mm(rounded, matrix.t()).float()
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, matrix = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rounded = grad.bfloat16()
        return (
            torch.mm(rounded, matrix).float() if for_x else None,
            torch.mm(rounded.t(), x).float() if for_weight else None,
            grad.sum(0) if for_bias else None,
        )
