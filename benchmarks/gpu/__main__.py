"""Command line of the GPU benchmark."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import benchmarks.gpu
from benchmarks.gpu.from_text import text
from benchmarks.gpu.harness import Run
from benchmarks.gpu.models import CONFIGS
from benchmarks.gpu.requests import fixed, requests
from benchmarks.gpu.scaling import invariance, lengths
from benchmarks.gpu.throughput import child, compiled, fp8, mix
from bertie.bench import mixed_lengths

PARTS: dict[str, Callable[[Run], None]] = {
    "mix": mix,
    "compiled": compiled,
    "requests": requests,
    "fp8": fp8,
    "fixed": fixed,
    "text": text,
    "lengths": lengths,
    "invariance": invariance,
}
BUDGETS = (65536, 32768, 131072, 16384)  # tokens per flat batch, the likely best first
SIZES = (256, 128, 512, 64)  # texts per padded batch


def table(results: dict[str, Any]) -> str:
    """`mix` as a Markdown table."""
    lines = [
        "| model | Bertie, seq/s | TF | share of ceiling | transformers, seq/s | TF | ratio | compiled, seq/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.get("mix", {}).items():
        cells = [name]
        for side in ("bertie", "transformers"):
            rates = row.get(side)
            cells += [f"{rates['seq_per_s']:,.0f}", f"{rates['tflops']:.0f}"] if rates else ["", ""]
            cells += [f"{rates['share_of_ceiling']:.0%}" if rates else ""] if side == "bertie" else []
        cells.append(f"{row['ratio']:.2f}×" if "ratio" in row else "")
        by_side = row.get("compiled", {}).get("seq_per_s", {})
        compiled_cell = "{:,.0f} (Bertie then {:,.0f})"
        cells.append(
            compiled_cell.format(by_side["transformers, compiled"], by_side["bertie"]) if by_side else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"\nCeiling: {results['ceiling_tflops']:.0f} TFLOP/s, {results['dtype']}, on {results['chip']}.")
    return "\n".join(lines + [f"Skipped: {line}" for line in results["skipped"]])


def plots(results: dict[str, Any], folder: Path) -> None:
    """Draw `lengths` on logarithmic axes, where linear growth has slope 1."""
    from benchmarks.serve_plot import STYLE
    from bertie.evaluation.plots import Line, lines

    for part, label in (("total", "total tokens"), ("length", "tokens per text, 65,536 in all")):
        series = [
            Line(name, [(math.log2(int(n)), math.log2(1e3 * t)) for n, t in result[part].items()], style, True)
            for (name, result), style in zip(results["lengths"].items(), ("a", "b", "faint"), strict=False)
        ]
        svg = lines(f"Time by {label}", series, f"log2 of {label}", "log2 of milliseconds")
        svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        svg = svg.replace("</title>", "</title>" + STYLE, 1) + "\n"
        (folder / f"speed-{part}.svg").write_text(svg, encoding="utf-8")


def names(value: str) -> list[str]:
    return [name for name in value.split(",") if name]


def numbers(value: str) -> list[int]:
    return [int(number) for number in names(value)]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    summary, _, details = (benchmarks.gpu.__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "benchmarks.gpu", description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=names, default=list(CONFIGS), help="comma-separated names")
    parser.add_argument("--parts", type=names, default=["mix"], help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=150.0, help="time limit of the whole run")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved measurements")
    parser.add_argument("--count", type=int, default=4096, help="texts of `mix`")
    parser.add_argument("--budgets", type=numbers, default=list(BUDGETS), help="tokens per flat batch, to try")
    parser.add_argument("--sizes", type=numbers, default=list(SIZES), help="texts per padded batch, to try")
    parser.add_argument(
        "--requests", type=numbers, default=[64, 256, 1024, 4096, 8192], help="batch sizes of `requests`"
    )
    parser.add_argument("--compile", type=names, default=list(CONFIGS), help="models of `compiled`")
    parser.add_argument("--compile-seconds", type=float, default=90.0, help="time limit for each of them")
    parser.add_argument("--folder", type=Path, help="`text`: a sentence-transformers model")
    parser.add_argument("--texts", type=Path, help="`text`: a file with one text per line")
    parser.add_argument("--max-texts", type=int, default=30000)
    parser.add_argument("--encode-sizes", type=numbers, default=[1024, 256, 32], help="of sentence-transformers")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few texts, to try the benchmark out")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--plots", type=Path, help="only draw `lengths` of an earlier --json into this folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for flag, values, known in (("--models", options.models, CONFIGS), ("--parts", options.parts, PARTS)):
        if unknown := [value for value in values if value not in known]:
            parser.error(f"{flag}: {', '.join(unknown)} is not one of {', '.join(known)}")
    if options.tiny:
        options.count, options.repeats = min(options.count, 64), 2
        options.budgets, options.sizes, options.requests = [2048, 1024], [16, 8], [8, 32]
    return options


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    if options.plots:
        plots(json.loads(options.json.read_text(encoding="utf-8")), options.plots)
        return {}
    with torch.inference_mode():
        if options.child:
            child(options, mixed_lengths(options.count, 48 if options.tiny else 512))
            return {}
        run = Run(options)
        for part in options.parts:
            with run.guard(part):
                PARTS[part](run)
            run.save()
    print(table(run.results))
    return run.results


if __name__ == "__main__":
    main()
