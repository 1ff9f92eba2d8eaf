"""From a trained model and labelled data to a report: the output of `bertie train` and `bertie eval`.

The leak check compares what a model could have memorized: the text, both texts of a pair, the question with its context
(so a context that was trained on with other questions is found too), and in rankings the query.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertie._version import __version__
from bertie.data.atomic import atomic_write
from bertie.errors import InputError
from bertie.evaluation.calibration import Abstention, reliability, selective_precision, softmax
from bertie.evaluation.card import model_card
from bertie.evaluation.errors import wrong_rows
from bertie.evaluation.intervals import RESAMPLES
from bertie.evaluation.label_noise import LabelIssue, find_label_issues
from bertie.evaluation.leaks import find_leaks
from bertie.evaluation.metrics import Score, classification, multi_label
from bertie.evaluation.model_report import BaselineTable
from bertie.evaluation.report import (
    CalibrationReport,
    DataFile,
    Evaluation,
    LeakCheck,
    ModelReport,
    TokenCoverage,
    write_report,
)
from bertie.recipe import Recipe
from bertie.tasks.attribution import MAX_PIECES, attribute_each
from bertie.tasks.classify import Classifier
from bertie.tasks.results import AttributionResult
from bertie.training.finetune.base import AnyTrainable, Predictions, training_for
from bertie.training.finetune.cheap_baselines import BaselineSettings, evaluate_baselines
from bertie.training.finetune.classification import as_text, known_rows, label_table
from bertie.training.finetune.comparison import Baseline, as_tuple, compare, labels_of, select_rows
from bertie.training.finetune.data import LabelledDataset
from bertie.training.finetune.defaults import default_lr
from bertie.training.finetune.findings import findings
from bertie.training.finetune.runs import RunResult
from bertie.training.finetune.validation import ValidationPlan

ATTRIBUTED_ROWS, ATTRIBUTED_CHARACTERS = 40, 100_000  # of errors whose words are attributed


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """How a model was trained: the runs of all seeds, and the seed that `metric` selected on the dev data."""

    recipe: Recipe
    runs: Sequence[RunResult]
    best_seed: int
    metric: str
    validation: ValidationPlan | None = (
        None  # where the predictions on "dev" are for held-out rows of the training data
    )

    @property
    def best(self) -> RunResult:
        """The run of the best seed."""
        return next(run for run in self.runs if run.seed == self.best_seed)


def evaluate(task: AnyTrainable, data: LabelledDataset, *, resamples: int = RESAMPLES) -> Evaluation:
    """Predict and score labelled data.

    >>> data = read_dataset("classify", "test.jsonl")                                       # doctest: +SKIP
    >>> evaluate(Classifier.load("my-model"), data).scores["accuracy"]                      # doctest: +SKIP
    Score(value=0.91, low=0.89, high=0.93)
    """
    return score_predictions(task, training_for(task).predict_labelled(data), resamples=resamples)


def score_predictions(task: AnyTrainable, predictions: Predictions, *, resamples: int = RESAMPLES) -> Evaluation:
    """Score predictions, with confidence intervals."""
    return Evaluation(
        scores=training_for(task).scores(predictions, resamples=resamples),
        gold=predictions.gold,
        predicted=predictions.predicted,
        labels=_all_labels(task, predictions) if predictions.probabilities is not None else (),
        confidences=predictions.confidence,
        probabilities=predictions.probabilities,
        lengths=predictions.lengths,
        texts=["\n".join(example.texts) for example in predictions.data.examples],
    )


def build_report(
    task: AnyTrainable,
    predictions: Mapping[str, Predictions],
    *,
    title: str,
    model: str,
    train: LabelledDataset | None = None,
    training: TrainingRecord | None = None,
    baseline: Baseline | None = None,
    cheap_baselines: BaselineSettings | None = None,
    files: Mapping[str, Sequence[str]] | None = None,
    resamples: int = RESAMPLES,
) -> ModelReport:
    """Build the report of a model from its predictions on each split; the last split gives the headline score.

    `train` is the training data, for the leak check and the cheap baselines, which are left out without
    `cheap_baselines`. `baseline` is another model with its predictions on the last split. `files` are the file
    names of each split.
    """
    last = list(predictions)[-1]
    final = predictions[last]
    kind: Any = final.kind
    local = Path(model).is_dir()  # a report does not name private paths
    held_out = {split: part for split, part in predictions.items() if split != "dev" or len(predictions) == 1}
    leaks = None
    source = None if training is None else training.validation
    if train is not None:
        # Rows that were held out of all folds in turn are training rows, too; the folds keep equal texts together.
        seen = {split: train if split != "dev" or source is None else source.train for split in held_out}
        leaks = {
            split: check_leaks(task, rows, held_out[split], resamples=resamples)
            for split, rows in seen.items()
            if rows is not None
        }
    table = None
    if train is not None and cheap_baselines is not None:
        folds = () if last != "dev" or source is None else source.splits
        table = evaluate_baselines(task, train, final, cheap_baselines, folds=folds, split=last, resamples=resamples)
    return ModelReport(
        task_class=type(task).__name__,
        title=title,
        kind=kind,
        model=Path(model).absolute().name if local else model,
        base=None if local else model,
        evaluations={split: score_predictions(task, p, resamples=resamples) for split, p in predictions.items()},
        data=_data_files(train, predictions, files or {}),
        leaks=leaks or None,
        dev_source=None if source is None else source.description,
        label_issues={s: _label_issues(task, p) for s, p in held_out.items()} if kind == "classify" else None,
        # Held-out rows of the training data were predicted by other models than the final one.
        attributions=None if last == "dev" and source is not None else _attributions(task, final),
        calibration=calibration_report(task, final, last, resamples=resamples),
        abstention=_abstention(task, predictions.get("dev")),
        comparison=None if baseline is None else compare(task, final, baseline, split=last, resamples=resamples),
        baselines=table,
        findings=_findings(task, table, training),
        token_coverage={split: _token_coverage(part) for split, part in predictions.items()},
        versions={"bertie": __version__, "torch": torch.__version__, "python": platform.python_version()},
        **({} if training is None else _training_fields(training)),
    )


def _findings(task: AnyTrainable, table: BaselineTable | None, training: TrainingRecord | None) -> list[str]:
    if training is None:
        return findings(table)
    return findings(
        table,
        recipe=training.recipe,
        history=training.best.history,
        metric=training.metric,
        usual_lr=default_lr(task.model.config),
    )


def save_report(folder: str | Path, report: ModelReport) -> None:
    """Write the report and the model card (README.md) into a model's folder."""
    write_report(folder, report)
    atomic_write(Path(folder) / "README.md", model_card(report).encode())


