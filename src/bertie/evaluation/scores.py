"""Metrics of each task, each with its interval. All lie between 0 and 1 where the metric has such bounds.

What a draw draws: texts (classification, regression), sentences (tagging), questions (answering), queries (ranking).
The values are those of scikit-learn, seqeval and SQuAD's script; where these differ on something that is not defined,
the docstring says what is done.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from operator import eq
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bertie.errors import InputError, MissingPackageError
from bertie.evaluation.intervals import (
    DRAWS,
    BoolArray,
    Difference,
    FloatArray,
    IntArray,
    Measure,
    Score,
    bootstrap,
    linear,
    mcnemar,
    paired_bootstrap,
)

__all__ = [
    "MAIN",
    "Difference",
    "Score",
    "alikeness",
    "answering",
    "classification",
    "entities",
    "finding",
    "main_metric",
    "mcnemar",
    "multi_label",
    "paired",
    "ranking",
    "regression",
    "spans_in",
    "tagging",
]

MAIN = {
    "classify": "accuracy",
    "multi": "macro_f1",
    "regress": "spearman",
    "tag": "f1",
    "answer": "f1",
    "rerank": "map",
    "alike": "spearman",
    "find": "recall_1",
}
BINS = 15  # of equal width, for the expected calibration error


def main_metric(kind: str, names: Mapping[str, Any]) -> str:
    """The one metric that stands for a task: `MAIN`, but the accuracy of plain tags, which form no entities."""
    if kind not in MAIN:
        raise InputError(f"kind={kind!r} must be one of {', '.join(MAIN)}")
    return MAIN[kind] if MAIN[kind] in names else "accuracy"


# --- one label a text ---


def classification(
    gold: Sequence[str], probabilities: ArrayLike, labels: Sequence[str], *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Score]:
    """Accuracy, macro_f1, matthews, ece and log_loss; of two labels also f1, precision and recall of the second.

    `probabilities` is (n, k), a column a label. As in scikit-learn, macro_f1 leaves out labels that neither occur nor
    are predicted, and matthews is 0 where it is not defined. `ece` is the expected calibration error of the likeliest
    label over 15 bins of equal width.

    >>> scores = classification(["no", "yes", "yes"], [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], ["no", "yes"])
    >>> round(scores["accuracy"].value, 4), round(scores["recall"].value, 4)
    (0.6667, 0.5)
    """
    return bootstrap(*_classification(gold, probabilities, labels), draws=draws, seed=seed)


def _classification(gold: Sequence[str], probabilities: ArrayLike, labels: Sequence[str]) -> tuple[Measure, int]:
    table = np.asarray(probabilities)
    n, k = len(gold), len(labels)
    least = float(np.finfo(table.dtype if table.dtype.kind == "f" else np.float64).eps)  # as in scikit-learn
    table = _table(table, n, k)
    if n and np.abs(table.sum(axis=1) - 1).max() > 0.01:
        worst = int(np.abs(table.sum(axis=1) - 1).argmax())
        raise InputError(f"probabilities of text {worst} add up to {table[worst].sum():.4g}; they must add up to 1")
    given = _indices(gold, labels)
    likeliest = table.argmax(axis=1) if n else given
    right = given == likeliest
    loss = -np.log(np.clip(table[np.arange(n), given], least, 1 - least))
    one = np.eye(k)
    columns = np.concatenate(
        [one[given] * right[:, None], one[given], one[likeliest], _gaps(table.max(axis=1), right), loss[:, None]],
        axis=1,
    )

    def formula(sums: FloatArray) -> dict[str, FloatArray]:  # (draws, 3k + BINS + 1)
        hits, occur, said = sums[:, :k], sums[:, k : 2 * k], sums[:, 2 * k : 3 * k]
        found = {
            "accuracy": hits.sum(axis=1) / n,
            "macro_f1": macro_f1(hits, occur + said),
            "matthews": _matthews(hits.sum(axis=1), occur, said, n),
            "ece": np.abs(sums[:, 3 * k : -1]).sum(axis=1) / n,
            "log_loss": sums[:, -1] / n,
        }
        if k == 2:
            found |= {
                "f1": share(2 * hits[:, 1], occur[:, 1] + said[:, 1]),
                "precision": share(hits[:, 1], said[:, 1]),
                "recall": share(hits[:, 1], occur[:, 1]),
            }
        return found

    return linear(columns, formula), n


def _matthews(hits: FloatArray, occur: FloatArray, said: FloatArray, n: int) -> FloatArray:
    square = float(n * n)
    spread = (square - (occur**2).sum(axis=1)) * (square - (said**2).sum(axis=1))
    return share(hits * n - (occur * said).sum(axis=1), np.sqrt(np.maximum(spread, 0)))


# --- any number of labels a text ---


def multi_label(
    gold: ArrayLike, probabilities: ArrayLike, threshold: float, *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Score]:
    """Micro_f1, macro_f1, exact (all labels of a text right) and ece.

    `gold` is (n, k) of truth values, `probabilities` (n, k); a label is given from `threshold` on. As in scikit-learn,
    a label that neither occurs nor is given anywhere counts as 0 in macro_f1; one that is only missing in a draw is
    left out of that draw. `ece` compares all n x k probabilities with the truth of their label.
    """
    return bootstrap(*_multi_label(gold, probabilities, threshold), draws=draws, seed=seed)


def _multi_label(gold: ArrayLike, probabilities: ArrayLike, threshold: float) -> tuple[Measure, int]:
    true = np.asarray(gold, dtype=bool)
    if true.ndim != 2:
        raise InputError(f"gold has shape {true.shape}; it must be (texts, labels)")
    n, k = true.shape
    table = _table(probabilities, n, k)
    given = table >= threshold
    gaps = _gaps(table.ravel(), true.ravel()).reshape(n, k, BINS).sum(axis=1)
    exact = (given == true).all(axis=1)
    both = true.astype(np.float64) + given
    columns = np.concatenate([true & given, both, gaps, exact[:, None]], axis=1)
    never = int((both.sum(axis=0) == 0).sum())

    def formula(sums: FloatArray) -> dict[str, FloatArray]:  # (draws, 2k + BINS + 1)
        hits, either = sums[:, :k], sums[:, k : 2 * k]
        return {
            "micro_f1": share(2 * hits.sum(axis=1), either.sum(axis=1)),
            "macro_f1": macro_f1(hits, either, never),
            "exact": sums[:, -1] / n,
            "ece": np.abs(sums[:, 2 * k : -1]).sum(axis=1) / (n * k),
        }

    return linear(columns, formula), n


# --- values ---


def regression(gold: ArrayLike, predicted: ArrayLike, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Score]:
    """Pearson, spearman, mse, mae and r2. Correlations with a constant, and r2 of constant gold, are not defined."""
    return bootstrap(*_regression(gold, predicted), draws=draws, seed=seed)


def _regression(gold: ArrayLike, predicted: ArrayLike) -> tuple[Measure, int]:
    x, y = _values(gold, "gold"), _values(predicted, "predicted")
    if len(x) != len(y):
        raise InputError(f"gold has {len(x)} values and predicted {len(y)}; they must be of one length")
    n, error = len(x), x - y
    spread = float(x.std()) if n else 0.0
    x, y = _standard(x), _standard(y)  # or the differences of large squares would lose digits
    columns = np.stack([x, y, x * x, y * y, x * y, np.abs(error), error**2], axis=1)
    by_gold, by_predicted = _Ranks(x), _Ranks(y)

    def measure(drawn: FloatArray) -> dict[str, FloatArray]:
        sx, sy, sxx, syy, sxy, absolute, squared = (drawn @ columns).T / n
        vx, vy = _floor(sxx - sx * sx), _floor(syy - sy * sy)
        with np.errstate(divide="ignore", invalid="ignore"):
            pearson = (sxy - sx * sy) / np.sqrt(vx * vy)
            explained = 1 - squared / (vx * spread**2)
        return {
            "pearson": np.clip(pearson, -1, 1),
            "spearman": _spearman(drawn, by_gold, by_predicted),
            "mse": squared,
            "mae": absolute,
            "r2": np.where(vx > 0, explained, np.nan),
        }

    return measure, n


def _standard(values: FloatArray) -> FloatArray:
    spread = values.std() if len(values) else 0.0
    return (values - values.mean()) / spread if spread > 0 else np.zeros_like(values)


def _floor(variance: FloatArray) -> FloatArray:
    """What is left of the variance of equal values after rounding is none."""
    return np.where(variance > 1e-12, variance, 0.0)


class _Ranks:
    """Ranks of values in a draw, equal ones sharing their mean rank, from how often each value was drawn."""

    def __init__(self, values: FloatArray) -> None:
        self._order = np.argsort(values, kind="stable")
        unique, self._group = np.unique(values, return_inverse=True)
        self._starts = np.searchsorted(values[self._order], unique)

    def __call__(self, drawn: FloatArray) -> FloatArray:
        """(draws, n) counts -> (draws, n) ranks, less the mean rank."""
        ordered = drawn[:, self._order]
        times = ordered if len(self._starts) == ordered.shape[1] else np.add.reduceat(ordered, self._starts, axis=1)
        ranks = np.cumsum(times, axis=1) - (times - 1) / 2
        centred: FloatArray = (ranks - (drawn.shape[1] + 1) / 2)[:, self._group]
        return centred


def _spearman(drawn: FloatArray, by_gold: _Ranks, by_predicted: _Ranks) -> FloatArray:
    x, y = by_gold(drawn), by_predicted(drawn)
    weighted = drawn * x
    vx, vy = np.einsum("ij,ij->i", weighted, x), np.einsum("ij,ij,ij->i", drawn, y, y)
    with np.errstate(divide="ignore", invalid="ignore"):
        rho: FloatArray = np.einsum("ij,ij->i", weighted, y) / np.sqrt(vx * vy)
    return rho


# --- a tag a word ---


def tagging(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Score]:
    """Precision, recall and f1 of entities as seqeval counts them, and the accuracy over words.

    Plain tags (parts of speech) form no entities: they have accuracy and macro_f1 over words. Tags are entities' if all
    of them are O or begin with B-, I-, E-, S- (BIO, BIOES) or L-, U- (BILOU, read as E- and S-).
    """
    return bootstrap(*_tagging(gold, predicted), draws=draws, seed=seed)


def spans_in(*tagged: Sequence[Sequence[str]]) -> bool:
    """Whether tags mark entities, by the scheme they are written in."""
    tags = {tag for sentences in tagged for sentence in sentences for tag in sentence}
    return all(tag == "O" or (len(tag) > 2 and tag[0] in "BIESLU" and tag[1] == "-") for tag in tags)


def entities(sentences: Sequence[Sequence[str]]) -> list[set[tuple[str, int, int]]]:
    """(type, first word, last word) of each entity of each sentence, by seqeval."""
    try:
        get_entities = import_module("seqeval.metrics.sequence_labeling").get_entities
    except ImportError:
        raise MissingPackageError("scores of entities need the package seqeval: pip install 'bertie[train]'") from None
    return [set(get_entities([_BILOU.get(tag[:2], tag[:2]) + tag[2:] for tag in one])) for one in sentences]


_BILOU = {"L-": "E-", "U-": "S-"}


def _tagging(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> tuple[Measure, int]:
    n = _same_length(gold, predicted)
    for i, (true, said) in enumerate(zip(gold, predicted, strict=True)):
        if len(true) != len(said):
            raise InputError(f"sentence {i} has {len(true)} gold tags and {len(said)} predicted; one a word is needed")
    words = np.array([len(sentence) for sentence in gold], dtype=np.float64)
    if not words.sum():
        raise InputError("there is nothing to score: no sentence has words")
    if not spans_in(gold, predicted):
        return _plain_tags(gold, predicted, words), n
    rows = [
        (len(wanted & found), len(wanted), len(found), sum(map(eq, true, said)))
        for wanted, found, true, said in zip(entities(gold), entities(predicted), gold, predicted, strict=True)
    ]
    columns = np.concatenate([np.array(rows, dtype=np.float64), words[:, None]], axis=1)

    def formula(sums: FloatArray) -> dict[str, FloatArray]:
        hits, wanted, found, right, all_words = sums.T
        return {
            "precision": share(hits, found),
            "recall": share(hits, wanted),
            "f1": share(2 * hits, wanted + found),
            "accuracy": share(right, all_words),
        }

    return linear(columns, formula), n


def _plain_tags(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], words: FloatArray) -> Measure:
    hits, occur, said, _ = tag_counts(gold, predicted)
    k = hits.shape[1]
    columns = np.concatenate([hits, occur + said, words[:, None]], axis=1)

    def formula(sums: FloatArray) -> dict[str, FloatArray]:
        right = sums[:, :k]
        return {
            "accuracy": share(right.sum(axis=1), sums[:, -1]),
            "macro_f1": macro_f1(right, sums[:, k : 2 * k]),
        }

    return linear(columns, formula)


def tag_counts(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> tuple[FloatArray, FloatArray, FloatArray, list[str]]:
    """How often each tag is right, occurs and is predicted in each sentence: three of (n, k); and the k tags."""
    labels = sorted({tag for sentences in (gold, predicted) for sentence in sentences for tag in sentence})
    n, k, place = len(gold), len(labels), {tag: i for i, tag in enumerate(labels)}
    of = np.repeat(np.arange(n), [len(sentence) for sentence in gold])  # the sentence of each word
    true, said = (
        np.array([place[tag] for sentence in sentences for tag in sentence], dtype=np.int64)
        for sentences in (gold, predicted)
    )

    def count(sentence: IntArray, tag: IntArray) -> FloatArray:
        return np.bincount(sentence * k + tag, minlength=n * k).reshape(n, k).astype(np.float64)

    same = true == said
    return count(of[same], true[same]), count(of, true), count(of, said), labels


# --- answers ---


def answering(
    gold: Sequence[Sequence[str]], predicted: Sequence[str], *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Score]:
    """Exact_match and f1 as SQuAD's script defines them, between 0 and 1.

    Both texts are lowered and freed of punctuation, articles and odd spaces; of several gold answers the one that fits
    best counts. A question without gold answers wants the empty answer.

    >>> answering([["The Tower", "a tower of London"], []], ["tower!", ""])["exact_match"].value
    1.0
    """
    return bootstrap(*_answering(gold, predicted), draws=draws, seed=seed)


def _answering(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> tuple[Measure, int]:
    n = _same_length(gold, predicted)
    rows = []
    for i, (wanted, said) in enumerate(zip(gold, predicted, strict=True)):
        if isinstance(wanted, str):
            raise InputError(f"gold of question {i} is a str; it must be a list of all right answers")
        words = answer_words(said)
        golds = [one for one in map(answer_words, wanted) if one] or [[]]
        rows.append((float(words in golds), max(_overlap(one, words) for one in golds)))
    return linear(
        np.array(rows, dtype=np.float64).reshape(n, 2),
        lambda sums: {"exact_match": sums[:, 0] / n, "f1": sums[:, 1] / n},
    ), n


_ARTICLES, _PUNCTUATION = re.compile(r"\b(a|an|the)\b"), str.maketrans("", "", string.punctuation)


def answer_words(text: str) -> list[str]:
    """An answer as SQuAD compares it."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _overlap(gold: list[str], said: list[str]) -> float:
    if not gold or not said:
        return float(gold == said)
    return 2 * sum((Counter(gold) & Counter(said)).values()) / (len(gold) + len(said))


