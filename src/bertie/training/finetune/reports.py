"""From a trained model and labelled data to a report: what `bertie train` and `bertie eval` say of a model.

What counts as one unit in the leak check is what a model could remember: the text, both texts of a pair, the question
with its context (so a context that training knows with other questions is found too), and of rankings the query.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bertie._version import __version__
from bertie.errors import InputError
from bertie.evaluation.calibration import Abstention, reliability, selective_precision, softmax
from bertie.evaluation.label_noise import find_label_issues
from bertie.evaluation.leaks import find_leaks
from bertie.evaluation.metrics import classification, mcnemar, multi_label, paired
from bertie.evaluation.report import (
    CalibrationReport,
    Comparison,
    DataFile,
    Evaluation,
    LeakCheck,
    ModelReport,
    TokenCoverage,
    write_report,
)
from bertie.training.finetune.base import training_for

if TYPE_CHECKING:
    from bertie.recipe import Recipe
    from bertie.training.finetune.base import AnyTrainable, Predictions
    from bertie.training.finetune.data import Labelled
    from bertie.training.finetune.runs import Done

RESAMPLES = 1000


def evaluate(task: AnyTrainable, data: Labelled, *, resamples: int = RESAMPLES) -> Evaluation:
    """Predict labelled data, and score it.

    >>> evaluate(Classifier.load("my-model"), labelled("classify", "test.jsonl")).scores["accuracy"]  # doctest: +SKIP
    Score(value=0.91, low=0.89, high=0.93)
    """
    return evaluation(task, training_for(task).predict_labelled(data), resamples=resamples)


def evaluation(task: AnyTrainable, predictions: Predictions, *, resamples: int = RESAMPLES) -> Evaluation:
    """Score what was predicted."""
    return Evaluation(
        scores=training_for(task).scores(predictions, resamples=resamples),
        gold=predictions.gold,
        predicted=predictions.predicted,
        labels=_labels(task) if predictions.probabilities is not None else (),
        confidences=predictions.confidence,
        probabilities=predictions.probabilities,
        lengths=predictions.lengths,
        texts=["\n".join(one.texts) for one in predictions.data.examples],
    )


def study(
    task: AnyTrainable,
    predictions: Mapping[str, Predictions],
    *,
    title: str,
    model: str,
    train: Labelled | None = None,
    recipe: Recipe | None = None,
    runs: Sequence[Done] = (),
    chosen: int = 0,
    metric: str = "",
    baseline: tuple[str, AnyTrainable, Predictions] | None = None,
    files: Mapping[str, Sequence[str]] | None = None,
    resamples: int = RESAMPLES,
) -> ModelReport:
    """All there is to say of a model by what it predicted, by split; the last split is the one it is predictions by.

    `train` is what it was trained on. `runs` are those of all seeds, `chosen` is the seed that was kept, by `metric` on
    the dev data. `baseline` is another model by its name, and what it says of the last split. `files` are the names of
    the files behind each split.
    """
    last = list(predictions)[-1]
    kind: Any = predictions[last].kind
    best = next((run for run in runs if run.seed == chosen), None)
    local = Path(model).is_dir()  # where it lies is nobody's business
    held = {split: one for split, one in predictions.items() if split != "dev" or len(predictions) == 1}
    return ModelReport(
        title=title,
        kind=kind,
        model=Path(model).absolute().name if local else model,
        base=None if local else model,
        evaluations={split: evaluation(task, one, resamples=resamples) for split, one in predictions.items()},
        data=_data(train, predictions, files or {}),
        recipe=None if recipe is None else recipe.replace(seed=chosen).as_dict(),
        curve=None if best is None else best.history.curve,
        dev=None if best is None or not best.dev else _dev_rows(best, metric),
        seeds=[run.test or run.dev for run in runs] if len(runs) > 1 else None,
        leaks=None
        if train is None
        else {split: leaks(task, train, one, resamples=resamples) for split, one in held.items()},
        label_issues={split: _suspects(task, one) for split, one in held.items()} if kind == "classify" else None,
        calibration=calibration(task, predictions[last], last, resamples=resamples),
        abstention=_abstention(task, predictions.get("dev")),
        comparison=None
        if baseline is None
        else compare(task, predictions[last], *baseline, split=last, resamples=resamples),
        token_coverage={split: _reading(one) for split, one in predictions.items()},
        timings=None if best is None else _timings(best),
        versions=_versions(),
    )


def write_all(folder: str | Path, study: ModelReport) -> None:
    """Write the report and the model card (README.md) beside a model."""
    from bertie.evaluation.card import model_card

    write_report(folder, study)
    card = Path(folder) / "README.md"
    draft = card.with_name(f".{card.name}.part")
    draft.write_text(model_card(study), encoding="utf-8")
    os.replace(draft, card)


# --- parts of it ---


def leaks(task: AnyTrainable, train: Labelled, predictions: Predictions, *, resamples: int = RESAMPLES) -> LeakCheck:
    """Rows of a split that were trained on, as they are or lightly edited, and the scores without them."""
    known, asked = _units(train), _units(predictions.data)
    # Many rows may share a unit, as the passages of a query.
    first = {unit: i for i, unit in reversed(list(enumerate(known)))}
    unique, places = list(first), {unit: i for i, unit in enumerate(dict.fromkeys(asked))}
    of = {leak.test_index: leak for leak in find_leaks(unique, list(places))}
    found = [
        replace(leak, test_index=row, train_index=first[unique[leak.train_index]])
        for row, unit in enumerate(asked)
        if (leak := of.get(places[unit])) is not None
    ]
    rows = len(asked)
    rest = sorted(set(range(rows)) - {leak.test_index for leak in found})
    return LeakCheck(
        rows=rows,
        leaks=found,
        texts=[(asked[leak.test_index], known[leak.train_index]) for leak in found],
        scores_without=_scores_of(task, predictions, rest, resamples) if found and rest else None,
    )


def _units(data: Labelled) -> list[str]:
    if data.kind == "rerank":
        return [one.texts[0] for one in data.examples]
    return ["\n".join(one.texts) for one in data.examples]


def _scores_of(task: AnyTrainable, predictions: Predictions, rows: Sequence[int], resamples: int) -> Any:
    """Of some rows alone; None where they cannot be scored, as queries without a relevant passage."""

    def part(values: Any) -> Any:
        return None if values is None else values[rows] if isinstance(values, np.ndarray) else [values[i] for i in rows]

    several = ("gold", "predicted", "probabilities", "confidence", "lengths", "read", "windows")
    data = replace(predictions.data, examples=part(predictions.data.examples))
    some = replace(predictions, data=data, **{name: part(getattr(predictions, name)) for name in several})
    try:
        return training_for(task).scores(some, resamples=resamples)
    except InputError:
        return None


def calibration(
    task: AnyTrainable, predictions: Predictions, split: str, *, resamples: int = RESAMPLES
) -> CalibrationReport | None:
    """The calibration error with and without the temperature that was fitted; None where none was."""
    after = predictions.probabilities
    if after is None or (temperature := task.info.calibration.temperature) == 1.0:
        return None
    labels, table = _labels(task), np.clip(after.astype(np.float64), 1e-30, 1.0)
    threshold = task.info.calibration.threshold
    if predictions.kind == "classify":
        # p is softmax(z / temperature), so log p times temperature is z, but for what softmax takes no notice of.
        before = softmax(temperature * np.log(table))
        scores = [classification(predictions.gold, p, labels, resamples=resamples) for p in (before, after)]
        gold = np.array([labels.index(label) for label in predictions.gold])
        bins = [reliability(p.max(1), p.argmax(1) == gold) for p in (before, after)]
    else:
        z = temperature * (np.log(table) - np.log(np.clip(1 - table, 1e-30, 1.0)))
        before, true = np.exp(-np.logaddexp(0, -z)), _truth(predictions.gold, labels)
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
        threshold=threshold if predictions.kind == "multi" else None,
    )


def _abstention(task: AnyTrainable, dev: Predictions | None) -> Abstention | None:
    """The threshold that was fitted on the dev data."""
    if dev is None or dev.confidence is None:
        return None
    found = task.info.calibration
    if found.abstain_below is None or found.precision is None:
        return None
    right = np.array([a == b for a, b in zip(dev.gold, dev.predicted, strict=True)])
    precision = selective_precision(dev.confidence, right, found.abstain_below)
    coverage = float((dev.confidence >= found.abstain_below).mean())
    return Abstention(found.abstain_below, found.precision, precision, coverage)


def _suspects(task: AnyTrainable, predictions: Predictions) -> Any:
    labels = _labels(task)
    assert predictions.probabilities is not None
    return find_label_issues([labels.index(label) for label in predictions.gold], predictions.probabilities)


def compare(
    task: AnyTrainable,
    predictions: Predictions,
    name: str,
    other: AnyTrainable,
    others: Predictions,
    *,
    split: str = "test",
    resamples: int = RESAMPLES,
) -> Comparison:
    """This model and another on the same rows, whose labels may have other names for the other."""
    words = _translation(predictions, others, name)
    first, second = _arguments(task, predictions), _arguments(other, others)
    if predictions.kind == "classify":
        labels = [words.get(label, label) for label in second[2]]
        second = (first[0], second[1], labels)
    elif predictions.kind == "multi":
        own = _labels(task)
        place = {words.get(label, label): i for i, label in enumerate(_labels(other))}
        table = np.zeros_like(first[1])
        for i, label in enumerate(own):
            if label in place:
                table[:, i] = second[1][:, place[label]]
        second = (first[0], table, second[2])
    elif predictions.kind == "tag":
        second = (first[0], [[words.get(tag, tag) for tag in tags] for tags in others.predicted])
    right = None
    if predictions.kind == "classify":
        right = [[a == b for a, b in zip(one.gold, one.predicted, strict=True)] for one in (predictions, others)]
    return Comparison(
        name=name,
        split=split,
        scores=training_for(other).scores(others, resamples=resamples),
        differences=paired(predictions.kind, first, second, resamples=resamples),
        mcnemar=None if right is None else mcnemar(*right),
    )


def _arguments(task: AnyTrainable, predictions: Predictions) -> tuple[Any, ...]:
    """What the function for this kind in `bertie.evaluation.metrics` takes."""
    if predictions.kind == "classify":
        return predictions.gold, predictions.probabilities, _labels(task)
    if predictions.kind == "multi":
        threshold = task.info.calibration.threshold
        return (
            _truth(predictions.gold, _labels(task)),
            predictions.probabilities,
            0.5 if threshold is None else threshold,
        )
    if predictions.kind == "rerank":
        return [one.texts[0] for one in predictions.data.examples], predictions.gold, predictions.predicted
    return predictions.gold, predictions.predicted


def _translation(predictions: Predictions, others: Predictions, name: str) -> dict[str, str]:
    """From the other model's labels to this one's, by the rows; others must not be taken for any of these."""
    if predictions.kind not in ("classify", "multi", "tag"):
        return {}
    both = zip(predictions.gold, others.gold, strict=True)
    words = {b: a for one, another in both for a, b in zip(_several(one), _several(another), strict=True)}
    return words | {label: f"{label} of {name}" for label in words.values() if label not in words}


def _several(target: Any) -> Sequence[str]:
    return (target,) if isinstance(target, str) else target


def in_words_of(task: AnyTrainable, data: Labelled) -> Labelled:
    """The data with labels as a model has them. Where those are names, whole numbers count them from 0."""
    if data.kind not in ("classify", "tag"):
        return data
    source, known = task.checkpoint.source, _labels(task)
    if data.multi and getattr(task, "problem", None) == "single":
        raise InputError(f"{data.name} has lists of labels, and {source} gives one label a text")
    given = {label for one in data.examples for label in _several(one.target)}
    counted = all(map(_is_number, given)) and not any(map(_is_number, known))
    words = dict(zip(map(str, range(len(known))) if counted else known, known, strict=True))
    if not given <= set(words):
        row, label = next((one.row, x) for one in data.examples for x in _several(one.target) if x not in words)
        some = ", ".join(map(repr, known[:20])) + (", …" if len(known) > 20 else "")
        raise InputError(f"{data.name}, row {row}: the label {label!r:.60} is none of those of {source}: {some}")
    examples = [
        replace(one, target=words[one.target] if isinstance(one.target, str) else tuple(words[x] for x in one.target))
        for one in data.examples
    ]
    return replace(data, examples=examples, labels=tuple(known))


def _is_number(label: str) -> bool:
    return label.removeprefix("-").isdigit()


def _labels(task: AnyTrainable) -> list[str]:
    return list(task.info.labels.values())


def _truth(gold: Sequence[Sequence[str]], labels: Sequence[str]) -> NDArray[np.bool_]:
    """(n, labels) which labels each text has."""
    return np.array([[label in one for label in labels] for one in map(set, gold)], dtype=bool)


# --- facts ---


def _data(
    train: Labelled | None, predictions: Mapping[str, Predictions], files: Mapping[str, Sequence[str]]
) -> list[DataFile]:
    splits = ({} if train is None else {"train": train}) | {split: one.data for split, one in predictions.items()}
    return [
        DataFile(
            split=split,
            files=files.get(split, [data.name]),
            rows=len(data.examples),
            labels=_counts(data),
        )
        for split, data in splits.items()
    ]


def _counts(data: Labelled) -> dict[str, int] | None:
    if data.kind not in ("classify", "tag"):
        return None
    found = Counter(label for one in data.examples for label in _several(one.target))
    return {label: found[label] for label in data.labels}


def _dev_rows(run: Done, metric: str) -> list[dict[str, Any]]:
    return [
        {"step": row["step"], "epoch": row["epoch"], "metric": metric, "value": row[metric]}
        for row in run.history.evaluations
    ]


def _reading(predictions: Predictions) -> TokenCoverage:
    return TokenCoverage(
        texts=len(predictions.gold),
        several=int((predictions.windows > 1).sum()),
        tokens_read=int(predictions.read.sum()),
        tokens_total=int(predictions.lengths.sum()),
    )


def _timings(run: Done) -> dict[str, float]:
    history = run.history
    return {
        "seconds of training": history.seconds,
        "steps": history.steps,
        "tokens trained on": history.tokens,
        "best step": history.best_step if history.best_step >= 0 else history.steps,
    }


def _versions() -> dict[str, str]:
    import torch

    return {"bertie": __version__, "torch": torch.__version__, "python": platform.python_version()}
