"""Data for embedders: every shape of it, and every error with its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pytest

from bertie.errors import InputError
from bertie.training.finetune.data import Example, read_dataset, split

PAIR = {"anchor": ["a cat", "a dog"], "positive": ["the cat", "the dog"]}


@pytest.mark.parametrize(
    ("table", "texts", "targets", "inputs"),
    [
        (PAIR, [("a cat", "the cat"), ("a dog", "the dog")], [None, None], "pairs"),
        (PAIR | {"negative": ["x", "y"]}, [("a cat", "the cat", "x"), ("a dog", "the dog", "y")], None, "pairs"),
        (
            PAIR | {"negative_10": ["q", "q"], "negative_2": ["x", "y"]},
            [("a cat", "the cat", "x", "q"), ("a dog", "the dog", "y", "q")],
            None,
            "pairs",
        ),
        (PAIR | {"negatives": [["x", "z"], '["y", "z"]']}, [("a cat", "the cat", "x", "z"), None], None, "pairs"),
        ({"query": ["a", "b"], "passage": ["c", "d"]}, [("a", "c"), ("b", "d")], None, "pairs"),
        ({"query": ["a", "b"], "passage": ["c", "d"], "label": [1, 0]}, None, [1.0, 0.0], "scores"),
        ({"query": ["a", "b"], "passage": ["c", "d"], "negative": ["e", "f"], "label": [1, 1]}, None, None, "pairs"),
        ({"text_a": ["a", "b"], "text_b": ["c", "d"], "score": ["4.5", 2]}, None, [4.5, 2.0], "scores"),
        ({"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": [1, "no"]}, None, ["1", "no"], "classes"),
        ({"sentence1": ["a", "b"], "sentence2": ["c", "d"]}, [("a", "c"), ("b", "d")], None, "pairs"),
        (
            {"query": ["a", "b"], "passages": [["c", "d"], '["e", "f"]'], "scores": [[1, 0.5], "[2, -3]"]},
            [("a", "c", "d"), ("b", "e", "f")],
            [(1.0, 0.5), (2.0, -3.0)],
            "lists",
        ),
    ],
)
def test_embedding_tables(table: Any, texts: Any, targets: Any, inputs: str, tmp_path: Path) -> None:
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    forms = [table, rows, file, pandas.DataFrame(table)]
    if all(len({type(value) for value in column}) == 1 for column in table.values()):
        forms.append(polars.DataFrame(table))
    for form in forms:
        data = read_dataset("embed", form)
        assert data.inputs == inputs
        if texts is not None:
            assert [item.texts for item in data.examples][: len(texts) - texts.count(None)] == [t for t in texts if t]
        if targets is not None:
            assert [item.target for item in data.examples] == targets
        assert len({len(item.texts) for item in data.examples}) == 1


def test_embedding_lists() -> None:
    pairs = [("a", "b"), ("c", "d")]
    assert read_dataset("embed", pairs).inputs == "pairs"
    assert read_dataset("embed", [("a", "b", "c")]).examples[0] == Example(("a", "b", "c"), None, 1)
    assert read_dataset("embed", pairs, np.array([0.5, 1.0])).inputs == "scores"
    assert read_dataset("embed", pairs, [1, 0]).inputs == "classes"
    assert read_dataset("embed", pairs, [1, 0.5]).examples[0].target == 1.0
    assert read_dataset("embed", [("q", ["a", "b"])], [[1, 0]]).examples[0].texts == ("q", "a", "b")
    columns = {"anchor": "q", "positive": "p", "negative": "n"}
    renamed = read_dataset("embed", {"q": ["a"], "p": ["b"], "n": ["c"]}, columns=columns)
    assert renamed.examples[0].texts == ("a", "b", "c")
    held = split(read_dataset("embed", [("q", str(i)) for i in range(5)] + [("r", "x")]), 0.3, 0)
    assert not {item.texts[0] for item in held[0].examples} & {item.texts[0] for item in held[1].examples}


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        ([("a", "b"), ("c",)], None, "row 2: 1 texts; give 2, the same in each row"),
        (["a", "b"], None, "give two texts or more, in a tuple"),
        ([("a", "b"), ("a", "b", "c")], None, "row 2: 3 texts; give 2"),
        ([("a", "b", "c")], [1.0], "3 texts with one score; give two"),
        ([("a", "")], None, "no text in text 2 of X"),
        ([("a", "b", "c")], [[1.0]], "2 passages and 1 scores"),
        ({"anchor": ["a"], "other": ["b"]}, None, "has no column 'anchor' \\+ 'positive' or"),
        ([("a", "b"), ("c", "d")], [1.0, 1.0], "has the label 1.0 in each"),
        ([("a", "b")], [float("nan")], "no score in y"),
        (PAIR | {"negatives": [["x", "z"], ["y"]]}, None, "row 2: 3 texts; give 4"),
    ],
)
def test_invalid_embedding_data(X: Any, y: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_dataset("embed", X, y)


def test_files_of_different_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"anchor": "a", "positive": "b"}\n')
    (tmp_path / "b.jsonl").write_text('{"text_a": "a", "text_b": "b", "score": 1}\n')
    with pytest.raises(InputError, match="scores here and pairs before; all data must be of one kind"):
        read_dataset("embed", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
