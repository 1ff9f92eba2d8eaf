"""Training on a CPU beside transformers' Trainer and sentence-transformers' trainer: rows a second, CPU time and loss.

    python -m benchmarks.train_cpu --model FOLDER --classify NAME FILE … [--pairs NAME FILE …] [--rows N] [--json FILE]

    python -m benchmarks.train_cpu --model all-MiniLM-L6-v2 --classify short sst2/train.jsonl.gz --rows 1600
    python -m benchmarks.train_cpu --model all-MiniLM-L6-v2 --classify mixed ag_news/train.jsonl.gz imdb/train.jsonl.xz

Files are JSON lines (plain, .gz or .xz): `text` and `label`, or with --pairs `text_a` and `text_b`.
Of several files equally many rows are taken, with the folder's name before the label. Each engine
trains the same rows from the same weights for one epoch, in float32, with the same batch size,
learning rate, schedule and dropout. The peers have their best settings, as in finetune_peer.py:
lengths grouped, dynamic padding, fused AdamW, no evaluation. The clock starts with the texts in
memory, after a training run of two batches in the same process, and stops when the weights are
trained. Runs alternate between the engines, each in a fresh process; the table has medians. On a
busy machine look at the CPU time a row. `loss` is the mean over the first and over the last quarter
of all steps. It needs transformers and accelerate (classify), or sentence-transformers, datasets
and accelerate (pairs).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES = {"classify": ("bertie", "transformers"), "pairs": ("bertie", "sentence-transformers")}
SCALE = 20.0  # of the similarities in the contrastive loss


def rows_of(files: list[Path], count: int) -> list[dict[str, Any]]:
    """The first rows of each file, in turn."""
    from benchmarks.finetune_peer import read

    share = -(-count // len(files))
    parts = [read([file], share) for file in files]
    if len(files) > 1:
        for file, part in zip(files, parts, strict=True):
            for row in part:
                row["label"] = f"{file.parent.name} {row['label']}"
    return [row for group in zip(*parts, strict=False) for row in group][:count]


def quarters(losses: list[float]) -> list[float]:
    """The mean over the first and over the last quarter."""
    size = max(1, len(losses) // 4)
    return [round(statistics.fmean(part), 4) for part in (losses[:size], losses[-size:])]


# --- engines: each trains rows and returns the loss of each step, or of each ten ---


def bertie_classify(options: argparse.Namespace, rows: list[dict[str, Any]]) -> list[float]:
    """`Classifier.fit`."""
    import bertie

    recipe: dict[str, Any] = {"lr": options.lr, "head_lr": options.lr, "freeze": options.freeze}
    task = bertie.Classifier(
        options.model,
        epochs=1,
        batch_size=options.batch_size,
        seed=options.seed,
        dev_fraction=0,
        overflow="truncate",
        max_length=options.max_length,
        device="cpu",
        **recipe,
    )
    task.fit([row["text"] for row in rows], [str(row["label"]) for row in rows], progress=False)
    return [point["loss"] for point in task.history_.curve]


def bertie_pairs(options: argparse.Namespace, rows: list[dict[str, Any]]) -> list[float]:
    """`Embedder.fit` with in-batch negatives."""
    import bertie

    task = bertie.Embedder(
        options.model,
        epochs=1,
        lr=options.lr,
        batch_size=options.batch_size,
        seed=options.seed,
        dev_fraction=0,
        overflow="truncate",
        max_length=options.max_length,
        loss="infonce",
        device="cpu",
    )
    task.fit([(row["text_a"], row["text_b"]) for row in rows], progress=False)
    return [point["loss"] for point in task.history_.curve]


def peer_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of both peers' trainers."""
    from benchmarks.finetune_peer import best_settings

    peer = argparse.Namespace(
        compile=False,
        workers=options.workers,
        epochs=1.0,
        lr=options.lr,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    return best_settings(peer) | {"logging_strategy": "steps", "logging_steps": 10}


def losses_of(trainer: Any) -> list[float]:
    """The logged losses, without the progress that the trainer prints."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def transformers_classify(options: argparse.Namespace, rows: list[dict[str, Any]]) -> list[float]:
    """transformers' Trainer."""
    import transformers

    from benchmarks.finetune_peer import load, of_texts, target_of

    target = target_of("classify", rows)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = load(options.model, target, options.seed)
    pad = transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    features = of_texts(rows, target, tokenizer, options.max_length)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, **peer_settings(options))
        trainer = transformers.Trainer(model, arguments, data_collator=pad, train_dataset=features)
        trainer.train()
    return losses_of(trainer)


