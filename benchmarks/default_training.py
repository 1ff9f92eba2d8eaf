"""Training with the defaults, against transformers' Trainer and the cheap baselines, over many datasets and seeds.

    python -m benchmarks.default_training --data FOLDER --model bertie-small --rows 1000 --json RESULTS.jsonl

Each result is a line of RESULTS.jsonl; runs that it already has are skipped, and the table over all of them is printed
at the end. The systems:

- bertie: `fit` with nothing but the rows and a seed;
- trainer: transformers' Trainer at its defaults (learning rate 5e-5, 3 epochs, batches of 8);
- trainer-same: Trainer with the learning rate, epochs and batch size that Bertie chose;
- baselines: majority class, TF-IDF with a linear model, frozen embeddings with logistic regression (no training).

The training rows of a seed are a random sample, the same for all systems; at most 1,500 test rows are scored.
Trainer needs accelerate. `FITTED` lists the datasets that the rule for the defaults was fitted on.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.finetune_peer import read

Row = dict[str, Any]
TEST_ROWS, DEV_ROWS = 1500, 600
SYSTEMS = ("bertie", "trainer", "trainer-same", "baselines")


@dataclass(frozen=True)
class Dataset:
    """A dataset: its task in Bertie, its files (None: taken from the training file), and the columns that are used."""

    task: str
    train: str
    dev: str | None
    test: str | None
    columns: tuple[str, ...] = ("text", "label")

    @property
    def peer(self) -> str:
        """The task's name in benchmarks.finetune_peer."""
        return "pair" if "text_b" in self.columns else self.task


def _files(folder: str, suffix: str = ".jsonl.gz") -> tuple[str, str, str]:
    return f"{folder}/train{suffix}", f"{folder}/dev{suffix}", f"{folder}/test{suffix}"


PAIR, TAGS, QUESTIONS = ("text_a", "text_b", "label"), ("tokens", "tags"), ("question", "context", "answers")
SETS = {
    "emotion": Dataset("classify", *_files("emotion")),
    "banking77": Dataset("classify", "banking77/train.jsonl.gz", None, "banking77/test.jsonl.gz"),
    "clinc150": Dataset("classify", *_files("clinc150")),
    "sst5": Dataset("classify", *_files("sst5")),
    "sst2": Dataset("classify", *_files("sst2")),
    "mr": Dataset("classify", "mr/all.jsonl.gz", None, None),
    "cr": Dataset("classify", "cr/all.jsonl.gz", None, None),
    "ag_news": Dataset("classify", "ag_news/train_desc.jsonl.gz", None, "ag_news/test.jsonl.gz"),
    "cola": Dataset("classify", "cola/train.jsonl.gz", "cola/dev.jsonl.gz", "cola/dev_ood.jsonl.gz"),
    "scicite": Dataset("classify", *_files("scicite")),
    "imdb": Dataset("classify", "imdb/train.jsonl.xz", None, "imdb/test.jsonl.xz"),
    "go_emotions": Dataset("classify", *_files("go_emotions"), ("text", "labels")),
    "snli": Dataset("classify", "snli/train_subset.jsonl.gz", "snli/dev.jsonl.gz", "snli/test.jsonl.gz", PAIR),
    "mrpc": Dataset("classify", *_files("mrpc"), PAIR),
    "rte": Dataset("classify", "rte/train.jsonl.gz", None, "rte/dev.jsonl.gz", PAIR),
    "stsb": Dataset("regress", *_files("stsb"), ("text_a", "text_b", "score")),
    "conll2003": Dataset("tag", *_files("conll2003"), TAGS),
    "wnut17": Dataset("tag", *_files("wnut17"), TAGS),
    "ncbi_disease": Dataset("tag", *_files("ncbi_disease"), TAGS),
    "ud_english_ewt": Dataset("tag", *_files("ud_english_ewt"), TAGS),
    "squad_v1": Dataset("answer", "squad_v1/train.jsonl.gz", None, "squad_v1/dev.jsonl.gz", QUESTIONS),
}
FITTED = "emotion banking77 clinc150 sst5 mr cola scicite go_emotions mrpc stsb wnut17 ncbi_disease".split()


