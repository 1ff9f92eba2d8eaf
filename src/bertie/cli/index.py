"""Create a search index from files, or update one.

Text, Markdown, HTML, PDF, and the rows of JSONL, CSV, TSV and Parquet are split into passages and
embedded. --refresh resumes an interrupted run and updates an index: it embeds new and modified
documents only, and deletes those of files that no longer exist.
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
from typing import TYPE_CHECKING, Any

from bertie.cli.cluster import add_ray, check_ray, on_cluster
from bertie.cli.common import UsageError, add_model, add_prompt, load, verb
from bertie.cli.folders import MAX_LISTED, add_follow_symlinks
from bertie.errors import ExistsError, NotFoundError

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.search.document_reader import ReadOptions
    from bertie.search.index import Index, IndexUpdate
    from bertie.tasks import Embedder

EXAMPLE = """  bertie index docs/ -o my-index
  bertie index docs/ -o my-index --refresh                               # update it after changes
  bertie index --verify -o my-index                                      # check all files
  bertie index papers/ -o postgresql://me@localhost/papers -m ./my-model
  bertie index docs/ -o my-index --prompt "passage: " --query-prompt "query: " -m intfloat/e5-small-v2
  bertie index docs/ -o my-index --sparse ./my-splade --late-interaction ./my-colbert
  bertie index products.csv --column description -o products --embedding-precision int8
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "index", "create or update a search index", __doc__, EXAMPLE)
    parser.add_argument("paths", nargs="*", metavar="FILE|DIR", help="files to index; folders are read recursively")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="INDEX",
        help="index to create or update: a folder, postgresql://… or lance://FOLDER",
    )
    add_model(parser, from_settings=False)
    parser.add_argument("--refresh", action="store_true", help="update the index if it exists")
    parser.add_argument("--rebuild", action="store_true", help="rebuild corrupt files of an index from its passages")
    parser.add_argument("--verify", action="store_true", help="check an index, and list corrupt files")
    parser.add_argument("--chunk-size", type=int, metavar="N", help="maximum tokens per passage (default: 256)")
    parser.add_argument(
        "--chunk-overlap", type=int, metavar="N", help="tokens shared by adjacent passages (default: 32)"
    )
    parser.add_argument(
        "--embedding-precision",
        choices=("fp32", "int8", "binary"),
        help="precision of the stored embeddings (default: fp32)",
    )
    parser.add_argument(
        "--language", help="language of the stemmer and the stop words (default: english); none disables both"
    )
    parser.add_argument(
        "--sparse", metavar="MODEL", help="SPLADE model: also store sparse embeddings, for --mode sparse and hybrid"
    )
    parser.add_argument(
        "--late-interaction", metavar="MODEL", help="ColBERT model: also store token embeddings, for --rerank"
    )
    named = "the checkpoint's prompt named {}, if it has one"
    add_prompt(parser, "each passage when it is embedded", named.format("passage or document"), example="passage: ")
    add_prompt(parser, "each query, stored in the index for searches", named.format("query"), prefix="query-")
    parser.add_argument("--encoding", help="encoding of text that is not UTF-8, such as cp1252")
    parser.add_argument("--column", default="text", metavar="NAME", help="the text column of tables (default: text)")
    parser.add_argument(
        "--id-column", metavar="NAME", help="the id column of tables (default: id or _id, or row numbers)"
    )
    parser.add_argument("--skip", action="store_true", help="skip files and rows that cannot be read, and list them")
    add_follow_symlinks(parser)
    parser.add_argument("--json", action="store_true", help="print the result as a JSON object")
    add_ray(parser, "split and embed documents")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    check_ray(args)
    if args.rebuild or args.verify:
        if args.paths:
            flag = "--rebuild" if args.rebuild else "--verify"
            raise UsageError(f"{flag} needs the index only; omit the files, or pass --refresh instead")
        _rebuild(args) if args.rebuild else _verify(args)
        return
    if not args.paths:
        raise UsageError("pass the files or folders to index")
    skipped: list[tuple[str, str]] = []
    index, is_new = _open_or_create(args)
    with index:
        index.progress = True
        try:
            update = _refresh(args, index, skipped)
        except BaseException as error:
            if len(index):
                error.add_note("--refresh resumes from there")
            elif is_new:
                _remove(index)
            raise
        index.refresh_derived()  # written to the folder now rather than at the first search
        total = len(index)
    _report_skipped(skipped)
    if args.json:
        record = {"index": _without_password(args.output), **asdict(update), "total": total, "skipped": len(skipped)}
        print(json.dumps(record))
    else:
        print(
            f"{_without_password(args.output)}: {update.added:,} documents added, {update.changed:,} changed, "
            f"{update.deleted:,} deleted, {update.unchanged:,} unchanged; {update.passages:,} passages embedded, "
            f"{total:,} in total"
        )


def _rebuild(args: argparse.Namespace) -> None:
    from bertie.search.index import Index
    from bertie.tasks import Embedder

    count = Index.rebuild(args.output, None if args.model is None else load(Embedder, args))
    name = _without_password(args.output)
    record = {"index": name, "embedded": count}
    print(json.dumps(record) if args.json else f"{name} has been repaired; {count:,} passages were embedded again")


