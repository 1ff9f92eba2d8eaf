"""Several trained models side by side, from the reports in their folders."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from bertie.errors import InputError, NotFoundError
from bertie.evaluation import metrics
from bertie.evaluation.intervals import RESAMPLES, Difference, Score
from bertie.evaluation.prediction_files import NAME, PredictedRow, read_predictions


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A folder with a report: `report` is its report.json, `rows` are the predictions on its last split."""

    name: str
    report: Mapping[str, Any]
    rows: Sequence[PredictedRow]

    @property
    def split(self) -> str:
        """The split of the headline score."""
        return str(self.report["final"])

    @property
    def scores(self) -> dict[str, Score]:
        """All metrics on that split."""
        return {
            metric: Score(*(math.nan if values[key] is None else values[key] for key in ("value", "low", "high")))
            for metric, values in self.report["evaluations"][self.split]["scores"].items()
        }


@dataclass(frozen=True, slots=True)
class RunDifference:
    """The difference of two runs on the rows that both predicted; None if there are none."""

    first: str
    second: str
    rows: int
    difference: Difference | None  # first - second; p by McNemar's test for accuracy, corrected for all pairs (Holm)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Runs of one kind of data, the best first, and the differences of the main metric between them."""

    kind: str
    metric: str
    runs: Sequence[ComparedRun]
    differences: Sequence[RunDifference]

    @property
    def same_rows(self) -> bool:
        """Whether all runs were tested on the same rows."""
        tested = [sorted((row.text, json.dumps(row.gold)) for row in run.rows) for run in self.runs]
        return all(rows and rows == tested[0] for rows in tested)


def read_run(folder: str | Path) -> ComparedRun:
    """Read the report of a folder, and its predictions if there are any."""
    folder = Path(folder)
    path = folder / "report.json"
    if not path.is_file():
        raise NotFoundError(f"{folder} has no report.json; bertie train and bertie eval --output write one")
    try:
        report = json.loads(path.read_text("utf-8"))
        split = report["final"]
        assert report["evaluations"][split]["scores"]
        assert report["kind"] in metrics.MAIN
    except (ValueError, KeyError, TypeError, AssertionError):
        raise InputError(f"{path} is not a report of bertie train or bertie eval") from None
    file = folder / NAME
    return ComparedRun(folder.absolute().name, report, read_predictions(file).get(split, []) if file.is_file() else [])


def compare_runs(folders: Sequence[str | Path], *, resamples: int = RESAMPLES) -> RunComparison:
    """Compare the runs in several folders on the metric of their task.

    >>> compare_runs(["my-model"])
    Traceback (most recent call last):
    bertie.errors.InputError: 1 folder given; a comparison needs at least 2
    """
    if len(folders) < 2:
        raise InputError(
            f"{len(folders)} folder{'' if len(folders) == 1 else 's'} given; a comparison needs at least 2"
        )
    runs = _with_different_names([read_run(folder) for folder in folders], folders)
    kinds = sorted({run.report["kind"] for run in runs})
    if len(kinds) > 1:
        raise InputError(f"the runs are of different tasks ({', '.join(kinds)}), whose scores cannot be compared")
    metric = metrics.main_metric(kinds[0], runs[0].scores)
    runs = sorted(runs, key=lambda run: -_finite(run.scores[metric].value))
    pairs = list(combinations(runs, 2)) if len(runs) <= 5 else [(runs[0], run) for run in runs[1:]]
    differences = [_difference(kinds[0], metric, *pair, resamples) for pair in pairs]
    return RunComparison(kinds[0], metric, runs, _holm(differences))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _with_different_names(runs: list[ComparedRun], folders: Sequence[str | Path]) -> list[ComparedRun]:
    """By their folders' names, or by their paths where those are equal."""
    if len({run.name for run in runs}) == len(runs):
        return runs
    if len(set(map(str, folders))) < len(runs):
        raise InputError("the same folder is given twice")
    return [replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]


def _difference(kind: str, metric: str, first: ComparedRun, second: ComparedRun, resamples: int) -> RunDifference:
    ours, theirs = _by_row(first.rows), _by_row(second.rows)
    keys = [key for key in ours if key in theirs]
    if not keys:
        return RunDifference(first.name, second.name, 0, None)
    rows = [[rows[key] for key in keys] for rows in (ours, theirs)]
    labels = sorted({label for part in rows for row in part for label in _labels(kind, row)})
    arguments = [_arguments(kind, part, labels) for part in rows]
    gap = metrics.paired(kind, arguments[0], arguments[1], resamples=resamples)[metric]
    if kind == "classify":
        gap = replace(gap, p=metrics.mcnemar(*([row.gold == row.predicted for row in part] for part in rows)))
    return RunDifference(first.name, second.name, len(keys), gap)


def _by_row(rows: Sequence[PredictedRow]) -> dict[tuple[str, str, int], PredictedRow]:
    """Rows by text and gold; equal ones are told apart by their order."""
    counts: dict[str, int] = {}
    table = {}
    for row in rows:
        counts[row.text] = counts.get(row.text, -1) + 1
        table[row.text, json.dumps(row.gold), counts[row.text]] = row
    return table


def _labels(kind: str, row: PredictedRow) -> list[str]:
    if kind == "classify":
        return [row.gold, row.predicted]
    return [*row.gold, *row.predicted] if kind == "multi_label" else []


def _arguments(kind: str, rows: Sequence[PredictedRow], labels: Sequence[str]) -> tuple[Any, ...]:
    """Of the kind's function in `metrics`, with probabilities of 0 and 1."""
    gold, predicted = [row.gold for row in rows], [row.predicted for row in rows]
    if kind == "classify":
        index = {label: i for i, label in enumerate(labels)}
        return gold, np.eye(len(labels))[[index[label] for label in predicted]], labels
    if kind == "multi_label":
        tables = [np.array([[label in names for label in labels] for names in part]) for part in (gold, predicted)]
        return tables[0], tables[1].astype(np.float64), 0.5
    return ([row.group for row in rows], gold, predicted) if kind == "rerank" else (gold, predicted)


def _holm(differences: Sequence[RunDifference]) -> list[RunDifference]:
    """Correct the p-values for the number of comparisons (Holm, 1979)."""
    tested = [d for d in differences if d.difference is not None and math.isfinite(d.difference.p)]
    tested.sort(key=lambda d: d.difference.p if d.difference is not None else 1.0)
    corrected: dict[tuple[str, str], float] = {}
    highest = 0.0
    for i, pair in enumerate(tested):
        assert pair.difference is not None
        highest = max(highest, min(1.0, pair.difference.p * (len(tested) - i)))
        corrected[pair.first, pair.second] = highest
    return [
        replace(d, difference=replace(d.difference, p=corrected.get((d.first, d.second), d.difference.p)))
        if d.difference is not None
        else d
        for d in differences
    ]
