"""Write a model with smaller weights, and a receipt of what that cost.

fp16 halves the weights, for every tool to load. int8 quarters them, for Bertie alone: each matrix in bytes, with one
scale a row. The receipt compares both models on texts, a few built-in ones unless you give your own; it is printed, and
kept in the new folder as receipt.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie._version import __version__
from bertie.cli.common import UsageError, add_column, check_output_folder, verb
from bertie.cli.report_output import short_name
from bertie.data.readers import open_table, text_cell
from bertie.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie shrink ./my-model -o my-small-model --to int8
  bertie shrink ./my-model -o my-small-model --to int8 --texts reviews.jsonl --json | jq .hidden.least_cosine
"""
RECEIPT = "receipt.json"


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "shrink", "write a model with smaller weights, and what that cost", __doc__, EXAMPLE)
    parser.add_argument("model", metavar="MODEL", help="a folder, a built-in name or a hub id")
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the new folder")
    parser.add_argument("--to", choices=("int8", "fp16"), required=True, help="how weights are kept")
    parser.add_argument("--texts", metavar="FILE", help="what to compare both on: .txt, .csv, .tsv, .jsonl, .parquet")
    add_column(parser)
    parser.add_argument("--revision", help="of a hub id: a branch, tag or commit")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it is there")
    parser.add_argument("--json", action="store_true", help="print the receipt as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    out = check_output_folder(args.output, overwrite=args.overwrite)
    if args.column and not args.texts:
        raise UsageError("--column is of a file of texts; name it with --texts")
    texts = _texts(args.texts, args.column) if args.texts else None

    from bertie.checkpoints import storage as store
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.checkpoints.hub import resolve
    from bertie.compress.quantization_report import TEXTS, differences

    folder = resolve(args.model, args.revision)
    before, size = Checkpoint.load(folder), weight_bytes(folder)
    if before.tokenizer is None and args.texts:
        raise InputError(f"--texts {args.texts}: {args.model} has no tokenizer to read texts with; leave it out")
    out.parent.mkdir(parents=True, exist_ok=True)
    # What is compared is what was written; it gets its name once its receipt is in it.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as place:
        draft = Path(place) / out.name
        before.save(draft, precision=args.to)
        after = Checkpoint.load(draft)
        total = sum(file.stat().st_size for file in draft.rglob("*") if file.is_file())
        receipt = {
            "model": short_name(args.model),
            "to": args.to,
            "bertie": __version__,
            "bytes": {"weights_before": size, "weights_after": weight_bytes(draft), "folder_after": total},
            "weights": weight_errors(before, after),
        }
        if before.tokenizer is not None:  # else, as with some models of proteins or genes, there is nothing to read
            receipt["texts"] = Path(args.texts).name if args.texts else "built-in"
            receipt |= differences(before, after, texts or TEXTS)
        (draft / RECEIPT).write_bytes(store.to_json(receipt))
        store.replace_folder(draft, out)
    print(json.dumps(receipt) if args.json else "\n".join(_lines(args.output, receipt)))


def _texts(name: str, column: str | None) -> list[str]:
    table = open_table(name)
    asked = table.column(["text"], column, "--column", only=True)
    found = [text_cell(table, number, row, asked) for number, row in enumerate(table.rows([asked]), 1)]
    texts = [text for text in found if text.strip()]
    if not texts:
        raise InputError(f"{table.name}: column {asked!r} holds no text to compare the models on")
    return texts


def weight_bytes(folder: Path) -> int:
    """The size of a folder's weights, those of named heads included."""
    from bertie.checkpoints import named_heads as heads
    from bertie.checkpoints import storage as store
    from bertie.checkpoints.sentence_modules import SentenceModules

    at = folder / SentenceModules.transformer_folder(folder)
    from bertie.checkpoints.weight_files import find_weight_files

    packed = heads.is_int8(store.read_json(at / "config.json").get(heads.KEY))
    files = [*find_weight_files(at, int8=packed), at / heads.FILE]
    return sum(file.stat().st_size for file in files if file.is_file())


# --- the weights ---


def weight_errors(before: Checkpoint, after: Checkpoint) -> dict[str, Any]:
    """How far all weights have moved, by their length, and which tensors moved furthest."""
    old, new = _tensors(before), _tensors(after)
    moved, length = 0.0, 0.0
    each: dict[str, float] = {}
    for name, x in old.items():
        one, all_ = float((new[name].double() - x.double()).square().sum()), float(x.double().square().sum())
        moved, length = moved + one, length + all_
        each[name] = (one / all_) ** 0.5 if all_ else 0.0
    coarsest = sorted(each, key=lambda name: -each[name])[:5]
    return {
        "parameters": sum(x.numel() for x in old.values()),
        "relative_error": (moved / length) ** 0.5,
        "coarsest": {name: each[name] for name in coarsest},
    }


def _tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """By the names in the files."""
    from bertie.checkpoints import named_heads as heads

    named = [name for name in checkpoint.heads if name not in checkpoint.spec.heads]
    return checkpoint.spec.weight_map.store(checkpoint.model) | heads.tensors(checkpoint.model, named)


def _lines(output: str, receipt: dict[str, Any]) -> Iterator[str]:
    """For people."""
    from bertie.compress.quantization_report import lines as said

    old, new, folder = (f"{size / 1e6:,.1f} MB" for size in receipt["bytes"].values())
    weights = receipt["weights"]
    worst, error = next(iter(weights["coarsest"].items()))
    rows = {
        "weights": f"{old} -> {new} in {receipt['to']}; {weights['parameters']:,} parameters; whole folder: {folder}",
        "error": f"{weights['relative_error']:.3%} of all weights' length; most in {worst}: {error:.3%}",
    } | said(receipt)
    rows["receipt"] = str(Path(output) / RECEIPT)
    width = max(map(len, rows))
    yield from (f"{name:<{width}}  {text}" for name, text in rows.items())
