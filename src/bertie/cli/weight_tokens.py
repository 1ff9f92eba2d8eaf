"""Weight tokens by their inverse document frequency: better search and similarity, without training.

Smooth inverse frequency (SIF) for an embedder with mean pooling: a token that occurs in the
fraction p of the texts gets the weight S / (S + p), where S is --smoothing. Use many texts from the
domain that will be searched. The model's task heads do not change. The result is stored as
sentence-transformers' WordWeights module, so sentence-transformers applies the same weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bertie.cli.common import add_column, add_device, add_model, check_output_folder, model_name, select_device, verb
from bertie.data.progress import Progress
from bertie.data.readers import open_table, text_cell

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie weight-tokens documents.jsonl -m sentence-transformers/all-MiniLM-L6-v2 -o my-embedder
  bertie weight-tokens manuals.csv --column body -o my-embedder
"""
SHOWN = 8  # tokens with the lowest weights


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "weight-tokens", "weight an embedder's tokens by inverse frequency (SIF)", __doc__, EXAMPLE)
    parser.add_argument("files", metavar="FILE", nargs="+", help="texts: .txt, .csv, .tsv, .jsonl, .parquet")
    add_column(parser)
    add_model(parser, overflow=False)
    add_device(parser)
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="folder to save the model in")
    parser.add_argument(
        "--smoothing", metavar="S", type=float, default=0.1, help="S in the weight S / (S + p) (default: 0.1)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if it exists")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Compute the weights and save the model with them."""
    output = check_output_folder(args.output, overwrite=args.overwrite)
    tables = [open_table(file) for file in args.files]
    columns = [table.column(["text"], args.column, "--column", only=True) for table in tables]

    from bertie.tasks import Embedder

    embedder, count = Embedder.load(model_name(args), revision=args.revision, device=select_device(args.device)), 0

    def texts() -> Iterator[str]:
        nonlocal count
        for table, column in zip(tables, columns, strict=True):
            with Progress("weight-tokens", table.fraction) as progress:
                for number, row in enumerate(table.rows([column]), 1):
                    yield text_cell(table, number, row, column)
                    progress.update(1)
                    count += 1

    embedder.weight_tokens(texts(), smoothing=args.smoothing)
    embedder.save(output, overwrite=args.overwrite)
    assert embedder.modules.pooling.token_weights is not None
    weights = embedder.modules.pooling.token_weights.tolist()
    first = sorted(range(len(weights)), key=weights.__getitem__)[:SHOWN]
    lowest = {embedder.tokenizer.vocabulary.get(id, ""): round(weights[id], 3) for id in first}
    if args.json:
        print(json.dumps({"output": args.output, "texts": count, "tokens": len(weights), "lowest": lowest}))
        return
    shown = ", ".join(f"{token} {weight:.2f}" for token, weight in lowest.items())
    print(f"{args.output}: {len(weights):,} token weights from {count:,} texts; lowest: {shown}", file=sys.stderr)
