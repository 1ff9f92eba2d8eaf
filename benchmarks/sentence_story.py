"""Why Sentence-BERT exists, in numbers: a bare encoder's vectors, and the same after each objective.

    python -m benchmarks.sentence_story MODEL --data DATA [--rows 3000] [--batch-size 32] [--lr 1e-4] [--json FILE]

MODEL is an encoder with no sentence training. It is read as it is (first token, mean over tokens, mean whitened), and
trained on the same rows of SNLI in each way: softmax over classes of pairs, triplets, and in-batch negatives (InfoNCE);
each with the mean, InfoNCE with the first token as well. Scores: Spearman on STS-B test and STS13, mean average
precision of WikiQA's passages by the cosine to their question; each with its bootstrap interval. "random pairs" is the
mean cosine of texts that have nothing to do with each other: near 1, all vectors point the same way. DATA has the
folders snli, stsb, sts12_16 and wikiqa with JSONL files.
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


class Judge:
    """The texts of all sets, embedded once a model."""

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
        self.place = {text: i for i, text in enumerate(self.texts)}

    def vectors(self, embedder: bertie.Embedder) -> Any:
        with Progress("embed", lambda: None) as progress:
            found = []
            for one in embedder.embed_each(self.texts):
                found.append(one.vector)
                progress.update(1)
        return np.stack(found)

    def scores(self, vectors: Any, resamples: int = 1000) -> dict[str, Any]:
        v = unit(vectors)

        def cosines(rows: list[dict[str, Any]], a: str, b: str) -> Any:
            return np.array([v[self.place[row[a]]] @ v[self.place[row[b]]] for row in rows])

        found = {
            name: sts([row["score"] for row in rows], cosines(rows, "text_a", "text_b"), resamples=resamples)[
                "spearman"
            ]
            for name, rows in self.pairs.items()
        }
        rows = self.passages
        queries, gold = [row["query"] for row in rows], [row["label"] for row in rows]
        found["WikiQA MAP"] = ranking(queries, gold, cosines(rows, "query", "passage"), resamples=resamples)["map"]
        return found


def data_for(loss: str, rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """SNLI as the loss wants it: pairs with classes, or what follows from a text with what contradicts it."""
    if loss == "softmax":
        return {key: [row[key] for row in rows] for key in ("text_a", "text_b", "label")}
    sides: dict[str, dict[str, str]] = {}
    for row in rows:
        sides.setdefault(row["text_a"], {})[row["label"]] = row["text_b"]
    whole = [
        (a, s["entailment"], s["contradiction"])
        for a, s in sides.items()
        if {"entailment", "contradiction"} <= s.keys()
    ]
    return dict(zip(("anchor", "positive", "negative"), map(list, zip(*whole, strict=True)), strict=True))


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
    parser.add_argument("--rows", type=int, default=3000, help="of SNLI, the same for all")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=["raw", *WAYS], help="some of them, by ;")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    predict_labelled = Judge(options.data)
    rows = [row for row in rows_of(options.data / "snli" / "train_subset.jsonl.gz") if row["label"] != "-"][
        : options.rows
    ]
    out: list[dict[str, Any]] = []

    def put(name: str, vectors: Any, seconds: float = 0.0, examples: int = 0) -> None:
        shape, found = isotropy(vectors), predict_labelled.scores(vectors)
        out.append({
            "way": name, "examples": examples, "seconds": round(seconds, 1),
            "scores": {key: {"value": s.value, "low": s.low, "high": s.high} for key, s in found.items()},
            "geometry": {key: float(getattr(shape, key)) for key in shape.__dataclass_fields__},
        })  # fmt: skip
        print(line(out[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(out, indent=1) + "\n")

    print(f"| vectors | examples | {' | '.join([*predict_labelled.pairs, 'WikiQA MAP'])} | random pairs |")
    print("|---|---|---|---|---|---|", flush=True)
    if "raw" in options.ways:
        put("as pretrained, first token", predict_labelled.vectors(bertie.Embedder(options.model, pooling="cls")))
        mean = predict_labelled.vectors(bertie.Embedder(options.model, pooling="mean"))
        put("as pretrained, mean", mean)
        put("as pretrained, mean, whitened", Whitening.fit(mean).apply(mean))
    for name, way in WAYS.items():
        if name not in options.ways:
            continue
        data = data_for(way["loss"].partition(":")[0], rows)
        began = time.perf_counter()
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
        put(name, predict_labelled.vectors(embedder), time.perf_counter() - began, len(next(iter(data.values()))))


def line(row: dict[str, Any]) -> str:
    cells = [f"{s['value']:.3f} [{s['low']:.3f}, {s['high']:.3f}]" for s in row["scores"].values()]
    return f"| {row['way']} | {row['examples'] or ''} | {' | '.join(cells)} | {row['geometry']['cosine']:.3f} |"


if __name__ == "__main__":
    main()
