"""Attention with relative terms on a GPU: our own programs against the plain path; with --tune, of which sizes.

    python -m benchmarks.disentangled [--seconds 60] [--tune] [--plain]

Shapes of DeBERTa-v3-base and -large, of MPNet-base and, without such terms, of BERT-base, where the plain path is the
framework's flash kernel; bfloat16, 65,536 tokens: a mix of lengths, and texts of one length. Times are of one layer's
attention without its projections. `--tune` prints the two constants of src/bertie/ops/disentangled.py that were
fastest, ROWS and SIZES. With --plain, all is without such terms: BERT-base alone, and PLAIN_ROWS and PLAIN_SIZES.
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
from bertie.ops.torch import grouped_attention as grouped
from bertie.ops.torch import varlen_attention as gpu
from bertie.ops.triton import disentangled_attention as disentangled
from bertie.ops.triton import short_attention as ragged

TOKENS = 1 << 16
WIDTH = 64
DEBERTA, MPNET = Disentangled(("c2p", "p2c"), 512, buckets=256), Bucketed(32)
SHAPES: dict[str, tuple[int, Disentangled | Bucketed | None]] = {
    "DeBERTa-v3-base": (12, DEBERTA),
    "DeBERTa-v3-large": (16, DEBERTA),
    "MPNet-base": (12, MPNET),
    "BERT-base": (12, None),
}
FIXED = (16, 32, 64, 128, 256, 512, 1024, 2048)
PROGRAMS = ("forward", "backward_queries", "backward_keys")
# Warps, turns of a loop in flight, registers.
CANDIDATES: dict[int, list[tuple[int, int, int | None]]] = {
    16: [(1, 1, None), (1, 1, 168), (1, 1, 128), (2, 1, None), (2, 1, 128)],
    32: [(2, 1, None), (2, 2, None), (4, 1, None), (4, 2, None), (4, 1, 128)],
    64: [(4, 1, None), (4, 2, None), (4, 3, None), (4, 1, 168), (8, 1, None)],
}


@dataclass
class Case:
    """A batch, and what it is computed from."""

    lengths: tuple[int, ...]
    leaves: list[torch.Tensor]
    cu: torch.Tensor
    relative: Relative | None
    up: torch.Tensor

    @classmethod
    def draw(cls, lengths: tuple[int, ...], shape: str) -> Case:
        """Random values."""
        heads, scheme = SHAPES[shape]
        here, half = torch.device("cuda"), torch.bfloat16
        total = sum(lengths)
        q, k, v = torch.randn(total, 3 * heads, WIDTH, device=here, dtype=half).split(heads, dim=1)
        tables: dict[str, torch.Tensor] = {}
        if isinstance(scheme, Bucketed):
            tables = {"scores": torch.randn(scheme.buckets, heads, device=here)}
        elif scheme is not None:
            size = (2 * scheme.span, heads, WIDTH)
            tables = {name: torch.randn(size, device=here, dtype=half) for name in ("keys", "queries")}
        leaves = [x.detach().requires_grad_() for x in (q, k, v, *tables.values())]
        relative = None
        if scheme is not None:
            rows = relative_rows(scheme, max(lengths), here)
            relative = Relative(rows, **dict(zip(tables, leaves[3:], strict=True)))
        cu = torch.tensor([0, *lengths]).cumsum(0).int().to(here)
        return cls(lengths, leaves, cu, relative, torch.randn(total, heads, WIDTH, device=here, dtype=half))

    def ours(self, dropout: float = 0.0) -> torch.Tensor:
        """By the programs."""
        scale = (3 * WIDTH) ** -0.5
        return disentangled.attend(
            *self.leaves[:3], self.lengths, self.cu, scale=scale, relative=self.relative, dropout=dropout
        )

    def plain(self, dropout: float = 0.0) -> torch.Tensor:
        """By the plain path; where there are no terms, by the framework's."""
        scale = (3 * WIDTH) ** -0.5
        if self.relative is None:
            return gpu.attend(*self.leaves, self.lengths, self.cu, scale=scale, pattern=Full(), dropout=dropout)
        return grouped.attend(
            *self.leaves[:3], self.lengths, scale=scale, pattern=Full(), relative=self.relative, dropout=dropout
        )

    def reading(self) -> torch.Tensor:
        """Another way where nothing is to be learnt: in rectangles, or without terms by a program for that alone."""
        scale = (3 * WIDTH) ** -0.5
        if self.relative is None:
            return ragged.attend(*self.leaves, self.lengths, scale=scale, pattern=Full())
        return gpu.attend_biased(*self.leaves[:3], self.lengths, scale=scale, relative=self.relative)

    def both_ways(self, call: Callable[[float], torch.Tensor]) -> Callable[[], Any]:
        """There and back, with dropout."""
        return lambda: torch.autograd.grad(call(0.1), self.leaves, self.up)


