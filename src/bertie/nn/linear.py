"""Linear layers in bytes, for inference on a CPU: weights with a scale a row, activations with a scale a token.

Products of bytes are exact, so what is lost is lost in rounding the two to 8 bits each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertie.nn.attention import QKV, SelfAttention, by_heads
from bertie.nn.feedforward import FeedForward
from bertie.store import quantize


class Int8Linear(nn.Module):
    """What a linear layer is once `to_int8` has seen it.

    >>> layer = nn.Linear(2, 1)
    >>> _ = layer.weight.data.copy_(torch.tensor([[127.0, -63.6]])), layer.bias.data.fill_(1.0)
    >>> Int8Linear(layer.weight, layer.bias)(torch.tensor([[255.0, 1.0]])).tolist()
    [[32322.0]]
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        codes, scale = quantize(weight)
        self.weight = nn.Parameter(codes, requires_grad=False)  # (N, K) int8
        self.scale = nn.Parameter(scale, requires_grad=False)  # (N,)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        # A row's own least and greatest number, and 0, lie on its scale of 256 steps: x = by · (code − zero).
        low = x.amin(dim=-1, keepdim=True).clamp(max=0)  # (T, 1)
        by = (x.amax(dim=-1, keepdim=True).clamp(min=0) - low) / 255
        steps = torch.where(by > 0, 1 / by, 0.0)
        zero = (-low * steps).round()
        codes = (x * steps + zero).round().clamp(max=255) - 128
        y = torch._int_mm(codes.to(torch.int8), self.weight.T).float()
        y = (y - (zero - 128) * self.weight.sum(1, dtype=torch.float32)) * (by * self.scale)
        return y if self.bias is None else y + self.bias


class Int8QKV(Int8Linear):
    """The same for query, key and value."""

    def __init__(self, qkv: QKV) -> None:
        super().__init__(qkv.weight, qkv.full_bias())
        self.sizes, self.head_width = qkv.sizes, qkv.head_width

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """(T, D) -> (T, H, d), (T, G, d), (T, G, d)."""
        return by_heads(super().forward(x), self.sizes, self.head_width)


def to_int8(encoder: nn.Module) -> None:
    """The products of an encoder's blocks in bytes from now on: it can be neither trained nor saved any more."""
    for module in encoder.modules():
        if isinstance(module, SelfAttention):
            for name in ("qkv", "global_qkv"):
                if isinstance(qkv := getattr(module, name), QKV):
                    setattr(module, name, Int8QKV(qkv))
            module.out = _bytes(module.out)
        elif isinstance(module, FeedForward):
            module.up, module.down = _bytes(module.up), _bytes(module.down)


def is_int8(encoder: nn.Module) -> bool:
    """Whether `to_int8` has seen it."""
    return any(isinstance(module, Int8Linear) for module in encoder.modules())


def _bytes(layer: nn.Module) -> nn.Module:
    return Int8Linear(layer.weight, layer.bias) if isinstance(layer, nn.Linear) else layer
