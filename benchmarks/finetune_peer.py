"""Fine-tuning with transformers' Trainer at its best settings, to compare with Bertie on the same machine.

    python -m benchmarks.finetune_peer --task classify --model FOLDER --train FILE … [--dev FILE] [--json FILE]

Tasks: classify (`text`), pair (`text_a`, `text_b` or `query`, `passage`), tag (`tokens`, `tags`), answer (`question`,
`context`, `answers`). The target is `label`, `labels` (multi-label), or `score` (a number). Files are JSON lines,
plain, .gz or .xz.

Best settings: all texts tokenized in one call before training, batches of similar lengths padded to their longest,
worker processes and pinned memory, bf16 autocast with tf32 beside it (fp32 without a GPU), sdpa attention, fused AdamW,
and nothing that synchronizes with the GPU: no evaluation, saving, logging, or NaN check of each loss.
The clock starts with the texts in memory and the model on the device, and stops when the weights are trained.
It needs torch, transformers, accelerate and scikit-learn.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import lzma
import os
import platform
import re
import string
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # or it warns when the workers are forked

import numpy as np
import torch

STRIDE, NBEST, LONGEST = 128, 20, 30  # of transformers' own example for SQuAD, run_qa.py
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Row = dict[str, Any]
Feature = dict[str, Any]


# Data


def read(files: Sequence[Path], limit: int | None) -> list[Row]:
    """The rows of JSON-lines files, one after the other."""
    rows: list[Row] = []
    for file in files:
        opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(file.suffix, open)
        with opener(file, "rt", encoding="utf-8") as lines:
            rows += map(json.loads, lines)
    return rows[:limit]


@dataclass(frozen=True)
class Target:
    """The targets: the loss and the label names."""

    problem: str
    labels: list[Any]

    @property
    def index(self) -> dict[Any, int]:
        return {label: i for i, label in enumerate(self.labels)}


def target_of(task: str, rows: list[Row]) -> Target:
    """Infer the targets from the training data."""
    first = rows[0]
    if task == "answer":
        return Target("answer", [])
    if task == "tag":
        return Target("tag", sorted({tag for row in rows for tag in row["tags"]}, key=lambda tag: (tag != "O", tag)))
    if "labels" in first:
        return Target("several", sorted({label for row in rows for label in row["labels"]}))
    if "score" in first:
        return Target("score", ["score"])
    if "query" in first:
        return Target("relevance", ["relevant"])
    return Target("one", sorted({row["label"] for row in rows}))


def goal(row: Row, target: Target, index: dict[Any, int]) -> Any:
    """A row's label in the form that the loss takes."""
    if target.problem == "several":
        return [float(label in row["labels"]) for label in target.labels]
    if target.problem == "score":
        return float(row["score"])
    if target.problem == "relevance":
        return [float(row["label"])]
    return index.get(row["label"], -1)  # a test label that training never showed counts as missed


# Features: what the collator pads


def of_texts(rows: list[Row], target: Target, tokenizer: Any, length: int) -> list[Feature]:
    """Tokenize one or two texts per row."""
    names = next(n for n in (("text",), ("text_a", "text_b"), ("query", "passage")) if n[0] in rows[0])
    texts = [[row[name] for row in rows] for name in names]
    # Segment ids of single texts are all 0, which is what a model assumes; the collator makes the mask.
    pair = len(names) == 2
    coded = tokenizer(
        *texts, truncation=True, max_length=length, return_attention_mask=False, return_token_type_ids=pair
    )
    names = tuple(name for name in tokenizer.model_input_names if name in coded)
    index = target.index
    return [
        {**dict(zip(names, values, strict=True)), "labels": goal(row, target, index)}
        for row, *values in zip(rows, *(coded[name] for name in names), strict=True)
    ]


