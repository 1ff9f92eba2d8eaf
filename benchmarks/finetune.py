"""Fine-tuning side by side: Bertie and transformers' Trainer, the same data, steps and learning rates, on one machine.

    python -m benchmarks.finetune --model FOLDER --data FOLDER [--sets sst2,mrpc] [--repeats 2] [--json OUT.json]

Each run is a process of its own, the two in turn. Both clocks start with the texts in memory and the model on the
device, and stop when the weights are trained: tokenizing and setting up are in, imports and evaluation are out.
The recipe is the plain one that both can do: one learning rate for all weights, 10% warm-up, linear decay, weight
decay 0.01, the checkpoint's dropout, bf16 autocast on a GPU.
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
    reach: int = 512
    lr: float = 5e-5


SETS = {
    "sst2": Set("classify", "classify", "sst2/train.jsonl.gz", "sst2/dev.jsonl.gz", "accuracy", 1),
    "mrpc": Set("classify", "pair", "mrpc/train.jsonl.gz", "mrpc/test.jsonl.gz", "f1", 5),
    "conll2003": Set("tag", "tag", "conll2003/train.jsonl.gz", "conll2003/test.jsonl.gz", "f1", 3),
    "squad": Set("answer", "answer", "squad_v1/train.jsonl.gz", "squad_v1/dev.jsonl.gz", "f1", 1, reach=384),
}


def bertie_run(name: str, model: str, data: Path, seed: int, limit: int | None) -> dict[str, Any]:
    """Train and score once, in this process."""
    import torch

    from benchmarks.finetune_peer import read
    from bertie.hub import Checkpoint
    from bertie.tasks.heads import LEARNERS
    from bertie.train.data import labelled

    one = SETS[name]
    rows, test = (read([data / file], limit) for file in (one.train, one.test))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = Checkpoint.load(model, device=device)
    learner = LEARNERS[one.task](checkpoint, epochs=one.epochs, lr=one.lr, batch_size=32, seed=seed, reach=one.reach)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    learner.fit(rows, quiet=True)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = round(torch.cuda.max_memory_allocated() / 2**20) if device == "cuda" else None
    kind: Any = one.task
    known = tuple(learner.info.labels.values()) or None
    held = labelled(kind, test, known=known, training=False)
    scores = {name: score.as_dict() for name, score in learner.scores(learner.judge(held)).items()}
    history = learner.history_
    return {
        "seconds": round(seconds, 3),
        "seconds_training": round(history.seconds, 3),
        "steps": history.steps,
        "tokens": history.tokens,
        "scores": scores,
        "peak_gpu_mib": peak,
    }


def peer_command(name: str, model: str, data: Path, seed: int, limit: int | None, out: Path) -> list[str]:
    """The same for the peer, as a command."""
    one = SETS[name]
    command = [sys.executable, "-m", "benchmarks.finetune_peer", "--task", one.peer, "--model", model]
    command += ["--train", str(data / one.train), "--dev", str(data / one.test), "--epochs", str(one.epochs)]
    command += ["--lr", str(one.lr), "--seed", str(seed), "--max-length", str(one.reach), "--json", str(out)]
    return command + (["--limit", str(limit)] if limit else [])


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every set, the two in turn."""
    results = []
    for name in options.sets.split(","):
        ours, theirs = [], []
        for repeat in range(options.repeats):
            for who in ("peer", "bertie") if repeat % 2 else ("bertie", "peer"):
                out = options.work / f"{name}-{who}-{repeat}.json"
                if who == "bertie":
                    command = [sys.executable, "-m", "benchmarks.finetune", "--one", name, "--json", str(out)]
                    command += ["--model", options.model, "--data", str(options.data), "--seed", str(repeat + 1)]
                    command += ["--limit", str(options.limit)] if options.limit else []
                else:
                    command = peer_command(name, options.model, options.data, repeat + 1, options.limit, out)
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    print(f"{name}, {who}: {done.stderr[-800:]}", file=sys.stderr)
                    continue
                (ours if who == "bertie" else theirs).append(json.loads(out.read_text()))
        if ours and theirs:
            results.append(row(name, ours, theirs))
            print(line(results[-1]), flush=True)
    return results


def row(name: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """One set's comparison."""
    metric = SETS[name].metric
    mine, other = (statistics.median(one["seconds"] for one in runs) for runs in (ours, theirs))
    return {
        "set": name,
        "metric": metric,
        "bertie_seconds": mine,
        "peer_seconds": other,
        "ratio": other / mine,
        "bertie_steps": ours[0]["steps"],
        "peer_steps": theirs[0]["steps"],
        "bertie_scores": [one["scores"][metric] for one in ours],
        "peer_scores": [one["scores"][metric] for one in theirs],
        "bertie": ours,
        "peer": theirs,
    }


def line(one: dict[str, Any]) -> str:
    """As a table's row."""
    mine = ", ".join(f"{s['value']:.4f} [{s['low']:.4f}, {s['high']:.4f}]" for s in one["bertie_scores"])
    other = ", ".join(f"{score:.4f}" for score in one["peer_scores"])
    return (
        f"| {one['set']} | {one['bertie_steps']} / {one['peer_steps']} | {one['bertie_seconds']:.1f} | "
        f"{one['peer_seconds']:.1f} | {one['ratio']:.1f}× | {one['metric']}: {mine} | {other} |"
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--data", required=True, type=Path, help="the folder of the sets")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--limit", type=int, help="only the first rows: for a quick try")
    parser.add_argument("--work", type=Path, default=Path(), help="where each run's figures are put")
    parser.add_argument("--one", help="run Bertie on this set, once, in this process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one:
        found: Any = bertie_run(options.one, options.model, options.data, options.seed, options.limit)
    else:
        print("| set | steps | Bertie, s | Trainer, s | ratio | Bertie | Trainer |\n|---|---|---|---|---|---|---|")
        found = compare(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
