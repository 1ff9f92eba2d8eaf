"""Fine-tuning side by side: Bertie and transformers' Trainer, the same data, steps and learning rates, on one machine.

    python -m benchmarks.finetune --model FOLDER --data FOLDER [--sets sst2,mrpc] [--repeats 3] [--json OUT.json]

Each run is a separate process, alternating between the two. Both clocks start with the texts in memory and the
model on the device, and stop when the weights are trained: tokenization and setup are included, imports and
evaluation are not. The recipe is one that both support: one learning rate for all weights, 10% warmup, linear decay,
weight decay 0.01, the checkpoint's dropout, bf16 autocast on a GPU. With --compile, Trainer is also run with
torch.compile: once, and as often as the others if that is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Dataset:
    """A dataset with its task, and the metric that is compared."""

    task: str  # Bertie's name
    peer: str  # the name in benchmarks.finetune_peer
    train: str
    test: str
    metric: str
    epochs: float
    max_length: int = 512
    lr: float = 5e-5


SETS = {
    "sst2": Dataset("classify", "classify", "sst2/train.jsonl.gz", "sst2/dev.jsonl.gz", "accuracy", 1),
    "mrpc": Dataset("classify", "pair", "mrpc/train.jsonl.gz", "mrpc/test.jsonl.gz", "f1", 5),
    "conll2003": Dataset("tag", "tag", "conll2003/train.jsonl.gz", "conll2003/test.jsonl.gz", "f1", 3),
    "squad": Dataset("answer", "answer", "squad_v1/train.jsonl.gz", "squad_v1/dev.jsonl.gz", "f1", 1, max_length=384),
}


def bertie_run(name: str, model: str, data: Path, seed: int, limit: int | None) -> dict[str, Any]:
    """Train and score once, in this process."""
    import torch

    from benchmarks.finetune_peer import read
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.tasks import registry
    from bertie.training.finetune.base import training_for
    from bertie.training.finetune.data import read_dataset

    dataset = SETS[name]
    rows, test = (read([data / file], limit) for file in (dataset.train, dataset.test))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = Checkpoint.load(model, device=device)
    task = registry.get(dataset.task).trainable_class(
        checkpoint, epochs=dataset.epochs, lr=dataset.lr, batch_size=32, seed=seed, max_length=dataset.max_length
    )
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    task.fit(rows, progress=False)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = round(torch.cuda.max_memory_allocated() / 2**20) if device == "cuda" else None
    kind: Any = dataset.task
    known = tuple(task.info.labels.values()) or None
    training = training_for(task)
    held = read_dataset(kind, test, known=known, training=False)
    scores = {name: score.as_dict() for name, score in training.scores(training.predict_labelled(held)).items()}
    history = task.history_
    return {
        "seconds": round(seconds, 3),
        "seconds_training": round(history.seconds, 3),
        "steps": history.steps,
        "tokens": history.tokens,
        "scores": scores,
        "peak_gpu_mib": peak,
    }


def bertie_command(name: str, options: argparse.Namespace, seed: int, out: Path) -> list[str]:
    """The command of one run of Bertie."""
    command = [sys.executable, "-m", "benchmarks.finetune", "--one", name, "--json", str(out)]
    command += ["--model", options.model, "--data", str(options.data), "--seed", str(seed)]
    return command + (["--limit", str(options.limit)] if options.limit else [])


def peer_command(name: str, options: argparse.Namespace, seed: int, out: Path) -> list[str]:
    """The command of one run of Trainer."""
    dataset, data = SETS[name], options.data
    command = [sys.executable, "-m", "benchmarks.finetune_peer", "--task", dataset.peer, "--model", options.model]
    command += [
        "--train",
        str(data / dataset.train),
        "--dev",
        str(data / dataset.test),
        "--epochs",
        str(dataset.epochs),
    ]
    command += [
        "--lr",
        str(dataset.lr),
        "--seed",
        str(seed),
        "--max-length",
        str(dataset.max_length),
        "--json",
        str(out),
    ]
    return command + (["--limit", str(options.limit)] if options.limit else [])


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run both on every dataset, alternating."""
    results = []
    for name in options.sets.split(","):
        runs: dict[str, list[dict[str, Any]]] = {"bertie": [], "peer": [], "compiled": []}

        def measure(who: str, repeat: int, name: str = name, runs: dict[str, list[dict[str, Any]]] = runs) -> None:
            out = options.work / f"{name}-{who}-{repeat}.json"
            make = bertie_command if who == "bertie" else peer_command
            command = make(name, options, repeat + 1, out) + (["--compile"] if who == "compiled" else [])
            try:
                subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=True)
                runs[who].append(json.loads(out.read_text()))
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(f"{name}, {who}: {error} {str(error.stderr)[-800:]}", file=sys.stderr)

        for repeat in range(options.repeats):
            for who in ("peer", "bertie") if repeat % 2 else ("bertie", "peer"):
                measure(who, repeat)
        if options.compile:
            measure("compiled", 0)
            if runs["compiled"] and runs["peer"] and seconds(runs["compiled"]) < seconds(runs["peer"]):
                for repeat in range(1, options.repeats):
                    measure("compiled", repeat)
        if runs["bertie"] and runs["peer"]:
            results.append(row(name, **runs))
            print(line(results[-1]), flush=True)
    return results


