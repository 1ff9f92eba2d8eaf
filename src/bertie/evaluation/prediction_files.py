"""The predictions of a model on each row of its splits: `predictions.jsonl`, beside a report.

Texts are not in it, only a hash of each, by which the rows of two models are matched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from bertie.errors import InputError
from bertie.evaluation.model_report import Evaluation

NAME = "predictions.jsonl"


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """One row of a split: the hash of its text, the gold label or value, and the prediction."""

    text: str
    group: str  # hash of the first line: the query in rankings
    gold: Any
    predicted: Any


def to_lines(evaluations: Mapping[str, Evaluation]) -> str:
    """The contents of the file: one JSON object per row of each split that has texts."""
    lines = []
    for split, evaluation in evaluations.items():
        if evaluation.texts is None:
            continue
        for text, gold, predicted in zip(evaluation.texts, evaluation.gold, evaluation.predicted, strict=True):
            row = {"split": split, "text": _hash(text), "group": _hash(text.partition("\n")[0])}
            lines.append(json.dumps({**row, "gold": _value(gold), "predicted": _value(predicted)}))
    return "".join(f"{line}\n" for line in lines)


def read_predictions(path: Path) -> dict[str, list[PredictedRow]]:
    """The rows of each split."""
    splits: dict[str, list[PredictedRow]] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            predicted = PredictedRow(row["text"], row["group"], row["gold"], row["predicted"])
            splits.setdefault(row["split"], []).append(predicted)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}, line {number}: not a prediction ({error!r})") from None
    return splits


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _value(value: Any) -> Any:
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Sequence):
        return [_value(item) for item in value]
    return value.item() if hasattr(value, "item") else value
