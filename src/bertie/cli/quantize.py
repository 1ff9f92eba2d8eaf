"""Write a model with quantized weights, and a quantization report.

fp16 takes half the size, in a format that other libraries can load. int8 takes a quarter, and can only be
loaded by Bertie: symmetric quantization with one scale per row of each weight matrix. The report compares
both models on texts (built-in ones by default). It is printed, and saved as quantization.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie._version import __version__
from bertie.cli.common import UsageError, add_column, add_model_argument, check_output_folder, verb
from bertie.cli.report_output import short_name
from bertie.data.draft_folder import draft_folder
from bertie.data.readers import open_table, text_cell
from bertie.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie quantize ./my-model -o my-model-int8 --precision int8
  bertie quantize ./my-model -o my-model-int8 --precision int8 --texts reviews.jsonl --json | jq .hidden.min_cosine
"""
REPORT = "quantization.json"


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "quantize", "quantize a model to int8 or fp16, with a quantization report", __doc__, EXAMPLE)
    add_model_argument(parser)
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="folder to create")
    parser.add_argument(
        "--precision", choices=("int8", "fp16"), default="int8", help="precision of the weights (default: int8)"
    )
    parser.add_argument(
        "--texts", metavar="FILE", help="compare both models on these texts: .txt, .csv, .tsv, .jsonl, .parquet"
    )
    add_column(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.model is None:
        raise UsageError("pass the model to quantize: a folder, a built-in name or a hub id")
    out = check_output_folder(args.output, overwrite=args.overwrite)
    if args.column and not args.texts:
        raise UsageError("--column needs --texts")
    texts = _texts(args.texts, args.column) if args.texts else None

    from bertie.checkpoints import storage
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.checkpoints.hub import resolve
    from bertie.compress.quantization_report import TEXTS, differences

    folder = resolve(args.model, args.revision)
    before, size = Checkpoint.load(folder, device="cpu"), weight_bytes(folder)
    if before.tokenizer is None and args.texts:
        raise InputError(f"--texts {args.texts}: {args.model} has no tokenizer to encode texts with; leave --texts out")
    # Compare what was written, and rename it once the report is in it.
    with draft_folder(out) as draft:
        before.save(draft / "saved" / "model", precision=args.precision)
        for path in list((draft / "saved" / "model").iterdir()):
            path.rename(draft / path.name)
        shutil.rmtree(draft / "saved")
        after = Checkpoint.load(draft, device="cpu")
        total = sum(file.stat().st_size for file in draft.rglob("*") if file.is_file())
        report = {
            "model": short_name(args.model),
            "precision": args.precision,
            "bertie": __version__,
            "bytes": {"weights_before": size, "weights_after": weight_bytes(draft), "folder_after": total},
            "weights": weight_errors(before, after),
        }
        if before.tokenizer is not None:  # some protein and genome models have none
            report["texts"] = Path(args.texts).name if args.texts else "built-in"
            report |= differences(before, after, texts or TEXTS)
        (draft / REPORT).write_bytes(storage.to_json(report))
    print(json.dumps(report) if args.json else "\n".join(_lines(args.output, report)))


def _texts(name: str, column: str | None) -> list[str]:
    table = open_table(name)
    column = table.column(["text"], column, "--column", only=True)
    cells = [text_cell(table, number, row, column) for number, row in enumerate(table.rows([column]), 1)]
    texts = [text for text in cells if text.strip()]
    if not texts:
        raise InputError(f"{table.name}: column {column!r} has no text to compare the models on")
    return texts


def weight_bytes(folder: Path) -> int:
    """The size of a folder's weight files, including those of named heads."""
    from bertie.checkpoints import named_heads, storage
    from bertie.checkpoints.sentence_modules import SentenceModules
    from bertie.checkpoints.weight_files import find_weight_files

    folder = folder / SentenceModules.transformer_folder(folder)
    int8 = named_heads.is_int8(storage.read_json(folder / "config.json").get(named_heads.KEY))
    files = [*find_weight_files(folder, int8=int8), folder / named_heads.FILE]
    return sum(file.stat().st_size for file in files if file.is_file())


# --- the weights ---


def weight_errors(before: Checkpoint, after: Checkpoint) -> dict[str, Any]:
    """The relative error of all weights (Frobenius norm), and the tensors with the largest error."""
    old, new = _tensors(before), _tensors(after)
    error, norm = 0.0, 0.0
    errors: dict[str, float] = {}
    for name, x in old.items():
        tensor_error = float((new[name].double() - x.double()).square().sum())
        tensor_norm = float(x.double().square().sum())
        error, norm = error + tensor_error, norm + tensor_norm
        errors[name] = (tensor_error / tensor_norm) ** 0.5 if tensor_norm else 0.0
    worst = sorted(errors, key=lambda name: -errors[name])[:5]
    return {
        "parameters": sum(x.numel() for x in old.values()),
        "relative_error": (error / norm) ** 0.5,
        "worst_tensors": {name: errors[name] for name in worst},
    }


def _tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All weights, by their names in the files."""
    from bertie.checkpoints import named_heads

    named = [name for name in checkpoint.heads if name not in checkpoint.spec.heads]
    return checkpoint.spec.weight_map.store(checkpoint.model) | named_heads.tensors(checkpoint.model, named)


def _lines(output: str, report: dict[str, Any]) -> Iterator[str]:
    """The report as text."""
    from bertie.compress.quantization_report import lines

    old, new, folder = (f"{size / 1e6:,.1f} MB" for size in report["bytes"].values())
    weights = report["weights"]
    worst, error = next(iter(weights["worst_tensors"].items()))
    rows = {
        "weights": f"{old} -> {new} in {report['precision']}; {weights['parameters']:,} parameters; "
        f"whole folder: {folder}",
        "error": f"{weights['relative_error']:.3%} relative error; largest in {worst}: {error:.3%}",
    } | lines(report)
    rows["report"] = str(Path(output) / REPORT)
    width = max(map(len, rows))
    yield from (f"{name:<{width}}  {text}" for name, text in rows.items())
