"""Find pairs of texts with a similar meaning (paraphrase mining), the most similar first.

Each text is compared with its nearest neighbours by the cosine similarity of their embeddings. Up to 100,000 texts
are compared exactly, more with an approximate FAISS index, which misses some pairs. Embeddings are written beside OUT
as they are computed, and --resume reuses them; all of them are in memory during the comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, add_top_k, verb
from bertie.cli.text_groups import TextInput, add_group_flags, check_outputs
from bertie.data.journal import ResumableFile
from bertie.data.progress import Progress
from bertie.data.writers import TableWriter, check_output_name, make_writer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bertie.cli.common import Verbs

EXAMPLE = """  bertie pairs questions.txt -o pairs.csv                     # cosine similarity of 0.8 and more
  bertie pairs tickets.jsonl --threshold 0.9 -k 3 -o pairs.jsonl -m ./my-embedder
  bertie pairs big.parquet -o pairs.parquet --method approximate --resume
"""
CHUNK = 4096  # rows


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "pairs", "find pairs of texts with a similar meaning (paraphrase mining)", __doc__, EXAMPLE)
    add_group_flags(parser, "output file with the pairs: .jsonl, .csv, .tsv, .parquet; also .gz, .xz and .zst")
    parser.add_argument(
        "--threshold", type=float, default=0.8, metavar="X", help="minimum cosine similarity (default: 0.8)"
    )
    add_top_k(parser, 10, "nearest neighbours of each text to compare with")
    parser.add_argument(
        "--method",
        choices=("auto", "exact", "approximate"),
        default="auto",
        help="compare all texts, or search an approximate FAISS index (default: exact for up to 100,000 texts)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.top_k < 1:
        raise UsageError(f"-k {args.top_k} must be at least 1")
    if not -1 <= args.threshold <= 1:
        raise UsageError(f"--threshold {args.threshold} must lie between -1 and 1")
    if args.resume and args.output is None:
        raise UsageError("--resume needs an output file; pass it with -o")
    path: Path | None = None
    if args.output is not None:
        check_output_name(args.output, embeddings=False)
        (path,) = check_outputs(args, args.output)
    source = TextInput(args)
    vectors = source.embeddings()

    from bertie.tasks.paraphrases import mine_pairs

    done = 0
    with Progress("compare", lambda: done / len(vectors)) as progress:

        def update(rows: int) -> None:
            nonlocal done
            done += rows
            progress.update(rows)

        pairs = mine_pairs(vectors, args.threshold, args.top_k, method=args.method, progress=update)
    wanted = {row for pair in pairs for row in (pair.a, pair.b)}
    texts = {row: text for row, text in enumerate(source.texts()) if row in wanted}
    records = (
        {
            "similarity": round(pair.similarity, 4),
            "row_a": pair.a + 1,
            "row_b": pair.b + 1,
            "text_a": texts[pair.a],
            "text_b": texts[pair.b],
        }
        for pair in pairs
    )
    if path is not None:
        _write(path, records)
        source.remove_embeddings()
    elif not args.json and pairs:
        sys.stdout.write(
            TableWriter(("similarity", "row", "row", "text", "text")).text(tuple(row.values()) for row in records)
        )
    elif args.json:
        sys.stdout.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    if args.json and path is not None:
        print(json.dumps({"output": args.output, "texts": len(vectors), "pairs": len(pairs)}))
        return
    where = f"; in {path}" if path is not None else ""
    print(f"bertie: texts: {len(vectors):,}; pairs: {len(pairs):,}{where}", file=sys.stderr)


def _write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    schema = {"similarity": float, "row_a": int, "row_b": int, "text_a": str, "text_b": str}
    writer, rows = make_writer(path.name, schema), iter(records)
    with ResumableFile(path, {}, resume=False, overwrite=True) as output:
        output.start(writer)
        while chunk := list(islice(rows, CHUNK)):
            output.append(writer.encode(chunk), len(chunk))
        output.finish()
