"""Measure how fast a model reads here: a checkpoint, or a shape with random weights.

From ids to the last hidden state, and from text to vectors; beside the pace of a large matrix product on the same
device. The texts are random and of mixed length (mean 117 tokens, median 87) unless a file is given. With fp8 and int8
there is a receipt of what that costs: what the model says of a few texts, built-in ones or the file's, beside what it
says in bf16 or fp32.
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
    add_model,
    add_precision,
    device_of,
    model_name,
    table_of,
    verb,
)
from bertie.data.readers import text_cell

if TYPE_CHECKING:
    from bertie.bench import Rate, Speed
    from bertie.cli.common import Verbs
    from bertie.tasks import Embedder

EXAMPLE = """  bertie bench
  bertie bench -m ./my-model --texts reviews.csv --price 2.50
  bertie bench --shape 12x768 --precision bf16 --json | jq .from_ids.tokens_per_s
  bertie bench -m ./my-model --precision fp8 --texts reviews.csv
"""
COMPARED = 256  # texts of a receipt, at most


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "bench", "how fast a model reads here, and what that costs", __doc__, EXAMPLE)
    add_model(parser, overflow=False)
    parser.add_argument("--shape", metavar="LxD|FILE", help="random weights: layers x width, or a config.json")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, …; a GPU if there is one")
    add_precision(parser)
    parser.add_argument("--texts", metavar="FILE", help="texts to measure with (.txt, .csv, .jsonl, …)")
    add_column(parser)
    parser.add_argument("--seconds", type=float, default=10.0, help="to measure for, about (10)")
    parser.add_argument("--price", type=float, help="of the machine an hour, in any currency")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    if args.shape and (args.model or args.texts):
        raise UsageError("--shape has no tokenizer: give it without -m and --texts")
    texts = None
    if args.texts:
        table = table_of([args.texts])
        column = table.column(["text"], args.column, "--column", only=True)
        texts = [text_cell(table, number, row, column) for number, row in enumerate(table.rows([column]), 1)]

    from bertie.bench import measure, random_model
    from bertie.tasks import Embedder

    device = device_of(args.device)
    if args.shape:
        found = measure(random_model(args.shape, device, args.precision), seconds=args.seconds, price=args.price)
    else:
        task = Embedder.load(model_name(args), revision=args.revision, device=device, precision=args.precision)
        found = measure(task.model, texts=texts, embedder=task, seconds=args.seconds, price=args.price)
    name = args.shape or task.checkpoint.source
    receipt = None if args.shape else _receipt(task, args, texts)
    if args.json:
        print(json.dumps({"model": name} | asdict(found) | ({"receipt": receipt} if receipt else {}), indent=2))
    else:
        print("\n".join(_lines(name, found, receipt)))


def _receipt(task: Embedder, args: argparse.Namespace, texts: list[str] | None) -> dict[str, Any] | None:
    """What eight bits cost, where there are such."""
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.compress.quantization_report import TEXTS, differences

    if task.checkpoint.precision not in ("int8", "fp8"):
        return None
    said = [text for text in texts or TEXTS if text.strip()]
    model = task.model
    unquantized: Literal["bf16", "fp32"] = "bf16" if task.checkpoint.precision == "fp8" else "fp32"
    before = Checkpoint.load(model_name(args), revision=args.revision, device=model.device, precision=unquantized)
    return {
        "against": unquantized,
        "texts": Path(args.texts).name if texts else "built-in",
        **differences(before, task.checkpoint, said[:: -(-len(said) // COMPARED)]),
    }


def _lines(name: str, found: Speed, receipt: dict[str, Any] | None) -> Iterator[str]:
    """For people."""
    from bertie.compress.quantization_report import lines

    rows: dict[str, str] = {
        "model": f"{name}, {found.precision} on {found.device}",
        "texts": f"{found.texts:,} with {found.tokens:,} tokens, {found.budget:,} tokens a batch",
        "ceiling": f"{found.ceiling / 1e12:,.2f} TFLOP/s in large matrix products",
        "from ids": _rate(found.from_ids),
        "from text": "" if found.from_text is None else _rate(found.from_text),
        "padding": f"none; batches of 32 padded to their longest would compute {found.padding:.0%} more tokens, "
        f"sorted by length {found.padding_sorted:.0%}",
        "peak memory": "" if found.peak_bytes is None else f"{found.peak_bytes / 2**20:,.0f} MiB",
        "cost": "" if found.per_million_tokens is None else f"{found.per_million_tokens:.4g} a million tokens",
        "receipt": "" if receipt is None else f"beside {receipt['against']}, on texts: {receipt['texts']}",
    } | ({} if receipt is None else lines(receipt))
    width = max(map(len, rows))
    yield from (f"{key:<{width}}  {text}" for key, text in rows.items() if text)


def _rate(rate: Rate) -> str:
    return (
        f"{rate.texts_per_s:,.0f} texts/s, {rate.tokens_per_s:,.0f} tokens/s, "
        f"{rate.share_of_ceiling:.0%} of the ceiling"
    )
