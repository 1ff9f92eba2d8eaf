"""Metrics of token classification: entities by seqeval, or plain tags by word."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from operator import eq

import numpy as np

from bertie.errors import InputError, MissingPackageError
from bertie.evaluation.intervals import RESAMPLES, FloatArray, IntArray, Score, Statistic, bootstrap, from_sums
from bertie.evaluation.metrics.shared import check_same_length, macro_f1, ratio

Sentences = Sequence[Sequence[str]]  # the tags of each sentence's words

_BILOU = {"L-": "E-", "U-": "S-"}


def tagging(gold: Sentences, predicted: Sentences, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Score]:
    """Compute seqeval's entity-level `precision`, `recall` and `f1`, and the `accuracy` over words.

    Plain tags (parts of speech) form no entities: they get accuracy and macro_f1 over words. Tags form
    entities if all of them are O or begin with B-, I-, E-, S- (BIO, BIOES) or L-, U- (BILOU, read as E-
    and S-).
    """
    statistic, n = tag_statistic(gold, predicted)
    support, predictions = (sum(any(tag != "O" for tag in tags) for tags in part) for part in (gold, predicted))
    trials = {"precision": predictions, "recall": support, "f1": (support + predictions) / 2}  # sentences with entities
    return bootstrap(statistic, n, trials=trials, resamples=resamples, seed=seed)


def is_span_scheme(*tagged: Sentences) -> bool:
    """Whether the tags mark entities, by their prefixes."""
    tags = {tag for sentences in tagged for sentence in sentences for tag in sentence}
    return all(tag == "O" or (len(tag) > 2 and tag[0] in "BIESLU" and tag[1] == "-") for tag in tags)


def entities(sentences: Sentences) -> list[set[tuple[str, int, int]]]:
    """(type, first word, last word) of each entity of each sentence, by seqeval."""
    try:
        get_entities = import_module("seqeval.metrics.sequence_labeling").get_entities
    except ImportError:
        raise MissingPackageError("scores of entities need the package seqeval: pip install 'bertie[train]'") from None
    return [set(get_entities([_BILOU.get(tag[:2], tag[:2]) + tag[2:] for tag in tags])) for tags in sentences]


def tag_statistic(gold: Sentences, predicted: Sentences) -> tuple[Statistic, int]:
    """Return the statistic of `tagging` and the number of sentences."""
    n = check_same_length(gold, predicted)
    for i, (true, guess) in enumerate(zip(gold, predicted, strict=True)):
        if len(true) != len(guess):
            raise InputError(
                f"sentence {i} has {len(true)} gold tags and {len(guess)} predicted; there must be one per word"
            )
    words = np.array([len(sentence) for sentence in gold], dtype=np.float64)
    if not words.sum():
        raise InputError("there is nothing to score: no sentence has words")
    if not is_span_scheme(gold, predicted):
        return _plain_tag_statistic(gold, predicted, words), n
    rows = [
        (len(true & guess), len(true), len(guess), sum(map(eq, true_tags, guess_tags)))
        for true, guess, true_tags, guess_tags in zip(entities(gold), entities(predicted), gold, predicted, strict=True)
    ]
    columns = np.concatenate([np.array(rows, dtype=np.float64), words[:, None]], axis=1)

    def formula(sums: FloatArray) -> dict[str, FloatArray]:
        hits, support, predictions, correct, total = sums.T
        return {
            "precision": ratio(hits, predictions),
            "recall": ratio(hits, support),
            "f1": ratio(2 * hits, support + predictions),
            "accuracy": ratio(correct, total),
        }

    return from_sums(columns, formula), n


def _plain_tag_statistic(gold: Sentences, predicted: Sentences, words: FloatArray) -> Statistic:
    hits, support, predictions, _ = tag_counts(gold, predicted)
    k = hits.shape[1]
    columns = np.concatenate([hits, support + predictions, words[:, None]], axis=1)

    def formula(sums: FloatArray) -> dict[str, FloatArray]:
        correct = sums[:, :k]
        return {
            "accuracy": ratio(correct.sum(axis=1), sums[:, -1]),
            "macro_f1": macro_f1(correct, sums[:, k : 2 * k]),
        }

    return from_sums(columns, formula)


def tag_counts(gold: Sentences, predicted: Sentences) -> tuple[FloatArray, FloatArray, FloatArray, list[str]]:
    """Correct, gold and predicted counts of each tag in each sentence, three (n, k) tables, and the k tags."""
    labels = sorted({tag for sentences in (gold, predicted) for sentence in sentences for tag in sentence})
    n, k, index = len(gold), len(labels), {tag: i for i, tag in enumerate(labels)}
    sentence_of = np.repeat(np.arange(n), [len(sentence) for sentence in gold])  # of each word
    true, guess = (
        np.array([index[tag] for sentence in sentences for tag in sentence], dtype=np.int64)
        for sentences in (gold, predicted)
    )

    def count(sentence: IntArray, tag: IntArray) -> FloatArray:
        return np.bincount(sentence * k + tag, minlength=n * k).reshape(n, k).astype(np.float64)

    same = true == guess
    return count(sentence_of[same], true[same]), count(sentence_of, true), count(sentence_of, guess), labels
