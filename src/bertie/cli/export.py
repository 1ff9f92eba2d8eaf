"""Export a model to ONNX or OpenVINO, and verify the outputs against the source model.

The graph contains the encoder with its pooling or head; tokenizer and configs are saved beside it, as
sentence-transformers, transformers.js, fastembed and ONNX Runtime expect them. Each file is run on texts
(built-in ones by default) and compared with the source model; if one differs too much, the export fails and
writes nothing. The report is printed, and saved as export.json and README.md.

int8: int8 weights; ONNX also multiplies in int8. fp16: half-precision weights, for smaller files.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bertie.cli.common import UsageError, add_column, add_head, add_model_argument, check_output_folder, verb
from bertie.data.readers import open_table, text_cell
from bertie.errors import InputError
from bertie.tasks import registry

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie export ./my-model -o exported --to onnx
  bertie export ./my-model -o exported --to onnx openvino --precision fp32 int8 --texts reviews.jsonl
  bertie export bertie-small -o ner --to onnx --task tag --json | jq '.files[].bytes'
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "export", "export a model to ONNX or OpenVINO, and verify the outputs", __doc__, EXAMPLE)
    add_model_argument(parser)
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="folder to create")
    parser.add_argument(
        "--to", nargs="+", choices=("onnx", "openvino"), default=["onnx"], help="formats (default: onnx)"
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=("fp32", "fp16", "int8"),
        default=["fp32"],
        help="precisions of the weights, one file each (default: fp32)",
    )
    parser.add_argument("--task", choices=tuple(registry.TASKS), help="the task (default: that of the model's head)")
    add_head(parser)
    parser.add_argument("--texts", metavar="FILE", help="compare on these texts: .txt, .csv, .tsv, .jsonl, .parquet")
    add_column(parser)
    parser.add_argument(
        "--max-error",
        type=float,
        metavar="E",
        help="maximum relative error of an output (default: 1e-4 for fp32, 0.01 for fp16, 0.25 for int8)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.model is None:
        raise UsageError("pass the model to export: a folder, a built-in name or a hub id")
    if args.column and not args.texts:
        raise UsageError("--column needs --texts")
    if args.max_error is not None and not args.max_error > 0:
        raise UsageError(f"--max-error {args.max_error} must be greater than 0")
    check_output_folder(args.output, overwrite=args.overwrite)
    texts = _texts(args.texts, args.column) if args.texts else None

    from bertie.checkpoints.hub import resolve
    from bertie.compress.export import README, REPORT, export

    report = export(
        resolve(args.model, args.revision) if args.revision else args.model,
        args.output,
        to=args.to,
        precision=args.precision,
        task=args.task,
        head=args.head,
        texts=texts,
        max_error=args.max_error,
        overwrite=args.overwrite,
        progress=True,
    )
    if args.json:
        print(json.dumps(report.to_dict()))
        return
    print(report)
    print(f"report   {Path(args.output) / REPORT}, {Path(args.output) / README}", file=sys.stderr)


def _texts(name: str, column: str | None) -> list[str]:
    table = open_table(name)
    column = table.column(["text"], column, "--column", only=True)
    cells = [text_cell(table, number, row, column) for number, row in enumerate(table.rows([column]), 1)]
    texts = [text for text in cells if text.strip()]
    if not texts:
        raise InputError(f"{table.name}: column {column!r} has no text to compare the models on")
    return texts