def of_words(
    rows: list[Row], target: Target, tokenizer: Any, length: int
) -> tuple[list[Feature], list[list[tuple[int, int]]]]:
    """Tokenize words: the first token of each has its tag, as in run_ner.py; also returns each token's word."""
    coded = tokenizer(
        [row["tokens"] for row in rows],
        is_split_into_words=True,
        truncation=True,
        max_length=length,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    index, features, places = target.index, [], []
    for i, row in enumerate(rows):
        words = coded.word_ids(i)
        firsts = [(t, word) for t, word in enumerate(words) if word is not None and (t == 0 or word != words[t - 1])]
        labels = [-100] * len(words)
        for t, word in firsts:
            labels[t] = index.get(row["tags"][word], -100)
        features.append({"input_ids": coded["input_ids"][i], "labels": labels})
        places.append(firsts)
    return features, places


@dataclass(frozen=True)
class Window:
    """A window of a context: its question, its first token, and the character offsets of its tokens."""

    row: int
    first: int
    starts: list[int]
    ends: list[int]


def of_questions(rows: list[Row], tokenizer: Any, length: int) -> tuple[list[Feature], list[Window]]:
    """Overlapping windows of the context behind each question, as in run_qa.py; the first answer is the target."""
    coded = tokenizer(
        [row["question"].lstrip() for row in rows],
        [row["context"] for row in rows],
        truncation="only_second",
        max_length=length,
        stride=STRIDE,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=True,
    )
    features, windows = [], []
    for i, sample in enumerate(coded["overflow_to_sample_mapping"]):
        parts = coded.sequence_ids(i)
        first = parts.index(1)
        inside = [span for span, part in zip(coded["offset_mapping"][i], parts, strict=True) if part == 1]
        window = Window(sample, first, [start for start, _ in inside], [end for _, end in inside])
        begin = end = 0  # an answer that is not whole in the window: the first token
        if rows[sample]["answers"]:
            answer = rows[sample]["answers"][0]
            at, stop = answer["answer_start"], answer["answer_start"] + len(answer["text"])
            if window.starts[0] <= at and window.ends[-1] >= stop:
                begin = first + bisect_right(window.starts, at) - 1
                end = first + bisect_left(window.ends, stop)
        feature = {name: coded[name][i] for name in tokenizer.model_input_names if name in coded}
        features.append(feature | {"start_positions": begin, "end_positions": end})
        windows.append(window)
    return features, windows


# Scores, all between 0 and 1


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Kind, start and end of each entity; an I- without a preceding tag of its kind starts one, as in seqeval."""
    found, kind, start = set(), "", 0
    for i, tag in enumerate([*tags, "O"]):
        if kind and (tag[0] != "I" or tag[2:] != kind):
            found.add((kind, start, i))
            kind = ""
        if not kind and tag[0] != "O":
            kind, start = tag[2:], i
    return found


def entity_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 of whole entities."""
    pairs = [(entities(one), entities(other)) for one, other in zip(gold, predicted, strict=True)]
    right = sum(len(one & other) for one, other in pairs)
    precision = right / max(1, sum(len(other) for _, other in pairs))
    recall = right / max(1, sum(len(one) for one, _ in pairs))
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    return {"f1": f1, "precision": precision, "recall": recall}


def plain(answer: str) -> list[str]:
    """Normalized words, as SQuAD compares them."""
    kept = "".join(c for c in answer.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def word_f1(gold: str, predicted: str) -> float:
    """F1 over words, by SQuAD's definition."""
    one, other = plain(gold), plain(predicted)
    same = sum((collections.Counter(one) & collections.Counter(other)).values())
    return 2 * same / (len(one) + len(other)) if one and other else float(one == other)


def answer_scores(gold: list[list[str]], predicted: list[str]) -> dict[str, float]:
    """Exact match and F1 of SQuAD: the best over the given answers."""
    pairs = [(texts or [""], text) for texts, text in zip(gold, predicted, strict=True)]
    exact = [max(plain(one) == plain(text) for one in texts) for texts, text in pairs]
    f1 = [max(word_f1(one, text) for one in texts) for texts, text in pairs]
    return {"exact_match": float(np.mean(exact)), "f1": float(np.mean(f1))}


def ranking_scores(queries: list[Any], gold: list[int], scores: Sequence[float]) -> dict[str, float]:
    """MAP and MRR over the queries that have an answer."""
    groups = collections.defaultdict(list)
    for query, relevant, score in zip(queries, gold, scores, strict=True):
        groups[query].append((-score, bool(relevant)))
    precisions, firsts = [], []
    for group in groups.values():
        ranks = [rank for rank, (_, relevant) in enumerate(sorted(group, key=lambda x: x[0]), 1) if relevant]
        if ranks:
            precisions.append(np.mean([found / rank for found, rank in enumerate(ranks, 1)]))
            firsts.append(1 / ranks[0])
    return {"map": float(np.mean(precisions)), "mrr": float(np.mean(firsts))}


def best_answers(rows: list[Row], windows: list[Window], logits: list[tuple[np.ndarray, ...]]) -> list[str]:
    """The best span over all windows of a question, among the most probable starts and ends."""
    best = [(-np.inf, "")] * len(rows)
    for window, (start, end) in zip(windows, logits, strict=True):
        starts, ends = np.argsort(start)[::-1][:NBEST], np.argsort(end)[::-1][:NBEST]
        last = window.first + len(window.starts)
        sums = start[starts][:, None] + end[ends]  # (N, N)
        tokens = ends - starts[:, None] + 1
        fits = (starts[:, None] >= window.first) & (ends < last) & (tokens >= 1) & (tokens <= LONGEST)
        if not fits.any():
            continue
        i, j = divmod(int(np.where(fits, sums, -np.inf).argmax()), len(ends))
        begin, stop = window.starts[starts[i] - window.first], window.ends[ends[j] - window.first]
        best[window.row] = max(best[window.row], (float(sums[i, j]), rows[window.row]["context"][begin:stop]))
    return [text for _, text in best]


def predict(model: Any, features: list[Feature], collate: Callable[..., Any]) -> list[tuple[np.ndarray, ...]]:
    """The logits of each feature without padding. Not Trainer.predict: grouping by length would shuffle its rows."""
    order = sorted(range(len(features)), key=lambda i: len(features[i]["input_ids"]))
    targets = {"labels", "start_positions", "end_positions"}
    results: list[tuple[np.ndarray, ...]] = [()] * len(features)
    model.eval()
    for at in range(0, len(order), 128):
        chosen = order[at : at + 128]
        batch = collate([{k: v for k, v in features[i].items() if k not in targets} for i in chosen])
        with torch.inference_mode(), torch.autocast(HERE.type, torch.bfloat16, enabled=HERE.type == "cuda"):
            out = model(**{name: tensor.to(HERE) for name, tensor in batch.items()})
        names = ("logits",) if "logits" in out else ("start_logits", "end_logits")
        logits = [out[name].float().cpu().numpy() for name in names]
        for i, row in enumerate(chosen):
            results[row] = tuple(values[i] for values in logits)
    return results


def evaluate(model: Any, rows: list[Row], target: Target, tokenizer: Any, length: int, pad: Any) -> dict[str, float]:
    """The scores of a trained model."""
    from scipy import stats
    from sklearn import metrics

    if target.problem == "answer":
        features, windows = of_questions(rows, tokenizer, length)
        predicted = best_answers(rows, windows, predict(model, features, pad))
        return answer_scores([[answer["text"] for answer in row["answers"]] for row in rows], predicted)
    if target.problem == "tag":
        features, places = of_words(rows, target, tokenizer, length)
        tags = []
        for row, firsts, (values,) in zip(rows, places, predict(model, features, pad), strict=True):
            words = ["O"] * len(row["tags"])  # and it stays so for words that were cut off
            for t, word in firsts:
                words[word] = target.labels[int(values[t].argmax())]
            tags.append(words)
        expected = [row["tags"] for row in rows]
        correct = [a == b for x, y in zip(expected, tags, strict=True) for a, b in zip(x, y, strict=True)]
        return entity_scores(expected, tags) | {"accuracy": float(np.mean(correct))}
    features = of_texts(rows, target, tokenizer, length)
    values = np.stack([logits for (logits,) in predict(model, features, pad)])
    gold = np.array([feature["labels"] for feature in features])
    if target.problem == "score":
        return {
            "spearman": float(stats.spearmanr(gold, values[:, 0])[0]),
            "pearson": float(stats.pearsonr(gold, values[:, 0])[0]),
        }
    if target.problem == "relevance":
        queries = [row.get("qid", row["query"]) for row in rows]
        return ranking_scores(queries, [row["label"] for row in rows], values[:, 0].tolist())
    if target.problem == "several":
        given = values > 0  # a probability of a half
        return {
            f"{name}_f1": float(metrics.f1_score(gold, given, average=name, zero_division=0))
            for name in ("macro", "micro")
        }
    best = values.argmax(-1)
    scores = {
        "accuracy": float(metrics.accuracy_score(gold, best)),
        "macro_f1": float(metrics.f1_score(gold, best, average="macro", zero_division=0)),
        "matthews": float(metrics.matthews_corrcoef(gold, best)),
    }
    if len(target.labels) == 2:
        scores["f1"] = float(metrics.f1_score(gold, best, zero_division=0))
    return scores


# The peer


def load(folder: str, target: Target, seed: int) -> Any:
    """The model with a fresh head, on the device."""
    import transformers

    transformers.set_seed(seed)
    auto = {"answer": "QuestionAnswering", "tag": "TokenClassification"}.get(target.problem, "SequenceClassification")
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if target.problem != "answer":
        options["num_labels"] = len(target.labels)
    if auto == "SequenceClassification":
        options["problem_type"] = {
            "one": "single_label_classification",
            "score": "regression",
        }.get(target.problem, "multi_label_classification")
    return getattr(transformers, f"AutoModelFor{auto}").from_pretrained(folder, **options).to(HERE)


def best_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Trainer's arguments: the recipe, and what makes it faster."""
    cuda = HERE.type == "cuda"
    fast: dict[str, Any] = {
        "bf16": cuda,
        "tf32": True if cuda else None,
        "use_cpu": not cuda,
        "optim": "adamw_torch_fused",
        "torch_compile": options.compile,
        "train_sampling_strategy": "group_by_length",
        "dataloader_num_workers": options.workers,
        "dataloader_pin_memory": cuda,
        "dataloader_persistent_workers": options.workers > 0,
        "dataloader_prefetch_factor": 4 if options.workers else None,
        "accelerator_config": {"non_blocking": cuda},
        "remove_unused_columns": False,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,  # True waits for the GPU at every step
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    recipe = {
        "num_train_epochs": options.epochs,
        "learning_rate": options.lr,
        "per_device_train_batch_size": options.batch_size,
        "seed": options.seed,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.1,  # below 1: a share of all steps
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    }
    return recipe | fast


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune once; returns the duration and the scores."""
    import transformers

    rows = read(options.train, options.limit)
    target = target_of(options.task, rows)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = load(options.model, target, options.seed)
    collator = "DataCollatorForTokenClassification" if options.task == "tag" else "DataCollatorWithPadding"
    pad = getattr(transformers, collator)(tokenizer, pad_to_multiple_of=8)
    settings = best_settings(options)
    trainer_class = transformers.Trainer  # imported now, before the clock starts
    stamps: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            stamps.append(time.perf_counter())

    if HERE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, **settings)
        begin = time.perf_counter()
        if options.task == "answer":
            features, _ = of_questions(rows, tokenizer, options.max_length)
        elif options.task == "tag":
            features, _ = of_words(rows, target, tokenizer, options.max_length)
        else:
            features = of_texts(rows, target, tokenizer, options.max_length)
        tokenized = time.perf_counter()
        trainer = trainer_class(
            model, arguments, data_collator=pad, train_dataset=features, processing_class=tokenizer, callbacks=[Clock()]
        )
        ready = time.perf_counter()
        outcome = trainer.train()
        if HERE.type == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter()

    lengths = [len(feature["input_ids"]) for feature in features]
    warm = len(stamps) // 10
    report: dict[str, Any] = {
        "peer": "transformers Trainer",
        "task": options.task,
        "model": Path(options.model).name,
        "train": [file.name for file in options.train],
        "rows": len(rows),
        "features": len(features),
        "features_of_greatest_length": sum(length == options.max_length for length in lengths),
        "max_length": options.max_length,
        "seconds_tokenizing": round(tokenized - begin, 3),
        "seconds_training": round(end - ready, 3),
        "seconds": round(end - begin, 3),
        "steps": trainer.state.global_step,
        "steps_per_second_after_a_tenth": round((len(stamps) - warm) / (end - stamps[warm - 1]), 2) if warm else None,
        "tokens": round(sum(lengths) * options.epochs),
        "tokens_per_second": round(sum(lengths) * options.epochs / (end - begin)),
        "train_loss": round(outcome.training_loss, 4),
        "peak_gpu_mib": round(torch.cuda.max_memory_allocated() / 2**20) if HERE.type == "cuda" else None,
    }
    if options.dev:
        dev = read(options.dev, options.limit)
        report["dev"] = [file.name for file in options.dev]
        report["dev_rows"] = len(dev)
        scores = evaluate(model, dev, target, tokenizer, options.max_length, pad)
        report["scores"] = {name: round(score, 4) for name, score in scores.items()}
    if options.test:
        report["tests"] = {}
        for file in options.test:
            scores = evaluate(model, read([file], options.limit), target, tokenizer, options.max_length, pad)
            report["tests"][file.name] = {name: round(score, 4) for name, score in scores.items()}
    report["settings"] = settings | {"attention": model.config._attn_implementation, "pad_to_multiple_of": 8}
    report["versions"] = versions()
    return report


def versions() -> dict[str, str]:
    """Versions and hardware."""
    from importlib.metadata import version

    packages = {name: version(name) for name in ("torch", "transformers", "tokenizers", "accelerate")}
    device = torch.cuda.get_device_name() if HERE.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return packages | {"python": platform.python_version(), "device": device}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=("classify", "pair", "tag", "answer"))
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--train", required=True, type=Path, nargs="+")
    parser.add_argument("--dev", type=Path, nargs="+", help="score the trained model on this")
    parser.add_argument("--test", type=Path, nargs="+", help="score it on each of these too")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-length", type=int, help="tokens; longer texts are cut (512; answer: windows of 384)")
    parser.add_argument("--limit", type=int, help="only the first rows of each split: for a quick try")
    parser.add_argument("--workers", type=int, default=min(8, (os.cpu_count() or 2) // 2), help="that make batches")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--json", type=Path, help="write the report here too")
    options = parser.parse_args()
    options.max_length = options.max_length or (384 if options.task == "answer" else 512)
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise SystemExit("transformers' Trainer needs accelerate: pip install accelerate") from None
    report = run(options)
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