def check_leaks(
    task: AnyTrainable, train: LabelledDataset, predictions: Predictions, *, resamples: int = RESAMPLES
) -> LeakCheck:
    """Find rows of a split that occur in the training data, verbatim or lightly edited, and score without them."""
    train_units, units = _leak_units(train), _leak_units(predictions.data)
    # Many rows may share a unit, as the passages of a query do.
    first_row = {unit: i for i, unit in reversed(list(enumerate(train_units)))}
    unique, index = list(first_row), {unit: i for i, unit in enumerate(dict.fromkeys(units))}
    by_unit = {leak.test_index: leak for leak in find_leaks(unique, list(index))}
    leaks = [
        replace(leak, test_index=row, train_index=first_row[unique[leak.train_index]])
        for row, unit in enumerate(units)
        if (leak := by_unit.get(index[unit])) is not None
    ]
    rest = sorted(set(range(len(units))) - {leak.test_index for leak in leaks})
    return LeakCheck(
        rows=len(units),
        leaks=leaks,
        texts=[(units[leak.test_index], train_units[leak.train_index]) for leak in leaks],
        scores_without=_score_rows(task, predictions, rest, resamples) if leaks and rest else None,
    )


def _leak_units(data: LabelledDataset) -> list[str]:
    if data.kind == "rerank":
        return [example.texts[0] for example in data.examples]
    return ["\n".join(example.texts) for example in data.examples]


def _score_rows(
    task: AnyTrainable, predictions: Predictions, rows: Sequence[int], resamples: int
) -> dict[str, Score] | None:
    """The scores of some rows; None where they cannot be scored, as queries without a relevant passage."""

    try:
        return training_for(task).scores(select_rows(predictions, rows), resamples=resamples)
    except InputError:
        return None


def calibration_report(
    task: AnyTrainable, predictions: Predictions, split: str, *, resamples: int = RESAMPLES
) -> CalibrationReport | None:
    """The calibration error before and after temperature scaling; None if no temperature was fitted."""
    after = predictions.probabilities
    if after is None or (temperature := task.info.calibration.temperature) == 1.0:
        return None
    labels, table = labels_of(task), np.clip(after.astype(np.float64), 1e-30, 1.0)
    if predictions.kind == "classify":
        # p = softmax(z / temperature), so temperature · log p is z up to a constant, which softmax ignores.
        before = softmax(temperature * np.log(table))
        scores = [classification(predictions.gold, p, labels, resamples=resamples) for p in (before, after)]
        names = np.array(predictions.gold, dtype=object)
        bins = [reliability(p.max(1), np.array(labels, dtype=object)[p.argmax(1)] == names) for p in (before, after)]
    else:
        z = temperature * (np.log(table) - np.log(np.clip(1 - table, 1e-30, 1.0)))
        before, true = np.exp(-np.logaddexp(0, -z)), label_table(predictions.gold, labels)  # of known labels
        scores = [multi_label(true, p, 0.5, resamples=resamples) for p in (before, after)]
        bins = [reliability(p.ravel(), true.ravel()) for p in (before, after)]
    return CalibrationReport(
        temperature=temperature,
        fitted_on="dev",
        measured_on=split,
        before=scores[0]["ece"],
        after=scores[1]["ece"],
        bins_before=bins[0],
        bins_after=bins[1],
        threshold=task.info.calibration.threshold if predictions.kind == "multi_label" else None,
    )


