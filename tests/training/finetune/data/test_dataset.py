"""Every shape of labelled data, every error with its row, and what splits and fingerprints promise."""

from __future__ import annotations

import csv
import io
import json
import lzma
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from bertie.errors import BertieWarning, InputError, NotFoundError
from bertie.training.finetune.data import Example, Kind, LabelledDataset, fingerprint, read_dataset, split

Rows = list[dict[str, Any]]
CONTEXT = "Bertie was built in Bern. Bern is a town."

# Rows of each kind with the texts, the target, and the words or answers that each must become.
ROWS: dict[str, tuple[Kind, Rows, list[tuple[Any, ...]]]] = {
    "classify": (
        "classify",
        [{"text": "so, good", "label": "good"}, {"text": "bad\nü", "label": "bad"}],
        [(("so, good",), "good"), (("bad\nü",), "bad")],
    ),
    "classify ints": (
        "classify",
        [{"text": "a", "label": 1}, {"text": "b", "label": 0}, {"text": "c", "label": 10}],
        [(("a",), "1"), (("b",), "0"), (("c",), "10")],
    ),
    "classify pairs": (
        "classify",
        [{"text_a": "a", "text_b": "b", "label": "x"}, {"text_a": "a", "text_b": "c", "label": "y"}],
        [(("a", "b"), "x"), (("a", "c"), "y")],
    ),
    "multi": (
        "classify",
        [{"text": "a", "labels": ["sad", "angry"]}, {"text": "b", "labels": []}, {"text": "c", "labels": ["glad"]}],
        [(("a",), ("sad", "angry")), (("b",), ()), (("c",), ("glad",))],
    ),
    "regress": (
        "regress",
        [{"text": "a", "score": 0.25}, {"text": "b", "score": -3.0}],
        [(("a",), 0.25), (("b",), -3.0)],
    ),
    "regress pairs": (
        "regress",
        [{"sentence1": "a", "sentence2": "b", "label": 5}, {"sentence1": "c", "sentence2": "d", "label": 1}],
        [(("a", "b"), 5.0), (("c", "d"), 1.0)],
    ),
    "tag": (
        "tag",
        [
            {"tokens": ["Bern", "is", "old"], "tags": ["B-LOC", "O", "O"]},
            {"tokens": ["ü😀", '"b"'], "tags": ["O", "B-PER"]},
        ],
        [
            (("Bern is old",), ("B-LOC", "O", "O"), ((0, 4), (5, 7), (8, 11))),
            (('ü😀 "b"',), ("O", "B-PER"), ((0, 2), (3, 6))),
        ],
    ),
    "answer": (
        "answer",
        [
            {"question": "where?", "context": CONTEXT, "answers": {"text": ["Bern"], "answer_start": [20]}},
            {"question": "who?", "context": CONTEXT, "answers": {"text": [], "answer_start": []}},
        ],
        [(("where?", CONTEXT), ((20, 24),), (), ("Bern",)), (("who?", CONTEXT), (), (), ())],
    ),
    "answer list": (
        "answer",
        [
            {"question": "where?", "context": CONTEXT, "answers": [{"text": "Bern", "answer_start": 26}] * 2},
            {"question": "who?", "context": CONTEXT, "answers": []},
        ],
        [(("where?", CONTEXT), ((26, 30),) * 2, (), ("Bern",) * 2), (("who?", CONTEXT), (), (), ())],
    ),
    "rerank": (
        "rerank",
        [{"query": "q", "passage": "p", "label": 1}, {"query": "q", "passage": "r", "label": 0}],
        [(("q", "p"), 1.0), (("q", "r"), 0.0)],
    ),
}


def shown(data: LabelledDataset) -> list[tuple[Any, ...]]:
    return [(one.texts, one.target, one.words, one.answers) for one in data.examples]


def filled(expected: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(*one, *[()] * (4 - len(one))) for one in expected]


def by_column(rows: Rows) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


def cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def as_csv(rows: Rows, delimiter: str = ",") -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows({key: cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def as_jsonl(rows: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def in_file(folder: Path, name: str, data: str | bytes) -> Path:
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder / name


def in_parquet(folder: Path, rows: Rows) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), folder / "in.parquet")
    return folder / "in.parquet"


def from_datasets(rows: Rows) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


SHAPES: dict[str, Callable[[Rows, Path], Any]] = {
    "jsonl": lambda rows, folder: in_file(folder, "in.jsonl", as_jsonl(rows)),
    "jsonl.xz as str": lambda rows, folder: str(in_file(folder, "in.jsonl.xz", lzma.compress(as_jsonl(rows).encode()))),
    "csv": lambda rows, folder: in_file(folder, "in.csv", as_csv(rows)),
    "tsv": lambda rows, folder: in_file(folder, "in.tsv", as_csv(rows, "\t")),
    "parquet": lambda rows, folder: in_parquet(folder, rows),
    "two files": lambda rows, folder: [
        in_file(folder, "1.jsonl", as_jsonl(rows[:1])),
        in_file(folder, "2.csv", as_csv(rows[1:])),
    ],
    "pandas": lambda rows, _: pandas.DataFrame(rows),
    "pandas of parquet": lambda rows, folder: pandas.read_parquet(in_parquet(folder, rows)),
    "polars": lambda rows, _: polars.DataFrame(rows),
    "pyarrow": lambda rows, _: pa.Table.from_pylist(rows),
    "dict": lambda rows, _: by_column(rows),
    "dict of arrays": lambda rows, _: {
        key: pandas.Series(column).to_numpy() for key, column in by_column(rows).items()
    },
    "rows": lambda rows, _: rows,
    "iterator of rows": lambda rows, _: iter(rows),
    "datasets": lambda rows, _: from_datasets(rows),
    "datasets as numpy": lambda rows, _: from_datasets(rows).with_format("numpy"),
    "datasets one by one": lambda rows, _: from_datasets(rows).to_iterable_dataset(),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("what", ROWS)
def test_tables(tmp_path: Path, what: str, shape: str) -> None:
    kind, rows, expected = ROWS[what]
    data = read_dataset(kind, SHAPES[shape](rows, tmp_path))
    assert shown(data) == filled(expected)
    assert [one.row for one in data.examples] == list(range(1, len(rows) + 1))
    assert data.kind == kind
    assert data.multi_label == (what == "multi")


def pairs(rows: Rows) -> list[Any]:
    items = [tuple(row.values())[:-1] for row in rows]
    return [item[0] if len(item) == 1 else item for item in items]


LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda items: items,
    "tuple": tuple,
    "iterator": iter,
    "pandas": pandas.Series,
    "polars": lambda items: polars.Series([list(one) if isinstance(one, tuple) else one for one in items]),
    "numpy": lambda items: pandas.Series(items).to_numpy(),
}


@pytest.mark.parametrize("shape", LISTS)
@pytest.mark.parametrize("what", ROWS)
def test_lists(what: str, shape: str) -> None:
    kind, rows, expected = ROWS[what]
    y = [list(row.values())[-1] for row in rows]
    data = read_dataset(kind, LISTS[shape](pairs(rows)), LISTS[shape](y))
    assert shown(data) == filled(expected)
    assert data.name == "the training data"


def test_columns_of_datasets() -> None:
    table = from_datasets(ROWS["classify"][1])
    assert shown(read_dataset("classify", table["text"], table["label"])) == filled(ROWS["classify"][2])


def test_arrays_of_pairs() -> None:
    data = read_dataset("rerank", np.array([["q", "p"], ["q", "r"]]), np.array([1, 0]))
    assert shown(data) == filled(ROWS["rerank"][2])


# --- columns ---


@pytest.mark.parametrize(
    "names", ["text", "text_a text_b", "premise hypothesis", "sentence1 sentence2", "question1 question2", "sentence"]
)
@pytest.mark.parametrize("kind", ["classify", "regress"])
def test_texts_are_found_by_name(kind: Kind, names: str) -> None:
    texts = {name: [f"{name} {i}" for i in range(2)] for name in names.split()}
    data = read_dataset(kind, {"id": [1, 2], "label": [0, 1], **texts})
    assert [one.texts for one in data.examples] == [tuple(f"{name} {i}" for name in names.split()) for i in range(2)]


def test_question_and_sentence_columns() -> None:
    data = read_dataset("classify", {"sentence": ["s", "t"], "question": ["q", "r"], "label": [0, 1]})
    assert [one.texts for one in data.examples] == [("q", "s"), ("r", "t")]


@pytest.mark.parametrize("name", ["passage", "document", "text"])
@pytest.mark.parametrize("target", ["label", "score"])
def test_passages_are_found_by_name(name: str, target: str) -> None:
    data = read_dataset("rerank", {"query": ["q", "q"], name: ["a", "b"], target: [0.5, True]})
    assert [(one.texts, one.target) for one in data.examples] == [(("q", "a"), 0.5), (("q", "b"), 1.0)]


def test_columns_are_named() -> None:
    table = {"text": ["no", "no"], "a": ["a", "b"], "b": ["c", "d"], "stars": [1, 2], "label": ["no", "no"]}
    data = read_dataset("classify", table, columns={"text": "a", "label": "stars"})
    assert [(one.texts, one.target) for one in data.examples] == [(("a",), "1"), (("b",), "2")]
    data = read_dataset("regress", table, columns={"text_a": "a", "text_b": "b", "score": "stars"})
    assert [(one.texts, one.target) for one in data.examples] == [(("a", "c"), 1.0), (("b", "d"), 2.0)]
    data = read_dataset("classify", {"text": ["a", "b"], "topics": ["x|y", "x"]}, columns={"labels": "topics"})
    assert [one.target for one in data.examples] == [("x", "y"), ("x",)]


def test_score_before_label_and_tags_of_the_hub() -> None:
    assert read_dataset("regress", {"text": ["a"], "label": [9], "score": [1]}).examples[0].target == 1.0
    assert read_dataset("tag", {"tokens": [["a", "b"]], "ner_tags": [["O", "B"]]}).examples[0].target == ("O", "B")


@pytest.mark.parametrize(
    ("kind", "table", "columns", "message"),
    [
        ("classify", {"review": ["a"], "label": [1]}, None, r"has no column 'text' or 'text_a' \+ 'text_b' or"),
        ("classify", {"review": ["a"], "label": [1]}, None, "only 'review', 'label'; name the right one with"),
        ("classify", {"text": ["a"], "stars": [1]}, None, r"no column 'label' or 'labels', only .* columns={'label': "),
        ("classify", {"text_a": ["a"], "label": [1]}, None, "has no column 'text'"),
        ("classify", {"text": ["a"], "label": [1]}, {"text": "body"}, "the data has no column 'body', only 'text'"),
        ("classify", {"text": ["a"], "label": [1]}, {"txt": "text"}, "names 'txt', which classify does not read; it"),
        ("tag", {"tokens": ["a"], "tags": ["O"]}, {"label": "tags"}, "it reads 'tokens', 'tags', 'ner_tags'"),
        ("classify", {"text": ["a"], "b": ["c"], "label": [1]}, {"text_a": "b"}, "names 'text_a' besides 'text'"),
        ("classify", {"text": ["a", "b"], "label": [1]}, None, "different lengths: 2 in 'text', 1 in 'label'"),
        ("classify", {"text": "a", "label": "b"}, None, "column 'text' is str; it must be a list"),
    ],
)
def test_missing_columns(kind: Kind, table: Any, columns: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_dataset(kind, table, columns=columns, name="the data")


def test_inputs_that_are_not_tables() -> None:
    double = pandas.DataFrame([["a", "b", 1]], columns=["text", "text", "label"])
    with pytest.raises(InputError, match="two columns of the same name: text, text, label"):
        read_dataset("classify", double)
    with pytest.raises(InputError, match="X is int; it must be a list"):
        read_dataset("classify", 3)
    with pytest.raises(InputError, match="X is LazyFrame; it must be a list"):
        read_dataset("classify", polars.LazyFrame({"text": ["a"]}))
    with pytest.raises(InputError, match="kind='sort' must be one of classify, regress, tag, answer, rerank"):
        read_dataset("sort", [])  # type: ignore[arg-type]
    parts = pytest.importorskip("datasets").DatasetDict({"train": from_datasets(ROWS["classify"][1])})
    with pytest.raises(InputError, match=r"DatasetDict of the splits train; pass one of them: X\['train'\]"):
        read_dataset("classify", parts)


# --- X and y ---


def test_labels_are_missing() -> None:
    with pytest.raises(
        InputError, match=r"the training data has no labels: give them as y, or .* 'text' or .* 'label'"
    ):
        read_dataset("classify", ["a", "b"])
    with pytest.raises(InputError, match="has no labels"):
        read_dataset("classify", pandas.Series(["a", "b"]))


def test_x_and_y_of_different_lengths() -> None:
    with pytest.raises(InputError, match="X has 3 texts and y 2 labels"):
        read_dataset("classify", ["a", "b", "c"], [1, 0])
    with pytest.raises(InputError, match=r"y has the shape \(2, 3\); give one label per text"):
        read_dataset("classify", ["a", "b"], np.eye(2, 3))
    with pytest.raises(InputError, match=r"y has the shape \(2, 1\)"):
        read_dataset("classify", ["a", "b"], pandas.DataFrame({"label": [1, 0]}))
    with pytest.raises(InputError, match="y is str; it must be a list"):
        read_dataset("classify", ["a", "b"], "ab")
    with pytest.raises(InputError, match="y is for a list of texts, and X is a table; put the labels in its"):
        read_dataset("classify", {"text": ["a", "b"]}, [1, 0])
    with pytest.raises(InputError, match=r"columns={'text': 'x'} needs a table"):
        read_dataset("classify", ["a", "b"], [1, 0], columns={"text": "x"})


# --- labels ---


@pytest.mark.parametrize(
    ("given", "labels", "original"),
    [
        (["b", "a"], ("a", "b"), {"a": "a", "b": "b"}),
        ([10, 9, -1], ("-1", "9", "10"), {"-1": -1, "9": 9, "10": 10}),
        (["10", "9"], ("9", "10"), {"9": "9", "10": "10"}),
        ([True, False], ("False", "True"), {"False": False, "True": True}),
        (np.array([1, 0], np.int8), ("0", "1"), {"0": 0, "1": 1}),
        ([np.int64(1), np.bool_(True), np.str_("x")], ("1", "True", "x"), {"1": 1, "True": True, "x": "x"}),
        ([1.0, np.float32(2)], ("1", "2"), {"1": 1, "2": 2}),
        (pandas.Series(["b", "a"], dtype="category"), ("a", "b"), {"a": "a", "b": "b"}),
        (pandas.Series([3, 2], dtype="Int64"), ("2", "3"), {"2": 2, "3": 3}),
        (["O", "B", "A"], ("O", "A", "B"), {"O": "O", "A": "A", "B": "B"}),
    ],
)
def test_labels(given: Any, labels: tuple[str, ...], original: dict[str, Any]) -> None:
    data = read_dataset("classify", [f"text {i}" for i in range(len(given))], given)
    assert data.labels == labels
    assert data.original == original
    assert {key: type(value) for key, value in data.original.items()} == {k: type(v) for k, v in original.items()}


def test_multi_label_cells(tmp_path: Path) -> None:
    file = in_file(tmp_path, "in.csv", 'text,labels\na,x | y\nb,[]\nc,y\nd,"[""x"", 3]"\n')
    data = read_dataset("classify", file)
    assert [one.target for one in data.examples] == [("x", "y"), (), ("y",), ("x", "3")]
    assert data.multi_label
    assert data.labels == ("3", "x", "y")
    # In a column of another name it is a label like any other.
    assert read_dataset("classify", ["a", "b"], ["x|y", "z"]).labels == ("x|y", "z")
    # A column `labels` of plain numbers has one a text.
    assert not read_dataset("classify", {"text": ["a", "b"], "labels": [0, 1]}).multi_label


def test_tags_come_with_o_first() -> None:
    data = read_dataset("tag", [["a", "b", "c"]], [["I-X", "O", "B-X"]])
    assert data.labels == ("O", "B-X", "I-X")
    assert read_dataset("tag", [["a", "b", "c"]], [[10, 9, 0]]).labels == ("0", "9", "10")


def test_words_and_tags_separated_by_spaces(tmp_path: Path) -> None:
    file = in_file(tmp_path, "in.tsv", "tokens\ttags\nBern is  old\tB-LOC O O\n")
    assert shown(read_dataset("tag", file)) == filled(
        [(("Bern is old",), ("B-LOC", "O", "O"), ((0, 4), (5, 7), (8, 11)))]
    )


def test_class_label_names() -> None:
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["neg", "pos"])
    features = datasets.Features(
        text=datasets.Value("string"),
        label=names,
        labels=datasets.Sequence(names),
        tokens=datasets.Sequence(datasets.Value("string")),
    )
    table = datasets.Dataset.from_list(
        [
            {"text": "a", "label": 1, "labels": [0, 1], "tokens": ["a", "b"]},
            {"text": "b", "label": 0, "labels": [], "tokens": ["c"]},
            {"text": "c", "label": -1, "labels": [1], "tokens": ["d"]},
        ],
        features=features,
    )
    for same in (table, table.to_iterable_dataset()):
        data = read_dataset("classify", same, columns={"labels": "labels"})
        assert [one.target for one in data.examples] == [("neg", "pos"), (), ("pos",)]
        assert data.labels == ("neg", "pos")
        assert data.original == {"neg": "neg", "pos": "pos"}
    assert [one.target for one in read_dataset("classify", table.select([0, 1])).examples] == ["pos", "neg"]
    assert read_dataset("tag", table.select([0]), columns={"tags": "labels"}).examples[0].target == ("neg", "pos")
    with pytest.raises(InputError, match="row 3: no label in column 'label'"):
        read_dataset("classify", table)


def test_known_labels_keep_their_order() -> None:
    data = read_dataset("classify", ["a"], ["x"], known=["y", "x", "z"], training=False)
    assert data.labels == ("y", "x", "z")
    assert data.original == {"x": "x"}


# --- answers ---


@pytest.mark.parametrize(
    ("answers", "target"),
    [
        ("Bern", ((20, 24),)),  # the first
        (["a town", "Bern"], ((34, 40), (20, 24))),
        ({"text": "Bern", "answer_start": 26}, ((26, 30),)),
        ({"text": ["Bern", "Bern"], "answer_start": [20, 26]}, ((20, 24), (26, 30))),
        ({"text": np.array(["Bern"], object), "answer_start": np.array([26], np.int32)}, ((26, 30),)),
        ([{"text": "Bern", "answer_start": 26}], ((26, 30),)),
        ([{"text": "Bern", "start": 26, "score": 1.0}], ((26, 30),)),
        ([{"text": "Bern", "answer_start": np.int64(26)}], ((26, 30),)),
        ([{"text": "Bern"}], ((20, 24),)),
        ([(20, 24), [0, 6]], ((20, 24), (0, 6))),
        ([(np.int64(20), np.int64(24))], ((20, 24),)),
        ([(0, len(CONTEXT))], ((0, len(CONTEXT)),)),
        ('{"text": ["Bern"], "answer_start": [26]}', ((26, 30),)),
        ('["Bern", "town"]', ((20, 24), (36, 40))),
        ([], ()),
        ("[]", ()),
    ],
)
def test_answers(answers: Any, target: Any) -> None:
    example = read_dataset("answer", [("where?", CONTEXT)], [answers], training=False).examples[0]
    assert example.target == target
    assert example.answers == tuple(CONTEXT[start:end] for start, end in target)


# --- what is wrong, and where ---

GOOD: dict[str, dict[str, Any]] = {
    "classify": {"text": "a", "label": "x"},
    "multi": {"text": "a", "labels": ["x"]},
    "pair": {"text_a": "a", "text_b": "b", "label": "x"},
    "regress": {"text": "a", "score": 1.0},
    "tag": {"tokens": ["a", "b"], "tags": ["O", "B"]},
    "answer": {"question": "q", "context": CONTEXT, "answers": [(0, 6)]},
    "rerank": {"query": "q", "passage": "p", "label": 1},
}
FIX = "; fill it in or leave the row out"
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("classify", {"text": None}, "no text in column 'text'" + FIX),
    ("classify", {"text": ""}, "no text in column 'text'" + FIX),
    ("classify", {"text": " \n"}, "no text in column 'text'" + FIX),
    ("classify", {"text": math.nan}, "no text in column 'text'" + FIX),
    ("classify", {"text": 3}, "int 3 in column 'text' is not text"),
    ("classify", {"text": ["a", "b"]}, "list ['a', 'b'] in column 'text' is not text"),
    ("classify", {"text": "a\ud800"}, "column 'text': character 1 is the lone surrogate U+D800"),
    ("pair", {"text_b": " "}, "no text in column 'text_b'" + FIX),
    ("classify", {"label": None}, "no label in column 'label'" + FIX),
    ("classify", {"label": math.nan}, "no label in column 'label'" + FIX),
    ("classify", {"label": pandas.NA}, "no label in column 'label'" + FIX),
    ("classify", {"label": " "}, "no label in column 'label'" + FIX),
    ("classify", {"label": 2.5}, "label 2.5 in column 'label' is not a class; for numbers use regress"),
    ("classify", {"label": math.inf}, "label inf in column 'label' is not a class"),
    ("classify", {"label": {"a": 1}}, "dict {'a': 1} in column 'label' is not a label; it must be a str, an int"),
    ("classify", {"label": ["x"]}, "a list in column 'label', and one label each in the rows before; use lists"),
    ("multi", {"labels": 1}, "one label in column 'labels', and lists in the rows before; use lists in all rows"),
    ("multi", {"labels": None}, "no labels in column 'labels'" + FIX + ", or write [] if the text has none"),
    ("multi", {"labels": ""}, "no label in column 'labels'" + FIX),
    ("multi", {"labels": ["x", None]}, "no label in column 'labels'" + FIX),
    ("multi", {"labels": "x||y"}, "no label in column 'labels'" + FIX),
    ("multi", {"labels": [0, 1, 0]}, "a label twice in column 'labels': [0, 1, 0]; list each label of the text"),
    ("regress", {"score": None}, "no score in column 'score'" + FIX),
    ("regress", {"score": "high"}, "str 'high' in column 'score' is not a number"),
    ("regress", {"score": [1]}, "list [1] in column 'score' is not a number"),
    ("regress", {"score": 10**400}, "in column 'score' is not a number"),
    ("regress", {"score": "inf"}, "score inf in column 'score' is not finite" + FIX),
    ("regress", {"score": np.float32("nan")}, "score nan in column 'score' is not finite" + FIX),
    ("tag", {"tokens": ["a"]}, "1 words and 2 tags; each word needs one tag"),
    ("tag", {"tags": ["O", "O", "O"]}, "2 words and 3 tags; each word needs one tag"),
    ("tag", {"tokens": ["a", ""]}, "word 2 in column 'tokens' is str ''; a word must not be empty, or have whitespace"),
    ("tag", {"tokens": [" a", "c"]}, "word 1 in column 'tokens' is str ' a'; a word must"),
    ("tag", {"tokens": ["a", "\u3000"]}, "word 2 in column 'tokens' is str '\\u3000'; a word must"),
    ("tag", {"tokens": ["a", 7]}, "word 2 in column 'tokens' is int 7; a word must"),
    ("tag", {"tokens": "[1, 2]"}, "word 1 in column 'tokens' is int 1; a word must"),
    ("tag", {"tokens": ["a", "\ud800"]}, "column 'tokens': character 2 is the lone surrogate"),
    ("tag", {"tokens": []}, "no words in column 'tokens'" + FIX),
    ("tag", {"tokens": None}, "no words in column 'tokens'" + FIX),
    ("tag", {"tokens": 7}, "int 7 in column 'tokens' is not a list of words"),
    ("tag", {"tags": None}, "no tags in column 'tags'" + FIX),
    ("tag", {"tags": ["O", None]}, "no tag in column 'tags'" + FIX),
    ("tag", {"tags": ["O", 0.5]}, "tag 0.5 in column 'tags' is not a class"),
    ("answer", {"context": ""}, "no text in column 'context'" + FIX),
    ("answer", {"answers": None}, "no answers in column 'answers'" + FIX + ", or write [] if the answer is not in"),
    ("answer", {"answers": 3}, "int 3, not answers, in column 'answers'"),
    ("answer", {"answers": "Basel"}, "answer 'Basel' in column 'answers' is not in the context; copy it from there"),
    ("answer", {"answers": ["Bern", ""]}, "answer str '' in column 'answers' is not text; write [] if the answer"),
    ("answer", {"answers": [3]}, "answer int 3 in column 'answers' is not text"),
    ("answer", {"answers": [{"start": 3}]}, "answer NoneType None in column 'answers' is not text"),
    ("answer", {"answers": [(6, 6)]}, "answer [6, 6] in column 'answers' is not a (start, end) within"),
    ("answer", {"answers": [(40, 42)]}, "answer [40, 42] in column 'answers' is not a (start, end)"),
    ("answer", {"answers": [(-2, 4)]}, "answer [-2, 4] in column 'answers' is not a (start, end)"),
    ("answer", {"answers": [(0, 1.5)]}, "answer [0, 1.5] in column 'answers' is not a (start, end)"),
    ("answer", {"answers": {"text": ["a", "b"], "answer_start": [3]}}, "2 answers and 1 starts in column 'answers'"),
    ("answer", {"answers": {"text": ["a"]}}, "1 answers and 0 starts in column 'answers'; give both"),
    ("answer", {"answers": [{"text": "Bern", "start": np.array([1, 2])}]}, "starts at ndarray array([1, 2]); it must"),
    ("answer", {"answers": [{"text": "Bern", "start": 21}]}, "answer 'Bern' in column 'answers' is not at"),
    ("answer", {"answers": [{"text": "Bern", "start": 22}]}, "the context, but at 20"),
    ("answer", {"answers": [{"text": "Bern", "start": 25}]}, "the context, but at 26"),
    ("answer", {"answers": [{"text": "Bern", "start": 999}]}, "is not at character 999 of the context, but at 26"),
    ("answer", {"answers": [{"text": "Bern", "start": -1}]}, "is not at character -1 of the context, but at 20"),
    ("answer", {"answers": [{"text": "Basel", "start": 3}]}, "answer 'Basel' in column 'answers' is not in the"),
    ("answer", {"answers": [{"text": "Bern", "start": "20"}]}, "starts at str '20'; it must be an int, counted from 0"),
    ("rerank", {"query": " "}, "no text in column 'query'" + FIX),
    ("rerank", {"label": 3}, "score 3.0 in column 'label' is not from 0 (irrelevant) to 1 (relevant); divide"),
    ("rerank", {"label": -0.5}, "score -0.5 in column 'label' is not from 0"),
    ("rerank", {"label": None}, "no score in column 'label'" + FIX),
]  # fmt: skip


