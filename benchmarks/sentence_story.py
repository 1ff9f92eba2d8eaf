"""Embeddings of a pretrained encoder before and after each training objective: why Sentence-BERT exists.

    python -m benchmarks.sentence_story MODEL --data DATA [--rows 3000] [--batch-size 32] [--lr 1e-4] [--json FILE]

MODEL is an encoder without sentence-level training. It is evaluated as it is (CLS pooling, mean pooling, mean pooling
with whitening), and after training on the same rows of SNLI with each loss: softmax over classes of pairs, triplet, and
InfoNCE (in-batch negatives); all with mean pooling, InfoNCE with CLS pooling as well. Scores: Spearman correlation on
STS-B test and STS13, mean average precision of WikiQA's passages by cosine; each with its bootstrap interval. "random
pairs" is the mean cosine of unrelated texts: near 1, embeddings are anisotropic. DATA has the folders snli, stsb,
sts12_16 and wikiqa with JSONL files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import bertie
from bertie.data.progress import Progress
from bertie.evaluation.isotropy import Whitening, isotropy
from bertie.evaluation.metrics import ranking, sts

WAYS: dict[str, dict[str, Any]] = {
    "softmax, mean": {"loss": "softmax", "pooling": "mean"},
    "triplet, mean": {"loss": "triplet:margin=0.3,distance=cosine", "pooling": "mean"},
    "InfoNCE, mean": {"loss": "infonce", "pooling": "mean"},
    "InfoNCE, first token": {"loss": "infonce", "pooling": "cls"},
}


def rows_of(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def unit(vectors: Any) -> Any:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


class Evaluator:
    """The texts of all data sets, embedded once per model."""

    def __init__(self, data: Path) -> None:
        self.pairs = {
            "STS-B test": rows_of(data / "stsb" / "test.jsonl.gz"),
            "STS13": rows_of(data / "sts12_16" / "sts13.jsonl.gz"),
        }
        passages = rows_of(data / "wikiqa" / "test.jsonl.gz")
        answered = {row["query"] for row in passages if row["label"]}
        self.passages = [row for row in passages if row["query"] in answered]
        texts = [row[side] for rows in self.pairs.values() for row in rows for side in ("text_a", "text_b")]
        texts += [row[side] for row in self.passages for side in ("query", "passage")]
        self.texts = list(dict.fromkeys(texts))
        self.index = {text: i for i, text in enumerate(self.texts)}

    def vectors(self, embedder: bertie.Embedder) -> Any:
        with Progress("embed", lambda: None) as progress:
            vectors = []
            for result in embedder.embed_each(self.texts):
                vectors.append(result.vector)
                progress.update(1)
        return np.stack(vectors)

    def scores(self, vectors: Any, resamples: int = 1000) -> dict[str, Any]:
        v = unit(vectors)

        def cosines(rows: list[dict[str, Any]], a: str, b: str) -> Any:
            return np.array([v[self.index[row[a]]] @ v[self.index[row[b]]] for row in rows])

        scores = {
            name: sts([row["score"] for row in rows], cosines(rows, "text_a", "text_b"), resamples=resamples)[
                "spearman"
            ]
            for name, rows in self.pairs.items()
        }
        rows = self.passages
        queries, gold = [row["query"] for row in rows], [row["label"] for row in rows]
        scores["WikiQA MAP"] = ranking(queries, gold, cosines(rows, "query", "passage"), resamples=resamples)["map"]
        return scores


def data_for(loss: str, rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """SNLI in the format of the loss: pairs with classes, or (premise, entailment, contradiction) triplets."""
    if loss == "softmax":
        return {key: [row[key] for row in rows] for key in ("text_a", "text_b", "label")}
    sides: dict[str, dict[str, str]] = {}
    for row in rows:
        sides.setdefault(row["text_a"], {})[row["label"]] = row["text_b"]
    triplets = [
        (a, s["entailment"], s["contradiction"])
        for a, s in sides.items()
        if {"entailment", "contradiction"} <= s.keys()
    ]
    return dict(zip(("anchor", "positive", "negative"), map(list, zip(*triplets, strict=True)), strict=True))


def main() -> None:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "benchmarks.sentence_story",
        description=about,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=3000, help="of SNLI, the same for all losses")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ways", type=lambda text: text.split(";"), default=["raw", *WAYS], help="a subset, separated by ;"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    evaluator = Evaluator(options.data)
    rows = [row for row in rows_of(options.data / "snli" / "train_subset.jsonl.gz") if row["label"] != "-"][
        : options.rows
    ]
    out: list[dict[str, Any]] = []

    def report(name: str, vectors: Any, seconds: float = 0.0, examples: int = 0) -> None:
        measures, scores = isotropy(vectors), evaluator.scores(vectors)
        out.append({
            "way": name, "examples": examples, "seconds": round(seconds, 1),
            "scores": {key: {"value": s.value, "low": s.low, "high": s.high} for key, s in scores.items()},
            "isotropy": {key: float(getattr(measures, key)) for key in measures.__dataclass_fields__},
        })  # fmt: skip
        print(line(out[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(out, indent=1) + "\n")

    print(f"| vectors | examples | {' | '.join([*evaluator.pairs, 'WikiQA MAP'])} | random pairs |")
    print("|---|---|---|---|---|---|", flush=True)
    if "raw" in options.ways:
        report("as pretrained, first token", evaluator.vectors(bertie.Embedder(options.model, pooling="cls")))
        mean = evaluator.vectors(bertie.Embedder(options.model, pooling="mean"))
        report("as pretrained, mean", mean)
        report("as pretrained, mean, whitened", Whitening.fit(mean).apply(mean))
    for name, way in WAYS.items():
        if name not in options.ways:
            continue
        data = data_for(way["loss"].partition(":")[0], rows)
        start = time.perf_counter()
        embedder = bertie.Embedder(
            options.model,
            lr=options.lr,
            epochs=options.epochs,
            batch_size=options.batch_size,
            seed=options.seed,
            dev_fraction=0.0,
            **way,
        )
        embedder.fit(data, progress=False)
        report(name, evaluator.vectors(embedder), time.perf_counter() - start, len(next(iter(data.values()))))


def line(row: dict[str, Any]) -> str:
    cells = [f"{s['value']:.3f} [{s['low']:.3f}, {s['high']:.3f}]" for s in row["scores"].values()]
    return f"| {row['way']} | {row['examples'] or ''} | {' | '.join(cells)} | {row['isotropy']['mean_cosine']:.3f} |"


if __name__ == "__main__":
    main()
