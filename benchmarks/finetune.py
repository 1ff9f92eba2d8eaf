"""Fine-tuning side by side: Bertie and transformers' Trainer, the same data, steps and learning rates, on one machine.

    python -m benchmarks.finetune --model FOLDER --data FOLDER [--sets sst2,mrpc] [--repeats 3] [--json OUT.json]

Each run is a process of its own, the two in turn. Both clocks start with the texts in memory and the model on the
device, and stop when the weights are trained: tokenizing and setting up are in, imports and evaluation are out.
The recipe is the plain one that both can do: one learning rate for all weights, 10% warm-up, linear decay, weight
decay 0.01, the checkpoint's dropout, bf16 autocast on a GPU. With --compile, Trainer is tried with torch.compile as
well: once, and as often as the others if that was faster.
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
class Set:
    """What is trained on what, and the score that is compared."""

    task: str  # of Bertie
    peer: str  # of benchmarks.finetune_peer
    train: str
    test: str
    metric: str
    epochs: float
    max_length: int = 512
    lr: float = 5e-5


SETS = {
    "sst2": Set("classify", "classify", "sst2/train.jsonl.gz", "sst2/dev.jsonl.gz", "accuracy", 1),
    "mrpc": Set("classify", "pair", "mrpc/train.jsonl.gz", "mrpc/test.jsonl.gz", "f1", 5),
    "conll2003": Set("tag", "tag", "conll2003/train.jsonl.gz", "conll2003/test.jsonl.gz", "f1", 3),
    "squad": Set("answer", "answer", "squad_v1/train.jsonl.gz", "squad_v1/dev.jsonl.gz", "f1", 1, max_length=384),
}


def bertie_run(name: str, model: str, data: Path, seed: int, limit: int | None) -> dict[str, Any]:
    """Train and score once, in this process."""
    import torch

    from benchmarks.finetune_peer import read
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.tasks import registry
    from bertie.training.finetune.base import training_for
    from bertie.training.finetune.data import read_dataset

    one = SETS[name]
    rows, test = (read([data / file], limit) for file in (one.train, one.test))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = Checkpoint.load(model, device=device)
    learner = registry.get(one.task).trainable_class(
        checkpoint, epochs=one.epochs, lr=one.lr, batch_size=32, seed=seed, max_length=one.max_length
    )
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    learner.fit(rows, progress=False)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = round(torch.cuda.max_memory_allocated() / 2**20) if device == "cuda" else None
    kind: Any = one.task
    known = tuple(learner.info.labels.values()) or None
    training = training_for(learner)
    held = read_dataset(kind, test, known=known, training=False)
    scores = {name: score.as_dict() for name, score in training.scores(training.predict_labelled(held)).items()}
    history = learner.history_
    return {
        "seconds": round(seconds, 3),
        "seconds_training": round(history.seconds, 3),
        "steps": history.steps,
        "tokens": history.tokens,
        "scores": scores,
        "peak_gpu_mib": peak,
    }


def bertie_command(name: str, options: argparse.Namespace, seed: int, out: Path) -> list[str]:
    """The same as a command."""
    command = [sys.executable, "-m", "benchmarks.finetune", "--one", name, "--json", str(out)]
    command += ["--model", options.model, "--data", str(options.data), "--seed", str(seed)]
    return command + (["--limit", str(options.limit)] if options.limit else [])


def peer_command(name: str, options: argparse.Namespace, seed: int, out: Path) -> list[str]:
    """The same for the peer."""
    one, data = SETS[name], options.data
    command = [sys.executable, "-m", "benchmarks.finetune_peer", "--task", one.peer, "--model", options.model]
    command += ["--train", str(data / one.train), "--dev", str(data / one.test), "--epochs", str(one.epochs)]
    command += ["--lr", str(one.lr), "--seed", str(seed), "--max-length", str(one.max_length), "--json", str(out)]
    return command + (["--limit", str(options.limit)] if options.limit else [])


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every set, the two in turn."""
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
    """The median."""
    return float(statistics.median(one["seconds"] for one in runs))


def row(
    name: str, bertie: list[dict[str, Any]], peer: list[dict[str, Any]], compiled: list[dict[str, Any]]
) -> dict[str, Any]:
    """One set's comparison."""
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
        "bertie_scores": [one["scores"][metric] for one in bertie],
        "peer_scores": [one["scores"][metric] for one in peer],
        "bertie": bertie,
        "peer": peer,
        "compiled": compiled,
    }


def line(one: dict[str, Any]) -> str:
    """As a table's row."""
    mine = ", ".join(f"{s['value']:.4f} [{s['low']:.4f}, {s['high']:.4f}]" for s in one["bertie_scores"])
    other = ", ".join(f"{score:.4f}" for score in one["peer_scores"])
    compiled = f"{one['compiled_seconds']:.1f}" if one["compiled_seconds"] else ""
    return (
        f"| {one['set']} | {one['bertie_steps']} / {one['peer_steps']} | {one['bertie_seconds']:.1f} | "
        f"{one['peer_seconds']:.1f} | {compiled} | {one['ratio']:.1f}× | {one['metric']}: {mine} | {other} |"
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--data", required=True, type=Path, help="the folder of the sets")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--limit", type=int, help="only the first rows: for a quick try")
    parser.add_argument("--compile", action="store_true", help="try Trainer with torch.compile too")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a run")
    parser.add_argument("--work", type=Path, default=Path(), help="where each run's figures are put")
    parser.add_argument("--one", help="run Bertie on this set, once, in this process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one:
        found: Any = bertie_run(options.one, options.model, options.data, options.seed, options.limit)
    else:
        titles = ("set", "steps", "Bertie, s", "Trainer, s", "compiled, s", "ratio", "Bertie", "Trainer")
        print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
        found = compare(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
