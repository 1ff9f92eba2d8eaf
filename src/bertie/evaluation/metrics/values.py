"""Metrics of regression and of semantic textual similarity."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError
from bertie.evaluation.intervals import RESAMPLES, FloatArray, Score, Statistic, bootstrap
from bertie.evaluation.metrics.shared import check_values


def regression(gold: ArrayLike, predicted: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Score]:
    """Compute `pearson`, `spearman`, `mse`, `mae` and `r2`.

    Correlations with a constant, and r2 of constant gold, are NaN.
    """
    return bootstrap(*regression_statistic(gold, predicted), resamples=resamples, seed=seed)


def sts(gold: ArrayLike, predicted: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Score]:
    """Compute the `spearman` and `pearson` correlation of predicted similarities with human ratings, on any scale.

    >>> sts([0, 1, 5], [0.1, 0.4, 0.5])["spearman"].value
    1.0
    """
    return bootstrap(*sts_statistic(gold, predicted), resamples=resamples, seed=seed)


def sts_statistic(gold: ArrayLike, predicted: ArrayLike) -> tuple[Statistic, int]:
    """Return the statistic of `sts` and the number of pairs."""
    statistic, n = regression_statistic(gold, predicted)

    def correlations(counts: FloatArray) -> dict[str, FloatArray]:
        values = statistic(counts)
        return {name: values[name] for name in ("spearman", "pearson")}

    return correlations, n


def regression_statistic(gold: ArrayLike, predicted: ArrayLike) -> tuple[Statistic, int]:
    """Return the statistic of `regression` and the number of texts."""
    x, y = check_values(gold, "gold"), check_values(predicted, "predicted")
    if len(x) != len(y):
        raise InputError(f"gold has {len(x)} values and predicted {len(y)}; they must be of one length")
    n, error = len(x), x - y
    scale = float(x.std()) if n else 0.0
    x, y = _standardize(x), _standardize(y)  # against cancellation between large squares
    columns = np.stack([x, y, x * x, y * y, x * y, np.abs(error), error**2], axis=1)
    gold_ranks, predicted_ranks = _Ranks(x), _Ranks(y)

    def statistic(counts: FloatArray) -> dict[str, FloatArray]:
        sx, sy, sxx, syy, sxy, absolute, squared = (counts @ columns).T / n
        vx, vy = _clip_variance(sxx - sx * sx), _clip_variance(syy - sy * sy)
        with np.errstate(divide="ignore", invalid="ignore"):
            pearson = (sxy - sx * sy) / np.sqrt(vx * vy)
            explained = 1 - squared / (vx * scale**2)
        return {
            "pearson": np.clip(pearson, -1, 1),
            "spearman": _spearman(counts, gold_ranks, predicted_ranks),
            "mse": squared,
            "mae": absolute,
            "r2": np.where(vx > 0, explained, np.nan),
        }

    return statistic, n


def _standardize(values: FloatArray) -> FloatArray:
    scale = values.std() if len(values) else 0.0
    return (values - values.mean()) / scale if scale > 0 else np.zeros_like(values)


def _clip_variance(variance: FloatArray) -> FloatArray:
    """Set the variance of constant values, which rounding leaves slightly off, to exactly 0."""
    return np.where(variance > 1e-12, variance, 0.0)


class _Ranks:
    """Centred ranks of values within a resample, with mean ranks for ties."""

    def __init__(self, values: FloatArray) -> None:
        self._order = np.argsort(values, kind="stable")
        unique, self._group = np.unique(values, return_inverse=True)
        self._starts = np.searchsorted(values[self._order], unique)

    def __call__(self, counts: FloatArray) -> FloatArray:
        """(resamples, n) counts -> (resamples, n) ranks, minus the mean rank."""
        ordered = counts[:, self._order]
        times = ordered if len(self._starts) == ordered.shape[1] else np.add.reduceat(ordered, self._starts, axis=1)
        ranks = np.cumsum(times, axis=1) - (times - 1) / 2
        centred: FloatArray = (ranks - (counts.shape[1] + 1) / 2)[:, self._group]
        return centred


def _spearman(counts: FloatArray, gold_ranks: _Ranks, predicted_ranks: _Ranks) -> FloatArray:
    x, y = gold_ranks(counts), predicted_ranks(counts)
    weighted = counts * x
    vx, vy = np.einsum("ij,ij->i", weighted, x), np.einsum("ij,ij,ij->i", counts, y, y)
    with np.errstate(divide="ignore", invalid="ignore"):
        rho: FloatArray = np.einsum("ij,ij->i", weighted, y) / np.sqrt(vx * vy)
    return rho
