"""Find hard negatives: passages of a corpus that look right for a query and are not, to train an embedder with.

The file of pairs has the columns query (or anchor) and positive (or passage), the corpus a column text (or passage).
What comes out has the columns query, positive and negatives, for `bertie train embed`. Passages nearly as near as the
known one are likely right, too, and are left out. With --teacher, a reranker scores each row's passages: the columns
are then query, passages and scores, to learn from it (--loss margin-mse or kl).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, add_model, load, verb
from bertie.errors import ExistsError, InputError

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie mine pairs.jsonl --corpus passages.jsonl -m ./my-embedder -o mined.jsonl
  bertie mine pairs.jsonl --corpus passages.jsonl --negatives 8 --ceiling 0.9 -o mined.jsonl
  bertie mine pairs.jsonl --corpus passages.jsonl --teacher ./my-reranker -o taught.jsonl
"""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "mine", "find hard negatives to train an embedder with", __doc__, EXAMPLE)
    parser.add_argument("pairs", metavar="PAIRS", nargs="+", help="files of queries and passages that answer them")
    parser.add_argument("--corpus", metavar="FILE", required=True, help="the passages to search")
    parser.add_argument("--column", metavar="NAME", help="the corpus's column with the texts (text or passage)")
    add_model(parser)
    parser.add_argument("--teacher", metavar="MODEL", help="a reranker that scores what was found")
    parser.add_argument("--negatives", metavar="N", type=int, default=4, help="for each pair (4)")
    parser.add_argument("--skip", metavar="N", type=int, default=0, help="of the nearest passages, to pass by (0)")
    parser.add_argument("--depth", metavar="N", type=int, default=100, help="of the nearest passages, to look at (100)")
    told = "leave out what is nearer than the known passage less this (0)"
    parser.add_argument("--margin", metavar="NUMBER", type=float, default=0.0, help=told)
    told = "leave out what is nearer than this share of the known passage's score (0.95)"
    parser.add_argument("--ceiling", metavar="NUMBER", type=float, default=0.95, help=told)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the JSONL file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the file, if there is one")
    parser.add_argument("--json", action="store_true", help="print what was found as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    from bertie.data.readers import open_table
    from bertie.training.finetune.data import labelled

    out = Path(args.output)
    if out.exists() and not args.overwrite:
        raise ExistsError(f"{out} is there already; pass --overwrite, or another name")
    if out.suffix != ".jsonl":
        raise UsageError(f"-o {out} must end in .jsonl: rows hold lists")
    data = labelled("embed", [Path(file) for file in args.pairs], training=False)
    if data.inputs != "pairs":
        raise InputError(f"{data.name} has {data.inputs}; mining needs pairs that belong together, without labels")
    table = open_table(args.corpus)
    column = table.column(["text", "passage", "document"], args.column, "--column")
    corpus = [str(row[column]) for row in table.rows((column,))]

    from bertie.tasks import Embedder, Reranker
    from bertie.training.embedding.mining import distilled, mine

    settings = {name: getattr(args, name) for name in ("negatives", "skip", "depth", "margin", "ceiling")}
    queries, answers = ([one.texts[i] for one in data.examples] for i in range(2))
    mined = mine(load(Embedder, args), queries, answers, corpus, **settings)
    found: dict[str, list[Any]] = mined.table()
    if args.teacher is not None and mined.rows:
        found = distilled(Reranker.load(args.teacher), mined.rows)
    draft = out.with_name(f".{out.name}.part")
    with draft.open("w", encoding="utf-8") as file:
        for row in zip(*found.values(), strict=True):
            file.write(json.dumps(dict(zip(found, row, strict=True)), ensure_ascii=False) + "\n")
    os.replace(draft, out)
    said = {"output": args.output, "rows": len(mined.rows), "left_out": mined.kept_out, "short": len(mined.short)}
    if args.json:
        print(json.dumps(said))
        return
    print(
        f"{args.output}: {len(mined.rows):,} rows of {args.negatives} negatives; {mined.kept_out:,} passages left out "
        f"as likely right, {len(mined.short):,} pairs without enough",
        file=sys.stderr,
    )