def _abstention(task: AnyTrainable, dev: Predictions | None) -> Abstention | None:
    """The abstention threshold that was fitted on the dev data."""
    if dev is None or dev.confidence is None:
        return None
    fitted = task.info.calibration
    if fitted.abstain_below is None or fitted.precision is None:
        return None
    correct = np.array([a == b for a, b in zip(dev.gold, dev.predicted, strict=True)])
    precision = selective_precision(dev.confidence, correct, fitted.abstain_below)
    coverage = float((dev.confidence >= fitted.abstain_below).mean())
    return Abstention(fitted.abstain_below, fitted.precision, precision, coverage)


def _label_issues(task: AnyTrainable, predictions: Predictions) -> list[LabelIssue]:
    assert predictions.probabilities is not None
    rows, gold = known_rows(predictions.gold, labels_of(task))
    issues = find_label_issues(gold, predictions.probabilities[rows])
    return [replace(issue, index=int(rows[issue.index])) for issue in issues]


def _attributions(task: AnyTrainable, predictions: Predictions) -> dict[int, list[tuple[str, float]]] | None:
    """Which words decided the most confident errors, of as many as can be computed in seconds."""
    if predictions.kind != "classify" or not isinstance(task, Classifier):
        return None
    rows, left = [], ATTRIBUTED_CHARACTERS
    for row in wrong_rows("classify", score_predictions(task, predictions, resamples=0))[:ATTRIBUTED_ROWS].tolist():
        left -= MAX_PIECES * len("".join(predictions.data.examples[row].texts))
        if left >= 0:
            rows.append(row)
    texts = [as_text(predictions.data.examples[row]) for row in rows]
    results = attribute_each(task.classify, texts, [predictions.predicted[row] for row in rows])
    return {row: _weighted_words(result) for row, result in zip(rows, results, strict=True)}


def _weighted_words(result: AttributionResult) -> list[tuple[str, float]]:
    """The pieces with their weights, and a new line between the texts of a pair."""
    words, sequence = [], 0
    for piece in result.pieces:
        words += [("\n", 0.0)] if piece.sequence != sequence else []
        words.append((piece.text, piece.weight))
        sequence = piece.sequence
    return words


def _all_labels(task: AnyTrainable, predictions: Predictions) -> list[str]:
    """The labels of the model, then those of the data that it does not have."""
    labels = labels_of(task)
    return [*labels, *sorted({label for gold in predictions.gold for label in as_tuple(gold)} - set(labels))]


def _data_files(
    train: LabelledDataset | None, predictions: Mapping[str, Predictions], files: Mapping[str, Sequence[str]]
) -> list[DataFile]:
    splits = ({} if train is None else {"train": train}) | {split: part.data for split, part in predictions.items()}
    return [
        DataFile(split=split, files=files.get(split, [data.name]), rows=len(data.examples), labels=label_counts(data))
        for split, data in splits.items()
    ]


def label_counts(data: LabelledDataset) -> dict[str, int] | None:
    """How often each label occurs; None for data without labels."""
    if data.kind not in ("classify", "tag"):
        return None
    counts = Counter(label for example in data.examples for label in as_tuple(example.target))
    return {label: counts[label] for label in data.labels}


def _token_coverage(predictions: Predictions) -> TokenCoverage:
    return TokenCoverage(
        texts=len(predictions.gold),
        several=int((predictions.windows > 1).sum()),
        tokens_read=int(predictions.read.sum()),
        tokens_total=int(predictions.lengths.sum()),
    )


def _training_fields(training: TrainingRecord) -> dict[str, Any]:
    """The fields of a report that describe the training."""
    best = training.best
    history, metric = best.history, training.metric
    dev = [
        {"step": row["step"], "epoch": row["epoch"], "metric": metric, "value": row[metric]}
        for row in history.evaluations
    ]
    defaults = Recipe().as_dict()
    recipe = training.recipe.replace(seed=training.best_seed).as_dict()
    return {
        "recipe": recipe,
        "default_settings": [name for name, value in recipe.items() if value == defaults[name]],
        "curve": history.curve,
        "dev": dev if best.dev else None,
        "seeds": [run.test or run.dev for run in training.runs] if len(training.runs) > 1 else None,
        "timings": {
            "seconds of training": history.seconds,
            "steps": history.steps,
            "tokens trained on": history.tokens,
            "best step": history.best_step if history.best_step >= 0 else history.steps,
        },
    }
