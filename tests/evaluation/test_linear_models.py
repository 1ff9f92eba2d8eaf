"""The linear models against scikit-learn's."""

from __future__ import annotations

import random

import numpy as np
import pytest
from sklearn import linear_model

from bertie.evaluation import linear_models
from bertie.evaluation.linear_models import LogisticRegression, Ridge, SparseRows, TfIdf, minimize


def dense(matrix: SparseRows) -> np.ndarray:
    return matrix.dot(np.eye(matrix.width))


@pytest.mark.parametrize("scipy", [True, False])
def test_sparse_rows(scipy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not scipy:
        monkeypatch.setattr(linear_models, "_scipy_sparse", lambda: None)
    rng = np.random.default_rng(0)
    table = rng.normal(size=(40, 25)) * (rng.random((40, 25)) < 0.2)
    table[[0, 7, 39]] = 0  # empty rows
    rows, columns = np.nonzero(table)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=40))])
    matrix = SparseRows(starts, columns, table[rows, columns], 25)
    weights = rng.normal(size=(25, 3))
    assert dense(matrix) == pytest.approx(table)
    assert matrix.dot(weights) == pytest.approx(table @ weights)
    assert dense(matrix.transposed()) == pytest.approx(table.T)
    chosen = np.array([5, 0, 5, 39, 12])
    assert dense(matrix.take(chosen)) == pytest.approx(table[chosen])


@pytest.mark.parametrize("classes", [2, 4])
def test_logistic_regression_is_scikit_learns(classes: int) -> None:
    rng = np.random.default_rng(classes)
    x = rng.normal(size=(200, 6))
    y = (x @ rng.normal(size=(6, classes)) + rng.normal(size=(200, classes))).argmax(axis=1)
    ours = LogisticRegression(strength=2.0, iterations=500).fit(x, np.eye(classes)[y]).predict(x)
    # With two classes scikit-learn has one column of weights where there are two here, which halves the penalty.
    theirs = linear_model.LogisticRegression(C=2.0 if classes > 2 else 4.0, max_iter=2000, tol=1e-8).fit(x, y)
    assert ours == pytest.approx(theirs.predict_proba(x), abs=5e-3)


def test_ridge_is_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 8))
    x -= x.mean(axis=0)
    y = x @ rng.normal(size=8) + 3 + rng.normal(size=100)
    theirs = linear_model.Ridge(alpha=0.5).fit(x, y)
    assert Ridge(strength=2.0).fit(x, y).predict(x) == pytest.approx(theirs.predict(x), abs=1e-4)


def test_the_penalty_is_chosen_by_cross_validation() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 120)
    noise, signal = rng.normal(size=(120, 60)), rng.normal(size=(120, 60)) + 2.5 * y[:, None]
    one_hot = np.eye(2)[y]
    strengths = [LogisticRegression().fit(x, one_hot).strength for x in (noise, signal)]
    assert strengths[0] is not None
    assert strengths[1] is not None
    assert strengths[0] <= strengths[1]


def test_minimize() -> None:
    scales = np.array([1.0, 30.0, 1000.0])
    best = minimize(lambda x: (float((scales * (x - 2) ** 2).sum()), 2 * scales * (x - 2)), np.zeros(3), 200)
    assert best == pytest.approx([2, 2, 2], abs=1e-2)


def test_tf_idf_tells_sides_apart() -> None:
    rng = random.Random(0)
    words = "red green blue tree house river stone cloud".split()
    texts = [(" ".join(rng.choices(words, k=5)), " ".join(rng.choices(words, k=5))) for _ in range(50)]
    vectorizer = TfIdf().fit(texts)
    assert vectorizer.similarity(("red tree", "red tree")) == pytest.approx(1)
    assert vectorizer.similarity(("red tree", "blue house")) == 0
    one, other = dense(vectorizer.transform([("red tree", "blue house"), ("blue house", "red tree")]))
    assert (one != other).any()
    assert np.linalg.norm(one) == pytest.approx(1)
    assert not dense(vectorizer.transform([("", "")]))[0].any()
