"""Columns of tables are lists of texts as they are; tables and holes are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas
import polars
import pytest

from bertie import Embedder
from bertie.errors import InputError
from tests.checkpoints.tiny_sentence import save_bert

TEXTS = ["the cat", "a dog sat on the mat", ""]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return Embedder.load(save_bert(tmp_path_factory.mktemp("bert")))


@pytest.mark.parametrize(
    "column",
    [
        pandas.DataFrame({"text": TEXTS})["text"],
        polars.DataFrame({"text": TEXTS})["text"],
        np.array(TEXTS),
        iter(TEXTS),
    ],
    ids=["pandas", "polars", "numpy", "iterator"],
)
def test_columns(embedder: Embedder, column: Any) -> None:
    np.testing.assert_array_equal(embedder.embed(column), embedder.embed(TEXTS))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (pandas.Series(["dog", None]), "text 1 must be a str"),
        (polars.Series(["dog", None]), "text 1 must be a str"),
        (pandas.DataFrame({"text": TEXTS}), "not DataFrame"),
        (polars.DataFrame({"text": TEXTS}), "not DataFrame"),
    ],
    ids=["pandas hole", "polars hole", "pandas table", "polars table"],
)
def test_refusals(embedder: Embedder, wrong: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        embedder.embed(wrong)
