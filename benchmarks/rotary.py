"""Rotary positions on a GPU: our own program against the plain expression; with --tune, of which sizes.

    python -m benchmarks.rotary [--tune]

Queries and keys of one layer, bfloat16, 65,536 tokens, without gradients. `--tune` prints the constants of
src/bertie/ops/rotary.py that were fastest.
"""

from __future__ import annotations

import argparse
from itertools import product
from statistics import median

import torch

from bertie.bench import time_interleaved
from bertie.config import Rotary
from bertie.ops.torch import eager
from bertie.ops.torch.eager import rotary_tables
from bertie.ops.triton import rotary

TOKENS = 1 << 16
# Heads of queries and of keys, and their width.
SHAPES = {"ModernBERT-base": (12, 12, 64), "ModernBERT-large": (16, 16, 64), "EuroBERT-2.1B": (18, 6, 128)}
HERE = torch.device("cuda")


def case(shape: str) -> tuple[torch.Tensor, ...]:
    heads, key_heads, width = SHAPES[shape]
    fused = torch.randn(TOKENS, heads + 2 * key_heads, width, device=HERE, dtype=torch.bfloat16)
    positions = torch.arange(TOKENS, device=HERE) % 512
    cos, sin = rotary_tables(Rotary((10000.0,)), positions, width)[10000.0]
    q, k, _ = fused.split([heads, key_heads, key_heads], dim=1)
    return q, k, cos, sin


def milliseconds(given: tuple[torch.Tensor, ...], ours: bool, times: int = 20) -> float:
    rotate_pair = rotary.rotate_pair if ours else eager.rotate_pair

    def call() -> None:
        for _ in range(times):
            rotate_pair(*given)

    call()
    return 1e3 * median(time_interleaved({"": call}, HERE, 5)[""]) / times


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.rotary", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    if options.tune:
        found = {}
        given = case("ModernBERT-base")
        for rows, warps in product((1, 2, 4, 8), (2, 4, 8)):
            rotary.ROWS, rotary.WARPS = rows, warps
            found[rows, warps] = milliseconds(given, ours=True)
        ranked = sorted(found.items(), key=lambda one: one[1])
        print("  ".join(f"{sizes}: {spent:.3f} ms" for sizes, spent in ranked))
        rotary.ROWS, rotary.WARPS = ranked[0][0]
        print(f"ROWS, WARPS = {rotary.ROWS}, {rotary.WARPS}")
    for shape in SHAPES:
        given = case(shape)
        ours, plain = milliseconds(given, ours=True), milliseconds(given, ours=False)
        moved = 2 * sum(x.numel() * x.element_size() for x in given[:2]) + given[2].numel() * 4
        print(f"{shape}: {ours:.3f} ms, {moved / ours / 1e9:.2f} TB/s; plain {plain:.3f} ms, {plain / ours:.1f}×")


if __name__ == "__main__":
    main()
