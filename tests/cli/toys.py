"""Labelled toy data for each task, in the few words that the tiny models know."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

SIZES = {"train": 24, "dev": 10, "test": 12}
TASKS = ("classify", "multi", "regress", "tag", "answer", "rerank", "choose")
MAIN = {
    "classify": "accuracy",
    "multi": "macro_f1",
    "regress": "spearman",
    "tag": "f1",
    "answer": "f1",
    "rerank": "map",
    "choose": "accuracy",
}


def write_toys(folder: Path, task: str, **sizes: int) -> list[str]:
    """Train, dev and test files, and how `bertie train` is told of them."""
    draw = random.Random(task)
    for split, rows in (SIZES | sizes).items():
        write(folder / f"{split}.jsonl", [_row(task, draw, i) for i in range(rows)])
    return ["classify" if task == "multi" else task, "train.jsonl", "--dev", "dev.jsonl", "--test", "test.jsonl"]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _row(task: str, draw: random.Random, i: int) -> dict[str, Any]:
    who = ("cat", "dog")[i % 2]
    other = {"cat": "dog", "dog": "cat"}[who]
    does, first, last = draw.choice(["sat", "ran"]), draw.choice(["a", "the"]), draw.choice(["a", "the"])
    words = f"{first} {who} {does} on {last} mat".split() + ["on"] * draw.randrange(12)
    text = " ".join(words)
    if task == "classify":
        return {"text": text, "label": who}
    if task == "multi":
        return {"text": text, "labels": [who, does] if does == "ran" else [who]}
    if task == "regress":
        return {"text": text, "score": float(who == "cat") + draw.random() / 10}
    if task == "tag":
        return {"tokens": words, "tags": ["B-PER" if word in ("cat", "dog") else "O" for word in words]}
    if task == "answer":
        start = text.index(who)
        return {"question": f"find {who}", "context": text, "answers": [{"text": who, "answer_start": start}]}
    if task == "choose":
        choices = [f"the {who}", f"a {other}"]
        return {"context": text, "choices": choices[:: 1 if does == "sat" else -1], "label": choices[0]}
    # Three queries with passages that fit and passages that do not.
    query = f"find the {who} on {('a', 'the', 'mat')[i // 2 % 3]}"
    said = i // 6 % 2 == 0
    return {"query": query, "passage": text if said else text.replace(who, other), "label": int(said)}
