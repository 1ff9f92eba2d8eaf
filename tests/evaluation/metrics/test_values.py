"""Regression metrics against scipy and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from bertie.evaluation.metrics import regression
from tests.evaluation.metric_data import values


def test_regression_is_scipys() -> None:
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 6, 150) + 1000.0  # ties, and far from 0
    output = gold + rng.normal(size=150).round(1)
    assert values(regression(gold, output, resamples=0)) == pytest.approx(
        {
            "pearson": stats.pearsonr(gold, output).statistic,
            "spearman": stats.spearmanr(gold, output).statistic,
            "mse": sk.mean_squared_error(gold, output),
            "mae": sk.mean_absolute_error(gold, output),
            "r2": sk.r2_score(gold, output),
        }
    )


def test_what_is_not_defined() -> None:
    result = regression([1.0, 2.0, 3.0], [5.0, 5.0, 5.0])
    assert math.isnan(result["pearson"].value)
    assert math.isnan(result["spearman"].value)
    assert result["pearson"].as_dict() == {"value": None, "low": None, "high": None}
    assert str(result["spearman"]) == "not defined"
    assert result["mae"].value == pytest.approx(3.0)
    assert math.isnan(regression([2.0, 2.0], [1.0, 3.0])["r2"].value)
