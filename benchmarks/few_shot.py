"""Classifiers from 8 and 16 examples a class: Bertie's methods, SetFit, and TF-IDF with a linear SVM, on the same rows.

    python -m benchmarks.few_shot --data FOLDER [--model NAME=FOLDER …] [--sets cr,scicite] [--shots 8,16] [--draws 3]
        [--methods tf-idf,frozen,few-shot,auto,full] --json OUT.jsonl
    python -m benchmarks.few_shot --table OUT.jsonl SETFIT.jsonl

One line of JSON per run is appended to the output; runs that it already has are left out. SetFit runs in an
environment of its own (`benchmarks.few_shot_peer`); --table puts the figures of several files together. The rules were
fitted on the sets in `few_shot_data.FITTED` and are judged on those in `JUDGED`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.few_shot_data import FITTED, JUDGED, Rows, draw

METHODS = ("tf-idf", "frozen", "few-shot", "auto", "full")
KEYS = ("method", "model", "set", "shots", "seed")


def run(method: str, model: str, train: Rows, test: Rows, seed: int) -> dict[str, Any]:
    """Train and score once."""
    texts, labels = zip(*train, strict=True)
    test_texts, expected = zip(*test, strict=True)
    began, cpu = time.perf_counter(), time.process_time()
    chosen = method
    if method == "tf-idf":
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.pipeline import make_pipeline
        from sklearn.svm import LinearSVC

        task: Any = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LinearSVC())
        task.fit(list(texts), list(labels))
    else:
        import bertie

        # Only "auto" needs held-out rows, to choose.
        options: dict[str, Any] = {} if method == "auto" else {"dev_fraction": 0.0}
        task = bertie.Classifier(model, method=method, seed=seed, **options)  # type: ignore[arg-type]
        task.fit(list(texts), list(labels), progress=False)
        chosen = task.history_.method or method
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    predicted = task.predict(list(test_texts))
    accuracy = statistics.mean(str(a) == b for a, b in zip(predicted, expected, strict=True))
    return {"accuracy": accuracy, "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "chosen": chosen}


def measure(args: argparse.Namespace) -> None:
    """Run what the output does not have yet."""
    lines = args.json.read_text().splitlines() if args.json.exists() else []
    done = {tuple(json.loads(line)[key] for key in KEYS) for line in lines}
    models = dict(item.split("=", 1) for item in args.model)
    for shots in map(int, args.shots.split(",")):
        for seed in range(args.draws):
            for name in args.sets.split(","):
                train, test = draw(args.data, name, shots, seed)
                for model, folder in models.items():
                    for method in args.methods.split(","):
                        key = (method, model, name, shots, seed)
                        if key in done:
                            continue
                        result = dict(zip(KEYS, key, strict=True)) | run(method, folder, train, test, seed)
                        print(json.dumps(result), flush=True)
                        with args.json.open("a") as file:
                            file.write(json.dumps(result) + "\n")


def table(files: Sequence[Path]) -> str:
    """Mean accuracies by set, shots and model, over the draws that every method has."""
    runs = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    methods = list(dict.fromkeys(row["method"] for row in runs))
    cells: dict[tuple[Any, ...], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in runs:
        cells[row["set"], row["shots"], row["model"]][row["method"]][row["seed"]] = row["accuracy"]
    lines = [f"| set | shots | model | draws | {' | '.join(methods)} |", "|---" * (4 + len(methods)) + "|"]
    for (name, shots, model), values in cells.items():
        common = sorted(set.intersection(*(set(by_seed) for by_seed in values.values())))
        means = [
            f"{statistics.mean(values[method][seed] for seed in common):.3f}" if common and method in values else ""
            for method in methods
        ]
        lines.append(f"| {name} | {shots} | {model} | {len(common)} | {' | '.join(means)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", nargs="+", default=["small=bertie-small"], metavar="NAME=FOLDER")
    parser.add_argument("--sets", default=",".join((*FITTED, *JUDGED)))
    parser.add_argument("--shots", default="8,16")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", nargs="+", type=Path, metavar="JSONL", help="print a table of the figures")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    if args.data is None or args.json is None:
        parser.error("--data and --json are needed, or --table")
    warnings.filterwarnings("ignore")
    measure(args)


if __name__ == "__main__":
    main()
