"""Whether the intervals of learning curves hold: extrapolate from 10, 30 and 100% of n rows, then train on 2n.

    python -m benchmarks.learning_curve --data FOLDER [--model MODEL] [--draws 4] [--json OUT.json]

The models are logistic regressions on frozen embeddings, which train in seconds. For each dataset, n and draw, the
95% interval of the gain should hold the gain that is measured.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from bertie import Embedder
from bertie.data.readers import open_table
from bertie.evaluation.intervals import Score, wilson_interval
from bertie.evaluation.learning_curves import CurvePoint, extrapolate
from bertie.evaluation.linear_models import LogisticRegression

SETS = {
    "ag_news": ("train_full", "test"),
    "banking77": ("train", "test"),
    "clinc150": ("train", "dev"),
    "sst2": ("train", "test"),
    "emotion": ("train", "test"),
    "scicite": ("train", "test"),
    "cr": ("all", ""),
}
POOL, HELD_OUT, WORDS = 2000, 600, 60
SIZES = (200, 500, 1000)


def read(data: Path, name: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """A pool to train on, and rows to evaluate on."""

    def rows(split: str, seed: int) -> list[tuple[str, str]]:
        table = open_table(str(data / name / f"{split}.jsonl.gz"))
        examples = [(" ".join(row["text"].split()[:WORDS]), str(row["label"])) for row in table.rows(["text", "label"])]
        random.Random(seed).shuffle(examples)
        return examples

    train, test = SETS[name]
    pool = rows(train, 0)
    return pool[:POOL], rows(test, 1)[:HELD_OUT] if test else pool[POOL : POOL + HELD_OUT]


def accuracy(x: Any, y: list[str], test_x: Any, test_y: list[str]) -> float:
    """The accuracy of a logistic regression."""
    if len(set(y)) < 2:
        return float(np.mean([label == y[0] for label in test_y]))
    labels = sorted(set(y))
    targets = np.array([[label == other for other in labels] for label in y], dtype=np.float64)
    best = LogisticRegression(strength=30.0, iterations=60).fit(x, targets).predict(test_x).argmax(1)
    return float(np.mean([labels[i] == label for i, label in zip(best, test_y, strict=True)]))


def embed(embedder: Embedder, rows: list[tuple[str, str]]) -> tuple[Any, list[str]]:
    """The embeddings of the texts, and the labels."""
    return embedder.embed([text for text, _ in rows]).astype(np.float64), [label for _, label in rows]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the datasets")
    parser.add_argument("--model", help="folder or hub id (default: the built-in model)")
    parser.add_argument("--draws", type=int, default=4, help="draws per dataset and size")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    embedder = Embedder.load(args.model, precision="int8")
    output: dict[str, list[dict[str, Any]]] = {}
    for name in SETS:
        (x, y), (test_x, test_y) = (embed(embedder, rows) for rows in read(args.data, name))
        results = output[name] = []
        for n in SIZES:
            for seed in range(args.draws):
                order = np.random.default_rng(seed).permutation(len(y))
                scores = {
                    size: accuracy(x[order[:size]], [y[i] for i in order[:size]], test_x, test_y)
                    for size in (n // 10, 3 * n // 10, n, 2 * n)
                }
                later = scores.pop(2 * n)
                points = [
                    CurvePoint(size, Score(score, *wilson_interval(score * len(test_y), len(test_y))), (score,))
                    for size, score in scores.items()
                ]
                (twice,) = extrapolate(points, [2 * n])
                gain = later - scores[n]
                held = twice.gain.low <= gain <= twice.gain.high
                results.append({"rows": n, "gain": gain, "held": held, "can_tell": twice.can_tell})
        held, told = (np.mean([result[key] for result in results]) for key in ("held", "can_tell"))
        print(f"{name:12} {len(results)} curves: {held:4.0%} of the intervals hold; {told:4.0%} can tell", flush=True)
    every = [result for results in output.values() for result in results]
    told = [result["held"] for result in every if result["can_tell"]]
    held = np.mean([result["held"] for result in every])
    print(f"{'all':12} {len(every)} curves: {held:.1%}; where it can tell {np.mean(told):.1%}")
    if args.json is not None:
        args.json.write_text(json.dumps(output, indent=1))


if __name__ == "__main__":
    main()
