"""Cluster texts by their embeddings, name the clusters, and draw a map.

The number of clusters is chosen by silhouette score unless --clusters is given; each cluster is named by its most
distinctive words (class-based TF-IDF). The clusters are printed. OUT contains the cluster of each row, and the .html
file beside it is a page with a map of up to 500 texts, to open in a browser.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, verb
from bertie.cli.text_groups import TextInput, add_group_flags, check_outputs, shorten, sibling
from bertie.data.atomic import atomic_write
from bertie.data.journal import ResumableFile
from bertie.data.writers import TableWriter, check_output_name, make_writer

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.pipeline.outputs import FloatArray
    from bertie.tasks.clusters import Clustering

EXAMPLE = """  bertie cluster feedback.csv --column comment -o clusters.csv     # and clusters.html
  bertie cluster tickets.jsonl --clusters 12 -o tickets.parquet -m ./my-embedder
  bertie cluster questions.txt                                      # print the clusters only
"""
CHUNK = 4096  # rows


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "cluster", "cluster texts, name the clusters, draw a map", __doc__, EXAMPLE)
    add_group_flags(
        parser, "output file with the cluster of each row: .jsonl, .csv, .tsv, .parquet; the map is saved beside it"
    )
    parser.add_argument(
        "--clusters", type=int, metavar="N", help="number of clusters (default: chosen by silhouette score, up to 100)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the clustering (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.clusters is not None and args.clusters < 1:
        raise UsageError(f"--clusters {args.clusters} must be at least 1")
    if args.resume and args.output is None:
        raise UsageError("--resume needs an output file; pass it with -o")
    paths = []
    if args.output is not None:
        check_output_name(args.output, embeddings=False)
        paths = check_outputs(args, args.output, sibling(args.output, ".html"))
    source = TextInput(args)
    vectors = source.embeddings()

    from bertie.tasks import clusters as task

    result = task.cluster_vectors(vectors, source.texts(), clusters=args.clusters, seed=args.seed)
    nearest = [row for cluster in result.clusters for row in cluster.examples]
    examples = {row: shorten(text) for row, text in task.texts_at(source.texts(), nearest)}
    if paths:
        _write_rows(paths[0], source, result)
        atomic_write(paths[1], _page(source, vectors, result, examples, args.seed).encode("utf-8"))
        source.remove_embeddings()
    _print(args, result, examples, paths)


def _write_rows(path: Path, source: TextInput, result: Clustering) -> None:
    labels = [cluster.label for cluster in result.clusters]
    schema = {"row": int, "cluster": int, "label": str, "similarity": float, "text": str}
    writer = make_writer(path.name, schema)
    rows = zip(result.assigned.tolist(), result.similarity.tolist(), source.texts(), strict=True)
    records = (
        {"row": row, "cluster": i + 1, "label": labels[i], "similarity": round(similarity, 4), "text": text}
        for row, (i, similarity, text) in enumerate(rows, 1)
    )
    with ResumableFile(path, {}, resume=False, overwrite=True) as output:
        output.start(writer)
        while chunk := list(islice(records, CHUNK)):
            output.append(writer.encode(chunk), len(chunk))
        output.finish()


def _page(source: TextInput, vectors: FloatArray, result: Clustering, examples: dict[int, str], seed: int) -> str:
    from bertie.evaluation.map_page import ClusterRow, MapPoint, map_page
    from bertie.tasks.clusters import map_sample, texts_at

    rows, points = map_sample(vectors, seed)
    texts = dict(texts_at(source.texts(), rows.tolist()))
    shown = [
        MapPoint(row + 1, float(x), float(y), int(result.assigned[row]), shorten(texts[row]))
        for row, (x, y) in zip(rows.tolist(), points, strict=True)
    ]
    clusters = [
        ClusterRow(cluster.label, cluster.size, [examples[i] for i in cluster.examples]) for cluster in result.clusters
    ]
    return map_page(f"Clusters of {source.name}", shown, clusters, result.silhouette)


def _print(args: argparse.Namespace, result: Clustering, examples: dict[int, str], paths: list[Path]) -> None:
    if args.json:
        clusters: list[dict[str, Any]] = [
            {
                "cluster": i,
                "label": cluster.label,
                "texts": cluster.size,
                "examples": [{"row": row + 1, "text": examples[row]} for row in cluster.examples],
            }
            for i, cluster in enumerate(result.clusters, 1)
        ]
        summary = {"texts": len(result.assigned), "silhouette": result.silhouette.as_dict(), "clusters": clusters}
        print(json.dumps(summary | ({"output": str(paths[0]), "map": str(paths[1])} if paths else {})))
        return
    rows = [
        (i, cluster.size, cluster.label, examples[cluster.examples[0]]) for i, cluster in enumerate(result.clusters, 1)
    ]
    sys.stdout.write(TableWriter(("cluster", "texts", "label", "example")).text(rows))
    print(
        f"bertie: texts: {len(result.assigned):,}; clusters: {len(rows)}; silhouette: {result.silhouette}"
        + (f"; rows in {paths[0]}, map in {paths[1]}" if paths else ""),
        file=sys.stderr,
    )