# --- rankings ---


def ranking(
    queries: Sequence[Hashable], gold: ArrayLike, scores: ArrayLike, *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Score]:
    """Map, mrr and ndcg_10 over the queries that have a relevant document; the others say nothing and are left out.

    The three have one entry a document: its query, how relevant it is (above 0: relevant; ndcg_10 takes the value as
    the gain), and its score. Documents of one score stay in the order in which they were given.

    >>> ranking(["a", "a", "b", "b"], [0, 1, 1, 0], [0.3, 0.2, 0.9, 0.1])["mrr"].value
    0.75
    """
    return bootstrap(*_ranking(queries, gold, scores), draws=draws, seed=seed)


def _ranking(queries: Sequence[Hashable], gold: ArrayLike, scores: ArrayLike) -> tuple[Measure, int]:
    gains, points = _values(gold, "gold"), _values(scores, "scores")
    if not len(queries) == len(gains) == len(points):
        raise InputError(f"queries, gold and scores have lengths {len(queries)}, {len(gains)} and {len(points)}")
    if (gains < 0).any():
        raise InputError(f"gold has {gains.min():g}; a document is relevant above 0, or not at 0")
    of: dict[Hashable, list[int]] = {}
    for i, query in enumerate(queries):
        of.setdefault(query, []).append(i)
    rows = [_one_query(gains[places], points[places]) for places in of.values() if gains[places].any()]
    if not rows:
        raise InputError("there is nothing to score: no query has a relevant document")
    names, n = ("map", "mrr", "ndcg_10"), len(rows)
    return linear(np.array(rows), lambda sums: {name: sums[:, i] / n for i, name in enumerate(names)}), n


