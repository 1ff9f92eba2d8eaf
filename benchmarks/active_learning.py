"""Simulated labelling: texts that `bertie suggest` chooses, against texts drawn at random.

    python -m benchmarks.active_learning --data FOLDER [--model MODEL] [--seeds 3] [--rounds 3] [--json OUT.json]

From a pool of 2,000 texts, some are labelled in each round, and a logistic regression on frozen embeddings is trained
on all that are labelled so far. The first round has no labels to learn from; from the second on, the model's
uncertainty counts. "uncertain" takes the most uncertain texts as they come, without regard to how similar they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning_curve import accuracy, embed, read
from bertie import Embedder
from bertie.evaluation.linear_models import LogisticRegression
from bertie.tasks.selection import choose

PER_ROUND = {"ag_news": 20, "emotion": 30, "sst2": 20, "cr": 20, "scicite": 20, "banking77": 50}
METHODS = ("random", "uncertain", "suggest")
Array = Any


def uncertainty(x: Array, y: list[str], others: Array) -> Array:
    """1 minus the margin between the two most probable labels."""
    labels = sorted(set(y))
    if len(labels) < 2:
        return np.ones(len(others))
    targets = np.array([[label == other for other in labels] for label in y], dtype=np.float64)
    table = np.sort(LogisticRegression(strength=30.0, iterations=60).fit(x, targets).predict(others), axis=1)
    return 1 - (table[:, -1] - table[:, -2])


def pick(method: str, x: Array, y: list[str], labelled: list[int], k: int, draw: Any) -> list[int]:
    """The rows to label next."""
    rest = np.array(sorted(set(range(len(y))) - set(labelled)))
    if method == "random" or (method == "uncertain" and not labelled):
        return [int(i) for i in draw.choice(rest, k, replace=False)]
    unsure = uncertainty(x[labelled], [y[i] for i in labelled], x[rest]) if labelled else None
    if method == "uncertain":
        return [int(rest[i]) for i in np.argsort(-unsure)[:k]]
    known = x[labelled] if labelled else None
    choices = choose(x[rest], k, uncertainty=unsure, labelled=known, seed=int(draw.integers(2**31)))
    return [int(rest[choice.row]) for choice in choices]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the datasets")
    parser.add_argument("--model", help="folder or hub id (default: the built-in model)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the accuracies to this file")
    args = parser.parse_args()
    embedder = Embedder.load(args.model, precision="int8")
    output: dict[str, dict[str, list[list[float]]]] = {}
    for name, k in PER_ROUND.items():
        (x, y), test = (embed(embedder, rows) for rows in read(args.data, name))
        results: dict[str, list[list[float]]] = {method: [] for method in METHODS}
        for method in METHODS:
            for seed in range(args.seeds):
                draw, labelled = np.random.default_rng(seed), list[int]()
                results[method].append([])
                for _ in range(args.rounds):
                    labelled += pick(method, x, y, labelled, k, draw)
                    results[method][-1].append(accuracy(x[labelled], [y[i] for i in labelled], *test))
            cells = "  ".join(f"{(r + 1) * k}: {value:.3f}" for r, value in enumerate(np.mean(results[method], axis=0)))
            print(f"{name:10} {method:10} {cells}", flush=True)
        output[name] = results
    print("\nmean accuracy by round, and seeds of all sets in which the last round is better than random")
    last = {m: np.array([[run[-1] for run in output[name][m]] for name in output]) for m in METHODS}
    for method in METHODS:
        means = np.mean([np.mean(output[name][method], axis=0) for name in output], axis=0)
        wins = int((last[method] > last["random"]).sum())
        print(f"{method:10} " + "  ".join(f"{value:.3f}" for value in means) + f"  {wins} of {last[method].size}")
    if args.json is not None:
        args.json.write_text(json.dumps(output, indent=1))


if __name__ == "__main__":
    main()