@pytest.mark.parametrize(("what", "change", "message"), BAD, ids=[f"{i} {one[0]}" for i, one in enumerate(BAD)])
def test_bad_rows(what: str, change: dict[str, Any], message: str) -> None:
    kind: Any = {"multi": "classify", "pair": "classify"}.get(what, what)
    rows = [GOOD[what], GOOD[what], GOOD[what] | change, GOOD[what]]
    with pytest.raises(InputError) as caught:
        read_dataset(kind, rows, name="the data")
    assert str(caught.value).startswith("the data, row 3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "X", "y", "message"),
    [
        ("classify", ["a", None], ["x", "y"], "row 2: no text in X; fill"),
        ("classify", ["a", 3], ["x", "y"], "row 2: int 3 in X is not text"),
        ("classify", ["a", ("b", "c")], ["x", "y"], "row 2: 2 texts; give one, the same in each row"),
        ("classify", [("b", "c"), "a"], ["x", "y"], "row 2: 1 texts; give a pair, the same in each row"),
        ("classify", ["a", []], ["x", "y"], "row 2: 0 texts; give one, the"),
        ("classify", [[], "a"], ["x", "y"], "row 1: 0 texts; give one or a pair, the"),
        ("regress", [("a", "b", "c")], [1], "row 1: 3 texts; give one or a pair"),
        ("regress", [("a", "b"), ("a", " ")], [1, 2], "row 2: no text in the second of the pair; fill"),
        ("classify", ["a", "b"], ["x", None], "row 2: no label in y; fill"),
        ("rerank", ["a"], [1], "row 1: 1 texts; give two, the query and the passage"),
        ("answer", ["a"], [[]], "row 1: 1 texts; give two, the question and the context"),
        ("tag", [["a "]], [["O"]], "row 1: word 1 in X is str 'a '"),
        ("tag", [["a"]], [None], "row 1: no tags in y"),
    ],
)
def test_bad_items(kind: Kind, X: Any, y: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_dataset(kind, X, y)
    assert str(caught.value).startswith("the training data, " + message)


def test_a_row_that_is_not_a_dict() -> None:
    with pytest.raises(InputError, match="row 2: no text in column 'text'"):
        read_dataset("classify", [GOOD["classify"], "a"])


def test_missing_values_of_pandas_and_polars() -> None:
    for table in (
        pandas.DataFrame({"text": ["a", None, "c"], "label": pandas.Series([1, 2, None], dtype="Int64")}),
        pandas.DataFrame({"text": ["a", None, "c"], "label": [1, 2, None]}),
        polars.DataFrame({"text": ["a", None, "c"], "label": [1, 2, None]}),
    ):
        with pytest.raises(InputError, match=r"row 2: no text in .*\n.*row 3: no label in column 'label'"):
            read_dataset("classify", table)


@pytest.mark.parametrize("known", [["x", "y"], [f"label {i}" for i in range(100)]])
def test_unknown_labels(known: list[str]) -> None:
    """Some count as errors, with one warning; no known label at all means that this is other data."""
    with pytest.warns(BertieWarning) as caught:
        data = read_dataset("classify", [known[0], "b", "c"], [known[0], "z", "z"], known=known, training=False)
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(f"the training data, row 2: the label 'z' is not one of {known[0]!r}, {known[1]!r}")
    assert message.endswith("count as errors: 'z (2 rows)' of 3")
    assert len(message) < 300
    assert data.labels == (*known, "z")
    with pytest.warns(BertieWarning, match="row 1: the label 'B-X' is not one of 'O', 'B-Y'"):
        read_dataset("tag", [["a", "b"]], [["B-Y", "B-X"]], known=["O", "B-Y"], training=False)
    with pytest.raises(InputError, match="has the labels 'B-X', but the model has 'O', 'B-Y'"):
        read_dataset("tag", [["a", "b"]], [["O", "B-X"]], known=["O", "B-Y"], training=False)
    with pytest.raises(InputError, match=f"has the labels 'q', 'z', but the model has '{known[0]}'"):
        read_dataset("classify", ["a", "b"], ["q", "z"], known=known, training=False)


def test_the_first_few_problems_are_named(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": None if i % 10 == 9 else i % 2} for i in range(120)]
    file = in_file(tmp_path, "in.csv", as_csv(rows))
    with pytest.raises(InputError) as caught:
        read_dataset("classify", file)
    lines = str(caught.value).splitlines()
    assert lines == [f"{file}, row {i}: no label in column 'label'{FIX}" for i in (10, 20, 30, 40, 50)] + [
        "and 7 more rows"
    ]


def test_each_file_counts_its_own_rows(tmp_path: Path) -> None:
    one = in_file(tmp_path, "one.jsonl", as_jsonl([{"text": "a", "label": 0}] * 3))
    two = in_file(tmp_path, "two.csv", "sentence,label\na,1\n,1\n")
    with pytest.raises(InputError) as caught:
        read_dataset("classify", [one, two])
    assert str(caught.value) == f"{two}, row 2: no text in column 'sentence'{FIX}"
    two.write_text("sentence,label\na,1\nb,1\n")
    data = read_dataset("classify", [one, two])
    assert data.name == f"{one} and 1 more"
    assert [example.row for example in data.examples] == [1, 2, 3, 4, 5]
    assert read_dataset("classify", one, training=False).name == str(one)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        read_dataset("classify", "nowhere.csv")
    with pytest.raises(InputError, match=r"in.txt has no column 'label' or 'labels', only 'text'"):
        read_dataset("classify", in_file(tmp_path, "in.txt", "a\nb\n"))
    # What the reader says of a file is no problem of a row.
    with pytest.raises(InputError, match="line 2 is not JSON") as caught:
        read_dataset("classify", in_file(tmp_path, "in.jsonl", '{"text": "a", "label": 1}\n{"text": \n'))
    assert ", row" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "X", "y", "message"),
    [
        ("classify", ["a", "b"], ["x", "x"], "has the label 'x' in each of its 2 rows; training needs two labels"),
        ("classify", ["a", "b"], [["x"], ["x"]], r"has the label \('x',\) in each of its 2 rows"),
        ("tag", [["a", "b"]], [["O", "O"]], "has the tag 'O' in each of its 1 rows; training needs two tags"),
        (
            "rerank",
            [("q", "p")],
            [1],
            r"has the label 1.0 in each of its 1 rows; .* needs positives \(1\) and negatives",
        ),
        ("rerank", [("q", "p")], [0], "has the label 0.0 in each"),
        ("answer", [("q", "c")], [[]], "has no answer in any of its 1 rows; training needs some"),
    ],
)
def test_nothing_to_learn(kind: Kind, X: Any, y: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_dataset(kind, X, y)
    assert len(read_dataset(kind, X, y, training=False).examples) == len(X)


def test_a_single_label_that_some_texts_lack() -> None:
    assert read_dataset("classify", ["a", "b"], [["x"], []]).labels == ("x",)


def test_empty_data() -> None:
    for X, y in (([], []), ({"text": [], "label": []}, None), (pandas.DataFrame({"text": [], "label": []}), None)):
        with pytest.raises(InputError, match="the training data is empty"):
            read_dataset("classify", X, y)


# --- splits ---


def examples(draw: Callable[..., Any], kind: Kind) -> list[Example]:
    few = st.sampled_from("abcdefghijklmnop")
    targets: dict[str, st.SearchStrategy[Any]] = {
        "classify": st.sampled_from("xyz"),
        "multi": st.lists(st.sampled_from("xyz"), unique=True).map(tuple),
        "regress": st.floats(0, 1),
        "rerank": st.floats(0, 1),
        "tag": st.just(("O",)),
        "answer": st.just(()),
    }
    rows = draw(st.lists(st.tuples(few, few, targets[kind]), min_size=2, max_size=60))
    single = kind in ("multi", "tag")
    return [Example(row[:1] if single else row[:2], row[2], i) for i, row in enumerate(rows, 1)]


@st.composite
def datas(draw: Callable[..., Any]) -> LabelledDataset:
    what = draw(st.sampled_from(["classify", "multi", "regress", "tag", "answer", "rerank"]))
    kind = "classify" if what == "multi" else what
    return LabelledDataset("the data", kind, examples(draw, what), what == "multi", ("x", "y", "z"), {"x": "x"})  # type: ignore[arg-type]


def key(data: LabelledDataset, example: Example) -> tuple[str, ...]:
    return {"rerank": example.texts[:1], "answer": example.texts[1:]}.get(data.kind, example.texts)


def can_be_spared(data: LabelledDataset, groups: dict[tuple[str, ...], list[Example]], one: tuple[str, ...]) -> bool:
    """Without it, is there something left, and of each of its labels?"""
    if data.kind != "classify" or data.multi_label:
        return len(groups) > 1
    rest = {example.target for group, members in groups.items() if group != one for example in members}
    alike = [members for members in groups.values() if members[0].target == groups[one][0].target]
    return len(alike) > 1 and all(example.target in rest for example in groups[one])


@settings(max_examples=200, deadline=None)
@given(data=datas(), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 3))
def test_splits(data: LabelledDataset, fraction: float, seed: int) -> None:
    groups: dict[tuple[str, ...], list[Example]] = {}
    for one in data.examples:
        groups.setdefault(key(data, one), []).append(one)
    sizes = [len(group) for group in groups.values()]
    single = data.kind == "classify" and not data.multi_label
    if not any(can_be_spared(data, groups, group) for group in groups):
        with pytest.raises(InputError, match="too few rows to hold some out"):
            split(data, fraction, seed)
        return
    rest, held = split(data, fraction, seed)
    assert sorted([*rest.examples, *held.examples], key=lambda one: one.row) == data.examples
    for part in (rest, held):
        assert part.examples
        assert [one.row for one in part.examples] == sorted(one.row for one in part.examples)
        assert replace(part, name=data.name, examples=data.examples) == data
    assert not {key(data, one) for one in rest.examples} & {key(data, one) for one in held.examples}
    assert split(data, fraction, seed) == (rest, held)
    if single:
        assert {one.target for one in rest.examples} == {one.target for one in data.examples}
    else:
        wanted = max(1, round(fraction * len(data.examples)))
        assert wanted - max(sizes) <= len(held.examples) <= max(wanted + max(sizes) / 2, min(sizes))