def _verify(args: argparse.Namespace) -> None:
    from bertie.search.index import Index

    with Index.open(args.output, verify=True) as index:
        passages = len(index)
    name = _without_password(args.output)
    record = {"index": name, "passages": passages}
    print(json.dumps(record) if args.json else f"{name}: {passages:,} passages, no errors")


def _refresh(args: argparse.Namespace, index: Index, skipped: list[tuple[str, str]]) -> IndexUpdate:
    options: ReadOptions = {
        "text": args.column,
        "id": args.id_column,
        "encoding": args.encoding,
        "on_error": "skip" if args.skip else "raise",
        "on_skip": lambda path, reason: skipped.append((path, reason)),
        "follow_symlinks": args.follow_symlinks,
    }
    if args.ray is None:
        return index.refresh(args.paths, **options)
    from bertie import cluster

    resources = {"device": args.device, "workers": args.workers, "threads": args.threads}
    with on_cluster():
        return cluster.index(index, args.paths, address=args.ray, **resources, **options)


def _without_password(index: str) -> str:
    """Remove the password from the location of an index.

    >>> _without_password("postgresql://me:secret@localhost/papers")
    'postgresql://me@localhost/papers'
    """
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1@", index)


def _open_or_create(args: argparse.Namespace) -> tuple[Index, bool]:
    """Return the index, and whether it is new."""
    from bertie.search.index import Index
    from bertie.tasks import Embedder

    names = ("chunk_size", "chunk_overlap", "embedding_precision", "language")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.refresh:
        try:
            existing = Index.open(args.output)
        except NotFoundError:
            pass
        else:
            for name, value in options.items():
                built_with = existing.config[name]
                if str(value).lower() != str(built_with).lower():
                    flag = "--" + name.replace("_", "-")
                    location = _without_password(args.output)
                    raise UsageError(f"{flag} {value}: {location} was built with {built_with}, which cannot be changed")
            _check_derived(args, existing)
            args.model = args.model or existing.config["model"]
            embedder = load(Embedder, args)
            for name, prompt in _prompts(args, embedder).items():
                if prompt != (built_with := existing.config[name]):
                    location = _without_password(args.output)
                    raise UsageError(
                        f"{name.replace('_', ' ')} {prompt!r}: {location} was built with {built_with!r}, which cannot "
                        "be changed"
                    )
            return Index(existing.store, embedder), False
    if args.language == "none":
        options["language"] = None
    embedder = load(Embedder, args)
    try:
        derived = {"sparse": args.sparse, "late_interaction": args.late_interaction}
        return Index.create(args.output, embedder, **options, **derived, **_prompts(args, embedder)), True
    except ExistsError as error:
        error.add_note("pass --refresh to update it")
        raise


def _check_derived(args: argparse.Namespace, existing: Index) -> None:
    """Reject sparse and late-interaction models that differ from those of the index."""
    from bertie.checkpoints.hub import absolute_name

    for name in ("sparse", "late_interaction"):
        given, settings = getattr(args, name), existing.config.get(name) or {}
        if given is not None and absolute_name(given) != settings.get("model"):
            flag, built_with = "--" + name.replace("_", "-"), settings.get("model", "none")
            location = _without_password(args.output)
            raise UsageError(f"{flag} {given}: {location} was built with {built_with}, which cannot be changed")


def _prompts(args: argparse.Namespace, embedder: Embedder) -> dict[str, Any]:
    """The given prompts, keyed as in the configuration of an index."""
    given = {"passage_prompt": (args.prompt, args.prompt_name)}
    given["query_prompt"] = (args.query_prompt, args.query_prompt_name)
    return {key: embedder.prompt_text(*pair) for key, pair in given.items() if pair != (None, None)}


def _report_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    """List unreadable files and symbolic links, and count files of other types."""
    from bertie.data.folders import LINK
    from bertie.data.readers import data_suffix
    from bertie.search.document_reader import DOCUMENT_SUFFIXES

    others = {
        path
        for path, reason in skipped
        if reason != LINK and data_suffix(path) not in DOCUMENT_SUFFIXES and not os.path.isdir(path)
    }
    unreadable = [
        reason if reason.startswith(path) else f"{path}: {reason}" for path, reason in skipped if path not in others
    ]
    lines = unreadable[:MAX_LISTED]
    if len(unreadable) > MAX_LISTED:
        lines.append(f"{len(unreadable) - MAX_LISTED:,} more unreadable files, rows and links")
    if others:
        suffixes = sorted({data_suffix(path) or "no suffix" for path in others})
        lines.append(f"{len(others):,} files of other types: {', '.join(suffixes[:MAX_LISTED])}")
    for line in lines:
        print(f"bertie: skipped {line}", file=sys.stderr)


def _remove(index: Index) -> None:
    from bertie.search.local_store import LocalStore

    if isinstance(index.store, LocalStore):
        shutil.rmtree(index.store.folder, ignore_errors=True)
