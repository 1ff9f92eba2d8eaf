"""Tune variable-length attention on this GPU: the Triton kernel by tile size against torch's kernel (FlashAttention).

    python -m benchmarks.short_attention [--shapes 12x32,12x64] [--lengths 16,64,…]
    python -m benchmarks.short_attention --rotary

Texts between half of a length and the length, 65,536 tokens in all, bfloat16, inference. Prints for each length
torch's time and those of the tile configurations (queries, keys, warps, pipeline stages, registers), fastest first.
`TILES` in src/bertie/ops/triton/short_attention.py comes from these tables.

With --rotary, rotary embeddings inside the kernel, for `ROTARY_TILES`: against a kernel of their own before it. The
fastest configuration is also timed with cos and sin in float16, which halves their bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from benchmarks.fused import capture, milliseconds
from bertie.bench import mixed_lengths
from bertie.config import Full, Pattern, Rotary, Sliding
from bertie.ops.torch import varlen_attention
from bertie.ops.torch.eager import rotary_tables
from bertie.ops.triton import short_attention
from bertie.ops.triton.rotary import apply_rotary
from bertie.ops.triton.short_attention import TileConfig

TOKENS = 1 << 16
DEVICE = torch.device("cuda")
CosSin = tuple[torch.Tensor, torch.Tensor]


def configs(*rows: tuple[int, ...]) -> tuple[TileConfig, ...]:
    return tuple(TileConfig(*row) for row in rows)


CANDIDATES = {
    16: configs((16, 16, 1, 1), (16, 16, 2, 1), (16, 16, 1, 1, 96)),
    32: configs((32, 32, 1, 1), (32, 32, 2, 1), (32, 32, 1, 1, 168)),
    64: configs((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2, 128), (64, 64, 4, 2, 96), (64, 32, 4, 2)),
    128: configs(
        *((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2, 128), (64, 64, 4, 3, 128), (64, 64, 4, 2, 96)),
        *((64, 32, 4, 3), (64, 32, 4, 3, 96), (64, 32, 4, 4, 96), (128, 64, 8, 2)),
    ),
}
ROTARY_CANDIDATES = configs(
    *((32, 32, 4, 2), (32, 64, 4, 1), (64, 32, 4, 1), (64, 32, 4, 2), (64, 32, 4, 3)),
    *((64, 64, 4, 1), (64, 64, 4, 1, 96), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2, 96)),
    *((128, 32, 8, 2), (128, 64, 8, 1), (128, 64, 8, 2), (128, 64, 8, 3)),
)


def random_batch(heads: int, width: int, longest: int) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
    """Fused queries, keys and values; the lengths of the texts; cu_seqlens."""
    draw = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(int(min(draw.integers((longest + 1) // 2, longest + 1), TOKENS - sum(lengths))))  # type: ignore[call-overload]
    qkv = torch.randn(TOKENS, 3 * heads, width, device=DEVICE, dtype=torch.bfloat16)
    return qkv, tuple(lengths), torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)


def tune(shape: str, longest: int) -> None:
    heads, width = map(int, shape.split("x"))
    qkv, lengths, cu_seqlens = random_batch(heads, width, longest)
    q, k, v = qkv.split(heads, dim=1)
    patterns: list[Pattern] = [Full()] if longest <= 64 or width < 64 else [Full(), Sliding(64)]
    for pattern in patterns:

        def triton(pattern: Pattern = pattern) -> torch.Tensor:
            return short_attention.attend(q, k, v, lengths, scale=0.1, pattern=pattern)

        def flash(pattern: Pattern = pattern) -> torch.Tensor:
            return varlen_attention.attend(q, k, v, lengths, cu_seqlens, scale=0.1, pattern=pattern)

        times = {}
        for config in CANDIDATES[min(128, longest)]:
            short_attention.TILES = dict.fromkeys((longest, short_attention.MAX_LENGTH), config)
            times[config] = device_milliseconds(triton)
        ranked = "  ".join(f"{tuple(config)}: {times[config]:.3f}" for config in sorted(times, key=times.__getitem__))
        print(f"{shape}, up to {longest}, {pattern}: torch {device_milliseconds(flash):.3f} ms; {ranked}", flush=True)


def tune_rotary() -> None:
    """Texts of mixed length and of one length, with 12 heads of 64."""
    q, k, v = torch.randn(TOKENS, 36, 64, device=DEVICE, dtype=torch.bfloat16).split(12, dim=1)
    texts = {"mixed": random_lengths()} | {str(n): (n,) * (TOKENS // n) for n in (64, 128, 512)}
    patterns: tuple[Pattern, ...] = (Full(), Sliding(64))

    def inside(lengths: tuple[int, ...], pattern: Pattern, tables: CosSin, config: TileConfig) -> Callable[[], object]:
        def call() -> torch.Tensor:
            short_attention.ROTARY_TILES = {short_attention.MAX_LENGTH: config}
            return short_attention.attend(q, k, v, lengths, scale=0.1, pattern=pattern, rotation=tables)

        return call

    def before(lengths: tuple[int, ...], pattern: Pattern, tables: CosSin | None) -> Callable[[], object]:
        def call() -> torch.Tensor:
            rotated = (q, k) if tables is None else apply_rotary(q, k, *tables)
            return short_attention.attend(*rotated, v, lengths, scale=0.1, pattern=pattern)

        return call

    tables = cos_sin(texts["mixed"])
    precompile(
        [inside(texts["mixed"], pattern, tables, config) for pattern in patterns for config in ROTARY_CANDIDATES]
    )
    for name, lengths in texts.items():
        cos, sin = cos_sin(lengths)
        for pattern in patterns:
            times = {c: device_milliseconds(inside(lengths, pattern, (cos, sin), c)) for c in ROTARY_CANDIDATES}
            *ranked, slowest = sorted(times, key=times.__getitem__)
            half = device_milliseconds(inside(lengths, pattern, (cos.half(), sin.half()), ranked[0]))
            print(
                f"{name}, {pattern}: rotary before {device_milliseconds(before(lengths, pattern, (cos, sin))):.3f} ms, "
                f"none {device_milliseconds(before(lengths, pattern, None)):.3f}; inside, float16 tables {half:.3f};",
                *(f" {tuple(config)}: {times[config]:.3f}" for config in ranked[:5]),
                f"… {tuple(slowest)}: {times[slowest]:.3f}",
                flush=True,
            )


def random_lengths() -> tuple[int, ...]:
    ends = np.minimum(np.cumsum(mixed_lengths(TOKENS // 80)), TOKENS)
    lengths = np.diff(ends, prepend=0)
    return tuple(lengths[lengths > 0].tolist())


def cos_sin(lengths: tuple[int, ...]) -> CosSin:
    positions = torch.cat([torch.arange(n) for n in lengths]).to(DEVICE)
    return rotary_tables(Rotary((10000.0,)), positions, 64)[10000.0]


def precompile(calls: Sequence[Callable[[], object]]) -> None:
    """Compile the kernels of these calls in parallel, without launching them."""
    import triton

    from bertie.ops.triton import short_attention_kernels as kernels

    kernel = kernels.attention_forward

    class Compiler:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            return lambda *arguments, **options: kernel.warmup(*arguments, grid=grid, **options)

    kernels.attention_forward = Compiler()
    try:
        with ThreadPoolExecutor(16) as pool, triton.AsyncCompileMode(pool):
            for call in calls:
                call()
    finally:
        kernels.attention_forward = kernel


def device_milliseconds(call: Callable[[], object]) -> float:
    """Time on the device alone, without launch overhead."""
    return milliseconds(capture(lambda: [call() for _ in range(5)])) / 5


@torch.no_grad()
def main() -> None:
    summary = __doc__.splitlines()[0] if __doc__ else None
    parser = argparse.ArgumentParser("benchmarks.short_attention", description=summary)
    parser.add_argument("--shapes", default="12x32,12x64", help="heads × head width")
    parser.add_argument("--lengths", default="16,32,64,128,256,512,1024,2048")
    parser.add_argument("--rotary", action="store_true", help="rotary embeddings inside the kernel")
    options = parser.parse_args()
    if options.rotary:
        tune_rotary()
        return
    for shape in options.shapes.split(","):
        for longest in map(int, options.lengths.split(",")):
            tune(shape, longest)


if __name__ == "__main__":
    main()
