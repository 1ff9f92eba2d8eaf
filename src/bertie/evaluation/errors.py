"""The errors of a model, for reading: what it predicted instead of the gold label, and how confidently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertie.evaluation.intervals import IntArray
from bertie.evaluation.metrics import answering
from bertie.evaluation.model_report import Evaluation, correct_predictions
from bertie.evaluation.pages import Cell, Marked, Table

MOST = 200  # errors in the table
_EXCERPT = 300  # characters of a text


def wrong_rows(kind: str, evaluation: Evaluation) -> IntArray:
    """The rows with an error, the most confident (or the largest) first; empty for tasks without errors of single rows.

    >>> scores = {"mse": 0.5}
    >>> wrong_rows("regress", Evaluation(scores={}, gold=[1.0, 2.0, 3.0], predicted=[1.0, 2.5, 5.0])).tolist()
    [2, 1]
    """
    if kind == "regress":
        size = np.abs(np.asarray(evaluation.gold, dtype=np.float64) - np.asarray(evaluation.predicted))
        return _ordered(np.flatnonzero(size > 0), size)
    if kind == "answer":
        size = 1 - np.array([_answer_f1(a, b) for a, b in zip(evaluation.gold, evaluation.predicted, strict=True)])
        return _ordered(np.flatnonzero(size > 0), size)
    if kind == "tag":
        pairs = zip(evaluation.gold, evaluation.predicted, strict=True)
        size = np.array([sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairs], dtype=np.float64)
        return _ordered(np.flatnonzero(size > 0), size)
    if kind not in ("classify", "multi_label", "choose"):
        return np.zeros(0, dtype=np.int64)
    rows = np.flatnonzero(~_correct(kind, evaluation))
    return rows if evaluation.confidences is None else _ordered(rows, np.asarray(evaluation.confidences))


def _ordered(rows: IntArray, size: Any) -> IntArray:
    return rows[np.argsort(-np.asarray(size, dtype=np.float64)[rows], kind="stable")]


def _correct(kind: str, evaluation: Evaluation) -> Any:
    if kind in ("classify", "choose"):
        return correct_predictions(evaluation)
    return np.array([set(a) == set(b) for a, b in zip(evaluation.gold, evaluation.predicted, strict=True)], dtype=bool)


def _answer_f1(gold: Sequence[str], predicted: str) -> float:
    return answering([gold], [predicted], resamples=0)["f1"].value


def error_table(
    kind: str, evaluation: Evaluation, attributions: Mapping[int, Sequence[tuple[str, float]]] | None = None
) -> tuple[Table | None, int]:
    """A table of the errors, at most `MOST`, and how many there are."""
    rows = wrong_rows(kind, evaluation)
    texts = evaluation.texts
    if not len(rows) or texts is None:
        return None, len(rows)
    head, cells = _COLUMNS[kind]
    table = [
        [str(i + 1), *cells(evaluation, i), _text(texts[i], (attributions or {}).get(i))] for i in rows[:MOST].tolist()
    ]
    return Table(["row", *head, "text"], table, sortable=True, filtered=True), len(rows)


def _text(text: str, pieces: Sequence[tuple[str, float]] | None) -> Cell:
    if pieces:
        return Marked(pieces)
    text = " ".join(text.split())
    return text if len(text) <= _EXCERPT else text[: _EXCERPT - 1] + "…"


def _label_cells(evaluation: Evaluation, i: int) -> list[str]:
    gold, predicted = str(evaluation.gold[i]), str(evaluation.predicted[i])
    if evaluation.probabilities is None or evaluation.confidences is None:
        return [gold, predicted, "–", "–"]
    probabilities, labels = np.asarray(evaluation.probabilities), list(evaluation.labels)
    at = labels.index(gold) if gold in labels else -1
    own = f"{probabilities[i, at]:.3f}" if 0 <= at < probabilities.shape[1] else "–"
    return [gold, predicted, f"{np.asarray(evaluation.confidences)[i]:.3f}", own]


def _multi_label_cells(evaluation: Evaluation, i: int) -> list[str]:
    gold, predicted = set(evaluation.gold[i]), set(evaluation.predicted[i])
    both, missing, extra = sorted(gold & predicted), sorted(gold - predicted), sorted(predicted - gold)
    return [", ".join(names) or "–" for names in (both, missing, extra)]


def _value_cells(evaluation: Evaluation, i: int) -> list[str]:
    gold, predicted = float(evaluation.gold[i]), float(evaluation.predicted[i])
    return [f"{gold:.3f}", f"{predicted:.3f}", f"{predicted - gold:+.3f}"]


def _tag_cells(evaluation: Evaluation, i: int) -> list[str]:
    words = (evaluation.texts or [])[i].split(" ")
    gold, predicted = evaluation.gold[i], evaluation.predicted[i]
    named = len(words) == len(gold)
    wrong = [
        f"{words[n] if named else f'word {n + 1}'}: {a} → {b}"
        for n, (a, b) in enumerate(zip(gold, predicted, strict=True))
        if a != b
    ]
    return [str(len(wrong)), "; ".join(wrong[:8]) + (" …" if len(wrong) > 8 else "")]


def _answer_cells(evaluation: Evaluation, i: int) -> list[str]:
    gold, predicted = evaluation.gold[i], evaluation.predicted[i]
    return [
        " / ".join(dict.fromkeys(gold)) or "no answer",
        predicted or "no answer",
        f"{_answer_f1(gold, predicted):.2f}",
    ]


def _choice_cells(evaluation: Evaluation, i: int) -> list[str]:
    confidence = "–" if evaluation.confidences is None else f"{np.asarray(evaluation.confidences)[i]:.3f}"
    return [str(evaluation.gold[i]), str(evaluation.predicted[i]), confidence]


_COLUMNS = {
    "classify": (["gold", "predicted", "confidence", "p(gold)"], _label_cells),
    "multi_label": (["correct", "missing", "wrong"], _multi_label_cells),
    "regress": (["gold", "predicted", "error"], _value_cells),
    "tag": (["wrong tags", "gold → predicted"], _tag_cells),
    "answer": (["gold", "predicted", "F1"], _answer_cells),
    "choose": (["gold", "predicted", "confidence"], _choice_cells),
}