def seconds(runs: list[dict[str, Any]]) -> float:
    """The median duration of some runs."""
    return float(statistics.median(run["seconds"] for run in runs))


def row(
    name: str, bertie: list[dict[str, Any]], peer: list[dict[str, Any]], compiled: list[dict[str, Any]]
) -> dict[str, Any]:
    """The comparison on one dataset."""
    metric = SETS[name].metric
    return {
        "set": name,
        "metric": metric,
        "bertie_seconds": seconds(bertie),
        "peer_seconds": seconds(peer),
        "compiled_seconds": seconds(compiled) if compiled else None,
        "ratio": seconds(peer) / seconds(bertie),
        "bertie_steps": bertie[0]["steps"],
        "peer_steps": peer[0]["steps"],
        "bertie_scores": [run["scores"][metric] for run in bertie],
        "peer_scores": [run["scores"][metric] for run in peer],
        "bertie": bertie,
        "peer": peer,
        "compiled": compiled,
    }


def line(result: dict[str, Any]) -> str:
    """A comparison as a row of a Markdown table."""
    own = ", ".join(f"{s['value']:.4f} [{s['low']:.4f}, {s['high']:.4f}]" for s in result["bertie_scores"])
    other = ", ".join(f"{score:.4f}" for score in result["peer_scores"])
    compiled = f"{result['compiled_seconds']:.1f}" if result["compiled_seconds"] else ""
    return (
        f"| {result['set']} | {result['bertie_steps']} / {result['peer_steps']} | {result['bertie_seconds']:.1f} | "
        f"{result['peer_seconds']:.1f} | {compiled} | {result['ratio']:.1f}× | {result['metric']}: {own} | {other} |"
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--data", required=True, type=Path, help="the folder of the datasets")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--limit", type=int, help="use only the first rows, for a quick test")
    parser.add_argument("--compile", action="store_true", help="also run Trainer with torch.compile")
    parser.add_argument("--timeout", type=float, default=300, help="seconds per run")
    parser.add_argument("--work", type=Path, default=Path(), help="folder for the result of each run")
    parser.add_argument("--one", help="run Bertie once on this dataset, in this process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one:
        result: Any = bertie_run(options.one, options.model, options.data, options.seed, options.limit)
    else:
        titles = ("set", "steps", "Bertie, s", "Trainer, s", "compiled, s", "ratio", "Bertie", "Trainer")
        print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
        result = compare(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
