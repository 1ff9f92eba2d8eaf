"""Compare trained models by the reports in their folders: scores, significance of differences, settings that differ.

The folders are those written by `bertie train` or `bertie eval --output`. The difference of two models is computed on
the rows that both predicted, so the models may have been evaluated on different files.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.cli.common import verb
from bertie.cli.labelled_input import add_resamples
from bertie.data.writers import TableWriter
from bertie.errors import ExistsError

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.evaluation.run_comparison import RunComparison

EXAMPLE = """  bertie compare ./first-model ./second-model
  bertie compare runs/* -o comparison.html
  bertie compare ./first-model ./second-model --json | jq .differences
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "compare", "compare trained models by their reports", __doc__, EXAMPLE)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="two or more folders with a report.json")
    parser.add_argument("-o", "--output", metavar="HTML", help="HTML page to write")
    parser.add_argument("--overwrite", action="store_true", help="replace that file")
    add_resamples(parser)
    parser.add_argument("--json", action="store_true", help="print the comparison as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Compare, print a table, and write the page."""
    from bertie.data.atomic import atomic_write
    from bertie.evaluation.comparison_page import comparison_page
    from bertie.evaluation.run_comparison import compare_runs

    if args.output is not None and Path(args.output).exists() and not args.overwrite:
        raise ExistsError(f"{args.output} exists; pass --overwrite, or another name")
    comparison = compare_runs(args.folders, resamples=max(1, args.resamples))
    if args.output is not None:
        atomic_write(Path(args.output), comparison_page(comparison).encode("utf-8"))
    if args.json:
        print(json.dumps(_as_dict(comparison)))
    else:
        sys.stdout.write(_table(comparison))
        hint = "-o comparison.html writes a page with curves and settings"
        print(f"page: {args.output}" if args.output else hint, file=sys.stderr)


def _as_dict(comparison: RunComparison) -> dict[str, Any]:
    return {
        "kind": comparison.kind,
        "metric": comparison.metric,
        "same_rows": comparison.same_rows,
        "runs": {run.name: {name: s.as_dict() for name, s in run.scores.items()} for run in comparison.runs},
        "differences": [
            {
                "first": pair.first,
                "second": pair.second,
                "rows": pair.rows,
                "difference": None if pair.difference is None else pair.difference.as_dict(),
            }
            for pair in comparison.differences
        ],
    }


def _table(comparison: RunComparison) -> str:
    from bertie.evaluation.model_report import p_value

    best, metric = comparison.runs[0].name, comparison.metric
    differences = {pair.second: pair.difference for pair in comparison.differences if pair.first == best}
    rows: list[list[object]] = []
    for run in comparison.runs:
        score, gap = run.scores[metric], differences.get(run.name)
        row: list[object] = [run.name, run.split, score.value, f"{score.low:.4f}–{score.high:.4f}"]
        rows.append(row + (["", ""] if gap is None else [str(gap), p_value(gap.p)]))
    if not comparison.same_rows:
        print("the runs were not all tested on the same rows", file=sys.stderr)
    return TableWriter(["run", "split", metric, "95%", "difference (best − run)", "p"]).text(rows)
