"""Which sizes the programs of bertie.kernels.fused should have on this GPU: times each, and says what was fastest.

    python -m benchmarks.fused [--rows 131072] [--width 768] [--write FILE]

`--write` puts the fastest into a copy of src/bertie/kernels/fused.py, whose constants they are.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bertie.kernels import fused


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


def there_and_back(forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> tuple[Any, Any]:
    up = torch.randn_like(forward())

    def back() -> None:
        torch.autograd.grad(held, inputs, up, retain_graph=True)

    held = forward()
    return forward, back


def main() -> None:
    """Try all, print a table."""
    parser = argparse.ArgumentParser("benchmarks.fused", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=131072)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    fused.enabled = True
    here, half = torch.device("cuda"), torch.bfloat16
    x, y = (torch.randn(options.rows, options.width, device=here, dtype=half, requires_grad=True) for _ in range(2))
    wide = torch.randn(options.rows, 4 * options.width, device=here, dtype=half, requires_grad=True)
    norm = nn.LayerNorm(options.width, device=here)
    bias = torch.randn(4 * options.width, device=here, requires_grad=True)

    def normed() -> torch.Tensor:
        return fused._AddNorm.apply(x, y, norm.weight, norm.bias, 1e-12, 0.1, False)[0]  # type: ignore[no-untyped-call, no-any-return]

    def activated() -> torch.Tensor:
        return fused._Activate.apply(wide, bias, "gelu", False)  # type: ignore[no-untyped-call, no-any-return]

    found: dict[str, dict[Any, float]] = {name: {} for name in ("norm", "norm back", "tile", "tile back")}
    for warps in (1, 2, 4, 8):
        fused.NORM_WARPS = (warps, warps)
        forward, back = there_and_back(normed, [x, y, *norm.parameters()])
        found["norm"][warps] = timed(forward)
        for share in (4, 8, 16, 32):
            fused.NORM_SHARE = share
            found["norm back"][warps, share] = timed(back)
    for warps, rows in product((2, 4, 8), (1, 2, 4, 8)):
        fused.TILE_WARPS, fused.TILE_ROWS = (warps, warps), (rows, rows)
        forward, back = there_and_back(activated, [wide, bias])
        found["tile"][warps, rows] = timed(forward)
        for share in (4, 8, 16, 32):
            fused.TILE_SHARE = share
            found["tile back"][warps, rows, share] = timed(back)
    best = {name: min(times, key=times.__getitem__) for name, times in found.items()}
    for name, times in found.items():
        ranked = sorted(times.items(), key=lambda one: one[1])
        last, worst = ranked[-1]
        print(name, "  ".join(f"{key}: {ms:.3f}" for key, ms in ranked[:5]), f"… {last}: {worst:.3f} ms")
    lines = [
        f"NORM_WARPS, NORM_SHARE = ({best['norm']}, {best['norm back'][0]}), {best['norm back'][1]}",
        f"TILE_WARPS, TILE_ROWS, TILE_SHARE = ({best['tile'][0]}, {best['tile back'][0]}), "
        f"({best['tile'][1]}, {best['tile back'][1]}), {best['tile back'][2]}",
    ]
    print("\n".join(lines))
    if options.write:
        text = options.write.read_text("utf-8")
        for line in lines:
            start = re.escape(line.split(" = ", maxsplit=1)[0])
            text, count = re.subn(rf"(?m)^{start} = .*$", line, text)
            assert count == 1, start
        options.write.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
