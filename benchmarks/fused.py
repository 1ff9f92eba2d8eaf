"""Tune the fused norm and activation kernels on this GPU: time each tile size and print the fastest.

    python -m benchmarks.fused [--rows 131072] [--widths 384,768,1024] [--activations plain,gated]

Norms: forward for inference, forward with dropout, and backward. Activations: forward and backward, plain and gated.
Each row also gives the time of a copy that moves as many bytes. TILE, WARPS and PROGRAMS in ops/triton/norm.py and
ops/triton/activation.py come from these tables.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from bertie.ops.triton import activation, norm

COPY_BYTES_PER_S = 4.3e12  # read and written, on an H200


def milliseconds(call: Callable[[], Any], repeats: int = 12) -> float:
    """The median time on the device."""
    for _ in range(3):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def capture(call: Callable[[], object]) -> Callable[[], object]:
    """The same call as one CUDA graph, so that launching it takes no time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> object:
        graph.replay()
        return out

    return replay


def report(label: str, times: dict[Any, float], bytes_moved: int) -> None:
    ranked = sorted(times.items(), key=lambda item: item[1])
    slowest, slowest_ms = ranked[-1]
    fastest = "  ".join(f"{config}: {ms:.3f}" for config, ms in ranked[:4])
    copy_ms = 1e3 * bytes_moved / COPY_BYTES_PER_S
    print(f"{label}, copy {copy_ms:.3f} ms: {fastest} … {slowest}: {slowest_ms:.3f}", flush=True)


def backward(out: Tensor, inputs: list[Tensor]) -> float:
    dout = torch.randn_like(out)
    return milliseconds(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))


def tune_norm(rows: int, width: int) -> None:
    x, residual = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    module = nn.LayerNorm(width, device="cuda")
    tensor_bytes = 2 * rows * width
    inference: dict[Any, float] = {}
    dropout: dict[Any, float] = {}
    backward_pass: dict[Any, float] = {}
    for tile, warps in product((2048, 4096, 8192), (2, 4, 8)):
        if not 8 <= tile / (32 * warps) <= 64:
            continue
        norm.TILE, norm.WARPS = (tile, tile), (warps, warps)
        with torch.no_grad():
            inference[tile, warps] = milliseconds(lambda: norm.add_norm(x, residual, module, 0.0))
        dropout[tile, warps] = milliseconds(lambda: norm.add_norm(x, residual, module, 0.1))
        out = norm.add_norm(x, residual, module, 0.1)
        for programs in (8, 16, 32):
            norm.PROGRAMS = programs
            backward_pass[tile, warps, programs] = backward(out, [x, residual, *module.parameters()])
    report(f"{width}: norm", inference, 3 * tensor_bytes)
    report(f"{width}: norm with dropout", dropout, 3 * tensor_bytes)
    report(f"{width}: norm, backward", backward_pass, 5 * tensor_bytes)


def tune_activation(rows: int, width: int, gated: bool) -> None:
    x = torch.randn(rows, width * (2 if gated else 1), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = None if gated else torch.randn(width, device="cuda", requires_grad=True)
    function = activation._BiasActivation
    inference: dict[Any, float] = {}
    backward_pass: dict[Any, float] = {}
    for tile, warps in product((1024, 2048, 4096), (2, 4, 8)):
        if not 4 <= tile / (32 * warps) <= 32:
            continue
        activation.TILE, activation.WARPS = (tile, tile), (warps, warps)
        with torch.no_grad():
            inference[tile, warps] = milliseconds(lambda: function.run(x, bias, "gelu", gated))
        out: Tensor = function.apply(x, bias, "gelu", gated)
        for programs in (8, 16, 32):
            activation.PROGRAMS = programs
            backward_pass[tile, warps, programs] = backward(out, [x] if bias is None else [x, bias])
    kind = "gated" if gated else "plain"
    report(f"{width}: activation, {kind}", inference, x.nbytes + 2 * rows * width)
    report(f"{width}: activation, {kind}, backward", backward_pass, 2 * x.nbytes + 2 * rows * width)


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.fused", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=131072)
    parser.add_argument("--widths", default="384,768,1024", help="of norms")
    parser.add_argument("--activations", default="plain,gated")
    options = parser.parse_args()
    for width in map(int, options.widths.split(",")):
        tune_norm(options.rows, width)
    for kind in options.activations.split(","):
        tune_activation(options.rows, {"plain": 3072, "gated": 1152}[kind], kind == "gated")


if __name__ == "__main__":
    main()
