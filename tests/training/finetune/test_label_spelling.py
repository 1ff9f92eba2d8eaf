"""Labels that differ by spaces, case or type are noticed and said, for data of every form."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from bertie.errors import BertieWarning, InputError
from bertie.training.finetune.data import LabelledDataset, read_dataset


def read(labels: list[Any], **options: Any) -> tuple[LabelledDataset, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = read_dataset("classify", [f"text {i}" for i in range(len(labels))], labels, **options)
    assert all(issubclass(warning.category, BertieWarning) for warning in caught)
    return data, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["pos", "pos ", "neg"], "'pos' (1 times) and 'pos ' (1 times)"),
        (["Pos", "pos", "pos", "x"], "'Pos' (1 times) and 'pos' (2 times)"),
        (["1.0", "1", "0"], "'1.0' (1 times) and '1' (1 times)"),
        ([True, "true", "x"], "'True' (1 times) and 'true' (1 times)"),
        (["a\u00a0b", "a b", "c"], "differ only in spaces"),
        ([["x", "y"], ["X"], ["y"]], "'x' (1 times) and 'X' (1 times)"),
    ],
)
def test_similar_labels(labels: list[Any], said: str) -> None:
    data, messages = read(labels)
    assert len(messages) == 1
    assert said in messages[0]
    assert len(data.labels) == 3  # they stay different


@pytest.mark.parametrize("labels", [[1, "1", 0], ["1", 1, "0"], [0, 1.0, "1"], ["True", True, "x"]])
def test_labels_of_two_types(labels: list[Any]) -> None:
    data, messages = read(labels)
    assert len(data.labels) == 2
    assert len(messages) == 1
    assert "labels of two types that are treated as equal" in messages[0]


@pytest.mark.parametrize("labels", [[0, 1, 2], ["a", "b"], [1.0, 0.0, 1], ["good news", "bad news"], [True, False]])
def test_usual_labels(labels: list[Any]) -> None:
    assert read(labels)[1] == []


def test_a_label_of_the_model_with_another_spelling() -> None:
    with pytest.raises(InputError, match=r"label 'Pos ' in y is not one of 'neg', 'pos'; 'pos' is spelled differently"):
        read(["neg", "Pos "], known=("neg", "pos"), training=False)


def test_tags_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"tokens": ["a", "b"], "tags": ["B-PER", "b-per"]}\n')
    with pytest.warns(BertieWarning, match=r"in\.jsonl has different labels .* 'B-PER' \(1 times\) and 'b-per' \(1"):
        read_dataset("tag", tmp_path / "in.jsonl")
