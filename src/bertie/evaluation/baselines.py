"""Cheap baselines that a trained model should beat, computed in seconds from the same data.

    classify    majority class; TF-IDF (words and bigrams) + logistic regression; the same on embeddings
    regress     mean; ridge regression on TF-IDF and on embeddings
    tag         the most frequent tag of each word; the longest known span; logistic regression on embeddings
    answer      the sentence with the most words of the question; in it, the first span of the expected type
    rerank      the TF-IDF similarity of query and passage; the similarity of their embeddings

>>> train = ([("good film",), ("bad film",)] * 20, ["pos", "neg"] * 20)
>>> [(row.name, row.score.value) for row in evaluate(train, train, "classify")]
[('majority class', 0.5), ('TF-IDF + logistic regression', 1.0)]
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError
from bertie.evaluation import metrics
from bertie.evaluation.calibration import best_threshold
from bertie.evaluation.intervals import RESAMPLES, FloatArray, IntArray, Score
from bertie.evaluation.linear_models import (
    TF_IDF_STRENGTH,
    LogisticRegression,
    Matrix,
    Ridge,
    SparseRows,
    Texts,
    TfIdf,
    take,
)

Data = tuple[Sequence[Any], Sequence[Any]]  # inputs and targets: see `evaluate`
KINDS = ("classify", "regress", "tag", "answer", "rerank", "choose")
THRESHOLD = 0.5  # of multi-label probabilities, if the training data is too small to choose one
MAX_ROWS = 10_000  # of training data for the linear models: a sample is enough for a baseline
_FEWEST_TO_HOLD_OUT = 50  # rows, of which a fifth chooses the threshold


@dataclass(frozen=True, slots=True)
class BaselineScore:
    """The main metric of a baseline on the test data."""

    name: str
    metric: str
    score: Score  # with its 95% interval
    seconds: float  # for training and prediction
    kind: str  # a key of `bertie.evaluation.metrics.MAIN`
    arguments: tuple[Any, ...]  # of that kind's function, and of `metrics.paired` to compare it with a model


def evaluate(
    train: Data,
    test: Data,
    kind: str,
    *,
    embeddings: tuple[ArrayLike, ArrayLike] | None = None,
    embedded_rows: Sequence[int] | None = None,
    labels: Sequence[str] = (),
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[BaselineScore]:
    """Train the baselines of a kind of data, and score them on the test data.

    Inputs are tuples of one or two texts (answer: question and context; rerank: query and passage), of a context
    and its choices (choose), or lists of words (tag). Targets are a label or a tuple of labels (classify), a number
    (regress, rerank), tags, a list of answers, or an index (choose). `embeddings` are (rows, width) of the training
    and of the test inputs, for the baseline of frozen embeddings; see `pair_features` for pairs; for tags one row per
    word. `embedded_rows` are the training rows that have embeddings, by default all. `labels` sets the order of
    multi-label data, and leaves out others. A test label that the training data does not have counts as an error.
    """
    if kind not in KINDS:
        raise InputError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
    for name, (inputs, targets) in {"train": train, "test": test}.items():
        if not len(inputs) or len(inputs) != len(targets):
            raise InputError(f"{name} has {len(inputs)} inputs and {len(targets)} targets; give one target per input")
    embedded = None if embeddings is None else _Embedded.check(embeddings, embedded_rows, train, test, kind)
    if kind == "classify":
        runs = _classifiers(train, test, embedded, labels, seed)
    elif kind == "regress":
        runs = _regressors(train, test, embedded, seed)
    else:
        others = {"tag": _taggers, "answer": _readers, "rerank": _rerankers, "choose": _choosers}
        runs = others[kind](train, test, embedded)
    return [_score(name, run, resamples) for name, run in runs]


Run = tuple[str, Callable[[], tuple[str, tuple[Any, ...]]]]  # a name, and what gives the kind and its arguments


def _score(name: str, run: Callable[[], tuple[str, tuple[Any, ...]]], resamples: int) -> BaselineScore:
    start = time.perf_counter()
    kind, arguments = run()
    seconds = time.perf_counter() - start
    return replace(score_arguments(name, kind, arguments, resamples), seconds=seconds)


def score_arguments(name: str, kind: str, arguments: tuple[Any, ...], resamples: int = RESAMPLES) -> BaselineScore:
    """The score of a baseline by the arguments of its kind's metrics."""
    functions: dict[str, Callable[..., dict[str, Score]]] = {
        "classify": metrics.classification,
        "multi_label": metrics.multi_label,
        "regress": metrics.regression,
        "tag": metrics.tagging,
        "answer": metrics.answering,
        "rerank": metrics.ranking,
        "choose": metrics.choices,
    }
    scores = functions[kind](*arguments, resamples=resamples)
    metric = metrics.main_metric(kind, scores)
    return BaselineScore(name, metric, scores[metric], 0.0, kind, arguments)