def load(dataset: Dataset, data: Path) -> tuple[list[Row], list[Row]]:
    """All training rows and the test rows, in an order that is always the same."""
    rng = random.Random(7)

    def rows(file: str) -> list[Row]:
        return [{name: row[name] for name in dataset.columns} for row in read([data / file], None)]

    train = rows(dataset.train)
    rng.shuffle(train)
    if dataset.test is None:
        test, train = train[:TEST_ROWS], train[TEST_ROWS:]
    else:
        test = rows(dataset.test)
    if dataset.dev is None:
        dev, train = train[:DEV_ROWS], train[DEV_ROWS:]
    else:
        dev = rows(dataset.dev)
    rng.shuffle(dev)
    rng.shuffle(test)
    return train, test[:TEST_ROWS]


def sample(train: list[Row], count: int, seed: int) -> list[Row]:
    """A random sample of the training rows."""
    rows = list(train[:5000])
    random.Random(seed * 1000 + 1).shuffle(rows)
    return rows[:count]


def known_labels(train: list[Row], test: list[Row]) -> list[Row]:
    """The test rows whose labels the training rows have: Trainer cannot score others."""
    if "label" in train[0]:
        labels = {row["label"] for row in train}
        return [row for row in test if row["label"] in labels]
    if "tags" in train[0]:
        tags = {tag for row in train for tag in row["tags"]}
        return [row for row in test if tags.issuperset(row["tags"])]
    return test


def run_bertie(dataset: Dataset, model: str, train: list[Row], test: list[Row], seed: int) -> dict[str, Any]:
    """Train with the defaults."""
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.tasks import registry
    from bertie.training.finetune.base import training_for
    from bertie.training.finetune.data import read_dataset

    task = registry.get(dataset.task).trainable_class(Checkpoint.load(model, precision="fp32"), seed=seed)
    began = time.perf_counter()
    task.fit(train, progress=False)
    seconds = time.perf_counter() - began
    training = training_for(task)
    held = read_dataset(training.data_kind, test, known=tuple(task.info.labels.values()) or None, training=False)
    metric = training.main_metric(held)
    recipe = task.recipe_.as_dict()
    chosen = {name: recipe.get(name) for name in ("method", "lr", "head_lr", "epochs", "batch_size")}
    return {"metric": metric, "score": training.metrics(held)[metric], "seconds": seconds, "recipe": chosen}


def run_trainer(
    dataset: Dataset, model: str, train: list[Row], test: list[Row], seed: int, **recipe: float
) -> dict[str, Any]:
    """Train with transformers' Trainer."""
    from benchmarks import finetune_peer

    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name, rows in {"train": train, "test": test}.items():
            paths[name] = Path(folder, f"{name}.jsonl")
            paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
        options: dict[str, Any] = {"task": dataset.peer, "model": model, "seed": seed, "max_length": 512}
        options |= {"train": [paths["train"]], "dev": [paths["test"]], "test": None, "limit": None}
        options |= {"workers": 0, "compile": False, "epochs": 3.0, "lr": 5e-5, "batch_size": 8} | recipe
        report = finetune_peer.run(argparse.Namespace(**options))
    metric = {"classify": "accuracy", "pair": "accuracy", "tag": "f1", "answer": "f1"}[dataset.peer]
    if "score" in dataset.columns:
        metric = "spearman"
    elif "labels" in dataset.columns:
        metric = "macro_f1"
    elif dataset.task == "tag" and not any(tag.startswith("B-") for row in train for tag in row["tags"]):
        metric = "accuracy"  # parts of speech
    return {"metric": metric, "score": report["scores"][metric], "seconds": report["seconds"], "recipe": recipe}


