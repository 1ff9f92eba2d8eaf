"""Linear models on TF-IDF features or given embeddings, in numpy: the cheap baselines of `baselines`.

`LogisticRegression` is multinomial, or one sigmoid per label for multi-label data; `Ridge` is for values.
Both choose the strength of their L2 penalty by cross-validation on the training data.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertie.evaluation.intervals import FloatArray, IntArray

Texts = Sequence[tuple[str, ...]]  # one or two texts each
_WORD = re.compile(r"\w+|[^\w\s]")
_MAX_WORDS = 400  # of a text; a baseline need not read more
_CHUNK = 2**21  # cells of an intermediate product
_CV_ROWS, _FOLDS = 1500, 3  # of the training data, to choose the penalty on
STRENGTHS = (0.3, 3.0, 30.0, 300.0)  # inverse penalties, as scikit-learn's C
TF_IDF_STRENGTH = 100.0  # good for rows of length 1, with few or many of them


@dataclass(frozen=True, slots=True)
class SparseRows:
    """An (n, d) matrix in compressed sparse rows."""

    starts: IntArray  # (n + 1,)
    columns: IntArray
    values: FloatArray
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.starts) - 1, self.width

    def take(self, rows: IntArray) -> SparseRows:
        """Some of the rows."""
        counts = np.diff(self.starts)[rows]
        starts = np.concatenate([[0], np.cumsum(counts)])
        places = np.repeat(self.starts[rows] - starts[:-1], counts) + np.arange(starts[-1])
        return SparseRows(starts, self.columns[places], self.values[places], self.width)

    def dot(self, weights: FloatArray) -> FloatArray:
        """(n, d) @ (d, k), by scipy if it is installed."""
        if (sparse := _scipy_sparse()) is not None:
            return np.asarray(sparse.csr_matrix((self.values, self.columns, self.starts), self.shape) @ weights)
        return _gather(self.starts, self.columns, self.values, weights)

    def transposed(self) -> SparseRows:
        """The (d, n) matrix."""
        n = self.shape[0]
        order = np.argsort(self.columns, kind="stable")
        rows = np.repeat(np.arange(n), np.diff(self.starts))[order]
        starts = np.concatenate([[0], np.cumsum(np.bincount(self.columns, minlength=self.width))])
        return SparseRows(starts, rows, self.values[order], n)


@cache
def _scipy_sparse() -> Any:
    try:
        return import_module("scipy.sparse")
    except ImportError:
        return None


def _gather(starts: IntArray, columns: IntArray, values: FloatArray, weights: FloatArray) -> FloatArray:
    """Sum the weights of each row's columns, a block of rows at a time."""
    n, k = len(starts) - 1, weights.shape[1]
    result = np.zeros((n, k))
    step = max(1, _CHUNK // k)  # entries at once
    first = 0
    while first < n:
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + step, side="right")) - 1)
        begin, end = starts[first], starts[last]
        filled = np.flatnonzero(np.diff(starts[first : last + 1]))  # reduceat cannot sum nothing
        if len(filled):
            products = values[begin:end, None] * weights[columns[begin:end]]
            result[first + filled] = np.add.reduceat(products, starts[first + filled] - begin, axis=0)
        first = last
    return result


class TfIdf:
    """Words and word bigrams of one or two texts, with logarithmic counts, smoothed IDF and rows of length 1.

    The words of the two texts of a pair are distinct features; words in both texts are additional
    features, and so is the cosine of the two.
    """

    def __init__(self, max_features: int = 100_000) -> None:
        self.max_features = max_features

    def fit(self, texts: Texts) -> TfIdf:
        """Collect the features and their document frequencies."""
        times = Counter(name for names in map(_features, texts) for name in names)
        kept = sorted(times, key=lambda name: (-times[name], name))[: self.max_features]
        self._index = {name: i for i, name in enumerate(kept)}
        self._idf = np.array([math.log((1 + len(texts)) / (1 + times[name])) + 1 for name in kept])
        return self

    def transform(self, texts: Texts) -> SparseRows:
        """(n, d) features; the last column is the cosine of a pair, which is 0 for single texts."""
        columns: list[int] = []
        values: list[float] = []
        starts = [0]
        for text in texts:
            counts = {self._index[name]: count for name, count in _features(text).items() if name in self._index}
            weights = [(1 + math.log(count)) * float(self._idf[i]) for i, count in counts.items()]
            norm = math.sqrt(sum(weight * weight for weight in weights)) or 1.0
            columns += [*counts, len(self._index)]
            values += [*(weight / norm for weight in weights), self.similarity(text) if len(text) > 1 else 0.0]
            starts.append(len(columns))
        flat = np.array(values, dtype=np.float64)
        return SparseRows(np.array(starts), np.array(columns, dtype=np.int64), flat, len(self._index) + 1)

    def similarity(self, texts: tuple[str, ...]) -> float:
        """Cosine of the TF-IDF vectors of the words of two texts."""
        unknown = float(self._idf.max()) if len(self._idf) else 1.0

        def vector(text: str) -> dict[str, float]:
            words = Counter(_words(text))
            return {
                word: count * (float(self._idf[i]) if (i := self._index.get(f"a {word}")) is not None else unknown)
                for word, count in words.items()
            }

        a, b = vector(texts[0]), vector(texts[1])
        norms = math.sqrt(sum(v * v for v in a.values()) * sum(v * v for v in b.values()))
        return sum(value * b.get(word, 0.0) for word, value in a.items()) / norms if norms else 0.0


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())[:_MAX_WORDS]