def pair_features(first: ArrayLike, second: ArrayLike) -> FloatArray:
    """Features of pairs from the embeddings of their texts: absolute differences and products."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    return np.concatenate([np.abs(a - b), a * b], axis=1)


@dataclass(frozen=True, slots=True)
class _Embedded:
    """Standardized embeddings of some training rows, and of all test rows."""

    rows: IntArray  # of the training data
    train: FloatArray
    test: FloatArray

    @classmethod
    def check(
        cls,
        embeddings: tuple[ArrayLike, ArrayLike],
        embedded_rows: Sequence[int] | None,
        train: Data,
        test: Data,
        kind: str,
    ) -> _Embedded:
        rows = np.arange(len(train[0])) if embedded_rows is None else np.asarray(embedded_rows, dtype=np.int64)
        own, others = (np.asarray(table, dtype=np.float64) for table in embeddings)
        units: Callable[[Any], int] = len if kind == "tag" else lambda _: 1
        counts = {"train": sum(units(train[0][i]) for i in rows), "test": sum(map(units, test[0]))}
        for (name, count), table in zip(counts.items(), (own, others), strict=True):
            if table.ndim != 2 or len(table) != count:
                raise InputError(f"embeddings of {name} have shape {table.shape}; {count} rows need ({count}, width)")
        return cls(rows, own, others)

    def standardized(self) -> tuple[FloatArray, FloatArray]:
        mean, scale = self.train.mean(axis=0), max(float(self.train.std()), 1e-12)
        return (self.train - mean) / scale, (self.test - mean) / scale


# --- classification and regression ---


def _classifiers(
    train: Data, test: Data, embedded: _Embedded | None, given_labels: Sequence[str], seed: int
) -> list[Run]:
    multi = any(not isinstance(target, str) for target in train[1])
    gold, expected = ([_as_tuple(target) for target in targets] for targets in (train[1], test[1]))
    counts = Counter(label for names in gold for label in names)
    labels = list(given_labels) if multi and given_labels else sorted(counts)
    index = {label: i for i, label in enumerate(labels)}
    targets = np.zeros((len(gold), len(labels)))
    for row, names in enumerate(gold):
        targets[row, [index[label] for label in names if label in index]] = 1.0

    def result(probabilities: FloatArray, threshold: float = THRESHOLD) -> tuple[str, tuple[Any, ...]]:
        if not multi:
            return "classify", ([names[0] for names in expected], probabilities, labels)
        unseen = sorted({label for names in expected for label in names} - set(labels))
        table = np.array([[label in names for label in (*labels, *unseen)] for names in expected], dtype=bool)
        return "multi_label", (table, np.pad(probabilities, ((0, 0), (0, len(unseen)))), threshold)

    def majority() -> tuple[str, tuple[Any, ...]]:
        shares = targets.mean(axis=0)
        if multi:
            shares = np.where(shares == shares.max(), 1.0, shares)
        return result(np.tile(shares, (len(expected), 1)))

    def linear(features: tuple[Matrix, Matrix], rows: IntArray) -> tuple[str, tuple[Any, ...]]:
        strength = TF_IDF_STRENGTH if isinstance(features[0], SparseRows) else None
        model = LogisticRegression(multi_label=multi, strength=strength, iterations=60)
        threshold = _best_threshold(model, features[0], targets[rows], seed) if multi else THRESHOLD
        model.fit(features[0], targets[rows], seed)
        return result(model.predict(features[1]), threshold)

    runs: list[Run] = [("majority class", majority)]
    if len(labels) > 1:
        runs += [(f"{name} + logistic regression", run) for name, run in _linear(train, test, embedded, seed, linear)]
    return runs


def _best_threshold(model: LogisticRegression, features: Matrix, targets: FloatArray, seed: int) -> float:
    """The threshold with the best macro-F1 on a held-out fifth, as that of a trained model is chosen on dev data."""
    order = np.random.default_rng(seed).permutation(len(targets))
    fifth = len(order) // 5
    if len(order) < _FEWEST_TO_HOLD_OUT or not targets[order[:fifth]].any():
        return THRESHOLD
    model.fit(take(features, order[fifth:]), targets[order[fifth:]], seed)
    return best_threshold(targets[order[:fifth]] > 0, model.predict(take(features, order[:fifth])))


def _regressors(train: Data, test: Data, embedded: _Embedded | None, seed: int) -> list[Run]:
    targets, expected = (np.asarray(values, dtype=np.float64) for values in (train[1], test[1]))

    def linear(features: tuple[Matrix, Matrix], rows: IntArray) -> tuple[str, tuple[Any, ...]]:
        model = Ridge().fit(features[0], targets[rows], seed)
        return "regress", (expected, model.predict(features[1]))

    mean: Run = ("mean", lambda: ("regress", (expected, np.full(len(expected), targets.mean()))))
    runs = [(f"{name} + ridge regression", run) for name, run in _linear(train, test, embedded, seed, linear)]
    return [mean, *runs]


def _linear(
    train: Data,
    test: Data,
    embedded: _Embedded | None,
    seed: int,
    fit: Callable[[tuple[Matrix, Matrix], IntArray], tuple[str, tuple[Any, ...]]],
) -> list[Run]:
    """The same model on TF-IDF features, and on embeddings if there are any; on a sample of many rows."""
    rows = np.sort(np.random.default_rng(seed).permutation(len(train[0]))[:MAX_ROWS])

    def tf_idf() -> tuple[str, tuple[Any, ...]]:
        inputs, others = _as_texts(train[0][i] for i in rows), _as_texts(test[0])
        vectorizer = TfIdf().fit(inputs)
        return fit((vectorizer.transform(inputs), vectorizer.transform(others)), rows)

    runs: list[Run] = [("TF-IDF", tf_idf)]
    if embedded is None:
        return runs
    return [*runs, ("frozen embeddings", lambda: fit(embedded.standardized(), embedded.rows))]


def _as_texts(inputs: Iterable[Any]) -> Texts:
    return [(item,) if isinstance(item, str) else tuple(item) for item in inputs]


def _as_tuple(target: Any) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else tuple(target)


# --- tagging ---


def _taggers(train: Data, test: Data, embedded: _Embedded | None) -> list[Run]:
    by_word: dict[str, Counter[str]] = defaultdict(Counter)
    for words, tags in zip(*train, strict=True):
        for word, tag in zip(words, tags, strict=True):
            by_word[word][tag] += 1
            by_word[word.casefold()][tag] += 1
    overall = Counter(tag for tags in train[1] for tag in tags)
    default = "O" if "O" in overall else overall.most_common(1)[0][0]

    def word_tag(word: str) -> str:
        counts = by_word.get(word) or by_word.get(word.casefold())
        return counts.most_common(1)[0][0] if counts else default

    def by_words() -> tuple[str, tuple[Any, ...]]:
        return "tag", (list(test[1]), [[word_tag(word) for word in words] for words in test[0]])

    runs: list[Run] = [("most frequent tag of each word", by_words)]
    if metrics.is_span_scheme(list(train[1]), list(test[1])):
        runs.append(("dictionary of spans", lambda: ("tag", (list(test[1]), _SpanDictionary(train).tag(test[0])))))
    if embedded is not None and len(overall) > 1:
        run = partial(_frozen_tagger, train, test, embedded)
        runs.append(("frozen token embeddings + logistic regression", run))
    return runs


def _frozen_tagger(train: Data, test: Data, embedded: _Embedded) -> tuple[str, tuple[Any, ...]]:
    """A linear classifier of each word's frozen embedding."""
    tags = [tag for i in embedded.rows for tag in train[1][i]]
    names, index = np.unique(np.array(tags, dtype=object).astype(str), return_inverse=True)
    own, others = embedded.standardized()
    model = LogisticRegression(iterations=60).fit(own, np.eye(len(names))[index])
    best = iter(names[model.predict(others).argmax(axis=1)].tolist())
    return "tag", (list(test[1]), [list(islice(best, len(words))) for words in test[0]])


