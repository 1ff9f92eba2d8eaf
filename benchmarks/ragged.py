"""Attention without relative terms on a GPU: our own program by the sizes of its tiles, against the framework's kernel.

    python -m benchmarks.ragged [--shapes 12x32,12x64] [--lengths 16,64,…]
    python -m benchmarks.ragged --rotary

Texts of half to all of a length, 65,536 tokens in all, bfloat16, without gradients. Prints for each length the
framework's time, and that of each size of tiles (queries × keys, warps, turns of the loop in flight, registers),
fastest first: what `SIZES` in src/bertie/ops/ragged.py are chosen from.

With --rotary, queries and keys turned by the program, for TURNED_SIZES: against `rotated` before it, by the sizes that
are tuned for that. Of the fastest also the time with cos and sin in float16, half as many bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from benchmarks.fused import timed
from bertie.bench import mixed_lengths
from bertie.config import Full, Pattern, Rotary, Sliding
from bertie.ops.torch import varlen_attention as gpu
from bertie.ops.torch.eager import rotary_tables
from bertie.ops.triton import short_attention as ragged
from bertie.ops.triton.rotary import rotate_pair

TOKENS = 1 << 16
HERE = torch.device("cuda")
N = None
Sizes = tuple[int, int, int, int, int | None]
Angles = tuple[torch.Tensor, torch.Tensor]
SIZES: dict[int, tuple[Sizes, ...]] = {
    16: ((16, 16, 1, 1, N), (16, 16, 2, 1, N), (16, 16, 1, 1, 96)),
    32: ((32, 32, 1, 1, N), (32, 32, 2, 1, N), (32, 32, 1, 1, 168)),
    64: ((64, 64, 4, 2, N), (64, 64, 4, 3, N), (64, 64, 4, 2, 128), (64, 64, 4, 2, 96), (64, 32, 4, 2, N)),
    128: (
        *((64, 64, 4, 2, N), (64, 64, 4, 3, N), (64, 64, 4, 2, 128), (64, 64, 4, 3, 128), (64, 64, 4, 2, 96)),
        *((64, 32, 4, 3, N), (64, 32, 4, 3, 96), (64, 32, 4, 4, 96), (128, 64, 8, 2, N)),
    ),
}
TURNED: tuple[Sizes, ...] = (
    *((32, 32, 4, 2, N), (32, 64, 4, 1, N), (64, 32, 4, 1, N), (64, 32, 4, 2, N), (64, 32, 4, 3, N)),
    *((64, 64, 4, 1, N), (64, 64, 4, 1, 96), (64, 64, 4, 2, N), (64, 64, 4, 3, N), (64, 64, 4, 2, 96)),
    *((128, 32, 8, 2, N), (128, 64, 8, 1, N), (128, 64, 8, 2, N), (128, 64, 8, 3, N)),
)


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
    parser.add_argument("--rotary", action="store_true", help="queries and keys turned by the program, or before it")
    options = parser.parse_args()
    if options.rotary:
        turned()
        return
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


def turned() -> None:
    """For texts of mixed length and of one, with 12 heads of 64."""
    q, k, v = torch.randn(TOKENS, 36, 64, device=HERE, dtype=torch.bfloat16).split(12, dim=1)
    texts = {"mixed": _mixed()} | {str(n): (n,) * (TOKENS // n) for n in (64, 128, 512)}
    patterns: tuple[Pattern, ...] = (Full(), Sliding(64))

    def inside(lengths: tuple[int, ...], pattern: Pattern, rotation: Angles, sizes: Sizes) -> Callable[[], object]:
        def call() -> torch.Tensor:
            ragged.TURNED_SIZES = {ragged.LONGEST: sizes}
            return ragged.attend(q, k, v, lengths, scale=0.1, pattern=pattern, rotation=rotation)

        return call

    def before(lengths: tuple[int, ...], pattern: Pattern, rotation: Angles | None) -> Callable[[], object]:
        def call() -> torch.Tensor:
            turned = (q, k) if rotation is None else rotate_pair(q, k, *rotation)
            return ragged.attend(*turned, v, lengths, scale=0.1, pattern=pattern)

        return call

    angles = _angles(texts["mixed"])
    _compiled_ahead([inside(texts["mixed"], pattern, angles, sizes) for pattern in patterns for sizes in TURNED])
    for name, lengths in texts.items():
        cos, sin = _angles(lengths)
        for pattern in patterns:
            found = {sizes: _played(inside(lengths, pattern, (cos, sin), sizes)) for sizes in TURNED}
            *ranked, last = sorted(found, key=lambda sizes: found[sizes])
            half = _played(inside(lengths, pattern, (cos.half(), sin.half()), ranked[0]))
            print(
                f"{name}, {pattern}: turned before {_played(before(lengths, pattern, (cos, sin))):.3f} ms, not at all "
                f"{_played(before(lengths, pattern, None)):.3f}; inside, with tables of float16 {half:.3f};",
                *(f" {sizes}: {found[sizes]:.3f}" for sizes in ranked[:5]),
                f"… {last}: {found[last]:.3f}",
                flush=True,
            )


def _mixed() -> tuple[int, ...]:
    found = mixed_lengths(TOKENS // 80)
    ends = np.minimum(np.cumsum(found), TOKENS)
    lengths = np.diff(ends, prepend=0)
    return tuple(lengths[lengths > 0].tolist())


def _angles(lengths: tuple[int, ...]) -> Angles:
    positions = torch.cat([torch.arange(n) for n in lengths]).to(HERE)
    return rotary_tables(Rotary((10000.0,)), positions, 64)[10000.0]


def _compiled_ahead(calls: Sequence[Callable[[], object]]) -> None:
    """The program as these calls need it, by many threads at once; nothing is launched."""
    import triton

    from bertie.ops.triton import short_attention_kernels as programs

    program = programs.forward

    class Ahead:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            return lambda *given, **sizes: program.warmup(*given, grid=grid, **sizes)

    programs.forward = Ahead()
    try:
        with ThreadPoolExecutor(16) as pool, triton.AsyncCompileMode(pool):
            for call in calls:
                call()
    finally:
        programs.forward = program


def _played(call: Callable[[], object]) -> float:
    """Milliseconds on the device alone: recorded, so that launching it takes none."""
    from benchmarks.gpu import recorded

    return timed(recorded(lambda: [call() for _ in range(5)])) / 5


if __name__ == "__main__":
    main()
