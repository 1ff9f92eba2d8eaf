"""Cheap baselines on the rows that a trained model is evaluated on, and the significance of the difference.

They take seconds: linear models see at most `baselines.MAX_ROWS` training rows, frozen embeddings are computed for at
most `EMBEDDED_ROWS` training rows (fewer long ones) and `MAX_LENGTH` tokens of a text, and the test rows are a sample
of `TEST_ROWS`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertie.evaluation import baselines, metrics
from bertie.evaluation.baselines import BaselineScore
from bertie.evaluation.intervals import RESAMPLES, Difference
from bertie.evaluation.linear_models import TfIdf
from bertie.evaluation.model_report import BaselineResult, BaselineTable
from bertie.tasks import registry
from bertie.training.finetune.base import AnyTrainable, Predictions, training_for
from bertie.training.finetune.comparison import labels_of, metric_arguments, select_rows
from bertie.training.finetune.data import Example, LabelledDataset
from bertie.training.finetune.frozen_features import FrozenEncoder

EMBEDDED_ROWS, TEST_ROWS, MAX_LENGTH = 1_500, 2_000, 128
EMBEDDED_CHARACTERS = 150_000  # of the training data, but at least `FEWEST` rows
FEWEST = 400
Inputs = list[Any]
Folds = Sequence[tuple[LabelledDataset, LabelledDataset]]


@dataclass(frozen=True, slots=True)
class BaselineSettings:
    """The encoder of the frozen embeddings: the base model before training. None: no such baseline."""

    encoder: str | Path | None
    name: str | None = None
    device: str = "cpu"


def evaluate_baselines(
    task: AnyTrainable,
    train: LabelledDataset,
    predictions: Predictions,
    settings: BaselineSettings,
    *,
    folds: Folds = (),
    split: str = "test",
    resamples: int = RESAMPLES,
) -> BaselineTable:
    """Train the baselines on the training data, and compare the model's predictions with theirs.

    `folds`, for cross-validated predictions: each held-out part is predicted by baselines trained on the other rows.
    """
    total = len(predictions.gold)
    if predictions.kind not in ("similarity", "retrieval", "rerank"):  # ranks depend on all rows
        predictions = select_rows(predictions, _sample(total, TEST_ROWS))
    if predictions.kind in ("similarity", "retrieval"):
        scores = _embedding_baselines(train, predictions, settings, resamples)
    else:
        parts = _fold_rows(predictions, folds) or [(train, list(range(len(predictions.gold))))]
        encoder = None
        if settings.encoder is not None and train.kind not in ("answer", "choose"):
            encoder = FrozenEncoder(settings.encoder, max_length=MAX_LENGTH, device=settings.device)
        scores = _pool(
            [(_scores(task, rest, select_rows(predictions, rows), encoder, 0), rows) for rest, rows in parts],
            resamples,
        )
    own = training_for(task).scores(predictions, resamples=resamples)
    metric = metrics.main_metric(predictions.kind, own)
    first = metric_arguments(task, predictions)
    return BaselineTable(
        split=split,
        metric=metric,
        rows=len(predictions.gold),
        rows_total=total,
        training_rows=min(len(train.examples), baselines.MAX_ROWS),
        training_rows_total=len(train.examples),
        model=own[metric],
        results=[
            BaselineResult(
                name=score.name,
                score=score.score,
                difference=_difference(predictions, first, score, metric, resamples),
                seconds=score.seconds,
            )
            for score in scores
        ],
        encoder=settings.name,
    )


def _scores(
    task: AnyTrainable,
    train: LabelledDataset,
    predictions: Predictions,
    encoder: FrozenEncoder | None,
    resamples: int,
) -> list[BaselineScore]:
    start = time.perf_counter()
    frozen = None if encoder is None else _embed(train, predictions.data, encoder)
    seconds = time.perf_counter() - start
    inputs = [_inputs(data.kind, data.examples) for data in (train, predictions.data)]
    targets = [_targets(train), list(predictions.gold)]
    scores = baselines.evaluate(
        (inputs[0], targets[0]),
        (inputs[1], targets[1]),
        train.kind,
        embeddings=None if frozen is None else (frozen[1], frozen[2]),
        embedded_rows=None if frozen is None else frozen[0],
        labels=labels_of(task) if train.multi_label else (),
        resamples=resamples,
    )
    # The time for the embeddings belongs to the baseline that needs them.
    return [replace(s, seconds=s.seconds + seconds * ("frozen" in s.name)) for s in scores]


def _fold_rows(predictions: Predictions, folds: Folds) -> list[tuple[LabelledDataset, list[int]]]:
    """The training data of each fold, and the indices of the predictions for it."""
    index = {example.row: i for i, example in enumerate(predictions.data.examples)}
    rows = [[index[e.row] for e in held.examples if e.row in index] for _, held in folds]
    return [(rest, part) for (rest, _), part in zip(folds, rows, strict=True) if part]


def _pool(folds: Sequence[tuple[list[BaselineScore], list[int]]], resamples: int) -> list[BaselineScore]:
    """The scores of each baseline on the rows of all folds together, in the order of the predictions."""
    order = np.argsort([row for _, rows in folds for row in rows], kind="stable")
    pooled = []
    for name in dict.fromkeys(score.name for scores, _ in folds for score in scores):
        parts = [score for scores, _ in folds for score in scores if score.name == name]
        if len(parts) < len(folds):  # a fold had a single label
            continue
        kind = parts[0].kind
        score = baselines.score_arguments(name, kind, _join_arguments(kind, parts, order), resamples)
        pooled.append(replace(score, seconds=sum(part.seconds for part in parts)))
    return pooled


def _join_arguments(kind: str, parts: Sequence[BaselineScore], order: NDArray[np.int64]) -> tuple[Any, ...]:
    if kind == "classify":  # a fold may lack a label
        labels = sorted({label for part in parts for label in part.arguments[2]})
        tables = []
        for part in parts:
            table = np.zeros((len(part.arguments[0]), len(labels)))
            table[:, [labels.index(label) for label in part.arguments[2]]] = part.arguments[1]
            tables.append(table)
        gold = [label for part in parts for label in part.arguments[0]]
        return [gold[i] for i in order], np.concatenate(tables)[order], labels
    columns = list(zip(*(part.arguments for part in parts), strict=True))
    shared = columns[2:] if kind == "multi_label" else []  # the threshold
    joined: list[Any] = []
    for values in columns[: len(columns) - len(shared)]:
        if isinstance(values[0], np.ndarray):
            joined.append(np.concatenate(values)[order])
        else:
            items = [item for part in values for item in part]
            joined.append([items[i] for i in order])
    return (*joined, *(values[0] for values in shared))


def _difference(
    predictions: Predictions, first: tuple[Any, ...], baseline: BaselineScore, metric: str, resamples: int
) -> Difference:
    """The model's score - the baseline's, on the same rows."""
    kind = predictions.kind
    gap = metrics.paired(kind, first, baseline.arguments, resamples=max(1, resamples))[metric]
    if kind != "classify":
        return gap
    gold, probabilities, labels = baseline.arguments
    predicted = np.array(labels, dtype=object)[np.asarray(probabilities).argmax(axis=1)]
    pairs = zip(predictions.gold, predictions.predicted, strict=True)
    correct = np.array([a == b for a, b in pairs]), predicted == np.array(gold, dtype=object)
    return replace(gap, p=metrics.mcnemar(*correct))


def _sample(count: int, most: int, of: Sequence[int] | None = None) -> list[int]:
    """Sample at most `most` rows, in their order."""
    of = range(count) if of is None else of
    if count <= most:
        return list(of)
    return [of[i] for i in sorted(np.random.default_rng(0).permutation(count)[:most].tolist())]


def _inputs(kind: str, examples: Sequence[Example]) -> Inputs:
    if kind == "tag":
        return [[example.texts[0][a:b] for a, b in example.words] for example in examples]
    return [example.texts for example in examples]


def _targets(train: LabelledDataset) -> list[Any]:
    if train.kind == "answer":
        return [example.answers for example in train.examples]
    if train.kind == "tag":
        return [list(example.target) for example in train.examples]
    return [example.target for example in train.examples]


def _embed(
    train: LabelledDataset, test: LabelledDataset, encoder: FrozenEncoder
) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64]]:
    """The training rows that are embedded, their embeddings, and those of the test rows."""
    rows = _sample(len(train.examples), EMBEDDED_ROWS)
    most = 5 * MAX_LENGTH  # characters that the encoder reads, about
    sizes = np.cumsum([sum(min(len(text), most) for text in train.examples[i].texts) for i in rows])
    rows = _sample(len(rows), max(FEWEST, int(np.searchsorted(sizes, EMBEDDED_CHARACTERS))), rows)
    embed = encoder.words if train.kind == "tag" else encoder.texts
    return rows, embed([train.examples[i] for i in rows]), embed(test.examples)


def _embedding_baselines(
    train: LabelledDataset, predictions: Predictions, settings: BaselineSettings, resamples: int
) -> list[BaselineScore]:
    """For embeddings: the model before training, and where pairs have scores, TF-IDF."""
    kind, results = predictions.kind, []
    if settings.encoder is not None:
        start = time.perf_counter()
        task = registry.get("embed").trainable_class.load(settings.encoder, device=settings.device)
        before = training_for(task).predict_labelled(predictions.data)
        scores = training_for(task).scores(before, resamples=resamples)
        metric = metrics.main_metric(kind, scores)
        arguments = metric_arguments(task, before)
        name, seconds = "the model before training", time.perf_counter() - start
        results.append(BaselineScore(name, metric, scores[metric], seconds, kind, arguments))
    if kind == "similarity":
        start = time.perf_counter()
        texts = [(text,) for i in _sample(len(train.examples), TEST_ROWS) for text in train.examples[i].texts]
        vectorizer = TfIdf().fit(texts)
        similarities = [vectorizer.similarity((e.texts[0], e.texts[1])) for e in predictions.data.examples]
        scores = metrics.sts(predictions.gold, similarities, resamples=resamples)
        metric, seconds = metrics.main_metric(kind, scores), time.perf_counter() - start
        arguments = (predictions.gold, similarities)
        results.append(BaselineScore("TF-IDF similarity", metric, scores[metric], seconds, kind, arguments))
    return results
