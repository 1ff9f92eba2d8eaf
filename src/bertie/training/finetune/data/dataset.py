"""Examples of one kind: read, split, and told apart."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from bertie.errors import InputError
from bertie.training.finetune.data.examples import Example, Inputs, Reader
from bertie.training.finetune.data.tables import INPUTS, Kind, pieces

_SHOWN = 5  # problems an error names


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
    if kind not in INPUTS:
        raise InputError(f"kind={kind!r} must be one of {', '.join(INPUTS)}")
    reader = Reader(kind, known)
    examples: list[Example] = []
    names: list[str] = []
    problems: list[str] = []
    row = bad = 0
    for piece in pieces(kind, X, y, columns or {}, name):
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
