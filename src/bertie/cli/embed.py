"""Encode texts into embeddings."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.cli.cluster import add_ray, check_ray, on_cluster
from bertie.cli.common import UsageError, add_column, add_input, add_model, add_output, load, open_input, verb
from bertie.cli.stream import READ_COLUMNS, Stream, read_cells, result_schema
from bertie.data.readers import STDIN

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie embed "A cat sat on the mat."
  bertie embed reviews.csv --column review -o reviews.npy -m sentence-transformers/all-MiniLM-L6-v2
  zcat big.txt.gz | bertie embed - -o big.parquet --resume -m ./my-model
  bertie embed corpus/*.jsonl.gz -o vectors --ray local
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "embed", "encode texts into embeddings", __doc__, EXAMPLE)
    add_input(parser)
    add_column(parser)
    add_model(parser)
    pooling = ("cls", "mean", "max", "last", "weighted-mean")
    parser.add_argument(
        "--pooling", choices=pooling, help="pooling of token embeddings (default: that of the checkpoint)"
    )
    parser.add_argument("--normalize", action="store_true", default=None, help="L2-normalize the embeddings")
    parser.add_argument(
        "--dimension", type=int, metavar="N", help="truncate embeddings to the first N dimensions (Matryoshka)"
    )
    parser.add_argument("--prompt", metavar="NAME", help="name of a prompt of the checkpoint, prepended to each text")
    add_output(parser, embeddings=True)
    add_ray(parser, "embed any number of files into OUT, a folder of Parquet files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    check_ray(args)
    if args.ray is not None:
        run_ray(args)
        return
    table = open_input(args)
    column = table.column(["text"], args.column, "--column", only=True)
    stream = Stream(args, table, [column], embeddings=True)

    import numpy as np

    from bertie.tasks import Embedder
    from bertie.tasks.results import EmbeddingResult

    task = load(Embedder, args, pooling=args.pooling, normalize=args.normalize, dimension=args.dimension)

    def work(texts: list[str]) -> Iterator[dict[str, Any]]:
        return map(asdict, task.embed_each(texts, prompt=args.prompt))

    stream.write(
        stream.results(work),
        result_schema(EmbeddingResult, vector=[np.float32]),
        ("row", "vector", "dimension", *READ_COLUMNS, "text"),
        lambda record, text: [
            (
                record["row"],
                " ".join(f"{x:+.4f}" for x in record["vector"][:5]) + " …",
                len(record["vector"]),
                *read_cells(record),
                text,
            )
        ],
        dimension=task.dimension,
    )


def run_ray(args: argparse.Namespace) -> None:
    """Run the verb on a Ray cluster."""
    if args.output is None or args.output == STDIN:
        raise UsageError("--ray writes a folder of Parquet files: pass its name with -o")
    if args.skip_empty or args.on_error != "stop":
        raise UsageError("--skip-empty and --on-error are not for --ray")
    missing = next((item for item in args.items if not os.path.isfile(item)), None)
    if missing is not None:
        raise UsageError(f"{missing[:60]!r} is not a file; --ray reads only files")

    from bertie import cluster

    requested = {"pooling": args.pooling, "normalize": args.normalize, "dimension": args.dimension}
    options = {key: value for key, value in requested.items() if value is not None}
    with on_cluster():
        result = cluster.embed(
            [Path(item) for item in args.items],
            args.output,
            args.model,
            address=args.ray,
            column=args.column,
            format=args.format,
            prompt=args.prompt,
            resume=args.resume,
            overwrite=args.overwrite,
            device=args.device,
            workers=args.workers,
            threads=args.threads,
            overflow=args.overflow,
            revision=args.revision,
            **options,
        )
    if args.json:
        print(json.dumps({"folder": args.output, "rows": result.rows, "shards": result.shards}))
