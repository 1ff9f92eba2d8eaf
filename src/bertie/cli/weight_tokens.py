"""Let words count by how rare they are: better search and similarity by an embedder, without training.

An embedder whose vectors are means over tokens gets a weight for each word of its vocabulary. A word that stands in the
share p of the texts has the weight S / (S + p), S being --share: what is rare counts fully, what stands in S of the
texts by half. Give it many texts of the kind that will be searched. Heads of the model stay as they are, and
sentence-transformers reads the weights, too (WordWeights).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bertie.cli.common import add_column, add_model, new_folder, verb
from bertie.data.progress import Progress
from bertie.data.readers import open_table, text_of

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie weigh documents.jsonl -m sentence-transformers/all-MiniLM-L6-v2 -o my-embedder
  bertie weigh manuals.csv --column body -o my-embedder
"""
SHOWN = 8  # words


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "weigh", "let an embedder's words count by how rare they are", __doc__, EXAMPLE)
    parser.add_argument("files", metavar="FILE", nargs="+", help="texts: .txt, .csv, .tsv, .jsonl, .parquet")
    add_column(parser)
    add_model(parser, overflow=False)
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the new folder")
    parser.add_argument(
        "--share", metavar="S", type=float, default=0.1, help="of texts, whose words count by half (0.1)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it is there")
    parser.add_argument("--json", action="store_true", help="print what was found as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    out = new_folder(args.output, overwrite=args.overwrite)
    tables = [open_table(file) for file in args.files]
    columns = [table.column(["text"], args.column, "--column", only=True) for table in tables]

    from bertie.tasks import Embedder

    task, count = Embedder.load(args.model, revision=args.revision), 0

    def texts() -> Iterator[str]:
        nonlocal count
        for table, column in zip(tables, columns, strict=True):
            with Progress("weigh", table.fraction) as progress:
                for number, row in enumerate(table.rows([column]), 1):
                    yield text_of(table, number, row, column)
                    progress.update(1)
                    count += 1

    task.weigh(texts(), share=args.share)
    task.save(out, overwrite=args.overwrite)
    assert task.modules.pooling.words is not None
    words = task.modules.pooling.words.tolist()
    first = sorted(range(len(words)), key=words.__getitem__)[:SHOWN]
    least = {task.tokenizer.vocabulary.get(id, ""): round(words[id], 3) for id in first}
    if args.json:
        print(json.dumps({"output": args.output, "texts": count, "words": len(words), "least": least}))
        return
    shown = ", ".join(f"{word} {weight:.2f}" for word, weight in least.items())
    print(f"{args.output}: weighed by {count:,} texts; what counts least: {shown}", file=sys.stderr)