def _features(texts: tuple[str, ...]) -> Counter[str]:
    counts: Counter[str] = Counter()
    sides = [_words(text) for text in texts]
    for side, words in zip("ab", sides, strict=False):
        counts.update(f"{side} {word}" for word in words)
        counts.update(f"{side} {first} {second}" for first, second in pairwise(words))
    if len(sides) == 2:
        counts.update(f"both {word}" for word in set(sides[0]) & set(sides[1]))
    return counts


Matrix = SparseRows | FloatArray


def take(matrix: Matrix, rows: IntArray) -> Matrix:
    """Some of the rows."""
    return matrix.take(rows) if isinstance(matrix, SparseRows) else matrix[rows]


class LogisticRegression:
    """Logistic regression with an L2 penalty, by L-BFGS. `multi_label`: one sigmoid per label.

    `strength` is the inverse of the penalty; None: the best of `STRENGTHS` by cross-validation.
    """

    def __init__(self, *, multi_label: bool = False, strength: float | None = None, iterations: int = 100) -> None:
        self.multi_label, self.strength, self.iterations = multi_label, strength, iterations

    def fit(self, features: Matrix, targets: FloatArray, seed: int = 0) -> LogisticRegression:
        """Fit to (n, d) features and (n, k) targets of 0 and 1."""
        if self.strength is None:
            self.strength = _best_strength(features, targets, self._held_out_loss, seed)
        self.weights, self.bias = self._fit(features, targets, self.strength)
        return self

    def predict(self, features: Matrix) -> FloatArray:
        """(n, k) probabilities."""
        return self._probabilities(_product(features, self.weights) + self.bias)

    def _probabilities(self, logits: FloatArray) -> FloatArray:
        if self.multi_label:
            return np.asarray(1 / (1 + np.exp(-np.clip(logits, -500, 500))))
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(exponents / exponents.sum(axis=1, keepdims=True))

    def _fit(self, features: Matrix, targets: FloatArray, strength: float) -> tuple[FloatArray, FloatArray]:
        (n, d), k = features.shape, targets.shape[1]
        back = features.transposed() if isinstance(features, SparseRows) else features.T
        penalty = 1 / (strength * n)

        def loss(flat: FloatArray) -> tuple[float, FloatArray]:
            table = flat.reshape(d + 1, k)
            probabilities = self._probabilities(_product(features, table[:-1]) + table[-1])
            inside = np.clip(probabilities, 1e-12, 1 - 1e-12)
            value = -float((targets * np.log(inside)).sum())
            if self.multi_label:
                value -= float(((1 - targets) * np.log(1 - inside)).sum())
            error = (probabilities - targets) / n
            gradient = np.vstack([_product(back, error) + penalty * table[:-1], error.sum(axis=0)])
            return value / n + penalty / 2 * float((table[:-1] ** 2).sum()), gradient.ravel()

        table = minimize(loss, np.zeros((d + 1) * k), self.iterations).reshape(d + 1, k)
        return table[:-1], table[-1]

    def _held_out_loss(
        self, features: Matrix, targets: FloatArray, others: Matrix, expected: FloatArray, strength: float
    ) -> float:
        weights, bias = self._fit(features, targets, strength)
        probabilities = np.clip(self._probabilities(_product(others, weights) + bias), 1e-6, 1 - 1e-6)
        loss = -(expected * np.log(probabilities)).sum()
        return float(loss - ((1 - expected) * np.log(1 - probabilities)).sum() if self.multi_label else loss)


