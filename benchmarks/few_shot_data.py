"""The draws of `benchmarks.few_shot`: a few labelled texts of each class, and test rows. Standard library only.

The rules of `bertie.training.finetune.few_shot` were fitted on the sets in `FITTED`; those in `JUDGED` were not looked
at until they were done.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

FITTED = ("emotion", "sst5", "clinc150", "mr")
JUDGED = ("cr", "scicite", "ag_news", "banking77")
Rows = list[tuple[str, str]]  # texts and labels

WORDS = 60  # of a text of ag_news
# Intents of one domain each, which are easily confused.
LABELS = {
    "banking77": (
        *("card_about_to_expire", "card_acceptance", "card_arrival", "card_delivery_estimate"),
        "card_linking",
    ),
    "clinc150": ("change_speed", "whisper_mode", "change_language", "change_volume", "change_accent", "sync_device"),
}


def draw(data: Path, name: str, shots: int, seed: int, test_rows: int = 400) -> tuple[Rows, Rows]:
    """`shots` training rows of each class, others for each seed, and always the same test rows."""
    train, test = _read(data, name)
    by_label: dict[str, list[str]] = {}
    for text, label in train:
        by_label.setdefault(label, []).append(text)
    rng = random.Random(1000 * seed + shots)
    rows = [(text, label) for label in sorted(by_label) for text in rng.sample(by_label[label], shots)]
    rng.shuffle(rows)
    random.Random(0).shuffle(test)
    return rows, test[:test_rows]


def _read(data: Path, name: str) -> tuple[Rows, Rows]:
    if name in ("cr", "mr"):  # without a split of their own
        rows = _rows(data / name / "all.jsonl.gz")
        random.Random(0).shuffle(rows)
        half = len(rows) // 2
        return rows[:half], rows[half:]
    train, test = (_rows(data / name / f"{split}.jsonl.gz") for split in ("train", "test"))
    if name in LABELS:
        train, test = ([row for row in rows if row[1] in LABELS[name]] for rows in (train, test))
    return train, test


def _rows(path: Path) -> Rows:
    if not path.exists():  # ag_news has two training files
        path = path.with_name("train_full.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    cut = WORDS if path.parent.name == "ag_news" else None
    return [(" ".join(record["text"].split()[:cut]), str(record["label"])) for record in records]
