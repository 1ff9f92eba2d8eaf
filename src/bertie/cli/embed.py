"""Encode texts into embeddings.

SPLADE models compute sparse embeddings (term weights), which can also be saved as a SciPy CSR matrix (-o OUT.npz).
ColBERT models compute one embedding per token.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.cli.cluster import add_ray, check_ray, on_cluster
from bertie.cli.common import (
    UsageError,
    add_column,
    add_input,
    add_model,
    add_output,
    add_prompt,
    add_top_k,
    load,
    model_name,
    open_input,
    verb,
)
from bertie.cli.elmo import add_layer, embed_words, uses_elmo
from bertie.cli.stream import READ_COLUMNS, READ_SCHEMA, Stream, read_cells, result_schema
from bertie.data.readers import STDIN

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie embed "A cat sat on the mat."
  bertie embed reviews.csv --column review -o reviews.npy -m sentence-transformers/all-MiniLM-L6-v2
  bertie embed "how is text split?" --prompt "query: " -m intfloat/e5-small-v2
  bertie embed "A cat sat on the mat." --tokens
  bertie embed "A cat sat on the mat." --tokens --layer 2 -m ./elmo
  bertie embed texts.csv -o terms.npz -m ./my-splade                      # sparse embeddings
  bertie embed "what do cats eat?" --queries -m ./my-colbert              # one embedding per token
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
    add_prompt(parser, "each text", "the default prompt of the checkpoint, if it has one")
    parser.add_argument(
        "--tokens", action="store_true", help="write the last hidden state of every token, not one embedding per text"
    )
    add_layer(parser)
    parser.add_argument("--queries", action="store_true", help="with a ColBERT model: encode the texts as queries")
    add_top_k(parser, None, "with a SPLADE model: keep the N terms with the highest weights")
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
    elmo = uses_elmo(args)
    if elmo and not args.tokens:
        raise UsageError(
            f"{model_name(args)} is an ELMo model, which computes word embeddings, not text embeddings: pass --tokens"
        )
    if args.layer is not None and not elmo:
        raise UsageError("--layer is for ELMo models; for the layers of other models, use hidden_states() in Python")
    if elmo:
        embed_words(args, Stream(args, table, [column]))
        return

    from bertie.checkpoints.embedding_kind import embedding_kind

    kind = embedding_kind(model_name(args), args.revision)
    if kind != "dense":
        from bertie.cli.embed_terms import embed_late, embed_sparse

        (embed_sparse if kind == "sparse" else embed_late)(args, table, column)
        return
    if args.queries or args.top_k is not None:
        flag, what = ("--queries", "a ColBERT model") if args.queries else ("--top-k", "a SPLADE model")
        raise UsageError(f"{flag} is for {what}; leave it out")
    if args.tokens:
        _embed_tokens(args, Stream(args, table, [column]))
        return
    stream = Stream(args, table, [column], embeddings=True)

    import numpy as np

    from bertie.tasks import Embedder
    from bertie.tasks.results import EmbeddingResult

    task = load(Embedder, args, pooling=args.pooling, normalize=args.normalize, dimension=args.dimension)

    def work(texts: list[str]) -> Iterator[dict[str, Any]]:
        return map(asdict, task.embed_each(texts, prompt=args.prompt, prompt_name=args.prompt_name))

    stream.write(
        stream.results(work),
        result_schema(EmbeddingResult, vector=[np.float32]),
        ("row", "vector", "dimension", *READ_COLUMNS, "text"),
        lambda record, text: [
            (
                record["row"],
                _first_values(record["vector"]),
                len(record["vector"]),
                *read_cells(record),
                text,
            )
        ],
        dimension=task.dimension,
    )


def _embed_tokens(args: argparse.Namespace, stream: Stream) -> None:
    """Write the tokens of each text with their hidden states."""
    for flag in ("pooling", "normalize", "dimension"):
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag} is for text embeddings, and --tokens writes token embeddings before pooling")

    import numpy as np

    from bertie.tasks import Embedder

    task = load(Embedder, args)

    def work(texts: list[str]) -> Iterator[dict[str, Any]]:
        for result in task.token_embeddings(texts, prompt=args.prompt, prompt_name=args.prompt_name, progress=False):
            yield {
                "tokens": [token.text for token in result.tokens],
                "offsets": [[token.start, token.end] for token in result.tokens],
                "vectors": list(result.vectors),
                **{name: getattr(result, name) for name in READ_SCHEMA},
            }

    stream.write(
        stream.results(work),
        {"tokens": [str], "offsets": [[int]], "vectors": [[np.float32]], **READ_SCHEMA},
        ("row", "token", "characters", "vector", "dimension"),
        lambda record, text: [
            (record["row"], token, f"{start}-{end}", _first_values(vector), len(vector))
            for token, (start, end), vector in zip(record["tokens"], record["offsets"], record["vectors"], strict=True)
        ],
    )


def _first_values(vector: Any) -> str:
    return " ".join(f"{x:+.4f}" for x in vector[:5]) + " …"


def run_ray(args: argparse.Namespace) -> None:
    """Run the verb on a Ray cluster."""
    if args.output is None or args.output == STDIN:
        raise UsageError("--ray writes a folder of Parquet files: pass its name with -o")
    if args.skip_empty or args.on_error != "stop" or args.tokens:
        raise UsageError("--skip-empty, --on-error and --tokens are not supported with --ray")
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
            prompt_name=args.prompt_name,
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
