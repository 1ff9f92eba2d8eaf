"""Make files searchable, or bring an index up to date with them.

Text, Markdown, HTML, PDF, and the rows of JSONL, CSV, TSV and Parquet are cut into passages, each with its vector. What
was stopped goes on with --refresh, which embeds only what is new or has changed, and deletes what is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from bertie.cli.cluster import add_ray, check_ray, on_cluster
from bertie.cli.common import UsageError, add_model, load, verb
from bertie.errors import ExistsError, NotFoundError

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.search.document_reader import ReadOptions
    from bertie.search.index import Index

EXAMPLE = """  bertie index docs/ --out my-index
  bertie index docs/ --out my-index --refresh                            # take up what has changed
  bertie index papers/ --out postgresql://me@localhost/papers -m ./my-model
  bertie index products.csv --column description --out products --vectors int8
"""
SHOWN = 10  # files that were left out


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "index", "make files searchable", __doc__, EXAMPLE)
    parser.add_argument("paths", nargs="*", metavar="FILE|DIR", help="what to read; folders with all below them")
    parser.add_argument("--out", required=True, metavar="INDEX", help="a folder; postgresql://… or lance://FOLDER")
    add_model(parser)
    parser.add_argument("--refresh", action="store_true", help="if the index is there, take up what has changed")
    parser.add_argument("--rebuild", action="store_true", help="make damaged files of an index anew, from its passages")
    parser.add_argument("--size", type=int, metavar="N", help="tokens of a passage at most (256)")
    parser.add_argument("--overlap", type=int, metavar="N", help="tokens that neighbours share (32)")
    parser.add_argument("--vectors", choices=("fp32", "int8", "binary"), help="how they are kept (fp32)")
    parser.add_argument("--language", help="of stems and stop words (english); none leaves words as they are")
    parser.add_argument("--encoding", help="of text that is not UTF-8, such as cp1252")
    parser.add_argument("--column", default="text", metavar="NAME", help="with the texts of tables (text)")
    parser.add_argument("--id-column", metavar="NAME", help="with the ids of rows (id or _id, else their numbers)")
    parser.add_argument("--skip", action="store_true", help="leave out files that cannot be read, and say which")
    parser.add_argument("--json", action="store_true", help="print what was done as one JSON object")
    add_ray(parser, "cut and embed documents")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    from bertie import cluster as scale
    from bertie.search.index import Index
    from bertie.tasks import Embedder

    check_ray(args)
    if args.rebuild:
        if args.paths:
            raise UsageError("--rebuild works from the index alone; leave out the files, or pass --refresh instead")
        again = Index.rebuild(args.out, None if args.model is None else load(Embedder, args))
        said = {"index": _shown(args.out), "embedded": again}
        print(json.dumps(said) if args.json else f"{said['index']} is whole; {again:,} passages were embedded again")
        return
    if not args.paths:
        raise UsageError("name the files or folders to read")
    skipped: list[tuple[str, str]] = []
    index, made = _index(args)
    with index:
        index.progress = True
        try:
            options: ReadOptions = {
                "text": args.column,
                "id": args.id_column,
                "encoding": args.encoding,
                "on_error": "skip" if args.skip else "raise",
                "skipped": lambda path, reason: skipped.append((path, reason)),
            }
            if args.ray is None:
                counts = index.refresh(args.paths, **options)
            else:
                cluster = {"device": args.device, "workers": args.workers, "threads": args.threads}
                with on_cluster():
                    counts = scale.index(index, args.paths, address=args.ray, **cluster, **options)
        except BaseException as error:
            if len(index):
                error.add_note("--refresh goes on from there")
            elif made:
                _remove(index)
            raise
        if hasattr(index.store, "folder"):  # where they stay
            index.load_words()  # now, rather than when somebody waits for an answer
        total = len(index)
    _say(skipped)
    if args.json:
        print(json.dumps({"index": _shown(args.out), **asdict(counts), "total": total, "skipped": len(skipped)}))
    else:
        print(
            f"{_shown(args.out)}: {counts.added:,} documents added, {counts.changed:,} changed, {counts.deleted:,} "
            f"deleted, {counts.unchanged:,} as they were; {counts.passages:,} passages embedded, {total:,} in all"
        )


def _shown(index: str) -> str:
    """An index's address without a password.

    >>> _shown("postgresql://me:secret@localhost/papers")
    'postgresql://me@localhost/papers'
    """
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1@", index)


def _index(args: argparse.Namespace) -> tuple[Index, bool]:
    """The index, and whether it was made just now."""
    from bertie.search.index import Index
    from bertie.tasks import Embedder

    asked = {"size": args.size, "overlap": args.overlap, "vectors": args.vectors, "language": args.language}
    asked = {name: value for name, value in asked.items() if value is not None}
    if args.refresh:
        try:
            there = Index.open(args.out)
        except NotFoundError:
            pass
        else:
            has = {**there.about, "vectors": getattr(there.store, "vectors", "fp32")}
            for name, value in asked.items():
                if str(value).lower() != str(has[name]).lower():
                    raise UsageError(
                        f"--{name} {value}: {_shown(args.out)} was made with {has[name]}, which cannot be changed"
                    )
            args.model = args.model or there.about["model"]
            return Index(there.store, load(Embedder, args)), False
    if args.language == "none":
        asked["language"] = None
    try:
        return Index.create(args.out, load(Embedder, args), **asked), True
    except ExistsError as error:
        error.add_note("pass --refresh to take up what has changed")
        raise


def _say(skipped: Sequence[tuple[str, str]]) -> None:
    """What was left out: what cannot be read, and how many files of other kinds."""
    from bertie.data.readers import data_suffix
    from bertie.search.document_reader import DOCUMENT_SUFFIXES

    others = {path for path, _ in skipped if data_suffix(path) not in DOCUMENT_SUFFIXES and not os.path.isdir(path)}
    bad = [f"{path}: {reason}" for path, reason in skipped if path not in others]
    lines = bad[:SHOWN]
    if len(bad) > SHOWN:
        lines.append(f"{len(bad) - SHOWN:,} more that cannot be read")
    if others:
        kinds = sorted({data_suffix(path) or "without an ending" for path in others})
        lines.append(f"{len(others):,} files of other kinds: {', '.join(kinds[:SHOWN])}")
    for line in lines:
        print(f"bertie: left out {line}", file=sys.stderr)


def _remove(index: Index) -> None:
    from bertie.search.local_store import LocalStore

    if isinstance(index.store, LocalStore):
        shutil.rmtree(index.store.folder, ignore_errors=True)