def _one_query(gains: FloatArray, points: FloatArray) -> tuple[float, float, float]:
    gains = gains[np.argsort(-points, kind="stable")]
    ranks = np.flatnonzero(gains > 0) + 1
    precision = np.arange(1, len(ranks) + 1) / ranks
    discount = 1 / np.log2(np.arange(2, 2 + min(10, len(gains))))
    best = -np.sort(-gains)
    ndcg = (gains[:10] @ discount) / (best[:10] @ discount)
    return float(precision.mean()), float(1 / ranks[0]), float(ndcg)


# --- vectors ---


def alikeness(gold: ArrayLike, predicted: ArrayLike, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Score]:
    """Spearman and pearson of how alike texts are with how alike a model finds them, on whatever scale.

    >>> alikeness([0, 1, 5], [0.1, 0.4, 0.5])["spearman"].value
    1.0
    """
    return bootstrap(*_alikeness(gold, predicted), draws=draws, seed=seed)


def _alikeness(gold: ArrayLike, predicted: ArrayLike) -> tuple[Measure, int]:
    measure, n = _regression(gold, predicted)

    def some(drawn: FloatArray) -> dict[str, FloatArray]:
        found = measure(drawn)
        return {name: found[name] for name in ("spearman", "pearson")}

    return some, n


