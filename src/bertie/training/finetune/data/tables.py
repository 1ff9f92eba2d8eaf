"""From files, tables and lists to rows: which columns hold the texts and which the labels."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bertie.data.readers import open_table
from bertie.errors import InputError
from bertie.training.finetune.data.cells import as_list, as_scalar, join_names

Kind = Literal["classify", "regress", "tag", "answer", "rerank", "embed", "choose"]

# Column names in order of preference, including those of GLUE, SQuAD and CoNLL.
_TEXTS = (
    ("text",),
    ("text_a", "text_b"),
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence",),
)
INPUTS: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "classify": _TEXTS,
    "regress": _TEXTS,
    "tag": (("tokens",),),
    "answer": (("question", "context"),),
    "rerank": (("query", "passage"), ("query", "document"), ("query", "text")),
    "embed": (
        ("anchor", "positive"),
        ("query", "positive"),
        ("query", "passage"),
        ("query", "document"),
        ("query", "text"),
        *(group for group in _TEXTS if len(group) == 2),
    ),
    "choose": (
        ("context", "choices"),
        ("question", "choices"),
        ("sent1", "sent2", "ending0", "ending1", "ending2", "ending3"),  # SWAG
    ),
}
_TARGETS: dict[Kind, tuple[str, ...]] = {
    "classify": ("label", "labels"),
    "regress": ("score", "label"),
    "tag": ("tags", "ner_tags"),
    "answer": ("answers",),
    "rerank": ("label", "score"),
    "embed": ("score", "label"),
    "choose": ("label", "answer", "answerKey"),
}
_NEGATIVE = re.compile(r"negatives?|negative_\d+")


@dataclass(frozen=True, slots=True)
class RowSource:
    """A file, a table or lists, as rows of inputs and target."""

    name: str
    rows: Iterable[tuple[Any, Any]]
    columns: tuple[str, ...] = ()  # of the inputs; empty: an item of X
    target: str = ""  # the column of the targets; empty: y
    role: str = ""  # the usual name of that column
    classes: Sequence[str] | None = None  # the names of a Hugging Face ClassLabel


def row_sources(kind: Kind, X: Any, y: Any, columns: Mapping[str, str], name: str) -> Iterator[RowSource]:
    """One source per file, else a single one."""
    if isinstance(X, str | os.PathLike):
        files: list[Any] = [X]
    elif isinstance(X, Mapping) or _is_table(X):
        files = []
    else:
        features = getattr(X, "features", None)  # of an iterable Dataset
        X = _values(X, "X")
        files = X if X and all(isinstance(item, os.PathLike) for item in X) else []
        if not files and not (X and isinstance(X[0], Mapping)):
            yield _from_lists(kind, X, y, columns, name)
            return
    if y is not None:
        raise InputError(
            f"y is for a list of texts, and X is a table; put the labels in its column {_TARGETS[kind][0]!r}"
        )
    if files:
        for file in files:
            table = open_table(os.fspath(file))
            inputs, target, role = _choose_columns(kind, table.columns, columns, table.name)
            rows = table.rows(_all_columns(inputs, target))
            yield RowSource(table.name, _select(rows, inputs, target), inputs, target, role)
    elif isinstance(X, list):
        available = list(dict.fromkeys(key for row in X if isinstance(row, Mapping) for key in row))
        inputs, target, role = _choose_columns(kind, available, columns, name)
        yield RowSource(name, _select(X, inputs, target), inputs, target, role, _classes(features, target))
    else:
        yield _from_table(kind, X, columns, name)


def _from_lists(kind: Kind, X: list[Any], y: Any, columns: Mapping[str, str], name: str) -> RowSource:
    if columns:
        raise InputError(f"columns={dict(columns)} needs a table or a file, and X is a list of texts")
    if y is None and kind == "embed":
        return RowSource(name, ((texts, None) for texts in X))
    if y is None:
        raise InputError(
            f"{name} has no labels: give them as y, or give a table with the columns {_alternatives(INPUTS[kind])} and "
            f"{_alternatives((column,) for column in _TARGETS[kind])}"
        )
    if getattr(y, "ndim", 1) > 1:
        raise InputError(
            f"y has the shape {tuple(y.shape)}; give one label per text, or a list of its labels, not an indicator "
            "matrix"
        )
    labels = _values(y, "y")
    if len(labels) != len(X):
        raise InputError(f"X has {len(X):,} texts and y {len(labels):,} labels; each text needs its own")
    return RowSource(name, zip(X, labels, strict=True), role=_target_role(labels) if kind == "embed" else "")


def _target_role(labels: Sequence[Any]) -> str:
    """The kind of targets for embeddings: lists of scores, scores or classes."""
    if any(as_list(label) is not None for label in labels):
        return "scores"
    return "score" if any(isinstance(as_scalar(label), float) for label in labels) else "label"


def _is_table(X: Any) -> bool:
    """Whether X is a DataFrame of pandas or polars, or a Dataset that can be read by column."""
    return (hasattr(X, "shape") and hasattr(X, "columns")) or (hasattr(X, "column_names") and hasattr(X, "__len__"))


def _from_table(kind: Kind, X: Any, columns: Mapping[str, str], name: str) -> RowSource:
    available = list(X if isinstance(X, Mapping) else X.column_names if hasattr(X, "column_names") else X.columns)
    if isinstance(X, Mapping) and any(hasattr(part, "column_names") for part in X.values()):
        splits = ", ".join(available)
        raise InputError(f"X is {type(X).__name__} of the splits {splits}; pass one of them: X[{available[0]!r}]")
    if len(set(available)) < len(available):
        raise InputError(f"{name} has two columns of the same name: {', '.join(map(str, available))}")
    inputs, target, role = _choose_columns(kind, available, columns, name)
    classes = _classes(getattr(X, "features", None), target)
    if hasattr(X, "select_columns"):  # a Dataset may return tensors, and is slow row by row
        X = X.select_columns(sorted({*_all_columns(inputs, target)})).to_dict()
    names = _all_columns(inputs, target)
    values = [_values(X[column], f"column {column!r}") for column in names]
    if len({len(column) for column in values}) > 1:
        counts = (f"{len(column):,} in {label!r}" for column, label in zip(values, names, strict=True))
        raise InputError(f"{name} has columns of different lengths: {', '.join(counts)}")
    if not target:
        values.append([None] * len(values[0]))
    rows = zip(zip(*values[:-1], strict=True), values[-1], strict=True)
    return RowSource(name, rows, inputs, target, role, classes)


def _values(column: Any, what: str) -> list[Any]:
    """A list, array, column or iterator as a list."""
    if isinstance(column, str | bytes | Mapping) or not isinstance(column, Iterable):
        raise InputError(f"{what} is {type(column).__name__}; it must be a list, an array, a column or a table")
    converters = [getattr(column, name) for name in ("to_list", "tolist", "to_pylist") if hasattr(column, name)]
    return list(converters[0]() if converters else column)


def _all_columns(inputs: tuple[str, ...], target: str) -> tuple[str, ...]:
    """The columns to read: matching pairs have no target."""
    return (*inputs, target) if target else inputs


def _select(rows: Iterable[Any], inputs: tuple[str, ...], target: str) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for row in rows:
        if not isinstance(row, Mapping):  # in a list of dicts
            row = {}
        yield tuple([row.get(column) for column in inputs]), row.get(target) if target else None


def _classes(features: Any, column: str) -> Sequence[str] | None:
    """The names of a ClassLabel, or of a list of them."""
    feature = features.get(column) if isinstance(features, Mapping) else None
    if isinstance(feature, list):
        feature = feature[0]
    names: Sequence[str] | None = getattr(getattr(feature, "feature", feature), "names", None)
    return names


def _choose_columns(
    kind: Kind, available: Sequence[str], columns: Mapping[str, str], name: str
) -> tuple[tuple[str, ...], str, str]:
    """The columns of the inputs and of the target, and the target's usual name; names in `columns` come first."""
    groups, targets = INPUTS[kind], tuple((column,) for column in _TARGETS[kind])
    known = list(dict.fromkeys(column for group in (*groups, *targets) for column in group))
    if kind == "embed":
        known += ["negative", "negatives", "passages", "scores"]
    for role, column in columns.items():
        if role not in known and not (kind == "embed" and _NEGATIVE.fullmatch(role)):
            raise InputError(f"columns names {role!r}, which {kind} does not read; it reads {join_names(known)}")
        if column not in available:
            raise InputError(f"{name} has no column {column!r}, only {join_names(available)}")

    def choose(groups: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        for group in sorted(groups, key=lambda group: not any(role in columns for role in group)):
            if all(columns.get(role, role) in available for role in group):
                return group
        raise InputError(
            f"{name} has no column {_alternatives(groups)}, only {join_names(available)}; name the right one with "
            f"columns={{{groups[0][0]!r}: ...}}"
        )

    if kind == "embed":
        inputs, target, role = _choose_embedding_columns(available, columns, choose)
        used = _all_columns(inputs, target)
        unused = [role for role, column in columns.items() if column not in (*inputs, target)]
    else:
        inputs, (target,) = choose(groups), choose(targets)
        used, role = (*inputs, target), target
        unused = [role for role in columns if role not in used]
    if unused:
        raise InputError(f"columns names {join_names(unused)} besides {join_names(used)}; name one or the other")
    if kind == "embed":
        return inputs, target, role
    return tuple(columns.get(role, role) for role in inputs), columns.get(target, target), target


def _choose_embedding_columns(
    available: Sequence[str], columns: Mapping[str, str], choose: Callable[[Sequence[tuple[str, ...]]], tuple[str, ...]]
) -> tuple[tuple[str, ...], str, str]:
    """As `_choose_columns`, for embeddings: the columns tell the kind of data."""
    usual = {name: role for role, name in columns.items()}
    by_role = {usual.get(name, name): name for name in available}
    if "query" in by_role and "passages" in by_role and "scores" in by_role:
        return (by_role["query"], by_role["passages"]), by_role["scores"], "scores"
    group = choose(INPUTS["embed"])
    inputs = tuple(by_role[role] for role in group)
    negatives = [role for role in by_role if _NEGATIVE.fullmatch(role)]
    if group[1] == "positive" or (group[0] == "query" and negatives):
        negatives.sort(key=lambda role: (len(role), role))  # negative_2 before negative_10
        return (*inputs, *(by_role[role] for role in negatives)), "", ""
    for role in ("score", "label"):
        if role in by_role:
            return inputs, by_role[role], "score" if group[0] == "query" else role
    return inputs, "", ""


def _alternatives(groups: Iterable[tuple[str, ...]]) -> str:
    return " or ".join(" + ".join(map(repr, group)) for group in groups)
