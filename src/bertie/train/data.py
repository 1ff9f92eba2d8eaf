"""Labelled data in, checked examples out.

`labelled` reads files, tables and lists. Nothing is repaired, guessed or left out: rows that cannot be learned from are
named, the first few of them in one error, so that a file is mended once and not row by row. `split` holds a part out,
and `fingerprint` tells whether two runs have the same data.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate
from typing import Any, Literal

from bertie.data.readers import open_table
from bertie.errors import InputError
from bertie.text.tokenizer import checked_text

Kind = Literal["classify", "regress", "tag", "answer", "rerank", "embed"]
Inputs = Literal["", "pairs", "classes", "scores", "lists"]

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
_INPUTS: dict[Kind, tuple[tuple[str, ...], ...]] = {
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
_SHOWN = 5  # problems an error names
_MEND = "fill it in or leave the row out"


@dataclass(frozen=True, slots=True)
class Example:
    """One row: texts, and what a model shall learn to say of them."""

    texts: tuple[
        str, ...
    ]  # the text, or the two of a pair; tag: the words, joined by single spaces; embed: two or more
    target: Any  # classify: a label, or a tuple of them; regress, rerank: a float; tag: a tuple of tags, one a word;
    # answer: a tuple of (start, end) characters in the context, empty if the answer is not in it; embed: by `inputs`
    row: int  # counted from 1 in what was given
    words: tuple[tuple[int, int], ...] = ()  # tag: where each word lies in the text
    answers: tuple[str, ...] = ()  # answer: the texts as they were given, one a target


@dataclass(frozen=True, slots=True)
class Labelled:
    """Examples of one kind."""

    name: str
    kind: Kind
    examples: list[Example]
    multi: bool  # classify: any number of labels a text
    labels: tuple[str, ...]  # classify and tag: in the order of a model's outputs
    original: dict[str, Any]  # from a label to what was given for it: {"0": 0}
    inputs: Inputs = ""  # embed: pairs have no target, others a label (classes), a float, or one a text but the first


@dataclass(frozen=True, slots=True)
class _Piece:
    """A file or whatever else was given, as rows of inputs and target."""

    name: str
    rows: Iterable[tuple[Any, Any]]
    columns: tuple[str, ...] = ()  # of the inputs; none: a row's inputs are one thing, as it was in X
    target: str = ""  # the column of the targets; none: y
    role: str = ""  # what `labelled` calls that column
    classes: Sequence[str] | None = None  # what the numbers of a Hugging Face data set stand for


def labelled(
    kind: Kind,
    X: Any,
    y: Any = None,
    *,
    columns: Mapping[str, str] | None = None,
    name: str = "the training data",
    known: Sequence[str] | None = None,
    training: bool = True,
) -> Labelled:
    """Read labelled data, and check every row.

    `X` is the name of a file (CSV, TSV, JSONL or Parquet, compressed or not), a list of `Path`s, or a table: a pandas
    or polars DataFrame, a Hugging Face Dataset, a dict of columns or a list of dicts. Or `X` holds the texts (pairs;
    lists of words for `tag`) and `y` their labels, as lists, arrays or columns.

    A table's columns are found by these names, the first that are there; `columns={"text": "review"}` says what one is
    called instead.

    - classify: `text`, or a pair (`text_a` and `text_b`, `premise` and `hypothesis`, `sentence1` and `sentence2`,
      `question1` and `question2`, `question` and `sentence`), or `sentence`; with `label` or `labels`
    - regress: the same, with `score` or `label`
    - tag: `tokens`, with `tags` or `ner_tags`
    - answer: `question` and `context`, with `answers`
    - rerank: `query` and `passage` (or `document`, or `text`), with `label` or `score`, from 0 to 1
    - embed: what belongs together: `anchor` and `positive`, or `query` and `positive` (or `passage`, `document`,
      `text`), with texts that do not, if there are any: `negative`, `negative_1`, …, or lists of `negatives`. Or a pair
      of texts with `score`, or with `label`: a class, but of queries and passages a score. Or `query`, lists of
      `passages` and lists of their `scores`. Lists of pairs or triplets need no `y`

    What they hold:

    - A label is a str, int or bool; the numbers of a Hugging Face ClassLabel become its names. A list of labels makes
      the data multi-label, and so do texts like `sad|angry` in a column `labels`.
    - Words and tags are lists, or texts with spaces between them.
    - Answers are SQuAD's `{"text": [...], "answer_start": [...]}`, a list of `{"text", "answer_start"}` (or `start`), a
      list of (start, end), or bare texts: these are taken to stand where the context has them first. `[]` says that
      the answer is not in the context.
    - Wherever a list is wanted, its JSON will do, since CSV has no lists.

    `name` is what errors call data that are no file. `known` are the labels of a model: others are refused. `training`
    asks that there be something to learn: at least two labels, for example.

    >>> data = labelled("classify", ["a delight", "a bore"], [1, 0])
    >>> data.labels, data.original
    (('0', '1'), {'1': 1, '0': 0})
    >>> data.examples[0]
    Example(texts=('a delight',), target='1', row=1, words=(), answers=())
    >>> labelled("classify", {"text": ["a delight", " ", "a bore"], "label": ["good", "bad", None]})
    Traceback (most recent call last):
    bertie.errors.InputError: the training data, row 2: no text in column 'text'; fill it in or leave the row out
    the training data, row 3: no label in column 'label'; fill it in or leave the row out
    """
    if kind not in _INPUTS:
        raise InputError(f"kind={kind!r} must be one of {', '.join(_INPUTS)}")
    reader = _Reader(kind, known)
    examples: list[Example] = []
    names: list[str] = []
    problems: list[str] = []
    row = bad = 0
    for piece in _pieces(kind, X, y, columns or {}, name):
        names.append(piece.name)
        for number, (inputs, target) in enumerate(piece.rows, 1):
            row += 1
            try:
                examples.append(reader.example(piece, inputs, target, row))
            except InputError as error:
                bad += 1
                if bad <= _SHOWN:
                    problems.append(f"{piece.name}, row {number}: {error}")
    name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    if bad > _SHOWN:
        problems.append(f"and {bad - _SHOWN:,} more rows")
    if problems:
        raise InputError("\n".join(problems))
    if not examples:
        raise InputError(f"{name} is empty: there is nothing to learn from")
    if training:
        _check_worth(kind, examples, name)
    labels = tuple(known) if known is not None else _ordered(reader.original)
    return Labelled(name, kind, examples, bool(reader.multi), labels, reader.original, reader.inputs)


def split(data: Labelled, share: float, seed: int) -> tuple[Labelled, Labelled]:
    """Hold a share of the examples out: what is left, and what is held out, each in the order it was in.

    The same text is never on both sides, nor are passages of one query or questions about one context. Of each label
    the same share is held out as far as that goes, and never all of it. The same data and `seed` give the same parts.

    >>> data = labelled("classify", [f"text {i}" for i in range(100)], ["rare"] * 10 + ["common"] * 90)
    >>> rest, held = split(data, 0.1, seed=0)
    >>> len(rest.examples), [example.target for example in held.examples].count("rare")
    (90, 1)
    """
    if not 0 < share < 1:
        raise InputError(f"share={share!r} must be between 0 and 1")
    shared = {"rerank": slice(0, 1), "embed": slice(0, 1), "answer": slice(1, 2)}.get(data.kind, slice(0, 2))
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, example in enumerate(data.examples):
        groups.setdefault(example.texts[shared], []).append(i)
    single = data.kind == "classify" and not data.multi
    labels: list[str] = [example.target if single else "" for example in data.examples]
    strata: dict[str, list[list[int]]] = {}
    for _, members in sorted((_draw(seed, *texts), members) for texts, members in groups.items()):
        strata.setdefault(labels[members[0]], []).append(members)
    strata = {label: found for label, found in strata.items() if len(found) > 1}  # of a single one none can be spared
    wanted = {label: share * sum(map(len, found)) for label, found in strata.items()}
    counts = {label: math.floor(rows) for label, rows in wanted.items()}
    over = max(1, round(sum(wanted.values()))) - sum(counts.values())
    # What rounding down leaves over goes to the labels that lost the most by it.
    for label in sorted(wanted, key=lambda label: (counts[label] - wanted[label], _draw(seed, label)))[:over]:
        counts[label] += 1
    held: set[int] = set()
    rest = Counter(labels)

    def spare(members: list[int]) -> bool:
        return all(rest[label] > count for label, count in Counter(labels[i] for i in members).items())

    for label, found in strata.items():
        for members in found:
            # Only what brings the count nearer to what is wanted.
            if counts[label] > 0 and len(members) <= 2 * counts[label] and spare(members):
                held.update(members)
                rest.subtract(labels[i] for i in members)
                counts[label] -= len(members)
    if not held:
        some = [members for found in strata.values() for members in found if spare(members)]
        if not some:
            raise InputError(f"{data.name} has too few rows to hold some out; give data to check with, or more rows")
        smallest = min(some, key=len)
        held.update(smallest)
    return (
        replace(data, examples=[one for i, one in enumerate(data.examples) if i not in held]),
        replace(
            data,
            name=f"the held-out part of {data.name}",
            examples=[one for i, one in enumerate(data.examples) if i in held],
        ),
    )


def fingerprint(data: Labelled) -> str:
    """A hash of all that training sees: the same for the same examples in the same order, wherever they came from."""
    found = sha256(json.dumps([data.kind, data.multi, data.labels]).encode())
    for one in data.examples:
        found.update(json.dumps([one.texts, one.target, one.words, one.answers]).encode())
    return found.hexdigest()


def _draw(seed: int, *parts: str) -> bytes:
    """A place in a random order that is the same on every machine and does not depend on other rows."""
    return sha256(json.dumps([seed, *parts]).encode()).digest()


def _ordered(labels: Iterable[str]) -> tuple[str, ...]:
    """By number if all are whole numbers, else by letter; `O`, the tag of words outside all entities, comes first."""
    try:
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(labels, key=lambda label: (label != "O", label)))


def _check_worth(kind: Kind, examples: Sequence[Example], name: str) -> None:
    """Is there anything to learn?"""
    if kind == "answer" and not any(example.target for example in examples):
        raise InputError(f"{name} has no answer in any of its {len(examples):,} rows; training needs some")
    if kind not in ("classify", "tag", "rerank", "embed"):
        return
    if kind == "embed" and not isinstance(examples[0].target, str | float):  # pairs, and lists of scores
        return
    found = {tag for one in examples for tag in one.target} if kind == "tag" else {one.target for one in examples}
    if len(found) > 1:
        return
    needs = {"tag": "two tags", "rerank": "positives (1) and negatives (0)"}.get(kind, "two labels")
    what = "tag" if kind == "tag" else "label"
    raise InputError(
        f"{name} has the {what} {found.pop()!r} in each of its {len(examples):,} rows; training needs {needs}"
    )


# --- from what was given to rows ---


def _pieces(kind: Kind, X: Any, y: Any, columns: Mapping[str, str], name: str) -> Iterator[_Piece]:
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
            yield _Piece(table.name, _picked(rows, inputs, target), inputs, target, role)
    elif isinstance(X, list):
        have = list(dict.fromkeys(key for row in X if isinstance(row, Mapping) for key in row))
        inputs, target, role = _chosen(kind, have, columns, name)
        yield _Piece(name, _picked(X, inputs, target), inputs, target, role, _classes(features, target))
    else:
        yield _from_table(kind, X, columns, name)


def _from_lists(kind: Kind, X: list[Any], y: Any, columns: Mapping[str, str], name: str) -> _Piece:
    if columns:
        raise InputError(f"columns={dict(columns)} needs a table or a file, and X is a list of texts")
    if y is None and kind == "embed":
        return _Piece(name, ((texts, None) for texts in X))
    if y is None:
        raise InputError(
            f"{name} has no labels: give them as y, or give a table with the columns {_either(_INPUTS[kind])} and "
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
    return _Piece(name, zip(X, labels, strict=True), role=_role(labels) if kind == "embed" else "")


def _role(labels: Sequence[Any]) -> str:
    """What the targets of texts to be compared are: lists of scores, scores or classes."""
    if any(_list(one) is not None for one in labels):
        return "scores"
    return "score" if any(isinstance(_scalar(one), float) for one in labels) else "label"


def _is_table(X: Any) -> bool:
    """A DataFrame of pandas or polars, or a Dataset that can be read by column."""
    return (hasattr(X, "shape") and hasattr(X, "columns")) or (hasattr(X, "column_names") and hasattr(X, "__len__"))


def _from_table(kind: Kind, X: Any, columns: Mapping[str, str], name: str) -> _Piece:
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
    return _Piece(name, rows, inputs, target, role, classes)


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
    groups, targets = _INPUTS[kind], tuple((one,) for one in _TARGETS[kind])
    known = list(dict.fromkeys(one for group in (*groups, *targets) for one in group))
    if kind == "embed":
        known += ["negative", "negatives", "passages", "scores"]
    for role, column in columns.items():
        if role not in known and not (kind == "embed" and _NEGATIVE.fullmatch(role)):
            raise InputError(f"columns names {role!r}, which {kind} does not read; it reads {_listed(known)}")
        if column not in have:
            raise InputError(f"{name} has no column {column!r}, only {_listed(have)}")

    def choose(groups: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        for group in sorted(groups, key=lambda group: not any(one in columns for one in group)):
            if all(columns.get(one, one) in have for one in group):
                return group
        raise InputError(
            f"{name} has no column {_either(groups)}, only {_listed(have)}; name the right one with "
            f"columns={{{groups[0][0]!r}: ...}}"
        )

    if kind == "embed":
        inputs, target, role = _compared(have, columns, choose)
        if left := [one for one in columns if columns[one] not in (*inputs, target)]:
            raise InputError(
                f"columns names {_listed(left)} besides {_listed(_both(inputs, target))}; name one or other"
            )
        return inputs, target, role
    inputs, (target,) = choose(groups), choose(targets)
    if left := [one for one in columns if one not in (*inputs, target)]:
        raise InputError(f"columns names {_listed(left)} besides {_listed((*inputs, target))}; name one or the other")
    return tuple(columns.get(one, one) for one in inputs), columns.get(target, target), target


def _compared(
    have: Sequence[str], columns: Mapping[str, str], choose: Callable[[Sequence[tuple[str, ...]]], tuple[str, ...]]
) -> tuple[tuple[str, ...], str, str]:
    """As `_chosen`, of texts to be compared: which columns there are says what they are."""
    called = {name: role for role, name in columns.items()}  # what a column is to us
    roles = {called.get(name, name): name for name in have}
    if "query" in roles and "passages" in roles and "scores" in roles:
        return (roles["query"], roles["passages"]), roles["scores"], "scores"
    group = choose(_INPUTS["embed"])
    inputs = tuple(roles[one] for one in group)
    wrong = [role for role in roles if _NEGATIVE.fullmatch(role)]
    if group[1] == "positive" or (group[0] == "query" and wrong):
        wrong.sort(key=lambda role: (len(role), role))  # negative_2 before negative_10
        return (*inputs, *(roles[one] for one in wrong)), "", ""
    for role in ("score", "label"):
        if role in roles:
            return inputs, roles[role], "score" if group[0] == "query" else role
    return inputs, "", ""


def _listed(names: Sequence[Any], most: int = 20) -> str:
    some = ", ".join(map(repr, names[:most]))
    return some if len(names) <= most else f"{some}, … ({len(names)} in all)"


def _either(groups: Iterable[tuple[str, ...]]) -> str:
    return " or ".join(" + ".join(map(repr, group)) for group in groups)


# --- from a row to an example ---


class _Reader:
    """Rows to examples. It remembers which labels there were, and what the first row looked like."""

    def __init__(self, kind: Kind, known: Sequence[str] | None) -> None:
        self.kind = kind
        self.known = known
        self.original: dict[str, Any] = {}
        self.multi: bool | None = None
        self.inputs: Inputs = ""
        self._width = 0

    def example(self, piece: _Piece, inputs: Any, target: Any, row: int) -> Example:
        """One row, or an error that says what is wrong with it."""
        where = f"column {piece.target!r}" if piece.target else "y"
        if self.kind == "tag":
            return self._tagged(piece, inputs[0] if piece.columns else inputs, target, where, row)
        if self.kind == "embed":
            return self._several(piece, inputs, target, where, row)
        texts = self._texts(piece, inputs)
        if self.kind == "classify":
            return Example(texts, self._labels(piece, target, where), row)
        if self.kind == "answer":
            spans, answers = _answers(target, texts[1], where)
            return Example(texts, spans, row, answers=answers)
        return Example(texts, self._score(target, where), row)

    def _texts(self, piece: _Piece, inputs: Any) -> tuple[str, ...]:
        if piece.columns:
            places = [f"column {column!r}" for column in piece.columns]
        else:
            inputs = (inputs,) if (both := _list(inputs)) is None else both
            places = ["X"] if len(inputs) == 1 else ["the first of the pair", "the second of the pair"]
        if self.kind in ("answer", "rerank"):
            if len(inputs) != 2:
                raise InputError(f"{len(inputs)} texts; give two, the {' and the '.join(_INPUTS[self.kind][0])}")
        elif len(inputs) not in ((self._width,) if self._width else (1, 2)):
            before = {1: "one", 2: "a pair"}.get(self._width, "one or a pair")
            raise InputError(f"{len(inputs)} texts; give {before}, the same in each row")
        self._width = len(inputs)
        return tuple([_text(text, place) for text, place in zip(inputs, places, strict=True)])

    def _several(self, piece: _Piece, inputs: Any, target: Any, where: str, row: int) -> Example:
        """Texts to be compared, with what is known of them."""
        found: Inputs = "pairs"
        if piece.role:
            found = {"score": "scores", "label": "classes", "scores": "lists"}[piece.role]  # type: ignore[assignment]
        if self.inputs and found != self.inputs:
            raise InputError(f"{found} here and {self.inputs} before; all data must be of one kind")
        self.inputs = found
        given = list(inputs) if piece.columns else _list(inputs)
        if given is None:
            raise InputError(f"{_shown(inputs)} in X; give two texts or more, in a tuple")
        texts: list[str] = []
        for i, value in enumerate(given):
            place = f"column {piece.columns[i]!r}" if piece.columns else f"text {i + 1} of X"
            many = _list(value)
            if many is None and isinstance(value, str) and i >= (1 if found == "lists" else 2):
                many = _json(value, list)  # passages or negatives, where a file has no lists
            texts += [_text(one, place) for one in ([value] if many is None else many)]
        if len(texts) < 2 or (self._width and len(texts) != self._width):
            raise InputError(f"{len(texts)} texts; give {self._width or 'two or more'}, the same in each row")
        if found in ("scores", "classes") and len(texts) != 2:
            raise InputError(f"{len(texts)} texts with one {piece.role}; give two")
        self._width = len(texts)
        if found == "pairs":
            return Example(tuple(texts), None, row)
        if found == "classes":
            return Example(tuple(texts), self._label(piece, target, where), row)
        if found == "scores":
            return Example(tuple(texts), self._score(target, where), row)
        scores = tuple([self._score(one, where) for one in _parts(target, where, "scores")])
        if len(scores) != len(texts) - 1:
            raise InputError(f"{len(texts) - 1} passages and {len(scores)} scores in {where}; each needs one")
        return Example(tuple(texts), scores, row)

    def _labels(self, piece: _Piece, value: Any, where: str) -> str | tuple[str, ...]:
        several = _list(value)
        if piece.role == "labels" and _missing(value):
            raise InputError(f"no labels in {where}; {_MEND}, or write [] if the text has none")
        if piece.role == "labels" and isinstance(value, str):
            several = _json(value, list)
            if several is None:
                several = [part.strip() for part in value.split("|")]
        if several is None:
            found: str | tuple[str, ...] = self._label(piece, value, where)
        else:
            found = tuple([self._label(piece, one, where) for one in several])
            if len(set(found)) < len(found):
                raise InputError(f"a label twice in {where}: {several!r:.60}; list each label that the text has once")
        if self.multi is None:
            self.multi = several is not None
        if self.multi != (several is not None):
            got, before = ("one label", "lists") if self.multi else ("a list", "one label each")
            raise InputError(f"{got} in {where}, and {before} in the rows before; give all rows lists, or none")
        return found

    def _label(self, piece: _Piece, value: Any, where: str, what: str = "label") -> str:
        if type(value) is str and value in self.original:
            return value
        value = _scalar(value)
        if piece.classes is not None and type(value) is int:
            # The Hub writes -1 where there is no label.
            value = piece.classes[value] if 0 <= value < len(piece.classes) else None
        if _missing(value) or (isinstance(value, str) and not value.strip()):
            raise InputError(f"no {what} in {where}; {_MEND}")
        if isinstance(value, float):
            if not value.is_integer():
                raise InputError(f"{what} {value!r} in {where} is no class; to learn numbers, use regress")
            value = int(value)  # pandas makes whole numbers floats when one is missing
        if not isinstance(value, str | int):
            raise InputError(f"{_shown(value)} in {where} is no {what}; it must be a str, an int or a bool")
        label = str(value)
        if self.known is not None and label not in self.known:
            raise InputError(f"{what} {label!r:.60} in {where} is none of {_listed(self.known, 8)}")
        self.original.setdefault(label, value)
        return label

    def _score(self, value: Any, where: str) -> float:
        if _missing(value):
            raise InputError(f"no score in {where}; {_MEND}")
        try:
            score = float(value)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{_shown(value)} in {where} is no number") from None
        if not math.isfinite(score):
            raise InputError(f"score {score!r} in {where} is not finite; {_MEND}")
        if self.kind == "rerank" and not 0 <= score <= 1:
            raise InputError(
                f"score {score!r} in {where} is not from 0 (irrelevant) to 1 (relevant); divide grades by the highest"
            )
        return score

    def _tagged(self, piece: _Piece, given: Any, value: Any, where: str, row: int) -> Example:
        place = f"column {piece.columns[0]!r}" if piece.columns else "X"
        words = _parts(given, place, "words")
        for i, word in enumerate(words, 1):
            if not isinstance(word, str) or not word or word != word.strip():
                raise InputError(
                    f"word {i} in {place} is {_shown(word)}; a word is not empty and has no whitespace at its ends"
                )
        tags = _parts(value, where, "tags")
        if len(words) != len(tags):
            raise InputError(f"{len(words)} words and {len(tags)} tags; each word needs one tag")
        target = tuple([self._label(piece, tag, where, "tag") for tag in tags])
        ends = list(accumulate(map(len, words), lambda end, size: end + 1 + size))
        spans = tuple([(end - len(word), end) for word, end in zip(words, ends, strict=True)])
        return Example((checked_text(" ".join(words), place),), target, row, words=spans)


def _text(value: Any, where: str) -> str:
    if isinstance(value, str) and value and not value.isspace():
        return checked_text(value, where)
    if isinstance(value, str) or _missing(value):
        raise InputError(f"no text in {where}; {_MEND}")
    raise InputError(f"{_shown(value)} in {where} is not text")


def _parts(value: Any, where: str, what: str) -> list[Any]:
    """A list, its JSON, or what lies between spaces."""
    found = _list(value)
    if isinstance(value, str):
        found = _json(value, list)
        if found is None:
            found = value.split()
    if found is None and not _missing(value):
        raise InputError(f"{_shown(value)} in {where} is no list of {what}")
    if not found:
        raise InputError(f"no {what} in {where}; {_MEND}")
    return found


def _answers(value: Any, context: str, where: str) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:
    """Where the answers are, and their texts."""
    if isinstance(value, str):
        found = _json(value, (list, dict))
        value = [value] if found is None else found
    if isinstance(value, Mapping):
        value = _answers_of_squad(value, where)
    given = _list(value)
    if given is None:
        what = "no answers" if _missing(value) else f"{_shown(value)}, not answers,"
        raise InputError(f"{what} in {where}; {_MEND}, or write [] if the answer is not in the context")
    spans = tuple([_span(one, context, where) for one in given])
    return spans, tuple([context[start:end] for start, end in spans])


def _answers_of_squad(value: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """From lists of texts and starts to answers; a single answer may come without lists."""
    texts, starts = _list(value.get("text")), _list(value.get("answer_start"))
    if texts is None:
        return [dict(value)]
    if starts is None or len(starts) != len(texts):
        raise InputError(
            f"{len(texts)} answers and {len(starts or ())} starts in {where}; give both 'text' and 'answer_start', as "
            "lists of one length"
        )
    return [{"text": text, "start": start} for text, start in zip(texts, starts, strict=True)]


def _span(answer: Any, context: str, where: str) -> tuple[int, int]:
    """Where an answer is."""
    bounds = _list(answer)
    if bounds is not None:
        bounds = [_scalar(one) for one in bounds]
        if len(bounds) == 2 and all(type(one) is int for one in bounds) and 0 <= bounds[0] < bounds[1] <= len(context):
            return bounds[0], bounds[1]
        raise InputError(
            f"answer {bounds!r:.60} in {where} is no (start, end) within the {len(context):,} characters of the context"
        )
    text, start = answer, None
    if isinstance(answer, Mapping):
        text, start = answer.get("text"), _scalar(answer.get("answer_start", answer.get("start")))
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"answer {_shown(text)} in {where} is no text; write [] if the answer is not in the context")
    if start is not None and type(start) is not int:
        raise InputError(f"answer {text!r:.60} in {where} starts at {_shown(start)}; it must be an int, counted from 0")
    found = context.find(text) if start is None else start
    if found >= 0 and context.startswith(text, found):
        return found, found + len(text)
    around = (context.rfind(text, 0, max(found, 0) + len(text)), context.find(text, max(found, 0)))
    near = min((place for place in around if place >= 0), key=lambda place: abs(place - found), default=None)
    if near is None:
        raise InputError(f"answer {text!r:.60} in {where} is not in the context; copy it from there")
    raise InputError(f"answer {text!r:.60} in {where} is not at character {found} of the context, but at {near}")


def _list(value: Any) -> list[Any] | None:
    """A list, tuple or array as a list; None for anything else."""
    if isinstance(value, list | tuple):
        return list(value)
    found = value.tolist() if hasattr(value, "tolist") else None
    return found if isinstance(found, list) else None


def _json(text: str, kinds: type | tuple[type, ...]) -> Any:
    """The list or dict that a cell holds as JSON; None if it holds anything else."""
    if text[:1] not in ("[", "{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, kinds) else None


def _scalar(value: Any) -> Any:
    """A number of numpy as Python's own."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _missing(value: Any) -> bool:
    """None, NaN, or pandas' NA."""
    return value is None or (isinstance(value, float) and math.isnan(value)) or type(value).__name__ == "NAType"


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.40}"