def finding(gold: ArrayLike, ranks: ArrayLike, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Score]:
    """Recall_1, recall_10 and mrr_10: how often what was looked for is the first found, is among ten, and 1 / rank.

    `ranks` count from 1, and `gold` is a 1 for each. With a second column, of 1 where what was looked for is above
    what is known to be wrong, accuracy is its mean.

    >>> scores = finding([1, 1, 1, 1], [1, 2, 1, 40])
    >>> scores["recall_1"].value, scores["mrr_10"].value
    (0.5, 0.625)
    """
    return bootstrap(*_finding(gold, ranks), draws=draws, seed=seed)


def _finding(gold: ArrayLike, ranks: ArrayLike) -> tuple[Measure, int]:
    table = np.asarray(ranks, dtype=np.float64)
    table = table[:, None] if table.ndim == 1 else table
    n, rank = len(table), table[:, 0]
    if not n or len(np.asarray(gold)) != n or rank.min() < 1:
        raise InputError(f"there are {n} ranks for {len(np.asarray(gold))} rows; give one a row, from 1 on")
    columns = np.stack([rank <= 1, rank <= 10, np.where(rank <= 10, 1 / rank, 0), *table.T[1:]], axis=1).astype(float)
    names = ("recall_1", "recall_10", "mrr_10", "accuracy")[: columns.shape[1]]
    return linear(columns, lambda sums: {name: sums[:, i] / n for i, name in enumerate(names)}), n


