"""Disentangled attention on a GPU: the Triton kernels against padded groups; with --tune, tile sizes.

    python -m benchmarks.disentangled [--seconds 60] [--tune] [--plain]

Shapes of DeBERTa-v3-base and -large, of MPNet-base (relative position bias) and, without relative position terms, of
BERT-base, where the baseline is FlashAttention; bfloat16, 65,536 tokens: mixed lengths, and texts of one length. Times
are of one layer's attention without its projections. `--tune` prints the fastest MAX_TILES and OPTIONS for
src/bertie/ops/triton/disentangled_attention.py. With --plain, everything is without relative position terms: BERT-base
only, and PLAIN_MAX_TILES and PLAIN_OPTIONS.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bertie.config import Bucketed, Disentangled, Full
from bertie.nn.positions import relative_rows
from bertie.ops import Relative
from bertie.ops.torch import grouped_attention, varlen_attention
from bertie.ops.triton import disentangled_attention, short_attention
from bertie.ops.triton.disentangled_attention import KernelOptions

TOKENS = 1 << 16
WIDTH = 64
DEBERTA, MPNET = Disentangled(("c2p", "p2c"), 512, buckets=256), Bucketed(32)
SHAPES: dict[str, tuple[int, Disentangled | Bucketed | None]] = {
    "DeBERTa-v3-base": (12, DEBERTA),
    "DeBERTa-v3-large": (16, DEBERTA),
    "MPNet-base": (12, MPNET),
    "BERT-base": (12, None),
}
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
KERNELS = ("attention_forward", "attention_backward_q", "attention_backward_kv")
CANDIDATES: dict[int, list[tuple[int, int, int | None]]] = {  # warps, pipeline stages, registers
    16: [(1, 1, None), (1, 1, 168), (1, 1, 128), (2, 1, None), (2, 1, 128)],
    32: [(2, 1, None), (2, 2, None), (4, 1, None), (4, 2, None), (4, 1, 128)],
    64: [(4, 1, None), (4, 2, None), (4, 3, None), (4, 1, 168), (8, 1, None)],
}


@dataclass
class Case:
    """A random batch."""

    lengths: tuple[int, ...]
    leaves: list[torch.Tensor]
    cu_seqlens: torch.Tensor
    relative: Relative | None
    dout: torch.Tensor

    @classmethod
    def random(cls, lengths: tuple[int, ...], shape: str) -> Case:
        heads, scheme = SHAPES[shape]
        device, dtype = torch.device("cuda"), torch.bfloat16
        total = sum(lengths)
        q, k, v = torch.randn(total, 3 * heads, WIDTH, device=device, dtype=dtype).split(heads, dim=1)
        tables: dict[str, torch.Tensor] = {}
        if isinstance(scheme, Bucketed):
            tables = {"scores": torch.randn(scheme.buckets, heads, device=device)}
        elif scheme is not None:
            size = (2 * scheme.span, heads, WIDTH)
            tables = {name: torch.randn(size, device=device, dtype=dtype) for name in ("keys", "queries")}
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *tables.values())]
        relative = None
        if scheme is not None:
            rows = relative_rows(scheme, max(lengths), device)
            relative = Relative(rows, **dict(zip(tables, leaves[3:], strict=True)))
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        return cls(lengths, leaves, cu_seqlens, relative, torch.randn(total, heads, WIDTH, device=device, dtype=dtype))

    def triton(self, dropout: float = 0.0) -> torch.Tensor:
        scale = (3 * WIDTH) ** -0.5
        return disentangled_attention.attend(
            *self.leaves[:3], self.lengths, self.cu_seqlens, scale=scale, relative=self.relative, dropout=dropout
        )

    def baseline(self, dropout: float = 0.0) -> torch.Tensor:
        """By padded groups; without relative position terms by FlashAttention."""
        scale = (3 * WIDTH) ** -0.5
        if self.relative is None:
            return varlen_attention.attend(
                *self.leaves, self.lengths, self.cu_seqlens, scale=scale, pattern=Full(), dropout=dropout
            )
        return grouped_attention.attend(
            *self.leaves[:3], self.lengths, scale=scale, pattern=Full(), relative=self.relative, dropout=dropout
        )

    def inference(self) -> torch.Tensor:
        """The other kernel for inference: padded rectangles with a bias, or without terms the one for short texts."""
        scale = (3 * WIDTH) ** -0.5
        if self.relative is None:
            return short_attention.attend(*self.leaves, self.lengths, scale=scale, pattern=Full())
        return varlen_attention.attend_biased(*self.leaves[:3], self.lengths, scale=scale, relative=self.relative)

    def training(self, call: Callable[[float], torch.Tensor]) -> Callable[[], Any]:
        """Forward and backward, with dropout."""
        return lambda: torch.autograd.grad(call(0.1), self.leaves, self.dout)


def mixed(total: int = TOKENS) -> tuple[int, ...]:
    """Log-normal lengths: mean 117, median 87, at most 512."""
    draw = np.random.default_rng(0)
    out: list[int] = []
    while sum(out) < total:
        out.append(int(np.clip(draw.lognormal(np.log(87), 0.77), 3, 512)))
    out[-1] -= sum(out) - total
    return tuple(sorted((n for n in out if n > 0), reverse=True))


def equal(length: int) -> tuple[int, ...]:
    """Texts of one length."""
    return (length,) * (TOKENS // length)


def milliseconds(call: Callable[[], Any], repeats: int = 10, limit: float = 0.5) -> float | None:
    """The median time, of fewer repeats where it is long. None if the call fails; the error is printed."""
    times: list[float] = []
    try:
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        while len(times) < repeats and (len(times) < 2 or time.perf_counter() - begin < limit):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
    except Exception as error:
        print(f"    {_short(error)}", flush=True)
        torch.cuda.empty_cache()
        return None
    return statistics.median(times)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"


def compare(until: float, shapes: list[str]) -> None:
    """Print the table."""
    print(f"{'':28}{'forward, ms':>30}{'forward and backward, ms':>32}")
    columns = f"{'Triton':>10}{'baseline':>10}{'':>10}{'Triton':>12}{'baseline':>10}{'':>10}"
    print(f"{'shape, lengths':28}{columns}", flush=True)
    cases = [(shape, name, lengths) for shape in shapes for name, lengths in _lengths(shape)]
    for shape, name, lengths in cases:
        if time.perf_counter() > until:
            print("out of time")
            return
        case = Case.random(lengths, shape)
        with torch.no_grad():
            times = [milliseconds(case.triton), milliseconds(case.baseline)]
        times += [milliseconds(case.training(case.triton)), milliseconds(case.training(case.baseline))]
        cells = [f"{'-':>10}" if ms is None else f"{ms:10.3f}" for ms in times]
        ratios = [
            f"{'':>10}" if not triton or not baseline else f"{baseline / triton:9.1f}×"
            for triton, baseline in ((times[0], times[1]), (times[2], times[3]))
        ]
        line = f"{shape[:18]:18}{name:>8}  {cells[0]}{cells[1]}{ratios[0]}  {cells[2]}{cells[3]}{ratios[1]}"
        if not shape.startswith("DeBERTa"):
            with torch.no_grad():
                other = milliseconds(case.inference)
            name = "short attention" if case.relative is None else "padded rectangles"
            line += "" if other is None else f"   ({name}: {other:.3f})"
        print(line, flush=True)
        del case
        torch.cuda.empty_cache()


def _lengths(shape: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mixed", mixed()
    for n in (16, 128, 512) if shape.startswith("MPNet") else LENGTHS:
        yield str(n), equal(n)


# --- tuning ---


def set_options(shape: str, tile: int, options: tuple[int, int, int | None]) -> None:
    if SHAPES[shape][1] is None:
        disentangled_attention.PLAIN_MAX_TILES = (tile, tile)
        disentangled_attention.PLAIN_OPTIONS[tile] = (KernelOptions(*options),) * 3
    else:
        disentangled_attention.MAX_TILES = (tile, tile)
        disentangled_attention.OPTIONS[tile] = (KernelOptions(*options),) * 3


def precompile(shape: str, tile: int, options: tuple[int, int, int | None]) -> None:
    """Compile in a process of its own, so that many compile at once; Triton keeps the results on disk."""
    try:
        set_options(shape, tile, options)
        case = Case.random((496, 256), shape)
        case.training(case.triton)()
        torch.cuda.synchronize()
    except Exception:  # reported when it is timed
        return


# Per lengths, tile and kernel: the fastest time and its options.
Best = dict[str, dict[int, dict[str, tuple[float, Any]]]]


def tune(until: float, shape: str) -> None:
    """Time each candidate on batches that its tile is meant for; print the fastest of each kernel."""
    work = [(shape, tile, options) for tile, candidates in CANDIDATES.items() for options in candidates]
    with multiprocessing.get_context("spawn").Pool(min(len(work), multiprocessing.cpu_count())) as pool:
        pool.starmap(precompile, work, chunksize=1)
    best: Best = {}
    for name, tiles in (("16", (16,)), ("32", (16, 32)), ("mixed", (32, 64)), ("512", (32, 64))):
        case = Case.random(mixed() if name == "mixed" else equal(int(name)), shape)
        best[name] = {}
        for tile in tiles:
            times: dict[str, dict[Any, float]] = {kernel: {} for kernel in KERNELS}
            for options in CANDIDATES[tile]:
                if time.perf_counter() > until:
                    print("out of time")
                    return
                set_options(shape, tile, options)
                try:
                    for kernel, ms in milliseconds_by_kernel(case.training(case.triton)).items():
                        times[kernel][options] = ms
                except Exception as error:
                    print(f"    {tile} {options} {_short(error)}", flush=True)
            best[name][tile] = {}
            for kernel, by_options in times.items():
                ranked = sorted(by_options.items(), key=lambda item: item[1])
                if ranked:
                    best[name][tile][kernel] = (ranked[0][1], ranked[0][0])
                columns = "  ".join(f"{options}: {ms:.3f}" for options, ms in ranked)
                print(f"lengths {name:>5}, tile {tile}, {kernel:21}", columns)
        del case
    print_best(best, "" if SHAPES[shape][1] else "PLAIN_")


def milliseconds_by_kernel(call: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.key in KERNELS]
    return {event.key: event.device_time_total / 1000 / event.count for event in events}


def print_best(best: Best, prefix: str) -> None:
    for name, by_tile in best.items():
        for tile, by_kernel in by_tile.items():
            forward = by_kernel.get(KERNELS[0], (float("nan"),))[0]
            backward = sum(by_kernel[kernel][0] for kernel in KERNELS[1:] if kernel in by_kernel)
            print(f"lengths {name:>5}, tile {tile}: forward {forward:.3f} ms, backward {backward:.3f} ms at best")
    on_mix = best.get("mixed", {})
    if all(len(on_mix.get(tile, {})) == len(KERNELS) for tile in (32, 64)):
        forward_tile = min((32, 64), key=lambda tile: on_mix[tile][KERNELS[0]][0])
        backward_tile = min((32, 64), key=lambda tile: sum(on_mix[tile][kernel][0] for kernel in KERNELS[1:]))
        print(f"{prefix}MAX_TILES = ({forward_tile}, {backward_tile})")
    print(f"{prefix}OPTIONS:")
    for tile, name in ((16, "16"), (32, "mixed"), (64, "mixed")):
        print(f"    {tile}: ({', '.join(str(best[name][tile].get(kernel, ('', '-'))[1]) for kernel in KERNELS)}),")


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.disentangled", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="time limit")
    parser.add_argument("--tune", action="store_true", help="search tile sizes and compiler options")
    parser.add_argument("--plain", action="store_true", help="without relative position terms")
    options = parser.parse_args()
    torch.manual_seed(0)
    until = time.perf_counter() + options.seconds
    if options.tune:
        tune(until, "BERT-base" if options.plain else "DeBERTa-v3-base")
    else:
        compare(until, ["BERT-base"] if options.plain else list(SHAPES))


if __name__ == "__main__":
    main()
