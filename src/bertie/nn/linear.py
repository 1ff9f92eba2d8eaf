"""Quantized linear layers for inference: weights with one scale per row, activations with one scale per token.

int8 (`to_int8`) runs on a CPU. Its matrix multiplications are exact; the error is that of rounding weights and
activations to 8 bits. fp8 (`to_fp8`, ops/triton/fp8.py) runs on a GPU and accumulates in higher precision.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from bertie.config import Precision
from bertie.errors import ConfigError
from bertie.nn.attention import QKV, SelfAttention, split_heads
from bertie.nn.blocks import Block
from bertie.nn.encoder import Encoder
from bertie.nn.feedforward import FeedForward
from bertie.ops.dispatch import DispatchTable
from bertie.ops.quantization import quantize
from bertie.ops.triton import fp8
from bertie.ops.triton.launch import HALF, Fp8Rows


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and activations.

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
        # Asymmetric: 256 levels between a row's minimum and maximum, 0 included: x = scale · (code − zero_point).
        low = x.amin(dim=-1, keepdim=True).clamp(max=0)  # (T, 1)
        scale = (x.amax(dim=-1, keepdim=True).clamp(min=0) - low) / 255
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        zero_point = (-low * inverse).round()
        codes = (x * inverse + zero_point).round().clamp(max=255) - 128
        y = torch._int_mm(codes.to(torch.int8), self.weight.T).float()
        y = (y - (zero_point - 128) * self.weight.sum(1, dtype=torch.float32)) * (scale * self.scale)
        return y if self.bias is None else y + self.bias


class Int8QKV(Int8Linear):
    """Query, key and value projections in int8."""

    def __init__(self, qkv: QKV) -> None:
        super().__init__(qkv.weight, qkv.full_bias())
        self.sizes, self.head_width = qkv.sizes, qkv.head_width

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """(T, D) -> (T, H, d), (T, G, d), (T, G, d)."""
        return split_heads(super().forward(x), self.sizes, self.head_width)


def to_int8(encoder: nn.Module) -> None:
    """Quantize the linear layers of an encoder's blocks to int8, in place. It can then be neither trained nor saved."""
    for module in encoder.modules():
        if isinstance(module, SelfAttention):
            for name in ("qkv", "global_qkv"):
                if isinstance(qkv := getattr(module, name), QKV):
                    setattr(module, name, Int8QKV(qkv))
            module.out = _to_int8(module.out)
        elif isinstance(module, FeedForward):
            module.up, module.down = _to_int8(module.up), _to_int8(module.down)
        elif isinstance(module, Encoder):
            module.reset_dispatch()


def _to_int8(layer: nn.Module) -> nn.Module:
    return Int8Linear(layer.weight, layer.bias) if isinstance(layer, nn.Linear) else layer


# --- on a GPU ---


class Fp8Linear(nn.Module):
    """A linear layer with fp8 (e4m3) weights and activations.

    >>> layer = nn.Linear(16, 16)
    >>> _ = nn.init.constant_(layer.weight, 3.0), nn.init.ones_(layer.bias)
    >>> Fp8Linear(layer.weight, layer.bias)(torch.full((1, 16), 2.0)).unique().tolist()       # 16 · 2 · 3 + 1
    [97.0]
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        codes, scales = fp8.quantize_rows(weight.detach())
        self.dtype = weight.dtype  # of the outputs
        self.weight = nn.Parameter(codes, requires_grad=False)  # (N, K) e4m3
        self.scale = nn.Parameter(scales[:, 0], requires_grad=False)  # (N,)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def multiply(self, x: Tensor | Fp8Rows, bias: Tensor | None = None) -> Tensor:
        """(T, K) -> (T, N), plus `bias`, which may differ from the layer's."""
        return fp8.linear(fp8.quantize(x), self.weight, self.scale, bias, self.dtype)

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        """(T, K) -> (T, N)."""
        return self.multiply(x, self.bias)


class Fp8QKV(Fp8Linear):
    """Query, key and value projections in fp8."""

    def __init__(self, qkv: QKV) -> None:
        super().__init__(qkv.weight, qkv.full_bias())
        self.sizes, self.head_width = qkv.sizes, qkv.head_width

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """(T, D) -> (T, H, d), (T, G, d), (T, G, d)."""
        return split_heads(super().forward(x), self.sizes, self.head_width)