@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    fraction=st.floats(0.05, 0.5),
    seed=st.integers(0, 1000),
)
def test_splits_are_stratified(counts: list[int], fraction: float, seed: int) -> None:
    y = [label for label, count in enumerate(counts) for _ in range(count)]
    data = read_dataset("classify", [f"text {i}" for i in range(len(y))], y)
    if max(counts) == 1:
        with pytest.raises(InputError, match="too few rows"):
            split(data, fraction, seed)
        return
    held = Counter(one.target for one in split(data, fraction, seed)[1].examples)
    for label, count in enumerate(counts):
        assert abs(held[str(label)] - fraction * count) < 1 or count == 1
        assert held[str(label)] < count
    spare = sum(count for count in counts if count > 1)
    assert abs(sum(held.values()) - max(1, fraction * spare)) < 0.5 + 1e-9


def test_splits_depend_on_the_seed_and_the_texts() -> None:
    texts = [f"text {i}" for i in range(200)]
    data = read_dataset("classify", texts, [i % 2 for i in range(200)])
    held = [{one.texts for one in split(data, 0.1, seed)[1].examples} for seed in range(3)]
    assert len({frozenset(one) for one in held}) == 3
    # Rows in another order are parted alike.
    turned = read_dataset("classify", texts[::-1], [i % 2 for i in range(200)][::-1])
    assert {one.texts for one in split(turned, 0.1, 0)[1].examples} == held[0]
    # The same on every machine: no `hash`, no `random`.
    drawn = sorted(range(200), key=lambda i: sha256(json.dumps([0, texts[i]]).encode()).digest())
    first = [i for i in drawn if i % 2 == 0][:10] + [i for i in drawn if i % 2 == 1][:10]
    assert held[0] == {(texts[i],) for i in first}


