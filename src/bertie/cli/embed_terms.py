"""`bertie embed` with models whose embeddings are not one vector per text: SPLADE and ColBERT."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertie.cli.common import UsageError, load
from bertie.cli.stream import READ_COLUMNS, READ_SCHEMA, Stream, read_cells
from bertie.data.readers import InputTable

SHOWN_TERMS = 8  # in a row of the table


def _check_flags(args: argparse.Namespace, what: str, *names: str) -> None:
    for name in names:
        if getattr(args, name) not in (None, False):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} is not for {what}; leave it out")


def embed_sparse(args: argparse.Namespace, table: InputTable, column: str) -> None:
    """Write the terms of each text, or all texts as one matrix (.npz)."""
    _check_flags(args, "sparse embeddings", "pooling", "normalize", "dimension", "tokens", "queries")
    if args.output is not None and Path(args.output).suffix == ".npz":
        _save_matrix(args, table, column)
        return
    stream = Stream(args, table, [column])

    import numpy as np

    from bertie.tasks import SparseEmbedder

    task = load(SparseEmbedder, args)
    options = {"top_k": args.top_k, "prompt": args.prompt, "prompt_name": args.prompt_name}

    def work(texts: list[str]) -> Iterator[dict[str, Any]]:
        for result in task.embed_each(texts, **options):
            yield {
                "ids": result.ids.tolist(),
                "tokens": list(result.tokens),
                "weights": result.weights,
                **{name: getattr(result, name) for name in READ_SCHEMA},
            }

    def cells(record: dict[str, Any], text: str) -> list[tuple[object, ...]]:
        terms = zip(record["tokens"][:SHOWN_TERMS], record["weights"][:SHOWN_TERMS], strict=True)
        shown = " ".join(f"{token} {weight:.2f}" for token, weight in terms)
        more = " …" if len(record["tokens"]) > SHOWN_TERMS else ""
        return [(record["row"], shown + more, len(record["tokens"]), *read_cells(record), text)]

    schema = {"ids": [int], "tokens": [str], "weights": [np.float32], **READ_SCHEMA}
    stream.write(stream.results(work), schema, ("row", "terms", "count", *READ_COLUMNS, "text"), cells)


def _save_matrix(args: argparse.Namespace, table: InputTable, column: str) -> None:
    """Write all texts as one matrix in SciPy's CSR format (.npz)."""
    _check_flags(args, "an .npz matrix, which is written in a single step", "resume", "json")
    if Path(args.output).exists() and not args.overwrite:
        raise UsageError(f"{args.output} exists; --overwrite replaces it")
    output, args.output, args.overwrite = args.output, None, False
    stream = Stream(args, table, [column])

    from bertie.tasks import SparseEmbedder
    from bertie.tasks.results import SparseEmbeddingResult

    task = load(SparseEmbedder, args)
    options = {"top_k": args.top_k, "prompt": args.prompt, "prompt_name": args.prompt_name}
    results: list[SparseEmbeddingResult] = []

    def work(texts: list[str]) -> Iterator[dict[str, Any]]:
        return ({"result": result} for result in task.embed_each(texts, **options))

    for chunk in stream.results(work):
        results += [record["result"] for record, _ in chunk if "result" in record]
    task.matrix(results).save(output)


def embed_late(args: argparse.Namespace, table: InputTable, column: str) -> None:
    """Write the token embeddings of each document or query."""
    _check_flags(args, "a late-interaction model", "pooling", "normalize", "dimension", "prompt", "prompt_name")
    _check_flags(args, "a late-interaction model", "top_k")
    stream = Stream(args, table, [column])

    import numpy as np

    from bertie.tasks import LateInteraction

    task = load(LateInteraction, args)
    each = task.embed_queries_each if args.queries else task.embed_documents_each

    def work(texts: list[str]) -> Iterator[dict[str, Any]]:
        for result in each(texts):
            yield {
                "tokens": list(result.tokens),
                "vectors": list(result.vectors),
                **{name: getattr(result, name) for name in READ_SCHEMA},
            }

    stream.write(
        stream.results(work),
        {"tokens": [str], "vectors": [[np.float32]], **READ_SCHEMA},
        ("row", "token", "vector", "dimension"),
        lambda record, text: [
            (record["row"], token, " ".join(f"{x:+.4f}" for x in vector[:5]) + " …", len(vector))
            for token, vector in zip(record["tokens"], record["vectors"], strict=True)
        ],
    )