class Fp8FeedForward(FeedForward):
    """A feed-forward layer in fp8: between its two matrix multiplications only quantized values are written."""

    up: Fp8Linear
    down: Fp8Linear

    def __init__(self, ff: FeedForward, up: Fp8Linear, down: Fp8Linear) -> None:
        nn.Module.__init__(self)
        self.gated, self.activation = ff.gated, ff.activation
        self.up, self.down = up, down

    def forward(self, x: Tensor, ops: DispatchTable) -> Tensor:
        """(T, D) -> (T, D)."""
        out: Tensor = self.down(
            fp8.activate_and_quantize(self.up.multiply(x), self.up.bias, self.activation, self.gated)
        )
        return out


def to_fp8(encoder: Encoder) -> None:
    """Quantize the linear layers of an encoder's blocks to fp8, in place. It can then be neither trained nor saved.

    On a GPU the encoder must be in half precision, as everything else stays. Layers with a side that is no multiple of
    16 are left as they are. On a CPU the same numbers are computed slowly.
    """
    words = encoder.embeddings.words.weight
    if words.is_cuda:
        check_fp8(words.device)
        if words.dtype not in HALF:
            raise ConfigError(f"an encoder in {words.dtype} cannot go to fp8 on a GPU; allowed: bfloat16, float16")
    for block in cast("list[Block]", list(encoder.blocks)):
        attention, ff = block.attention, block.ff
        for name in ("qkv", "global_qkv"):
            if isinstance(qkv := getattr(attention, name), QKV) and _fits(qkv.weight):
                setattr(attention, name, Fp8QKV(qkv))
        attention.out = _fp8(attention.out)
        ff.up, ff.down = up, down = _fp8(ff.up), _fp8(ff.down)
        if isinstance(up, Fp8Linear) and isinstance(down, Fp8Linear):
            block.ff = Fp8FeedForward(ff, up, down)
    _quantize_norm_outputs(encoder)
    encoder.reset_dispatch()


def _quantize_norm_outputs(encoder: Encoder) -> None:
    """Make norms whose output is read by an fp8 layer write it quantized as well; the last block's is not."""
    blocks, order = cast("list[Block]", list(encoder.blocks)), encoder.cfg.layer_map
    norms = [norm for block in blocks for norm in (block.pre_attention, block.post_attention, block.pre_ff)]
    norms += [blocks[number].post_ff for number in set(order[:-1])]
    first = encoder.embeddings
    if isinstance(blocks[order[0]].pre_attention, nn.Identity) and first.norm is not None and first.project is None:
        norms.append(first.norm)
    for norm in norms:
        norm.fp8 = encoder.cfg.width % fp8.ALIGNMENT == 0  # type: ignore[assignment]


def check_fp8(device: torch.device | str) -> None:
    """Raise an error for a device without fp8 matrix multiplication."""
    if not fp8.is_supported(torch.device(device)):
        least = ".".join(map(str, fp8.MIN_CAPABILITY))
        raise ConfigError(
            f"precision='fp8' with device={str(device)!r} needs a GPU of compute capability {least} or above "
            "(Ada, Hopper or later)"
        )


def _fits(weight: Tensor) -> bool:
    return all(side % fp8.ALIGNMENT == 0 for side in weight.shape)


def _fp8(layer: nn.Module) -> nn.Module:
    return Fp8Linear(layer.weight, layer.bias) if isinstance(layer, nn.Linear) and _fits(layer.weight) else layer


# --- precision of an encoder ---


def is_int8(encoder: nn.Module) -> bool:
    """Whether any layer is quantized to int8."""
    return any(isinstance(module, Int8Linear) for module in encoder.modules())


def is_fp8(encoder: nn.Module) -> bool:
    """Whether any layer is quantized to fp8."""
    return any(isinstance(module, Fp8Linear) for module in encoder.modules())


def precision_of(encoder: nn.Module) -> Precision:
    """The precision that an encoder computes in."""
    if is_int8(encoder):
        return "int8"
    if is_fp8(encoder):
        return "fp8"
    dtype = next(encoder.parameters()).dtype
    names: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(dtype, "fp32")