def mix(total: int = TOKENS) -> tuple[int, ...]:
    """Log-normal lengths: mean 117, median 87, at most 512."""
    draw = np.random.default_rng(0)
    out: list[int] = []
    while sum(out) < total:
        out.append(int(np.clip(draw.lognormal(np.log(87), 0.77), 3, 512)))
    out[-1] -= sum(out) - total
    return tuple(sorted((n for n in out if n > 0), reverse=True))


def fixed(length: int) -> tuple[int, ...]:
    """Texts of one length."""
    return (length,) * (TOKENS // length)


def timed(call: Callable[[], Any], repeats: int = 10, most: float = 0.5) -> float | None:
    """Milliseconds, the median; fewer repeats of what takes long. None if it fails: why is printed."""
    times: list[float] = []
    try:
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        while len(times) < repeats and (len(times) < 2 or time.perf_counter() - begin < most):
            one, two = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            one.record()
            call()
            two.record()
            torch.cuda.synchronize()
            times.append(one.elapsed_time(two))
    except Exception as error:
        print(f"    {_short(error)}", flush=True)
        torch.cuda.empty_cache()
        return None
    return statistics.median(times)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"


def compare(until: float, shapes: list[str]) -> None:
    """The table."""
    print(f"{'':28}{'there, ms':>30}{'there and back, ms':>32}")
    print(f"{'shape, lengths':28}{'ours':>10}{'plain':>10}{'':>10}{'ours':>12}{'plain':>10}{'':>10}", flush=True)
    cases = [(shape, name, lengths) for shape in shapes for name, lengths in _lengths(shape)]
    for shape, name, lengths in cases:
        if time.perf_counter() > until:
            print("out of time")
            return
        case = Case.draw(lengths, shape)
        with torch.no_grad():
            found = [timed(case.ours), timed(case.plain)]
        found += [timed(case.both_ways(case.ours)), timed(case.both_ways(case.plain))]
        cells = [f"{'-':>10}" if ms is None else f"{ms:10.3f}" for ms in found]
        ratios = [
            f"{'':>10}" if not ours or not plain else f"{plain / ours:9.1f}×"
            for ours, plain in ((found[0], found[1]), (found[2], found[3]))
        ]
        line = f"{shape[:18]:18}{name:>8}  {cells[0]}{cells[1]}{ratios[0]}  {cells[2]}{cells[3]}{ratios[1]}"
        if not shape.startswith("DeBERTa"):
            with torch.no_grad():
                other = timed(case.reading)
            line += "" if other is None else f"   ({'ragged' if case.relative is None else 'rectangles'}: {other:.3f})"
        print(line, flush=True)
        del case
        torch.cuda.empty_cache()


def _lengths(shape: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mix", mix()
    for n in (16, 128, 512) if shape.startswith("MPNet") else FIXED:
        yield str(n), fixed(n)


# --- sizes ---


def _sized(shape: str, rows: int, sizes: tuple[int, int, int | None]) -> None:
    if SHAPES[shape][1] is None:
        disentangled.PLAIN_ROWS = (rows, rows)
        disentangled.PLAIN_SIZES[rows] = (sizes,) * 3
    else:
        disentangled.ROWS = (rows, rows)
        disentangled.SIZES[rows] = (sizes,) * 3


def _compiled(shape: str, rows: int, sizes: tuple[int, int, int | None]) -> None:
    """In a process of its own, so that many compile at once; what they make, Triton keeps on disk."""
    try:
        _sized(shape, rows, sizes)
        case = Case.draw((496, 256), shape)
        case.both_ways(case.ours)()
        torch.cuda.synchronize()
    except Exception:  # said when it is timed
        return


def tune(until: float, shape: str) -> None:
    """Each candidate on batches that its number of rows is for; the fastest of each program."""
    work = [(shape, rows, sizes) for rows, some in CANDIDATES.items() for sizes in some]
    with multiprocessing.get_context("spawn").Pool(min(len(work), multiprocessing.cpu_count())) as pool:
        pool.starmap(_compiled, work, chunksize=1)
    best: dict[str, dict[int, dict[str, tuple[float, Any]]]] = {}
    for name, rows_of in (("16", (16,)), ("32", (16, 32)), ("mix", (32, 64)), ("512", (32, 64))):
        case = Case.draw(mix() if name == "mix" else fixed(int(name)), shape)
        best[name] = {}
        for rows in rows_of:
            found: dict[str, dict[Any, float]] = {program: {} for program in PROGRAMS}
            for sizes in CANDIDATES[rows]:
                if time.perf_counter() > until:
                    print("out of time")
                    return
                _sized(shape, rows, sizes)
                try:
                    for program, ms in _by_program(case.both_ways(case.ours)).items():
                        found[program][sizes] = ms
                except Exception as error:
                    print(f"    {rows} {sizes} {_short(error)}", flush=True)
            best[name][rows] = {}
            for program, times in found.items():
                ranked = sorted(times.items(), key=lambda one: one[1])
                if ranked:
                    best[name][rows][program] = (ranked[0][1], ranked[0][0])
                print(f"lengths {name:>4}, {rows} rows, {program:17}", "  ".join(f"{k}: {ms:.3f}" for k, ms in ranked))
        del case
    _chosen(best, "" if SHAPES[shape][1] else "PLAIN_")


def _by_program(call: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Milliseconds of each program."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    out = {}
    for event in profile.key_averages():
        if event.key in PROGRAMS:
            out[event.key] = event.device_time_total / 1000 / event.count
    return out


def _chosen(best: dict[str, dict[int, dict[str, tuple[float, Any]]]], prefix: str) -> None:
    for name, rows_of in best.items():
        for rows, programs in rows_of.items():
            back = sum(programs[program][0] for program in PROGRAMS[1:] if program in programs)
            there = programs.get("forward", (float("nan"),))[0]
            print(f"lengths {name:>4}, {rows} rows: there {there:.3f} ms, back {back:.3f} ms at best")
    mixed = best.get("mix", {})
    if all(len(mixed.get(rows, {})) == len(PROGRAMS) for rows in (32, 64)):
        there = min((32, 64), key=lambda rows: mixed[rows]["forward"][0])
        back = min((32, 64), key=lambda rows: sum(mixed[rows][program][0] for program in PROGRAMS[1:]))
        print(f"{prefix}ROWS = ({there}, {back})")
    print(f"{prefix}SIZES:")
    for rows, name in ((16, "16"), (32, "mix"), (64, "mix")):
        print(f"    {rows}: ({', '.join(str(best[name][rows].get(program, ('', '-'))[1]) for program in PROGRAMS)}),")


def main() -> None:
    """Compare, or tune."""
    parser = argparse.ArgumentParser("benchmarks.disentangled", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--plain", action="store_true", help="without relative terms")
    options = parser.parse_args()
    torch.manual_seed(0)
    until = time.perf_counter() + options.seconds
    if options.tune:
        tune(until, "BERT-base" if options.plain else "DeBERTa-v3-base")
    else:
        compare(until, ["BERT-base"] if options.plain else list(SHAPES))


if __name__ == "__main__":
    main()