class _SpanDictionary:
    """The spans of the training data that are entities more often than not, matched from the longest on."""

    def __init__(self, train: Data) -> None:
        self._tags: dict[tuple[str, ...], Counter[tuple[str, ...]]] = defaultdict(Counter)
        for words, tags, spans in zip(*train, metrics.entities(list(train[1])), strict=True):
            for _, first, last in spans:
                self._tags[tuple(words[first : last + 1])][tuple(tags[first : last + 1])] += 1
        self._longest = max(map(len, self._tags), default=0)
        seen: Counter[tuple[str, ...]] = Counter()
        for words in train[0]:
            seen.update(name for _, _, name in self._known(words))
        kept = {name for name, tags in self._tags.items() if 2 * tags.total() >= seen[name]}
        self._tags = defaultdict(Counter, {name: self._tags[name] for name in kept})

    def _known(self, words: Sequence[str]) -> Iterable[tuple[int, int, tuple[str, ...]]]:
        for first in range(len(words)):
            for size in range(min(self._longest, len(words) - first), 0, -1):
                if (name := tuple(words[first : first + size])) in self._tags:
                    yield first, size, name

    def tag(self, sentences: Iterable[Sequence[str]]) -> list[list[str]]:
        """The tags of each sentence."""
        result = []
        for words in sentences:
            tags, free = ["O"] * len(words), 0
            for first, size, name in self._known(words):
                if first >= free:
                    tags[first : first + size] = self._tags[name].most_common(1)[0][0]
                    free = first + size
            result.append(tags)
        return result