# --- comparisons ---

_MEASURES: dict[str, Callable[..., tuple[Measure, int]]] = {
    "classify": _classification,
    "multi": _multi_label,
    "regress": _regression,
    "tag": _tagging,
    "answer": _answering,
    "rerank": _ranking,
    "alike": _alikeness,
    "find": _finding,
}


def paired(
    kind: str, first: Sequence[Any], second: Sequence[Any], *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Difference]:
    """By how much each metric of the first predictions is above the second's, on the same units.

    `first` and `second` hold what the function of that kind takes: for "classify" the gold labels, the probabilities
    and the labels. The interval and p come from drawing the same units for both.

    >>> gold, labels = ["no", "yes"] * 50, ["no", "yes"]
    >>> good, bad = [[0.9, 0.1], [0.1, 0.9]] * 50, [[0.9, 0.1], [0.9, 0.1]] * 50
    >>> paired("classify", (gold, good, labels), (gold, bad, labels))["accuracy"].value
    0.5
    """
    if kind not in _MEASURES:
        raise InputError(f"kind={kind!r} must be one of {', '.join(_MEASURES)}")
    shared = 2 if kind == "rerank" else 1  # queries and gold; or gold alone
    for one, other in zip(first[:shared], second[:shared], strict=True):
        if len(one) != len(other) or not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True)):
            raise InputError("the two to be compared must have the same gold, in the same order")
    (measure, units), (other_measure, other_units) = _MEASURES[kind](*first), _MEASURES[kind](*second)
    assert units == other_units
    return paired_bootstrap(measure, other_measure, units, draws=draws, seed=seed)