def run_baselines(dataset: Dataset, model: str, train: list[Row], test: list[Row]) -> list[dict[str, Any]]:
    """The cheap baselines."""
    import numpy as np

    from bertie.evaluation import baselines
    from bertie.tasks.embed import Embedder

    names = dataset.columns[:-1]
    embed = Embedder(model).embed

    def features(rows: list[Row]) -> Any:
        sides = [np.asarray(embed([row[name] for row in rows])) for name in names]
        return sides[0] if len(sides) == 1 else baselines.pair_features(*sides)

    def data(rows: list[Row]) -> Any:
        goal = dataset.columns[-1]
        targets = [tuple(row[goal]) if goal == "labels" else row[goal] for row in rows]
        if dataset.task == "classify" and goal == "label":
            targets = [str(target) for target in targets]
        inputs = [row["tokens"] if dataset.task == "tag" else tuple(row[name] for name in names) for row in rows]
        return inputs, targets

    embeddings = None if dataset.task == "tag" else (features(train), features(test))
    scores = baselines.evaluate(data(train), data(test), dataset.task, embeddings=embeddings, resamples=100)
    return [{"name": s.name, "metric": s.metric, "score": s.score.value, "seconds": s.seconds} for s in scores]


def key(result: dict[str, Any]) -> tuple[Any, ...]:
    """What identifies a run."""
    return result["model"], result["set"], result["rows"], result["seed"], result["system"]


def run(options: argparse.Namespace) -> None:
    """Run what is missing."""
    out = Path(options.json)
    results = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {key(result): result for result in results if "error" not in result}
    for seed in range(options.seeds):
        for name in options.sets.split(","):
            dataset = SETS[name]
            everything, test = load(dataset, options.data)
            train = sample(everything, options.rows, seed)
            test = known_labels(train, test)
            for system in options.systems.split(","):
                result: dict[str, Any] = {"model": options.name or Path(options.model).name, "set": name}
                result |= {"rows": len(train), "seed": seed, "system": system, "test_rows": len(test)}
                if key(result) in done:
                    continue
                try:
                    if system == "bertie":
                        result |= run_bertie(dataset, options.model, train, test, seed)
                    elif system == "baselines":
                        result["baselines"] = run_baselines(dataset, options.model, train, test)
                    elif system == "trainer":
                        result |= run_trainer(dataset, options.model, train, test, seed)
                    else:
                        result |= run_trainer(dataset, options.model, train, test, seed, **same(result, dataset, train))
                except Exception as error:  # the others must run
                    result["error"] = f"{type(error).__name__}: {error}"[:500]
                done[key(result)] = result
                with out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(json.dumps(result), file=sys.stderr, flush=True)


def same(result: dict[str, Any], dataset: Dataset, train: list[Row]) -> dict[str, float]:
    """The learning rate, epochs and batch size of Bertie's rule."""
    import math

    from bertie.training.finetune import defaults

    size = 16 if len(train) < defaults.LARGE else 32
    least = 5 if len(train) < defaults.LARGE else 3
    epochs = float(min(defaults.MAX_EPOCHS, max(least, math.ceil(defaults.STEPS * size / len(train)))))
    return {"lr": defaults.BASE_LR, "epochs": epochs, "batch_size": size}


def table(path: Path) -> str:
    """The mean test scores as a Markdown table, with the range over the seeds."""
    scores: dict[tuple[str, str, int], dict[str, list[float]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for line in path.read_text().splitlines():
        result = json.loads(line)
        where = scores[result["model"], result["set"], result["rows"]]
        for baseline in result.get("baselines", ()):
            where[baseline["name"]].append(100 * baseline["score"])
        if "score" in result:
            where[result["system"]].append(100 * result["score"])
    systems = list(dict.fromkeys([*SYSTEMS[:3], *(name for row in scores.values() for name in row)]))
    lines = ["| model | set | rows | " + " | ".join(systems) + " |", "|---" * (3 + len(systems)) + "|"]
    for (model, name, rows), row in sorted(scores.items()):
        cells = [_cell(row.get(system, [])) for system in systems]
        lines.append(f"| {model} | {name}{'' if name in FITTED else ' *'} | {rows:,} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "* not among the datasets that the rule was fitted on"])


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the datasets")
    parser.add_argument("--model", default="bertie-small", help="a folder; Trainer needs one in float32")
    parser.add_argument("--name", help="the model's name in the results")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", required=True, help="JSON lines: one per run")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    run(options)
    print(table(Path(options.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
