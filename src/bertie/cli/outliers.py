"""Find texts unlike the rest of a file, or unlike those of a reference file, the most unusual first.

The score of a text is the mean cosine distance of its embedding to those of its nearest neighbours. Texts with a score
above a threshold are outliers. The threshold is set for a false-positive rate, --false-alarms, that is measured on
ordinary texts (--reference) or estimated from the bulk of the scores. OUT contains the score of each row.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, add_top_k, verb
from bertie.cli.text_groups import TextInput, add_group_flags, check_outputs, shorten
from bertie.data.journal import ResumableFile
from bertie.data.progress import Progress
from bertie.data.writers import TableWriter, check_output_name, make_writer

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.tasks.outliers import Outliers

EXAMPLE = """  bertie outliers tickets.csv --column message -o scores.csv
  bertie outliers today.jsonl --reference ordinary.jsonl --false-alarms 0.001 -k 20
  bertie outliers big.parquet -o scores.parquet --method approximate --resume
"""
CHUNK = 4096  # rows


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "outliers", "find texts unlike the rest", __doc__, EXAMPLE)
    add_group_flags(
        parser, "output file with the score of each row: .jsonl, .csv, .tsv, .parquet; also .gz, .xz and .zst"
    )
    parser.add_argument("--reference", metavar="FILE", help="file of ordinary texts to compare with")
    parser.add_argument(
        "--neighbours",
        type=int,
        default=10,
        metavar="N",
        help="number of nearest neighbours (default: 10)",
    )
    parser.add_argument(
        "--false-alarms",
        type=float,
        default=0.01,
        metavar="P",
        help="false-positive rate: fraction of ordinary texts above the threshold (default: 0.01)",
    )
    add_top_k(parser, 20, "outliers to print")
    parser.add_argument(
        "--method",
        choices=("auto", "exact", "approximate"),
        default="auto",
        help="compare all texts, or search an approximate FAISS index (default: exact for up to 100,000 texts)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.neighbours < 1 or args.top_k < 0:
        raise UsageError(f"--neighbours {args.neighbours} must be at least 1, and -k {args.top_k} at least 0")
    if not 0 < args.false_alarms < 1:
        raise UsageError(f"--false-alarms {args.false_alarms:g} must be a rate between 0 and 1")
    if args.resume and args.output is None:
        raise UsageError("--resume needs an output file; pass it with -o")
    path: Path | None = None
    if args.output is not None:
        check_output_name(args.output, embeddings=False)
        (path,) = check_outputs(args, args.output)
    source, reference = TextInput(args), _reference(args)
    vectors = source.embeddings()
    known = None if reference is None else reference.embeddings()

    from bertie.tasks.outliers import outliers_of, with_texts

    total, done = len(vectors) + (0 if known is None else len(known)), 0
    with Progress("compare", lambda: done / total) as progress:

        def update(rows: int) -> None:
            nonlocal done
            done += rows
            progress.update(rows)

        options: dict[str, Any] = {"neighbours": args.neighbours, "false_alarms": args.false_alarms}
        result = outliers_of(vectors, known, **options, method=args.method, progress=update)
    if path is not None:
        _write(path, source, result)
        source.remove_embeddings()
        if reference is not None:
            reference.remove_embeddings()
    shown = result.texts[: args.top_k]
    texts = _texts_at(source, {outlier.index for outlier in shown})
    compared = _texts_at(reference or source, {outlier.nearest for outlier in shown})
    count, result = len(result.texts), replace(result, texts=shown)
    _print(args, with_texts(result, texts.__getitem__, compared.__getitem__), count)


def _reference(args: argparse.Namespace) -> TextInput | None:
    """The texts of --reference, with a separate file of embeddings beside the output."""
    if args.reference is None:
        return None
    output = None if args.output is None else f"{args.output}.reference"
    return TextInput(argparse.Namespace(**vars(args) | {"items": [args.reference], "output": output}))


def _texts_at(source: TextInput, rows: set[int]) -> dict[int, str]:
    return {row: shorten(text) for row, text in enumerate(source.texts()) if row in rows} if rows else {}


def _write(path: Path, source: TextInput, result: Outliers) -> None:
    schema = {"row": int, "score": float, "p_value": float, "outlier": bool, "nearest": int, "similarity": float}
    writer = make_writer(path.name, schema | {"text": str})
    found = {outlier.index for outlier in result.texts}
    columns = (result.scores, result.p_values, result.nearest, result.similarity)
    records = (
        {
            "row": row + 1,
            "score": round(float(score), 4),
            "p_value": round(float(p_value), 6),
            "outlier": row in found,
            "nearest": int(at) + 1,
            "similarity": round(float(similarity), 4),
            "text": text,
        }
        for row, (score, p_value, at, similarity, text) in enumerate(zip(*columns, source.texts(), strict=True))
    )
    with ResumableFile(path, {}, resume=False, overwrite=True) as output:
        output.start(writer)
        while chunk := list(islice(records, CHUNK)):
            output.append(writer.encode(chunk), len(chunk))
        output.finish()


def _print(args: argparse.Namespace, result: Outliers, count: int) -> None:
    if args.json:
        outliers = [
            {
                "row": outlier.index + 1,
                "score": round(outlier.score, 4),
                "p_value": outlier.p_value,
                "text": outlier.text,
                "nearest": outlier.nearest + 1,
                "similarity": round(outlier.similarity, 4),
                "nearest_text": outlier.nearest_text,
            }
            for outlier in result.texts
        ]
        summary = {
            "texts": len(result.scores),
            "outliers": count,
            "share": result.share.as_dict(),
            "threshold": result.threshold,
            "false_alarms": result.false_alarms.as_dict(),
        }
        print(json.dumps(summary | {"shown": outliers} | ({"output": args.output} if args.output else {})))
        return
    if result.texts:
        table = TableWriter(("row", "score", "p", "text", "nearest", "similarity", "text"))
        rows = [
            (o.index + 1, o.score, o.p_value, o.text, o.nearest + 1, o.similarity, o.nearest_text) for o in result.texts
        ]
        sys.stdout.write(table.text(rows))
    rate, share = result.false_alarms, result.share
    interval = "" if math.isnan(rate.low) else f" [{rate.low:.2%}, {rate.high:.2%}]"
    where = f"; scores in {args.output}" if args.output else ""
    print(
        f"bertie: texts: {len(result.scores):,}; outliers: {count:,} ({share.value:.2%} [{share.low:.2%}, "
        f"{share.high:.2%}]); threshold {result.threshold:.4f}; false-alarm rate {rate.value:.2%}{interval}{where}",
        file=sys.stderr,
    )