# --- shared ---


def share(part: FloatArray, whole: FloatArray) -> FloatArray:
    """Part by whole; 0 where there is no whole, as scikit-learn and seqeval have it."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def macro_f1(hits: FloatArray, either: FloatArray, never: int = 0) -> FloatArray:
    """(draws, k) -> (draws,): the mean f1 of the labels that are in a draw; `never` more count as 0."""
    there = (either > 0).sum(axis=1) + never
    return share(share(2 * hits, either).sum(axis=1), there.astype(np.float64))


def bin_of(confidence: FloatArray, bins: int = BINS) -> NDArray[np.int64]:
    """The bin of each confidence; bins are of equal width, each with its upper end."""
    return np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)


def _gaps(confidence: FloatArray, right: BoolArray) -> FloatArray:
    """(n, BINS): confidence less truth, in the column of its bin; the calibration error is a sum over such sums."""
    columns = np.zeros((len(confidence), BINS))
    columns[np.arange(len(confidence)), bin_of(confidence)] = confidence - right
    return columns


def _table(probabilities: ArrayLike, n: int, k: int) -> FloatArray:
    table = np.asarray(probabilities, dtype=np.float64)
    if not n:
        raise InputError("there is nothing to score: no texts were given")
    if table.shape != (n, k):
        raise InputError(f"probabilities has shape {table.shape}; {n} texts and {k} labels need {(n, k)}")
    if not (np.isfinite(table).all() and table.min() >= 0 and table.max() <= 1.001):
        bad = int(np.flatnonzero(~((table >= 0) & (table <= 1.001)).all(axis=1))[0])
        raise InputError(f"probabilities of text {bad} are not between 0 and 1: {table[bad].tolist()!r:.80}")
    return table


def _indices(gold: Sequence[str], labels: Sequence[str]) -> IntArray:
    place = {label: i for i, label in enumerate(labels)}
    if len(place) < len(labels):
        raise InputError(f"labels={list(labels)!r:.80} must be different")
    try:
        return np.array([place[label] for label in gold], dtype=np.int64)
    except KeyError as error:
        raise InputError(f"gold has the label {error.args[0]!r}, which is not among {list(labels)!r:.200}") from None


def _values(values: ArrayLike, name: str) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not np.isfinite(array).all():
        raise InputError(f"{name} must be a list of finite numbers; it has shape {array.shape}")
    return array


def _same_length(gold: Sequence[Any], predicted: Sequence[Any]) -> int:
    if len(gold) != len(predicted):
        raise InputError(f"gold has {len(gold)} entries and predicted {len(predicted)}; they must be of one length")
    if not len(gold):
        raise InputError("there is nothing to score: no texts were given")
    return len(gold)
