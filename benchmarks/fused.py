"""Which sizes the programs of bertie.ops.triton.fused should have on this GPU: times each, and says what was fastest.

    python -m benchmarks.fused [--rows 131072] [--widths 384,768,1024] [--activations plain,gated]

Norms: without dropout and gradients, and with both, there and back; activations: there and back, and gated. Beside
each stands the time that a copy of as many bytes would take. The constants of src/bertie/ops/fused.py are chosen
from it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import nn

from bertie.ops.triton import fused

COPY = 4.3e12  # bytes/s, read and written, of an H200


def timed(call: Callable[[], Any], repeats: int = 12) -> float:
    """Milliseconds, the median."""
    for _ in range(3):
        call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def say(what: str, found: dict[Any, float], moved: int) -> None:
    ranked = sorted(found.items(), key=lambda one: one[1])
    last, worst = ranked[-1]
    said = "  ".join(f"{key}: {ms:.3f}" for key, ms in ranked[:4])
    print(f"{what}, a copy {1e3 * moved / COPY:.3f} ms: {said} … {last}: {worst:.3f}", flush=True)


def norms(rows: int, width: int) -> None:
    """Tiles and warps, there without gradients, there and back with them."""
    x, y = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    module = nn.LayerNorm(width, device="cuda")
    one = 2 * rows * width  # bytes
    there: dict[Any, float] = {}
    drawn: dict[Any, float] = {}
    back: dict[Any, float] = {}
    for tile, warps in product((2048, 4096, 8192), (2, 4, 8)):
        if not 8 <= tile / (32 * warps) <= 64:
            continue
        fused.NORM_TILE, fused.NORM_WARPS = (tile, tile), (warps, warps)
        with torch.no_grad():
            there[tile, warps] = timed(lambda: fused.add_norm(x, y, module, 0.0))
        drawn[tile, warps] = timed(lambda: fused.add_norm(x, y, module, 0.1))
        out = fused.add_norm(x, y, module, 0.1)
        up = torch.randn_like(out)
        for share in (8, 16, 32):
            fused.NORM_SHARE = share
            back[tile, warps, share] = timed(
                lambda: torch.autograd.grad(out, [x, y, *module.parameters()], up, retain_graph=True)  # noqa: B023
            )
    say(f"{width}: norm", there, 3 * one)
    say(f"{width}: norm, with dropout", drawn, 3 * one)
    say(f"{width}: norm, back", back, 5 * one)


def activations(rows: int, width: int, gated: bool) -> None:
    """Tiles and warps, there and back."""
    x = torch.randn(rows, width * (2 if gated else 1), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = None if gated else torch.randn(width, device="cuda", requires_grad=True)
    there: dict[Any, float] = {}
    back: dict[Any, float] = {}
    for tile, warps in product((1024, 2048, 4096), (2, 4, 8)):
        if not 4 <= tile / (32 * warps) <= 32:
            continue
        fused.TILE, fused.TILE_WARPS = (tile, tile), (warps, warps)
        with torch.no_grad():
            there[tile, warps] = timed(lambda: fused._Activate.run(x, bias, "gelu", gated))
        out: torch.Tensor = fused._Activate.apply(x, bias, "gelu", gated)  # type: ignore[no-untyped-call]
        up = torch.randn_like(out)
        for share in (8, 16, 32):
            fused.TILE_SHARE = share
            wanted = [x] if bias is None else [x, bias]
            back[tile, warps, share] = timed(lambda: torch.autograd.grad(out, wanted, up, retain_graph=True))  # noqa: B023
    kind = "gated" if gated else "plain"
    say(f"{width}: activation, {kind}", there, x.nbytes + 2 * rows * width)
    say(f"{width}: activation, {kind}, back", back, 2 * x.nbytes + 2 * rows * width)


def main() -> None:
    """Try all, print a table."""
    parser = argparse.ArgumentParser("benchmarks.fused", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=131072)
    parser.add_argument("--widths", default="384,768,1024", help="of norms")
    parser.add_argument("--activations", default="plain,gated")
    options = parser.parse_args()
    for width in map(int, options.widths.split(",")):
        norms(options.rows, width)
    for kind in options.activations.split(","):
        activations(options.rows, {"plain": 3072, "gated": 1152}[kind], kind == "gated")


if __name__ == "__main__":
    main()
