"""`EmbeddingTransformer` in scikit-learn's pipelines, searches and column transformers."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from bertie import Embedder
from bertie.errors import InputError

sklearn = pytest.importorskip("sklearn")
from sklearn.base import clone  # noqa: E402
from sklearn.compose import ColumnTransformer  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline  # noqa: E402

from bertie.integrations.sklearn import EmbeddingTransformer  # noqa: E402

TEXTS = ["A delight.", "Dull and long.", "Loved it!", "A waste of time."] * 2
LABELS = ["good", "bad"] * 4


def test_the_embeddings_are_those_of_the_embedder(embedder: Embedder) -> None:
    expected = embedder.embed(TEXTS)
    transformer = EmbeddingTransformer()
    np.testing.assert_array_equal(transformer.transform(TEXTS), expected)  # without fit
    np.testing.assert_array_equal(transformer.fit_transform(TEXTS, LABELS), expected)
    np.testing.assert_array_equal(embedder.transform(TEXTS), expected)
    np.testing.assert_array_equal(transformer.fit(TEXTS, LABELS).transform(iter(TEXTS)), expected)
    query = EmbeddingTransformer(prompt="query: ", normalize=True, dimension=32)
    same = Embedder.load(normalize=True, dimension=32).embed(TEXTS, prompt="query: ")
    np.testing.assert_array_equal(query.fit_transform(np.array(TEXTS)[:, None]), same)
    np.testing.assert_array_equal(
        EmbeddingTransformer(precision="int8").transform(TEXTS), Embedder.load(precision="int8").embed(TEXTS)
    )


def test_pipelines_and_grid_search() -> None:
    pipeline = Pipeline([("embed", EmbeddingTransformer()), ("classify", LogisticRegression(C=10))])
    assert pipeline.fit(TEXTS, LABELS).predict(["What a joy."]).tolist() == ["good"]
    assert make_pipeline(EmbeddingTransformer()).fit(TEXTS, LABELS).transform(TEXTS).shape == (8, 384)  # the last step
    grid = {"embed__pooling": ["mean", "cls"], "embed__dimension": [None, 16], "embed__prompt": [None, "film: "]}
    searches = [GridSearchCV(pipeline, grid, cv=2, n_jobs=n, error_score="raise").fit(TEXTS, LABELS) for n in (1, 2)]
    np.testing.assert_array_equal(*(search.cv_results_["mean_test_score"] for search in searches))
    best = searches[0].best_estimator_["embed"]
    assert {f"embed__{name}": getattr(best, name) for name in ("pooling", "dimension", "prompt")} == (
        searches[0].best_params_
    )
    union = FeatureUnion([("a", EmbeddingTransformer(dimension=4)), ("b", EmbeddingTransformer(dimension=8))])
    assert union.fit_transform(TEXTS).shape == (8, 12)
    assert "EmbeddingTransformer" in pipeline._repr_html_()


def test_embeddings_are_cached_by_a_pipeline_with_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline([("embed", EmbeddingTransformer()), ("classify", LogisticRegression())], memory=str(tmp_path))
    pipeline.fit(TEXTS, LABELS)
    monkeypatch.setattr(Embedder, "embed", None)
    pipeline.set_params(classify__C=10).fit(TEXTS, LABELS)


def test_parameters(embedder: Embedder) -> None:
    transformer = EmbeddingTransformer(dimension=8)
    assert transformer.transform(TEXTS).shape == (8, 8)
    assert transformer.set_params(dimension=16).transform(TEXTS).shape == (8, 16)  # loaded again
    loaded = transformer.embedder_
    assert transformer.set_params(prompt="query: ").fit(TEXTS).embedder_ is loaded
    copied = clone(transformer)
    assert copied.get_params() == transformer.get_params()
    assert not hasattr(copied, "embedder_")
    restored = pickle.loads(pickle.dumps(transformer))
    np.testing.assert_array_equal(restored.transform(TEXTS), transformer.transform(TEXTS))
    assert repr(EmbeddingTransformer(pooling="cls")) == "EmbeddingTransformer(pooling='cls')"
    for model in (embedder, embedder.checkpoint):
        with pytest.raises(InputError, match=r"model must be a folder, a hub id or None, not .*; save it"):
            EmbeddingTransformer(model).fit(TEXTS)  # type: ignore[arg-type]


def test_tables(embedder: Embedder) -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    pyarrow = pytest.importorskip("pyarrow")
    columns = {"review": TEXTS, "stars": [5, 1, 4, 2] * 2}
    expected = embedder.embed(TEXTS)
    transformer = EmbeddingTransformer(column="review")
    for table in (columns, pandas.DataFrame(columns), polars.DataFrame(columns), pyarrow.table(columns)):
        np.testing.assert_array_equal(transformer.fit_transform(table), expected)
        with pytest.raises(InputError, match="X has several columns; select the text column, as in column='review'"):
            EmbeddingTransformer().fit(table)
        with pytest.raises(InputError, match=r"X has no column 'reviews'; did you mean 'review'\?"):
            EmbeddingTransformer(column="reviews").transform(table)
        with pytest.raises(InputError, match="X has no column 'text'; there are 'review', 'stars'"):
            EmbeddingTransformer(column="text").transform(table)
        with pytest.raises(InputError, match="X has no column 0; there are 'review', 'stars'"):
            EmbeddingTransformer(column=0).transform(table)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"EmbeddingTransformer\(\) has no argument 'pool': it takes model, column"):
        EmbeddingTransformer(pool="cls")  # type: ignore[call-arg]
    table = pandas.DataFrame(columns, index=range(100, 108))
    np.testing.assert_array_equal(EmbeddingTransformer().transform(table[["review"]]), expected)
    features = ColumnTransformer([("embed", EmbeddingTransformer(), "review")], remainder="passthrough")
    assert features.fit_transform(table).shape == (8, 385)
    assert features.get_feature_names_out()[[0, 384]].tolist() == ["embed__embedding0", "remainder__stars"]
    output = transformer.set_output(transform="pandas").transform(table)
    assert (list(output.index), output.columns[383]) == (list(range(100, 108)), "embedding383")
    assert isinstance(transformer.set_output(transform="polars").transform(table), polars.DataFrame)
    with pytest.raises(InputError, match="column='review', but X is not a table: list"):
        transformer.transform(TEXTS)
    with pytest.raises(InputError, match="transform takes a list of texts, not str; wrap a single one in a list"):
        EmbeddingTransformer().transform("A single text.")
