"""The table of errors, of every kind of data."""

from __future__ import annotations

from typing import Any

import pytest

from bertie.evaluation.errors import MOST, error_table, wrong_rows
from bertie.evaluation.model_report import Evaluation
from bertie.evaluation.pages import Marked


def evaluation(gold: list[Any], predicted: list[Any], **values: Any) -> Evaluation:
    return Evaluation(scores={}, gold=gold, predicted=predicted, texts=["one two", "three", "four five"], **values)


def test_classification() -> None:
    """The most confident error first, with the probability of the gold label, and the words that decided."""
    test = evaluation(
        ["a", "b", "c"],
        ["b", "b", "a"],
        labels=["a", "b", "c"],
        confidences=[0.5, 0.9, 0.8],
        probabilities=[[0.3, 0.5, 0.2], [0.0, 0.9, 0.1], [0.8, 0.15, 0.05]],
    )
    table, count = error_table("classify", test, {0: [("one ", 0.2), ("two", -0.1)]})
    assert count == 2
    assert table is not None
    assert table.rows[0] == ["3", "c", "a", "0.800", "0.050", "four five"]
    assert table.rows[1] == ["1", "a", "b", "0.500", "0.300", Marked([("one ", 0.2), ("two", -0.1)])]


CASES: dict[str, tuple[list[Any], list[Any], list[list[str]]]] = {
    "multi_label": (
        [("a",), ("b", "c"), ()],
        [("a",), ("c", "d"), ("a",)],
        [["2", "c", "b", "d"], ["3", "–", "–", "a"]],
    ),
    "regress": (
        [1.0, 2.0, 3.0],
        [1.5, 2.0, 1.0],
        [["3", "3.000", "1.000", "-2.000"], ["1", "1.000", "1.500", "+0.500"]],
    ),
    "tag": (
        [["O", "B"], ["O"], ["B", "B"]],
        [["O", "O"], ["O"], ["O", "O"]],
        [["3", "2", "four: B → O; five: B → O"], ["1", "1", "two: B → O"]],
    ),
    "answer": ([["x y"], [], ["z"]], ["x", "", "w"], [["3", "z", "w", "0.00"], ["1", "x y", "x", "0.67"]]),
}


@pytest.mark.parametrize("kind", CASES)
def test_other_kinds(kind: str) -> None:
    gold, predicted, rows = CASES[kind]
    table, count = error_table(kind, evaluation(gold, predicted))
    assert count == 2
    assert table is not None
    assert [row[:-1] for row in table.rows] == rows


def test_long_lists_and_none() -> None:
    many = Evaluation(scores={}, gold=["a"] * 500, predicted=["b"] * 500, labels=["a", "b"], texts=["x " * 400] * 500)
    table, count = error_table("classify", many)
    assert count == 500
    assert table is not None
    assert len(table.rows) == MOST
    assert len(str(table.rows[0][-1])) == 300
    assert error_table("classify", Evaluation(scores={}, gold=["a"], predicted=["a"], labels=["a"], texts=["x"])) == (
        None,
        0,
    )
    assert not len(wrong_rows("rerank", evaluation([1.0, 0.0, 0.0], [0.1, 0.2, 0.3])))