# --- question answering and reranking ---

_SENTENCE = re.compile(r"[^.!?]+(?:[.!?](?!\s)[^.!?]*)*[.!?]?")
_NUMBER = re.compile(r"[$£€]?\d[\d,.]*%?(?:\s(?:percent|million|billion|years?|days?|miles|people))?")
_DATE = re.compile(r"(?:(?:\d{1,2}\s)?[A-Z][a-z]+\s(?:\d{1,2},\s)?)?\d{4}")
_NAME = re.compile(r"[A-Z][\w'’-]*(?:\s(?:of\s|the\s|de\s)?[A-Z][\w'’-]*)*")


def _readers(train: Data, test: Data, _: _Embedded | None) -> list[Run]:
    vectorizer = TfIdf().fit([(context,) for _, context in dict.fromkeys(map(tuple, train[0]))])

    def sentence(question: str, context: str) -> str:
        sentences = _SENTENCE.findall(context) or [context]
        return str(max(sentences, key=lambda text: vectorizer.similarity((question, text)))).strip()

    def best_sentence() -> tuple[str, tuple[Any, ...]]:
        return "answer", (list(test[1]), [sentence(question, context) for question, context in test[0]])

    def typed_span() -> tuple[str, tuple[Any, ...]]:
        return "answer", (list(test[1]), [_typed_span(q, sentence(q, context)) for q, context in test[0]])

    return [("most similar sentence", best_sentence), ("span of the expected type", typed_span)]


def _typed_span(question: str, sentence: str) -> str:
    """The first number, date or name of a sentence, by the question's word, that is not in the question."""
    words = question.casefold()
    if re.search(r"\bhow (many|much|long|old|far|tall|large)\b", words):
        patterns = (_NUMBER, _NAME)
    elif re.search(r"\b(when|what year|which year|what date)\b", words):
        patterns = (_DATE, _NUMBER)
    else:
        patterns = (_NAME, _NUMBER)
    for pattern in patterns:
        spans = [match.group().strip() for match in pattern.finditer(sentence)]
        for span in spans:
            if span.casefold() not in words:
                return span
    return sentence


def _rerankers(train: Data, test: Data, embedded: _Embedded | None) -> list[Run]:
    def result(scores: Sequence[float]) -> tuple[str, tuple[Any, ...]]:
        return "rerank", ([query for query, _ in test[0]], [float(target) for target in test[1]], scores)

    def similarity() -> tuple[str, tuple[Any, ...]]:
        vectorizer = TfIdf().fit([(passage,) for _, passage in train[0]])
        return result([vectorizer.similarity((query, passage)) for query, passage in test[0]])

    def cosine() -> tuple[str, tuple[Any, ...]]:
        assert embedded is not None
        products = embedded.test[:, embedded.test.shape[1] // 2 :]  # as in `pair_features`, of unit vectors
        return result(products.sum(axis=1).tolist())

    runs: list[Run] = [("TF-IDF similarity", similarity)]
    return runs if embedded is None else [*runs, ("similarity of frozen embeddings", cosine)]


def _choosers(train: Data, test: Data, _: _Embedded | None) -> list[Run]:
    def result(score: Callable[[str, str], float]) -> tuple[str, tuple[Any, ...]]:
        chosen = [int(np.argmax([score(context, choice) for choice in choices])) for context, *choices in test[0]]
        return "choose", (list(test[1]), chosen)

    def similarity() -> tuple[str, tuple[Any, ...]]:
        vectorizer = TfIdf().fit([(text,) for texts in train[0] for text in texts])
        return result(lambda context, choice: vectorizer.similarity((context, choice)))

    def longest() -> tuple[str, tuple[Any, ...]]:
        return result(lambda context, choice: len(choice))

    return [("longest choice", longest), ("TF-IDF similarity", similarity)]