def test_labels_that_share_a_text_are_not_lost() -> None:
    # The text of "rare" is that of a "common" one, and would be drawn with it.
    data = read_dataset("classify", ["a", "a", *"bcdefgh"], ["common", "rare", *["common"] * 7])
    for seed in range(20):
        rest, _ = split(data, 0.5, seed)
        assert {one.target for one in rest.examples} == {"common", "rare"}


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, math.nan])
def test_invalid_fractions(fraction: float) -> None:
    data = read_dataset("classify", ["a", "b"], [0, 1])
    with pytest.raises(InputError, match=r"fraction=.* must be between 0 and 1"):
        split(data, fraction, 0)


def test_one_context_cannot_be_split() -> None:
    data = read_dataset("answer", [("q", CONTEXT), ("r", CONTEXT)], ["Bern", "town"])
    with pytest.raises(InputError, match="the training data has too few rows to hold some out; give dev data"):
        split(data, 0.5, 0)


# --- fingerprints ---


def test_fingerprints_tell_data_apart() -> None:
    data = read_dataset("tag", [["a", "b"], ["c"]], [["O", "B"], ["O"]])
    one, two = data.examples
    changed = [
        replace(data, examples=[two, one]),
        replace(data, examples=[one]),
        replace(data, examples=[one, one]),
        replace(data, examples=[one, replace(two, texts=("d",))]),
        replace(data, examples=[one, replace(two, texts=("c", ""))]),
        replace(data, examples=[one, replace(two, target=("B",))]),
        replace(data, examples=[one, replace(two, words=((0, 2),))]),
        replace(data, examples=[one, replace(two, answers=("c",))]),
        replace(data, labels=("B", "O")),
        replace(data, kind="classify"),
        replace(data, multi_label=True),
    ]
    assert len({fingerprint(data), *map(fingerprint, changed)}) == 1 + len(changed)
    same = [
        replace(data, name="other"),
        replace(data, original={}),
        replace(data, examples=[replace(one, row=7), two]),
        read_dataset("tag", {"tokens": ["a b", "c"], "tags": ["O B", "O"]}),
    ]
    assert {fingerprint(data)} == set(map(fingerprint, same))


def test_fingerprints_do_not_change_from_run_to_run() -> None:
    data = fingerprint(read_dataset("classify", [("ü", "b"), ("c", "d")], [1, 0]))
    assert data == "73a84d0e8917a9d9e8fc54f1803cb8f3850b30e0636e9fb7d89c423b3e835188"
    assert fingerprint(read_dataset("regress", ["a"], [0.1])) != fingerprint(
        read_dataset("regress", ["a"], [0.1 + 1e-16])
    )


def test_no_torch() -> None:
    code = "import sys, bertie.training.finetune.data; print({'torch', 'pandas', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
