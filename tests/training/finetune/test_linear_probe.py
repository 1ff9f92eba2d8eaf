"""Logistic regression as a head: weights in the units of the features, a penalty that fits the data."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from bertie.evaluation.calibration import best_macro_f1
from bertie.training.finetune.linear_probe import STRENGTHS, LinearHead, stratified_folds

rng = np.random.default_rng(0)
CLASSES = np.arange(60) % 3
TARGETS = np.eye(3)[CLASSES]
FEATURES = rng.normal(size=(60, 12)) * 4 + 2 * TARGETS @ rng.normal(size=(3, 12)) + 7


def test_agrees_with_scikit_learn_at_the_same_penalty() -> None:
    head = LinearHead.fit(FEATURES, TARGETS)
    mean = FEATURES.mean(0)
    scale = (FEATURES - mean).std()
    peer = LogisticRegression(C=head.strength, max_iter=1000).fit((FEATURES - mean) / scale, CLASSES)
    logits = head.logits(FEATURES)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert p == pytest.approx(peer.predict_proba((FEATURES - mean) / scale), abs=0.01)


def test_noise_gets_a_stronger_penalty_than_signal() -> None:
    noise = LinearHead.fit(rng.normal(size=(60, 40)), TARGETS)
    signal = LinearHead.fit(FEATURES + 40 * TARGETS @ rng.normal(size=(3, 12)), TARGETS)
    assert noise.strength < signal.strength


def test_rare_labels_get_the_penalty_with_the_best_f1() -> None:
    rng = np.random.default_rng(1)
    directions = rng.normal(size=(12, 64))
    targets = (rng.random((800, 12)) < 0.03).astype(np.float64)
    features = rng.normal(size=(800, 64)) * 4 + targets @ directions
    (train, test), (expected, gold) = np.split(features, 2), np.split(targets, 2)
    head = LinearHead.fit(train, expected, multi_label=True)
    mean, scale = train.mean(0), (train - train.mean(0)).std()
    scores = {}
    for strength in STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=500)
        columns = [model.fit((train - mean) / scale, c).predict_proba((test - mean) / scale)[:, 1] for c in expected.T]
        scores[strength] = best_macro_f1(gold > 0, np.stack(columns, 1))
    assert scores[head.strength] > max(scores.values()) - 0.02
    assert scores[head.strength] > scores[STRENGTHS[0]] + 0.1


def test_folds_have_their_share_of_each_label() -> None:
    fold = stratified_folds(TARGETS, 5, seed=1)
    counts = [[int(((fold == i) & (c == CLASSES)).sum()) for c in range(3)] for i in range(5)]
    assert counts == [[4, 4, 4]] * 5