def sentence_transformers_pairs(options: argparse.Namespace, rows: list[dict[str, Any]]) -> list[float]:
    """sentence-transformers' trainer with MultipleNegativesRankingLoss."""
    import datasets
    import sentence_transformers as st
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    model = st.SentenceTransformer(options.model, device="cpu")
    model.max_seq_length = options.max_length
    data = datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in ("text_a", "text_b")})
    settings = peer_settings(options)
    settings.pop("train_sampling_strategy")  # by length needs token ids, and this trainer tokenizes in its collator
    with tempfile.TemporaryDirectory() as folder:
        arguments = st.SentenceTransformerTrainingArguments(folder, **settings)
        loss = MultipleNegativesRankingLoss(model, scale=SCALE)
        trainer = st.SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss)
        trainer.train()
    return losses_of(trainer)


RUNS = {
    ("classify", "bertie"): bertie_classify,
    ("classify", "transformers"): transformers_classify,
    ("pairs", "bertie"): bertie_pairs,
    ("pairs", "sentence-transformers"): sentence_transformers_pairs,
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train in this process."""
    if options.engine == "bertie":
        import bertie  # noqa: F401  before torch: it sets how its threads wait
    rows = rows_of(options.files, options.rows)
    train = RUNS[options.child, options.engine]
    first = {str(row["label"]): row for row in rows} if options.child == "classify" else {}
    train(options, [*first.values(), *rows][: max(2 * options.batch_size, len(first))])  # every label
    wall, cpu = time.perf_counter(), time.process_time()
    losses = train(options, rows)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "rows_per_second": len(rows) / wall,
        "cpu_ms_per_row": 1000 * cpu / len(rows),
        "loss": quarters(losses),
        "rows": len(rows),
    }


# --- the comparison ---


def run_child(options: argparse.Namespace, kind: str, engine: str, files: list[str]) -> dict[str, Any]:
    """Measure one engine in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.train_cpu", "--child", kind, "--engine", engine, "--files", *files]
    for name in ("model", "rows", "batch_size", "lr", "max_length", "seed", "workers", "freeze"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(options: argparse.Namespace, kind: str, name: str, files: list[str]) -> dict[str, Any]:
    """Alternate between Bertie and its peer; medians and the ratio."""
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES[kind]}
    for _ in range(options.repeats):
        for engine in runs:
            runs[engine].append(run_child(options, kind, engine, files))
            print(f"{name}, {engine}: {runs[engine][-1]}", file=sys.stderr)
    result: dict[str, Any] = {"set": name, "kind": kind, "rows": runs["bertie"][0]["rows"]}
    for engine, measured in runs.items():
        result[engine] = {
            key: statistics.median(run[key] for run in measured) for key in ("rows_per_second", "cpu_ms_per_row")
        } | {"loss": [statistics.median(values) for values in zip(*(run["loss"] for run in measured), strict=True)]}
    ours, peer = (result[engine] for engine in ENGINES[kind])
    result["ratio"] = ours["rows_per_second"] / peer["rows_per_second"]
    result["cpu_ratio"] = peer["cpu_ms_per_row"] / ours["cpu_ms_per_row"]
    return result


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| set | engine | rows/s | CPU ms a row | loss, first and last quarter | ratio | ratio of CPU times |"]
    lines.append("|---|---|---|---|---|---|---|")
    for result in results:
        for engine in ENGINES[result["kind"]]:
            own = result[engine]
            ratios = f"{result['ratio']:.2f} | {result['cpu_ratio']:.2f}" if engine == "bertie" else "1 | 1"
            losses = ", ".join(f"{loss:.3f}" for loss in own["loss"])
            speed = f"{own['rows_per_second']:.1f} | {own['cpu_ms_per_row']:.1f}"
            lines.append(f"| {result['set']}, {result['rows']} rows | {engine} | {speed} | {losses} | {ratios} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bertie-small", help="a folder that both engines can load")
    parser.add_argument("--classify", nargs="+", action="append", default=[], metavar=("NAME", "FILE"))
    parser.add_argument("--pairs", nargs="+", action="append", default=[], metavar=("NAME", "FILE"))
    parser.add_argument("--rows", type=int, default=960)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--max-length", type=int, default=256, help="tokens; beyond it texts are truncated, by all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="of the peer's data loader")
    parser.add_argument("--freeze", type=int, default=0, help="lower layers that Bertie freezes; the peer trains all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results here too")
    for name in ("--child", "--engine"):  # of a process that `run_child` starts
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--files", nargs="+", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows < 10 * options.batch_size:
        parser.error(f"--rows {options.rows} must be 10 batches or more: the peers log the loss of every tenth step")
    if options.child:
        print(json.dumps(measure(options)))
        return 0
    sets = [(kind, *given) for kind in ENGINES for given in getattr(options, kind)]
    results = [compare(options, kind, name, files) for kind, name, *files in sets]
    print(table(results))
    if options.json:
        machine = {"processor": platform.processor(), "cpus": len(os.sched_getaffinity(0))}
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
