"""Rotary embeddings on a GPU: the Triton kernel against plain PyTorch; with --tune, tile sizes.

    python -m benchmarks.rotary [--tune]

Queries and keys of one layer, bfloat16, 65,536 tokens, inference. `--tune` prints the fastest ROWS and WARPS for
src/bertie/ops/triton/rotary.py.
"""

from __future__ import annotations

import argparse
from itertools import product
from statistics import median
from typing import Any

import torch

from bertie.bench import time_interleaved
from bertie.config import Rotary
from bertie.ops.torch import eager
from bertie.ops.triton import rotary

TOKENS = 1 << 16
SHAPES = {  # heads, key and value heads, head width
    "ModernBERT-base": (12, 12, 64),
    "ModernBERT-large": (16, 16, 64),
    "EuroBERT-2.1B": (18, 6, 128),
}
DEVICE = torch.device("cuda")


def random_inputs(shape: str) -> tuple[torch.Tensor, ...]:
    """q, k, cos and sin."""
    heads, kv_heads, width = SHAPES[shape]
    qkv = torch.randn(TOKENS, heads + 2 * kv_heads, width, device=DEVICE, dtype=torch.bfloat16)
    positions = torch.arange(TOKENS, device=DEVICE) % 512
    cos, sin = eager.rotary_tables(Rotary((10000.0,)), positions, width)[10000.0]
    q, k, _ = qkv.split([heads, kv_heads, kv_heads], dim=1)
    return q, k, cos, sin


def milliseconds(ops: Any, inputs: tuple[torch.Tensor, ...], repeats: int = 20) -> float:
    def call() -> None:
        for _ in range(repeats):
            ops.apply_rotary(*inputs)

    call()
    return 1e3 * median(time_interleaved({"": call}, DEVICE, 5)[""]) / repeats


def tune() -> None:
    times, inputs = {}, random_inputs("ModernBERT-base")
    for rows, warps in product((1, 2, 4, 8), (2, 4, 8)):
        rotary.ROWS, rotary.WARPS = rows, warps
        times[rows, warps] = milliseconds(rotary, inputs)
    ranked = sorted(times, key=times.__getitem__)
    print("  ".join(f"{config}: {times[config]:.3f} ms" for config in ranked))
    rotary.ROWS, rotary.WARPS = ranked[0]
    print(f"ROWS, WARPS = {rotary.ROWS}, {rotary.WARPS}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.rotary", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tune", action="store_true", help="search tile sizes first")
    if parser.parse_args().tune:
        tune()
    for shape in SHAPES:
        inputs = random_inputs(shape)
        fused, plain = milliseconds(rotary, inputs), milliseconds(eager, inputs)
        bytes_moved = 2 * sum(x.nbytes for x in inputs[:2]) + inputs[2].numel() * 4
        bandwidth = bytes_moved / fused / 1e9
        print(f"{shape}: {fused:.3f} ms, {bandwidth:.2f} TB/s; PyTorch {plain:.3f} ms, {plain / fused:.1f}×")


if __name__ == "__main__":
    main()