class Ridge:
    """Linear regression with an L2 penalty, chosen as in `LogisticRegression`; by conjugate gradients."""

    def __init__(self, *, strength: float | None = None, iterations: int = 100) -> None:
        self.strength, self.iterations = strength, iterations

    def fit(self, features: Matrix, targets: FloatArray, seed: int = 0) -> Ridge:
        """Fit to (n, d) features and (n,) values."""
        column = targets[:, None]
        if self.strength is None:
            self.strength = _best_strength(features, column, self._held_out_loss, seed)
        self.weights, self.mean = self._fit(features, column, self.strength)
        return self

    def predict(self, features: Matrix) -> FloatArray:
        """(n,) values."""
        return np.asarray(_product(features, self.weights)[:, 0] + self.mean)

    def _fit(self, features: Matrix, column: FloatArray, strength: float) -> tuple[FloatArray, float]:
        mean, penalty = float(column.mean()), 1 / strength
        back = features.transposed() if isinstance(features, SparseRows) else features.T
        weights = np.zeros((features.shape[1], 1))
        residual = _product(back, column - mean)
        direction, square = residual.copy(), float((residual**2).sum())
        smallest = 1e-10 * square
        for _ in range(self.iterations):
            if square <= smallest:
                break
            applied = _product(back, _product(features, direction)) + penalty * direction
            step = square / float((direction * applied).sum())
            weights += step * direction
            residual -= step * applied
            square, before = float((residual**2).sum()), square
            direction = residual + square / before * direction
        return weights, mean

    def _held_out_loss(
        self, features: Matrix, targets: FloatArray, others: Matrix, expected: FloatArray, strength: float
    ) -> float:
        weights, mean = self._fit(features, targets, strength)
        return float(((_product(others, weights) + mean - expected) ** 2).sum())


def _product(matrix: Matrix | NDArray[np.float64], weights: FloatArray) -> FloatArray:
    return matrix.dot(weights) if isinstance(matrix, SparseRows) else np.asarray(matrix @ weights)


def _best_strength(
    features: Matrix,
    targets: FloatArray,
    held_out_loss: Callable[[Matrix, FloatArray, Matrix, FloatArray, float], float],
    seed: int,
) -> float:
    """The strength with the smallest loss in cross-validation, on at most `_CV_ROWS` rows."""
    order = np.random.default_rng(seed).permutation(len(targets))[:_CV_ROWS]
    if len(order) < 2 * _FOLDS:
        return STRENGTHS[1]
    # Rows of one target are dealt to the folds in turn, so that each fold has its share.
    by_target = order[np.lexsort((np.arange(len(order)), targets[order].argmax(axis=1)))]
    fold = np.arange(len(by_target)) % _FOLDS
    losses = dict.fromkeys(STRENGTHS, 0.0)
    for i in range(_FOLDS):
        inside, outside = by_target[fold != i], by_target[fold == i]
        parts = take(features, inside), targets[inside], take(features, outside), targets[outside]
        for strength in STRENGTHS:
            losses[strength] += held_out_loss(*parts, strength)
    return min(losses, key=lambda strength: losses[strength])


def minimize(
    loss: Callable[[FloatArray], tuple[float, FloatArray]], start: FloatArray, iterations: int, memory: int = 8
) -> FloatArray:
    """Minimize a smooth function, given with its gradient, by L-BFGS with backtracking line search."""
    x = start
    value, gradient = loss(x)
    steps: list[tuple[FloatArray, FloatArray, float]] = []  # of x, of the gradient, 1 / their product
    for _ in range(iterations):
        direction = -_lbfgs_product(gradient, steps)
        slope = float(direction @ gradient)
        if slope > -1e-12:
            break
        rate = 1.0 if steps else min(1.0, 1.0 / (float(np.abs(gradient).sum()) + 1e-12))
        for _ in range(25):
            new = x + rate * direction
            new_value, new_gradient = loss(new)
            if new_value <= value + 1e-4 * rate * slope:
                break
            rate /= 2
        else:
            break
        change, difference = new - x, new_gradient - gradient
        product = float(change @ difference)
        if product > 1e-12:
            steps = [*steps[-(memory - 1) :], (change, difference, 1 / product)]
        converged = value - new_value < 1e-6 * max(1e-3, abs(value))
        x, value, gradient = new, new_value, new_gradient
        if converged:
            break
    return x


def _lbfgs_product(gradient: FloatArray, steps: Sequence[tuple[FloatArray, FloatArray, float]]) -> FloatArray:
    """The gradient times the approximate inverse of the Hessian (two-loop recursion)."""
    result = gradient.copy()
    factors = []
    for change, difference, inverse in reversed(steps):
        factors.append(inverse * float(change @ result))
        result -= factors[-1] * difference
    if steps:
        change, difference, inverse = steps[-1]
        result /= inverse * float(difference @ difference)
    for (change, difference, inverse), factor in zip(steps, reversed(factors), strict=True):
        result += change * (factor - inverse * float(difference @ result))
    return result
