"""From files, tables and lists to rows: which columns hold what."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bertie.data.readers import open_table
from bertie.errors import InputError
from bertie.training.finetune.data.cells import as_list, listed, scalar

Kind = Literal["classify", "regress", "tag", "answer", "rerank", "embed"]

# The columns that are looked for: the first that are there. Those of GLUE, SQuAD and CoNLL are among them.
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
}
_TARGETS: dict[Kind, tuple[str, ...]] = {
    "classify": ("label", "labels"),
    "regress": ("score", "label"),
    "tag": ("tags", "ner_tags"),
    "answer": ("answers",),
    "rerank": ("label", "score"),
    "embed": ("score", "label"),
}
_NEGATIVE = re.compile(r"negatives?|negative_\d+")


@dataclass(frozen=True, slots=True)
class Piece:
    """A file or whatever else was given, as rows of inputs and target."""

    name: str
    rows: Iterable[tuple[Any, Any]]
    columns: tuple[str, ...] = ()  # of the inputs; none: a row's inputs are one thing, as it was in X
    target: str = ""  # the column of the targets; none: y
    role: str = ""  # what `labelled` calls that column
    classes: Sequence[str] | None = None  # what the numbers of a Hugging Face data set stand for


def pieces(kind: Kind, X: Any, y: Any, columns: Mapping[str, str], name: str) -> Iterator[Piece]:
    """One piece a file, else one of all."""
    if isinstance(X, str | os.PathLike):
        files: list[Any] = [X]
    elif isinstance(X, Mapping) or _is_table(X):
        files = []
    else:
        features = getattr(X, "features", None)  # of a Dataset that is read row by row
        X = _values(X, "X")
        files = X if X and all(isinstance(one, os.PathLike) for one in X) else []
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
            inputs, target, role = _chosen(kind, table.columns, columns, table.name)
            rows = table.rows(_both(inputs, target))
            yield Piece(table.name, _picked(rows, inputs, target), inputs, target, role)
    elif isinstance(X, list):
        have = list(dict.fromkeys(key for row in X if isinstance(row, Mapping) for key in row))
        inputs, target, role = _chosen(kind, have, columns, name)
        yield Piece(name, _picked(X, inputs, target), inputs, target, role, _classes(features, target))
    else:
        yield _from_table(kind, X, columns, name)


def _from_lists(kind: Kind, X: list[Any], y: Any, columns: Mapping[str, str], name: str) -> Piece:
    if columns:
        raise InputError(f"columns={dict(columns)} needs a table or a file, and X is a list of texts")
    if y is None and kind == "embed":
        return Piece(name, ((texts, None) for texts in X))
    if y is None:
        raise InputError(
            f"{name} has no labels: give them as y, or give a table with the columns {_either(INPUTS[kind])} and "
            f"{_either((one,) for one in _TARGETS[kind])}"
        )
    if getattr(y, "ndim", 1) > 1:
        raise InputError(
            f"y has the shape {tuple(y.shape)}; give one label a text, or a list of the labels that it has, not a 0 or "
            "1 for each there is"
        )
    labels = _values(y, "y")
    if len(labels) != len(X):
        raise InputError(f"X has {len(X):,} texts and y {len(labels):,} labels; each text needs its own")
    return Piece(name, zip(X, labels, strict=True), role=_role(labels) if kind == "embed" else "")


def _role(labels: Sequence[Any]) -> str:
    """What the targets of texts to be compared are: lists of scores, scores or classes."""
    if any(as_list(one) is not None for one in labels):
        return "scores"
    return "score" if any(isinstance(scalar(one), float) for one in labels) else "label"


def _is_table(X: Any) -> bool:
    """A DataFrame of pandas or polars, or a Dataset that can be read by column."""
    return (hasattr(X, "shape") and hasattr(X, "columns")) or (hasattr(X, "column_names") and hasattr(X, "__len__"))


def _from_table(kind: Kind, X: Any, columns: Mapping[str, str], name: str) -> Piece:
    have = list(X if isinstance(X, Mapping) else X.column_names if hasattr(X, "column_names") else X.columns)
    if isinstance(X, Mapping) and any(hasattr(part, "column_names") for part in X.values()):
        raise InputError(f"X is {type(X).__name__} of the parts {', '.join(have)}; give one of them: X[{have[0]!r}]")
    if len(set(have)) < len(have):
        raise InputError(f"{name} has two columns of one name: {', '.join(map(str, have))}")
    inputs, target, role = _chosen(kind, have, columns, name)
    classes = _classes(getattr(X, "features", None), target)
    if hasattr(X, "select_columns"):  # a Dataset may be set to give tensors, and is slow one by one
        X = X.select_columns(sorted({*_both(inputs, target)})).to_dict()
    found = [_values(X[column], f"column {column!r}") for column in _both(inputs, target)]
    if len({len(one) for one in found}) > 1:
        counts = (f"{len(one):,} in {column!r}" for one, column in zip(found, _both(inputs, target), strict=True))
        raise InputError(f"{name} has columns of different lengths: {', '.join(counts)}")
    if not target:
        found.append([None] * len(found[0]))
    rows = zip(zip(*found[:-1], strict=True), found[-1], strict=True)
    return Piece(name, rows, inputs, target, role, classes)


def _values(column: Any, what: str) -> list[Any]:
    """A list, array, column or iterator as a list."""
    if isinstance(column, str | bytes | Mapping) or not isinstance(column, Iterable):
        raise InputError(f"{what} is {type(column).__name__}; it must be a list, an array, a column or a table")
    ways = [getattr(column, way) for way in ("to_list", "tolist", "to_pylist") if hasattr(column, way)]
    return list(ways[0]() if ways else column)


def _both(inputs: tuple[str, ...], target: str) -> tuple[str, ...]:
    """The columns to read: pairs to be compared need no target."""
    return (*inputs, target) if target else inputs


def _picked(rows: Iterable[Any], inputs: tuple[str, ...], target: str) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for row in rows:
        if not isinstance(row, Mapping):  # in a list of dicts
            row = {}
        yield tuple([row.get(column) for column in inputs]), row.get(target) if target else None


def _classes(features: Any, column: str) -> Sequence[str] | None:
    """The names behind a ClassLabel, or a list of them."""
    feature = features.get(column) if isinstance(features, Mapping) else None
    if isinstance(feature, list):
        feature = feature[0]
    names: Sequence[str] | None = getattr(getattr(feature, "feature", feature), "names", None)
    return names


def _chosen(kind: Kind, have: Sequence[str], columns: Mapping[str, str], name: str) -> tuple[tuple[str, ...], str, str]:
    """The columns of the inputs and of the target, and the target's role; what `columns` names goes first."""
    groups, targets = INPUTS[kind], tuple((one,) for one in _TARGETS[kind])
    known = list(dict.fromkeys(one for group in (*groups, *targets) for one in group))
    if kind == "embed":
        known += ["negative", "negatives", "passages", "scores"]
    for role, column in columns.items():
        if role not in known and not (kind == "embed" and _NEGATIVE.fullmatch(role)):
            raise InputError(f"columns names {role!r}, which {kind} does not read; it reads {listed(known)}")
        if column not in have:
            raise InputError(f"{name} has no column {column!r}, only {listed(have)}")

    def choose(groups: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        for group in sorted(groups, key=lambda group: not any(one in columns for one in group)):
            if all(columns.get(one, one) in have for one in group):
                return group
        raise InputError(
            f"{name} has no column {_either(groups)}, only {listed(have)}; name the right one with "
            f"columns={{{groups[0][0]!r}: ...}}"
        )

    if kind == "embed":
        inputs, target, role = _compared(have, columns, choose)
        if left := [one for one in columns if columns[one] not in (*inputs, target)]:
            raise InputError(f"columns names {listed(left)} besides {listed(_both(inputs, target))}; name one or other")
        return inputs, target, role
    inputs, (target,) = choose(groups), choose(targets)
    if left := [one for one in columns if one not in (*inputs, target)]:
        raise InputError(f"columns names {listed(left)} besides {listed((*inputs, target))}; name one or the other")
    return tuple(columns.get(one, one) for one in inputs), columns.get(target, target), target


def _compared(
    have: Sequence[str], columns: Mapping[str, str], choose: Callable[[Sequence[tuple[str, ...]]], tuple[str, ...]]
) -> tuple[tuple[str, ...], str, str]:
    """As `_chosen`, of texts to be compared: which columns there are says what they are."""
    called = {name: role for role, name in columns.items()}  # what a column is to us
    roles = {called.get(name, name): name for name in have}
    if "query" in roles and "passages" in roles and "scores" in roles:
        return (roles["query"], roles["passages"]), roles["scores"], "scores"
    group = choose(INPUTS["embed"])
    inputs = tuple(roles[one] for one in group)
    wrong = [role for role in roles if _NEGATIVE.fullmatch(role)]
    if group[1] == "positive" or (group[0] == "query" and wrong):
        wrong.sort(key=lambda role: (len(role), role))  # negative_2 before negative_10
        return (*inputs, *(roles[one] for one in wrong)), "", ""
    for role in ("score", "label"):
        if role in roles:
            return inputs, roles[role], "score" if group[0] == "query" else role
    return inputs, "", ""


def _either(groups: Iterable[tuple[str, ...]]) -> str:
    return " or ".join(" + ".join(map(repr, group)) for group in groups)
