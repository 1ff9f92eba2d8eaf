"""Symmetric int8 quantization with one scale per row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_LEVELS = 127  # on each side of zero
_BLOCK = 1 << 18  # values per block


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row symmetrically: (R, …) -> int8 (R, …) and one float32 scale per row (R,).

    The error is at most half the scale. Scales have 16 significant bits, so that code × scale is exact in float32 and
    quantizing again gives the same codes. The largest absolute value of a row sets its scale: scales of least squared
    error, which clip outliers, are no better for rows of a few hundred weights.
    """
    rows = x.detach().cpu().flatten(1)  # (R, n)
    codes, scales = torch.empty(rows.shape, dtype=torch.int8), torch.empty(len(rows))
    for part, code, scale in _blocks(rows, codes, scales):
        exact = part.double()
        mantissa, exponent = torch.frexp(exact.abs().amax(dim=1) / _LEVELS)
        steps = torch.ldexp((mantissa * 2**16).ceil() / 2**16, exponent)
        steps.clamp_(min=2.0**-100)  # rows of zeros or denormals
        code.copy_((exact / steps[:, None]).round_())
        scale.copy_(steps)
    return codes.view(x.shape), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Undo `quantize`: (R, …), (R,) -> float32 (R, …).

    >>> dequantize(*quantize(torch.tensor([[127.0, -2.2]]))).tolist()
    [[127.0, -2.0]]
    """
    rows = torch.empty(codes.shape).flatten(1)
    for part, code, scale in _blocks(rows, codes.flatten(1), scales):
        torch.mul(code.float(), scale[:, None], out=part)
    return rows.view(codes.shape)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor, a few at a time, so that intermediate results stay in the cache."""
    rows = max(1, _BLOCK // tensors[0].shape[1])
    return zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
