"""Rerank documents for a query with a cross-encoder or a ColBERT model; or score the pairs of a file, row by row."""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

from bertie.cli.common import (
    UsageError,
    add_head,
    add_input,
    add_model,
    add_output,
    add_top_k,
    load,
    model_name,
    open_input,
    verb,
)
from bertie.cli.stream import CHUNK_ROWS, READ_COLUMNS, READ_SCHEMA, Result, Stream, read_cells

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie rerank "What do cats eat?" "Bread is baked from flour." "Cats eat meat and fish."
  bertie rerank "What do cats eat?" passages.txt --top-k 10 -m cross-encoder/ms-marco-MiniLM-L6-v2
  bertie rerank "What do cats eat?" passages.txt -m ./my-colbert
  bertie rerank pairs.csv -o scores.csv -m ./my-reranker                 # columns: query, passage
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "rerank", "rerank documents for a query with a cross-encoder", __doc__, EXAMPLE)
    what = "a query, then its documents or one file of them; or one file with the columns query and passage"
    add_input(parser, "QUERY DOC|QUERY FILE|FILE", what)
    parser.add_argument("--query-column", metavar="NAME", help="column of queries (default: query)")
    parser.add_argument("--column", metavar="NAME", help="column of documents (default: passage, document or text)")
    add_model(parser)
    add_head(parser)
    add_top_k(parser, None, "return the N best documents")
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.top_k is not None and args.top_k < 1:
        raise UsageError(f"--top-k {args.top_k} must be at least 1")
    query, *rest = args.items
    pairs = not rest
    table = open_input(args, items=rest or [query])
    document = table.column(["passage", "document", "text"], args.column, "--column", only=not pairs)
    if not pairs:
        if args.on_error == "null":
            raise UsageError("--on-error null is for a file of pairs; documents without a score cannot be ranked")
        if args.resume:
            raise UsageError("--resume is for a file of pairs; documents are ranked when all are scored")
        columns = [document]
    elif table.is_literal:
        raise UsageError("a query needs documents: pass them after it, or a file of them")
    else:
        if args.top_k is not None:
            raise UsageError("--top-k is for one query; in a file of pairs each row is scored by itself")
        columns = [table.column(["query"], args.query_column, "--query-column"), document]
    stream = Stream(args, table, columns)

    from bertie.cli.common import reranker_class

    task = load(reranker_class(model_name(args), args.revision), args)

    def work(items: list[Any]) -> Iterator[dict[str, Any]]:
        inputs = items if pairs else [(query, text) for text in items]
        return map(asdict, task.predict_each(inputs))

    scored = stream.results(work)
    stream.write(
        scored if pairs else _rank(scored, args.top_k),
        {"score": float} | READ_SCHEMA | ({} if pairs else {"text": str}),
        ("row", "score", *READ_COLUMNS, "document"),
        lambda record, item: [
            (record["row"], record["score"], *read_cells(record), item[1] if pairs else item),
        ],
    )


def _rank(scored: Iterator[list[Result]], top_k: int | None) -> Iterator[list[Result]]:
    """Sort by score, then by row."""

    def order(result: Result) -> tuple[float, int]:
        return -result[0]["score"], result[0]["row"]

    results = ((record | {"text": item}, item) for chunk in scored for record, item in chunk)
    best = iter(sorted(results, key=order) if top_k is None else heapq.nsmallest(top_k, results, key=order))
    while chunk := list(islice(best, CHUNK_ROWS)):
        yield chunk
