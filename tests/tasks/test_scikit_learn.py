"""Embedders in scikit-learn: pipelines, grid search, column transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bertie import Embedder
from bertie.errors import InputError
from tests.tasks.tiny import sentences

sklearn = pytest.importorskip("sklearn")
from sklearn.base import clone  # noqa: E402
from sklearn.compose import ColumnTransformer  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline  # noqa: E402

Made = Callable[..., Path]
TEXTS = sentences(12)
LABELS = [index % 2 for index in range(12)]


def test_pipelines(made: Made) -> None:
    embedder = Embedder(made("wordpiece", ""), pooling="cls")
    vectors = embedder.embed(TEXTS)
    model = make_pipeline(embedder, LogisticRegression()).fit(TEXTS, LABELS)
    expected = LogisticRegression().fit(vectors, LABELS).predict_proba(vectors)
    np.testing.assert_allclose(model.predict_proba(TEXTS), expected, atol=1e-6)
    np.testing.assert_array_equal(make_pipeline(embedder).fit(TEXTS).transform(TEXTS), vectors)  # the last step
    assert FeatureUnion([("a", embedder), ("b", clone(embedder))]).fit_transform(TEXTS).shape == (12, 64)
    assert "Embedder" in model._repr_html_()


def test_grid_search(made: Made) -> None:
    search = GridSearchCV(
        make_pipeline(Embedder(made("wordpiece", "")), LogisticRegression()),
        {"embedder__pooling": ["cls", "mean"], "logisticregression__C": [0.1, 1.0]},
        cv=2,
        error_score="raise",
    ).fit(TEXTS, LABELS)
    assert len(search.cv_results_["params"]) == 4
    assert search.predict(TEXTS[:2]).shape == (2,)


def test_hyperparameters_of_a_named_step_are_searched_in_processes(made: Made) -> None:
    pipeline = Pipeline([("embed", Embedder(made("wordpiece", ""))), ("classify", LogisticRegression())])
    grid = {"embed__dimension": [4, None], "embed__normalize": [True, False], "classify__C": [0.1, 1.0]}
    searches = [GridSearchCV(pipeline, grid, cv=2, n_jobs=n, error_score="raise").fit(TEXTS, LABELS) for n in (1, 2)]
    scores = [search.cv_results_["mean_test_score"] for search in searches]
    np.testing.assert_array_equal(*scores)
    search = searches[0]
    assert len(search.cv_results_["params"]) == 8
    # The estimator that was refitted has the parameters that were chosen, and the pipeline is as it was.
    best = search.best_estimator_
    assert best["embed"].get_params()["dimension"] == search.best_params_["embed__dimension"]
    assert best["classify"].coef_.shape[1] == (search.best_params_["embed__dimension"] or 32)
    assert pipeline["embed"].get_params()["dimension"] is None
    with pytest.raises(TypeError, match=r"Embedder\(\) has no argument 'size': it takes model, "):
        pipeline.set_params(embed__size=3)


def test_tables(made: Made) -> None:
    pandas = pytest.importorskip("pandas")
    embedder = Embedder(made("wordpiece", ""))
    table = pandas.DataFrame({"text": TEXTS, "number": LABELS})
    for column in ("text", ["text"]):
        features = ColumnTransformer([("embedding", embedder, column)], remainder="passthrough")
        np.testing.assert_allclose(features.fit_transform(table)[:, :32], embedder.embed(TEXTS), atol=1e-6)
        assert features.get_feature_names_out()[[0, 31, 32]].tolist() == [
            "embedding__embedding0",
            "embedding__embedding31",
            "remainder__number",
        ]
    assert embedder.fit(table[["text"]]).transform(np.array(TEXTS)[:, None]).shape == (12, 32)
    with pytest.raises(InputError, match="X has 2 columns, but transform takes a single column"):
        embedder.transform(table)
    with pytest.raises(InputError, match=r"trained on pairs of texts; for texts and labels use bertie\.Classifier"):
        embedder.fit(TEXTS, LABELS)


def test_tables_as_output(made: Made) -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    embedder = Embedder(made("wordpiece", ""))
    vectors = embedder.embed(TEXTS)
    series = pandas.Series(TEXTS, index=range(100, 112))
    assert isinstance(embedder.transform(series), np.ndarray)
    with sklearn.config_context(transform_output="pandas"):
        assert list(embedder.transform(TEXTS).index) == list(range(12))
    copied = clone(embedder.set_output(transform="pandas"))
    for table in (embedder.transform(series), copied.fit_transform(series)):
        assert (list(table.index), table.columns[31]) == (list(range(100, 112)), "embedding31")
        np.testing.assert_allclose(table.to_numpy(), vectors, atol=1e-6)
    assert embedder.set_output().set_output(transform="polars").transform(TEXTS).shape == (12, 32)
    assert isinstance(embedder.transform(TEXTS), polars.DataFrame)
    assert isinstance(embedder.set_output(transform="default").transform(TEXTS), np.ndarray)
    frame = pandas.DataFrame({"text": TEXTS, "number": LABELS})
    features = ColumnTransformer([("words", embedder, "text")], remainder="passthrough").set_output(transform="pandas")
    assert features.fit_transform(frame).columns[[0, 32]].tolist() == ["words__embedding0", "remainder__number"]
    assert make_pipeline(copied, LogisticRegression()).fit(TEXTS, LABELS).predict(TEXTS).shape == (12,)
    with pytest.raises(InputError, match="transform='arrow' must be 'default', 'pandas', 'polars' or None"):
        embedder.set_output(transform="arrow")  # type: ignore[arg-type]
