"""Mine hard negatives from a corpus, for training an embedder.

PAIRS have the columns query (or anchor) and positive (or passage); the corpus has a column text
(or passage). The output has the columns query, positive and negatives, for `bertie train embed`.
Passages nearly as similar as the positive are likely false negatives, and are left out. With --teacher,
a reranker scores each row's passages: the columns are then query, passages and scores, for distillation
(--loss margin-mse or kl).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, add_model, load, verb
from bertie.data.atomic import PathLock, atomic_write
from bertie.errors import ExistsError, InputError

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie mine pairs.jsonl --corpus passages.jsonl -m ./my-embedder -o mined.jsonl
  bertie mine pairs.jsonl --corpus passages.jsonl --negatives 8 --max-ratio 0.9 -o mined.jsonl
  bertie mine pairs.jsonl --corpus passages.jsonl --teacher ./my-reranker -o distill.jsonl
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "mine", "mine hard negatives for training an embedder", __doc__, EXAMPLE)
    parser.add_argument("pairs", metavar="PAIRS", nargs="+", help="files of queries and positives")
    parser.add_argument("--corpus", metavar="FILE", required=True, help="file of passages to mine from")
    parser.add_argument("--column", metavar="NAME", help="text column of the corpus (default: text or passage)")
    add_model(parser)
    parser.add_argument("--teacher", metavar="MODEL", help="reranker that scores the mined passages")
    parser.add_argument("--negatives", metavar="N", type=int, default=4, help="negatives per pair (default: 4)")
    parser.add_argument(
        "--skip", metavar="N", type=int, default=0, help="leave out the N nearest passages (default: 0)"
    )
    parser.add_argument(
        "--depth", metavar="N", type=int, default=100, help="consider the N nearest passages (default: 100)"
    )
    parser.add_argument(
        "--margin",
        metavar="X",
        type=float,
        default=0.0,
        help="leave out passages with a score above the positive's minus X (default: 0)",
    )
    parser.add_argument(
        "--max-ratio",
        metavar="X",
        type=float,
        default=0.95,
        help="leave out passages with a score above X times the positive's (default: 0.95)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="JSONL file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file if it exists")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Mine, and write the rows."""
    from bertie.data.readers import open_table
    from bertie.training.finetune.data import read_dataset

    output = Path(args.output)
    if not output.absolute().parent.is_dir():
        raise InputError(f"{output} cannot be written: there is no folder {output.parent}")
    args.cleanup.callback(PathLock(output.with_name(f"{output.name}.part.lock"), output).release)
    if output.exists() and not args.overwrite:
        raise ExistsError(f"{output} already exists; pass --overwrite, or another name")
    if output.suffix != ".jsonl":
        raise UsageError(f"-o {output} must end in .jsonl: rows contain lists")
    data = read_dataset("embed", [Path(file) for file in args.pairs], training=False)
    if data.inputs != "pairs":
        raise InputError(f"{data.name} has {data.inputs}; mining needs matching pairs, without labels")
    table = open_table(args.corpus)
    column = table.column(["text", "passage", "document"], args.column, "--column")
    corpus = [str(row[column]) for row in table.rows((column,))]

    from bertie.tasks import Embedder, Reranker
    from bertie.training.embedding.mining import mine, score_with_teacher

    settings = {name: getattr(args, name) for name in ("negatives", "skip", "depth", "margin", "max_ratio")}
    queries, answers = ([example.texts[i] for example in data.examples] for i in range(2))
    mined = mine(load(Embedder, args), queries, answers, corpus, **settings)
    columns: dict[str, list[Any]] = mined.table()
    if args.teacher is not None and mined.rows:
        columns = score_with_teacher(Reranker.load(args.teacher), mined.rows)
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    atomic_write(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8"))
    if args.json:
        counts = {"rows": len(mined.rows), "filtered": mined.filtered, "incomplete": len(mined.incomplete)}
        print(json.dumps({"output": args.output} | counts))
        return
    print(
        f"{args.output}: {len(mined.rows):,} rows with {args.negatives} negatives; {mined.filtered:,} likely false "
        f"negatives left out, {len(mined.incomplete):,} pairs with too few negatives",
        file=sys.stderr,
    )
