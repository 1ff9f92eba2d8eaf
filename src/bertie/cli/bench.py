"""Measure the throughput of a model on this machine: a checkpoint, or a shape with random weights.

Throughput is measured from token ids to the last hidden state and from text to embeddings, and compared with large
matrix multiplications on the same device, which run between the forward passes. Texts are random and of mixed lengths
(mean 117 tokens, median 87) unless a file is given. For fp8 and int8, a quantization report compares the outputs with
those in bf16 or fp32, on texts of the file or a few built-in ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bertie.cli.common import (
    UsageError,
    add_column,
    add_device,
    add_model,
    add_precision,
    model_name,
    select_device,
    verb,
)
from bertie.data.readers import open_table, text_cell

if TYPE_CHECKING:
    from bertie.bench import BenchmarkResult, Throughput
    from bertie.cli.common import Verbs
    from bertie.tasks import Embedder

EXAMPLE = """  bertie bench
  bertie bench -m ./my-model --texts reviews.csv --price 2.50
  bertie bench --shape 12x768 --precision bf16 --json | jq .from_ids.tokens_per_s
  bertie bench -m ./my-model --precision fp8 --texts reviews.csv
"""
REPORT_TEXTS = 256  # maximum number of texts for a quantization report


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "bench", "measure throughput, memory and cost on this machine", __doc__, EXAMPLE)
    add_model(parser, overflow=False, from_settings=False)
    parser.add_argument(
        "--shape", metavar="LxD|FILE", help="benchmark random weights: layers x width, or a config.json"
    )
    add_device(parser)
    add_precision(parser)
    parser.add_argument("--texts", metavar="FILE", help="texts to measure with (.txt, .csv, .jsonl, …)")
    add_column(parser)
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the measurement (default: 10)")
    parser.add_argument("--price", type=float, help="price of the machine per hour, in any currency")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure, and print the result."""
    if args.shape and (args.model or args.texts):
        raise UsageError("--shape has no tokenizer and no weights: pass it without -m and --texts")
    texts = None
    if args.texts:
        table = open_table(args.texts)
        column = table.column(["text"], args.column, "--column", only=True)
        texts = [text_cell(table, number, row, column) for number, row in enumerate(table.rows([column]), 1)]

    from bertie.bench import measure, random_model
    from bertie.tasks import Embedder

    device = select_device(args.device)
    if args.shape:
        result = measure(random_model(args.shape, device, args.precision), seconds=args.seconds, price=args.price)
    else:
        task = Embedder.load(model_name(args), revision=args.revision, device=device, precision=args.precision)
        result = measure(task.model, texts=texts, embedder=task, seconds=args.seconds, price=args.price)
    name = args.shape or task.checkpoint.source
    report = None if args.shape else _quantization_report(task, args, texts)
    if args.json:
        quantization = {"quantization_report": report} if report else {}
        print(json.dumps({"model": name} | asdict(result) | quantization, indent=2))
    else:
        print("\n".join(_lines(name, result, report)))


def _quantization_report(task: Embedder, args: argparse.Namespace, texts: list[str] | None) -> dict[str, Any] | None:
    """Compare an int8 or fp8 model with the unquantized one; None for other precisions."""
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.compress.quantization_report import TEXTS, differences

    if task.checkpoint.precision not in ("int8", "fp8"):
        return None
    compared = [text for text in texts or TEXTS if text.strip()]
    model = task.model
    unquantized: Literal["bf16", "fp32"] = "bf16" if task.checkpoint.precision == "fp8" else "fp32"
    before = Checkpoint.load(model_name(args), revision=args.revision, device=model.device, precision=unquantized)
    return {
        "against": unquantized,
        "texts": Path(args.texts).name if texts else "built-in",
        **differences(before, task.checkpoint, compared[:: -(-len(compared) // REPORT_TEXTS)]),
    }


def _lines(name: str, result: BenchmarkResult, report: dict[str, Any] | None) -> Iterator[str]:
    """The result as lines of text."""
    from bertie.compress.quantization_report import lines
    from bertie.ops.dispatch import summarize

    busy = "; the machine was busy: percentages are approximate" if result.machine_busy else ""
    rows: dict[str, str] = {
        "model": f"{name}, {result.precision} on {result.device}",
        "texts": f"{result.texts:,} with {result.tokens:,} tokens, {result.budget:,} tokens per batch",
        "ceiling": f"{result.ceiling / 1e12:,.2f} TFLOP/s in large matrix multiplications{busy}",
        "from ids": _format(result.from_ids),
        "from text": "" if result.from_text is None else _format(result.from_text),
        "padding": f"none; batches of 32 padded to their longest would compute {result.padding:.0%} more tokens, "
        f"sorted by length {result.padding_sorted:.0%}",
        "peak memory": "" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:,.0f} MiB",
        "cost": "" if result.per_million_tokens is None else f"{result.per_million_tokens:.4g} per million tokens",
        "quantization": "" if report is None else f"compared with {report['against']}, on texts: {report['texts']}",
    } | ({} if report is None else lines(report))
    rows |= {f"dispatch: {operation}": text for operation, text in summarize(result.dispatch).items()}
    width = max(map(len, rows))
    yield from (f"{key:<{width}}  {text}" for key, text in rows.items() if text)


def _format(throughput: Throughput) -> str:
    return (
        f"{throughput.texts_per_s:,.0f} texts/s, {throughput.tokens_per_s:,.0f} tokens/s, "
        f"{throughput.share_of_ceiling:.0%} of the ceiling"
    )
