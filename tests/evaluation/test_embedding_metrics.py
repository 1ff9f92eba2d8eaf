"""Similarity, pairs and clusters against scikit-learn and scipy; and `bertie eval` of a model of vectors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.cluster import KMeans
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    completeness_score,
    f1_score,
    homogeneity_score,
    v_measure_score,
)

from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.cli import main
from bertie.errors import InputError
from bertie.evaluation.embedding_metrics import Thresholds, clustering, pair_classification
from bertie.evaluation.intervals import resample_counts, wilson_interval
from bertie.evaluation.metrics import sts
from bertie.tasks import Embedder
from tests.tasks import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved with its modules: a folder of sentence-transformers."""
    top = tmp_path_factory.mktemp("model")
    embedder = Embedder.load(tiny.save(top / "bare", "wordpiece", ""))
    embedder.checkpoint.sentence = SentenceModules.create(32)
    embedder.save(top / "sentence")
    return top / "sentence"


def made(seed: int, n: int = 60, ties: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Which pairs are the same, and values that tell it by half, some of them equal."""
    rng = np.random.default_rng(seed)
    same = rng.random(n) < 0.4
    values = rng.normal(size=n) + same
    return same, np.round(values, 1) if ties else values


def test_sts_is_scipys_correlation() -> None:
    rng = np.random.default_rng(0)
    gold = np.round(rng.random(80) * 5)
    predicted = gold + rng.normal(size=80)
    result = sts(gold, predicted, resamples=100)
    assert result["spearman"].value == pytest.approx(spearmanr(gold, predicted)[0])
    assert result["pearson"].value == pytest.approx(pearsonr(gold, predicted)[0])
    assert all(one.low < one.value < one.high for one in result.values())


# --- pair classification ---


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ties", [True, False])
def test_thresholds_are_the_best_there_are(seed: int, ties: bool) -> None:
    same, values = made(seed, ties=ties)
    result = Thresholds.fit(same, values)
    tried = [*np.unique(values), values.max() + 1]
    assert f1_score(same, values >= result.f1) == pytest.approx(max(f1_score(same, values >= t) for t in tried[:-1]))
    assert accuracy_score(same, values >= result.accuracy) == max(accuracy_score(same, values >= t) for t in tried[:-1])


@pytest.mark.parametrize("seed", range(2))
def test_pairs_are_scored_as_by_scikit_learn(seed: int) -> None:
    thresholds = Thresholds.fit(*made(seed + 100))
    same, values = made(seed)
    result = pair_classification(same, values, thresholds, resamples=60)
    assert result["average_precision"].value == pytest.approx(average_precision_score(same, values))
    assert result["f1"].value == pytest.approx(f1_score(same, values >= thresholds.f1))
    assert result["accuracy"].value == pytest.approx(accuracy_score(same, values >= thresholds.accuracy))
    # The interval, from the variance of the same resamples by scikit-learn.
    drawn = [
        average_precision_score(same, values, sample_weight=one) for some in resample_counts(60, 60, 0) for one in some
    ]
    value = result["average_precision"].value
    size = value * (1 - value) / np.var(drawn)
    expected = wilson_interval(value * size, size)
    assert (result["average_precision"].low, result["average_precision"].high) == pytest.approx(expected)


def test_pairs_that_cannot_be_scored() -> None:
    with pytest.raises(InputError, match="both positive and negative pairs"):
        Thresholds.fit([True, True], [0.1, 0.2])
    with pytest.raises(InputError, match="one length"):
        pair_classification([True, False], [0.1], Thresholds(0.0, 0.0))


# --- clusters ---


@pytest.mark.parametrize("spread", [0.5, 2.0, 20.0])
def test_clusters_are_scored_as_by_scikit_learn(spread: float) -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 6, 200)
    vectors = rng.normal(size=(6, 8))[truth] * 4 + rng.normal(size=(200, 8)) * spread
    labels = [f"label {i}" for i in truth]
    result = clustering(vectors, labels, seed=3)
    clusters = KMeans(n_clusters=6, n_init=10, random_state=3).fit_predict(vectors)
    for name, score in (
        ("v_measure", v_measure_score),
        ("homogeneity", homogeneity_score),
        ("completeness", completeness_score),
    ):
        assert result[name].value == pytest.approx(score(labels, clusters), abs=1e-9), name
        assert result[name].low <= result[name].value <= result[name].high


def test_clusters_that_cannot_be_scored() -> None:
    with pytest.raises(InputError, match="one row per label"):
        clustering([[0.0]], ["a", "b"])
    with pytest.raises(InputError, match="at least two"):
        clustering([[0.0], [1.0]], ["a", "a"])


# --- the command ---


def test_a_model_of_vectors_is_scored_on_pairs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    a, b = tiny.sentences(40, seed=1), tiny.sentences(40, seed=2)
    gold = np.round(rng.random(40) * 5, 1).tolist()
    file = tmp_path / "pairs.jsonl"
    rows = [{"text_a": x, "text_b": y, "score": z} for x, y, z in zip(a, b, gold, strict=True)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = spearmanr(gold, np.diagonal(Embedder.load(model).similarity(a, b)))[0]
    for flags in ([], ["--task", "embed"]):
        assert main(["eval", str(file), "-m", str(model), "--resamples", "50", "--json", *flags]) == 0
        result = json.loads(capsys.readouterr().out)
        assert list(result) == ["spearman", "pearson"]
        assert result["spearman"]["value"] == pytest.approx(expected, abs=1e-5)
    bare = str(model.parent / "bare")
    assert main(["eval", str(file), "-m", str(model), "--baseline", bare, "--resamples", "50", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    gap = result["spearman"]["value"] - result["baseline"]["scores"]["spearman"]["value"]
    assert result["baseline"]["difference"]["spearman"]["value"] == pytest.approx(gap)


def test_single_texts_and_flags_for_heads_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "single.jsonl"
    file.write_text('{"text": "Emma", "score": 1}\n{"text": "London", "score": 2}\n')
    assert main(["eval", str(file), "-m", str(model)]) == 1
    assert "single texts" in capsys.readouterr().err
    assert main(["eval", str(file), "-m", str(model), "-o", str(tmp_path / "report")]) == 2
    assert "leave out --output" in capsys.readouterr().err
