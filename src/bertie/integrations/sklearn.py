"""scikit-learn: embeddings as a step of a pipeline.

>>> from sklearn.linear_model import LogisticRegression
>>> from sklearn.pipeline import make_pipeline
>>> from bertie.integrations.sklearn import EmbeddingTransformer
>>> texts, labels = ["A delight.", "Dull.", "Loved it!", "A waste of time."] * 2, ["good", "bad"] * 4
>>> make_pipeline(EmbeddingTransformer(), LogisticRegression(C=10)).fit(texts, labels).predict(["What a joy."])
array(['good'], dtype='<U4')
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from bertie.arguments import explain_arguments
from bertie.config import Precision
from bertie.errors import InputError, MissingPackageError
from bertie.pipeline.pipeline import Overflow
from bertie.tasks.embed import Embedder
from bertie.tasks.table_output import single_column

try:
    from sklearn.base import BaseEstimator, TransformerMixin
except ModuleNotFoundError as error:
    raise MissingPackageError("bertie.integrations.sklearn needs scikit-learn: pip install scikit-learn") from error

_PER_CALL = ("column", "prompt", "prompt_name")  # parameters that do not require reloading the model


class EmbeddingTransformer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A scikit-learn transformer that embeds texts with `Embedder.embed`.

    `model` is a folder, a hub id or a built-in name. `fit` trains nothing, and `transform` works without it. X is a
    list, array or column of texts, or a table whose text column is `column`. `prompt` is prepended to each text;
    `prompt_name` selects one of the checkpoint's prompts instead. All others are arguments of `Embedder.load`.

    >>> EmbeddingTransformer(dimension=64).fit_transform(["A cat sat on the mat.", "Stocks fell."]).shape
    (2, 64)
    >>> import pandas as pd
    >>> table = pd.DataFrame({"review": ["A delight.", "Dull."], "stars": [5, 1]})
    >>> EmbeddingTransformer(column="review").set_output(transform="pandas").fit_transform(table).shape
    (2, 384)
    """

    @explain_arguments
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        column: str | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        pooling: Literal["cls", "mean", "max", "last", "weighted-mean"] | None = None,
        normalize: bool | None = None,
        dimension: int | None = None,
        overflow: Overflow = "window",
        precision: Precision = "fp32",
        device: str | None = None,
    ) -> None:
        self.model = model
        self.column = column
        self.prompt, self.prompt_name = prompt, prompt_name
        self.pooling, self.normalize, self.dimension = pooling, normalize, dimension
        self.overflow, self.precision, self.device = overflow, precision, device

    def fit(self, X: Any, y: Any = None) -> Self:
        """Load the model, and check that X has the text column. Nothing is trained."""
        self._texts(X)
        self._embedder()
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Embed the texts into an array (N, dimension), or a table after `set_output`."""
        return self._embedder().embed(self._texts(X), prompt=self.prompt, prompt_name=self.prompt_name)

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """(dimension,) the column names: embedding0, embedding1, …"""
        return self._embedder().get_feature_names_out()

    def _embedder(self) -> Embedder:
        """The embedder, which is reloaded when the parameters change."""
        if not isinstance(self.model, str | Path | None):
            raise InputError(
                f"model must be a folder, a hub id or None, not {type(self.model).__name__}, which clone() "
                'would not copy as it is; save it, and pass the folder: embedder.save("my-embedder")'
            )
        parameters = {name: value for name, value in self.get_params().items() if name not in _PER_CALL}
        if self.__dict__.get("_loaded") != parameters:
            options = {name: value for name, value in parameters.items() if name != "model"}
            self.embedder_, self._loaded = Embedder.load(self.model, **options), parameters
        return self.embedder_

    def _texts(self, X: Any) -> Any:
        """The texts in X."""
        names = _column_names(X)
        if self.column is None:
            if names is not None and len(names) > 1:
                raise InputError(f"X has several columns; select the text column, as in column={names[0]!r}")
            return single_column(X) if names is None else X[names[0]]
        if names is None:
            raise InputError(f"column={self.column!r}, but X is not a table: {type(X).__name__}")
        if self.column not in names:
            close = get_close_matches(str(self.column), [str(name) for name in names], 1)
            advice = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(map(repr, names))}"
            raise InputError(f"X has no column {self.column!r}; {advice}")
        return X[self.column]

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array, tags.input_tags.one_d_array = True, False, True
        tags.requires_fit = False
        return tags


def _column_names(X: Any) -> list[Any] | None:
    """The column names of a table (pandas, polars, pyarrow, datasets or a dict); None if X is not a table."""
    if isinstance(X, Mapping):
        return list(X)
    names = getattr(X, "column_names", None) or getattr(X, "columns", None)
    return None if names is None else list(names)
