"""Attention without relative terms on a GPU: our own program by the sizes of its tiles, against the framework's kernel.

    python -m benchmarks.ragged [--shapes 12x32,12x64] [--lengths 16,64,…]

Texts of half to all of a length, 65,536 tokens in all, bfloat16, without gradients. Prints for each length the
framework's time, and that of each size of tiles (queries × keys, warps, turns of the loop in flight, registers),
fastest first: what `SIZES` in src/bertie/kernels/ragged.py are chosen from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.fused import timed
from bertie.config import Full, Pattern, Sliding
from bertie.kernels import gpu, ragged

TOKENS = 1 << 16
HERE = torch.device("cuda")
N = None
SIZES: dict[int, tuple[tuple[int, int, int, int, int | None], ...]] = {
    16: ((16, 16, 1, 1, N), (16, 16, 2, 1, N), (16, 16, 1, 1, 96)),
    32: ((32, 32, 1, 1, N), (32, 32, 2, 1, N), (32, 32, 1, 1, 168)),
    64: ((64, 64, 4, 2, N), (64, 64, 4, 3, N), (64, 64, 4, 2, 128), (64, 64, 4, 2, 96), (64, 32, 4, 2, N)),
    128: (
        *((64, 64, 4, 2, N), (64, 64, 4, 3, N), (64, 64, 4, 2, 128), (64, 64, 4, 3, 128), (64, 64, 4, 2, 96)),
        *((64, 32, 4, 3, N), (64, 32, 4, 3, 96), (64, 32, 4, 4, 96), (128, 64, 8, 2, N)),
    ),
}


def case(heads: int, width: int, longest: int) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
    """Queries, keys and values side by side, as a model has them; and the lengths of texts."""
    draw = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(int(min(draw.integers((longest + 1) // 2, longest + 1), TOKENS - sum(lengths))))
    qkv = torch.randn(TOKENS, 3 * heads, width, device=HERE, dtype=torch.bfloat16)
    return qkv, tuple(lengths), torch.tensor([0, *lengths]).cumsum(0).int().to(HERE)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.ragged", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="12x32,12x64", help="heads × their width")
    parser.add_argument("--lengths", default="16,32,64,128,256,512,1024,2048")
    options = parser.parse_args()
    for shape in options.shapes.split(","):
        heads, width = map(int, shape.split("x"))
        for longest in map(int, options.lengths.split(",")):
            qkv, lengths, ends = case(heads, width, longest)
            q, k, v = qkv.split(heads, dim=1)
            patterns: list[Pattern] = [Full()] if longest <= 64 or width < 64 else [Full(), Sliding(64)]
            for pattern in patterns:
                theirs = _played(lambda: gpu.attend(q, k, v, lengths, ends, scale=0.1, pattern=pattern))  # noqa: B023
                found = {}
                for sizes in SIZES[min(128, longest)]:
                    ragged.SIZES = dict.fromkeys((longest, ragged.LONGEST), sizes)
                    found[sizes] = _played(lambda: ragged.attend(q, k, v, lengths, scale=0.1, pattern=pattern))  # noqa: B023
                ranked = sorted(found.items(), key=lambda one: one[1])
                said = "  ".join(f"{sizes}: {spent:.3f}" for sizes, spent in ranked)
                print(f"{shape}, up to {longest}, {pattern}: framework {theirs:.3f} ms; {said}", flush=True)


def _played(call: Callable[[], object]) -> float:
    """Milliseconds on the device alone: recorded, so that launching it takes none."""
    from benchmarks.gpu import recorded

    return timed(recorded(lambda: [call() for _ in range(5)])) / 5


if __name__ == "__main__":
    main()
