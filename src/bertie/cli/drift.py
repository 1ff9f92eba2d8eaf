"""Test whether new texts differ from old ones, and show the most distinctive texts of each file.

A permutation test on embeddings: the p-value is the fraction of random splits of all texts that differ at least as much
as OLD and NEW (squared maximum mean discrepancy, MMD, with a Gaussian kernel). A random sample of each file is embedded
and compared; files of any size are read in one pass. Texts of one conversation or author are not independent, and make
the p-value too small.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bertie.cli.common import INPUT_FORMATS, UsageError, add_column, add_model, add_top_k, check_file_exists, load, verb
from bertie.cli.text_groups import shorten
from bertie.data.readers import STDIN, open_table, text_cell
from bertie.data.writers import TableWriter

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.tasks.drift import DriftResult

EXAMPLE = """  bertie drift january.csv february.csv --column message
  bertie drift train.jsonl requests.jsonl.gz --sample 2000 --json
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "drift", "test whether new texts differ from old ones", __doc__, EXAMPLE)
    parser.add_argument("old", metavar="OLD", help="file of texts (.txt, .csv, .tsv, .jsonl, .parquet; .gz, .xz, .zst)")
    parser.add_argument("new", metavar="NEW", help="file of texts to compare with OLD; one of them may be - for stdin")
    parser.add_argument("--format", choices=INPUT_FORMATS, help="format of files without a known suffix")
    add_column(parser)
    add_model(parser)
    parser.add_argument("--sample", type=int, default=1000, metavar="N", help="sample size per file (default: 1000)")
    parser.add_argument(
        "--permutations", type=int, default=1000, metavar="N", help="number of permutations (default: 1000)"
    )
    add_top_k(parser, 5, "texts of each file to show")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample and the test (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _texts(name: str, args: argparse.Namespace) -> Iterator[str]:
    table = open_table(name, args.format)
    column = table.column(["text"], args.column, "--column", only=True)
    return (text_cell(table, number, row, column) for number, row in enumerate(table.rows([column]), 1))


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.old == args.new == STDIN:
        raise UsageError("one of OLD and NEW may be standard input, not both")
    for flag, least in (("sample", 2), ("permutations", 19), ("top_k", 0)):
        if getattr(args, flag) < least:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(args, flag)} must be at least {least}")
    for name in (args.old, args.new):
        check_file_exists(name)
    old, new = _texts(args.old, args), _texts(args.new, args)

    from bertie.tasks import Embedder
    from bertie.tasks.drift import detect_drift

    result = detect_drift(
        old,
        new,
        load(Embedder, args),
        sample=args.sample,
        permutations=args.permutations,
        top_k=args.top_k,
        seed=args.seed,
    )
    if args.json:
        print(json.dumps(_record(result), ensure_ascii=False))
        return
    rows = [
        (side, item.index + 1, item.score, item.text)
        for side, texts in (("new", result.new_texts), ("old", result.old_texts))
        for item in texts
    ]
    if rows:
        sys.stdout.write(TableWriter(("file", "row", "score", "text")).text(rows))
    verdict = "the texts differ" if result.p_value < 0.05 else "no difference was found"
    print(f"p = {result.p_value:.4f}: {verdict} (MMD² {result.mmd:.4f}, expected without drift {result.expected:.4f})")


def _record(result: DriftResult) -> dict[str, Any]:
    texts: dict[str, Any] = {
        side: [{"row": item.index + 1, "score": round(item.score, 4), "text": shorten(item.text)} for item in items]
        for side, items in (("new", result.new_texts), ("old", result.old_texts))
    }
    numbers: dict[str, Any] = {"p_value": result.p_value, "mmd": result.mmd, "expected": result.expected}
    return numbers | texts
