"""Labelled datasets: reading, splitting and fingerprints.

Columns are found by these names, the first that exist; `columns={"text": "review"}` renames one.

- classify: `text`, or a pair (`text_a` and `text_b`, `premise` and `hypothesis`, `sentence1` and `sentence2`,
  `question1` and `question2`, `question` and `sentence`), or `sentence`; with `label` or `labels`
- regress: the same, with `score` or `label`
- tag: `tokens`, with `tags` or `ner_tags`
- answer: `question` and `context`, with `answers`
- rerank: `query` and `passage` (or `document`, or `text`), with `label` or `score`, from 0 to 1
- embed: matching texts, `anchor` and `positive`, or `query` and `positive` (or `passage`, `document`,
  `text`), with or without negatives: `negative`, `negative_1`, …, or lists of `negatives`. Or a pair of
  texts with `score`, or with `label`: a class, but a score for queries and passages. Or `query`, lists
  of `passages` and lists of their `scores`. Lists of pairs or triplets need no `y`
- choose: `context` (or `question`) and `choices`, with `label` (or `answer`, `answerKey`): the index of the right
  choice from 0, or its text; or SWAG's `sent1`, `sent2`, `ending0` to `ending3`, with `label`

Values:

- A label is a str, int or bool; a Hugging Face ClassLabel is replaced by its names. A list of labels makes the data
  multi-label, and so do texts like `sad|angry` in a column `labels`.
- Words and tags are lists, or texts with spaces between them.
- Answers are SQuAD's `{"text": [...], "answer_start": [...]}`, a list of `{"text", "answer_start"}` (or `start`), a
  list of (start, end), or texts alone, which are located at their first occurrence. `[]` means that the context has
  no answer.
- Instead of a list, its JSON is accepted, since CSV has no lists.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from bertie.errors import BertieWarning, InputError
from bertie.training.finetune.data.cells import join_names
from bertie.training.finetune.data.examples import Example, ExampleReader, Inputs
from bertie.training.finetune.data.label_spelling import warn_of_spellings
from bertie.training.finetune.data.tables import INPUTS, Kind, RowSource, row_sources

_MAX_PROBLEMS = 5  # named in one error
OUTSIDE = "O"  # the tag of words outside all spans, which all sets of tags share


@dataclass(frozen=True, slots=True)
class LabelledDataset:
    """Examples of one kind."""

    name: str
    kind: Kind
    examples: list[Example]
    multi_label: bool  # classify only
    labels: tuple[str, ...]  # classify and tag: in the order of a model's outputs
    original: dict[str, Any]  # from a label to its value in the input: {"0": 0}
    inputs: Inputs = ""  # embed: pairs have no target, classes a label, scores a float, lists a float per passage


def read_dataset(
    kind: Kind,
    X: Any,
    y: Any = None,
    *,
    columns: Mapping[str, str] | None = None,
    name: str = "the training data",
    known: Sequence[str] | None = None,
    training: bool = True,
) -> LabelledDataset:
    """Read labelled data, and check every row.

    `X` is a file name (CSV, TSV, JSONL or Parquet, compressed or not), a list of `Path`s, or a table: a
    pandas or polars DataFrame, a Hugging Face Dataset, a dict of columns or a list of dicts. Or `X` holds
    the texts (pairs; lists of words for `tag`) and `y` their labels, as lists, arrays or columns.

    The names of columns and the forms of values are listed at the top of this module.
    `name` is used in error messages for data that is not a file. `known` are the labels of a model. Other
    labels count as errors in evaluation, with a warning; data without any known label is rejected.
    `training` requires data to learn from: at least two labels, for example.

    >>> data = read_dataset("classify", ["a delight", "a bore"], [1, 0])
    >>> data.labels, data.original
    (('0', '1'), {'1': 1, '0': 0})
    >>> data.examples[0]
    Example(texts=('a delight',), target='1', row=1, words=(), answers=())
    >>> read_dataset("classify", {"text": ["a delight", " ", "a bore"], "label": ["good", "bad", None]})
    Traceback (most recent call last):
    bertie.errors.InputError: the training data, row 2: no text in column 'text'; fill it in or leave the row out
    the training data, row 3: no label in column 'label'; fill it in or leave the row out
    """
    if kind not in INPUTS:
        raise InputError(f"kind={kind!r} must be one of {', '.join(INPUTS)}")
    reader = ExampleReader(kind, known)
    name, examples = _read_rows(reader, row_sources(kind, X, y, columns or {}, name))
    warn_of_spellings(name, examples, reader.original, reader.mixed_types)
    if training:
        _check_trainable(kind, examples, name)
    labels = _sort_labels(reader.original)
    if known is not None:
        labels = (*known, *sorted(reader.unseen))
        if reader.unseen and kind == "embed":
            raise InputError(f"{name}: the label {labels[-1]!r:.60} is not one of {join_names(known, 8)}")
        if reader.unseen:
            warn_of_unseen(name, known, examples)
    return LabelledDataset(name, kind, examples, bool(reader.multi_label), labels, reader.original, reader.inputs)


def warn_of_unseen(name: str, known: Sequence[str], examples: Sequence[Example]) -> None:
    """Warn of labels that a model does not have; raise if the data has no other."""
    own, rows, total = set(known), Counter[str](), 0
    first = ""
    for example in examples:
        labels = {example.target} if isinstance(example.target, str) else set(example.target)
        total += len(labels - {OUTSIDE})
        rows.update(labels - own)
        if not first and labels - own:
            first = (
                f"{name}, row {example.row}: the label {min(labels - own)!r:.60} is not one of {join_names(known, 8)}"
            )
    if not rows:
        return
    if rows.total() == total:
        raise InputError(
            f"{name} has the labels {join_names(sorted(rows), 8)}, but the model has "
            f"{join_names(known, 8)}; pass data with the model's labels, or train a model on these"
        )
    counts = join_names([f"{label} ({count:,} rows)" for label, count in rows.most_common()], 8)
    warnings.warn(
        f"{first}. Labels that the model does not know count as errors: {counts} of {len(examples):,}",
        BertieWarning,
        stacklevel=4,
    )


def _read_rows(reader: ExampleReader, sources: Iterable[RowSource]) -> tuple[str, list[Example]]:
    """The name of the data and its examples; one error names the first rows that cannot be used."""
    examples: list[Example] = []
    names: list[str] = []
    problems: list[str] = []
    row = bad = 0
    for source in sources:
        names.append(source.name)
        for number, (inputs, target) in enumerate(source.rows, 1):
            row += 1
            try:
                examples.append(reader.example(source, inputs, target, row))
            except InputError as error:
                bad += 1
                if bad <= _MAX_PROBLEMS:
                    problems.append(f"{source.name}, row {number}: {error}")
    if bad > _MAX_PROBLEMS:
        problems.append(f"and {bad - _MAX_PROBLEMS:,} more rows")
    if problems:
        raise InputError("\n".join(problems))
    name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    if not examples:
        raise InputError(f"{name} is empty: there is nothing to learn from")
    return name, examples


def split(data: LabelledDataset, fraction: float, seed: int) -> tuple[LabelledDataset, LabelledDataset]:
    """Split off a fraction of the examples: the rest, and the held-out part, each in the original order.

    The same text is never in both, nor are passages of one query or questions about one context. The split
    is stratified by label as far as possible, and no label is held out entirely. The same data and `seed`
    give the same split.

    >>> data = read_dataset("classify", [f"text {i}" for i in range(100)], ["rare"] * 10 + ["common"] * 90)
    >>> rest, held = split(data, 0.1, seed=0)
    >>> len(rest.examples), [example.target for example in held.examples].count("rare")
    (90, 1)
    """
    if not 0 < fraction < 1:
        raise InputError(f"fraction={fraction!r} must be between 0 and 1")
    single = data.kind == "classify" and not data.multi_label
    labels: list[str] = [example.target if single else "" for example in data.examples]
    held = _held_out(_strata(data, labels, seed), labels, fraction, seed)
    if not held:
        raise InputError(f"{data.name} has too few rows to hold some out; give dev data, or more rows")
    parts = [[e for i, e in enumerate(data.examples) if (i in held) == wanted] for wanted in (False, True)]
    name = f"the held-out part of {data.name}"
    return replace(data, examples=parts[0]), replace(data, name=name, examples=parts[1])


def split_folds(data: LabelledDataset, count: int, seed: int) -> list[tuple[LabelledDataset, LabelledDataset]]:
    """Split into folds of cross-validation: for each, the other rows and the fold, each in the original order.

    Every row is in one fold. What belongs together stays together, and labels are distributed evenly, as in `split`.

    >>> data = read_dataset("classify", [f"text {i}" for i in range(100)], ["rare"] * 10 + ["common"] * 90)
    >>> [[e.target for e in held.examples].count("rare") for _, held in split_folds(data, 5, seed=0)]
    [2, 2, 2, 2, 2]
    """
    if count < 2:
        raise InputError(f"count={count} must be at least 2")
    single = data.kind == "classify" and not data.multi_label
    labels: list[str] = [example.target if single else "" for example in data.examples]
    fold_of: dict[int, int] = {}
    rows = [0] * count
    for groups in _groups(data, labels, seed).values():
        own = [0] * count
        for members in groups:
            fold = min(range(count), key=lambda i: (own[i], rows[i], i))
            own[fold] += len(members)
            rows[fold] += len(members)
            fold_of |= dict.fromkeys(members, fold)
    if 0 in rows:
        raise InputError(f"{data.name} has too few different texts for {count} folds; give dev data, or more rows")
    name = f"the held-out folds of {data.name}"
    return [
        (
            replace(data, examples=[e for i, e in enumerate(data.examples) if fold_of[i] != fold]),
            replace(data, name=name, examples=[e for i, e in enumerate(data.examples) if fold_of[i] == fold]),
        )
        for fold in range(count)
    ]


def _strata(data: LabelledDataset, labels: Sequence[str], seed: int) -> dict[str, list[list[int]]]:
    """Groups of examples that must stay together, by label. The only group of a label cannot be spared."""
    return {label: groups for label, groups in _groups(data, labels, seed).items() if len(groups) > 1}


def _groups(data: LabelledDataset, labels: Sequence[str], seed: int) -> dict[str, list[list[int]]]:
    """Groups of examples that must stay together, shuffled, by the label of their first one."""
    shared = {"rerank": slice(0, 1), "embed": slice(0, 1), "choose": slice(0, 1), "answer": slice(1, 2)}.get(
        data.kind, slice(0, 2)
    )
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, example in enumerate(data.examples):
        groups.setdefault(example.texts[shared], []).append(i)
    strata: dict[str, list[list[int]]] = {}
    for _, members in sorted((_random_key(seed, *texts), members) for texts, members in groups.items()):
        strata.setdefault(labels[members[0]], []).append(members)
    return strata


def _held_out(strata: Mapping[str, list[list[int]]], labels: Sequence[str], fraction: float, seed: int) -> set[int]:
    """The rows to hold out; none if no group can be spared."""
    wanted = {label: fraction * sum(map(len, groups)) for label, groups in strata.items()}
    counts = {label: math.floor(rows) for label, rows in wanted.items()}
    over = max(1, round(sum(wanted.values()))) - sum(counts.values())
    # The remainder goes to the labels that lost the most by rounding down.
    for label in sorted(wanted, key=lambda label: (counts[label] - wanted[label], _random_key(seed, label)))[:over]:
        counts[label] += 1
    held: set[int] = set()
    rest = Counter(labels)

    def can_spare(members: list[int]) -> bool:
        return all(rest[label] > count for label, count in Counter(labels[i] for i in members).items())

    for label, groups in strata.items():
        for members in groups:
            # Only groups that bring the count closer to the target.
            if counts[label] > 0 and len(members) <= 2 * counts[label] and can_spare(members):
                held.update(members)
                rest.subtract(labels[i] for i in members)
                counts[label] -= len(members)
    if not held:
        spare = [members for groups in strata.values() for members in groups if can_spare(members)]
        held.update(sorted(spare, key=len)[0] if spare else ())
    return held


def fingerprint(data: LabelledDataset) -> str:
    """A hash of all that training sees: the same for the same examples in the same order, whatever their source."""
    digest = sha256(json.dumps([data.kind, data.multi_label, data.labels]).encode())
    for example in data.examples:
        digest.update(json.dumps([example.texts, example.target, example.words, example.answers]).encode())
    return digest.hexdigest()


def _random_key(seed: int, *parts: str) -> bytes:
    """A sort key for a random order that is the same on every machine and independent of other rows."""
    return sha256(json.dumps([seed, *parts]).encode()).digest()


def _sort_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Sort labels numerically if all are integers, else alphabetically; `O`, the tag outside entities, comes first."""
    try:
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(labels, key=lambda label: (label != "O", label)))


def _check_trainable(kind: Kind, examples: Sequence[Example], name: str) -> None:
    """Refuse data without anything to learn, such as a single label."""
    if kind == "answer" and not any(example.target for example in examples):
        raise InputError(f"{name} has no answer in any of its {len(examples):,} rows; training needs some")
    if kind not in ("classify", "tag", "rerank", "embed"):
        return
    if kind == "embed" and not isinstance(examples[0].target, str | float):  # pairs, and lists of scores
        return
    labels = {t for example in examples for t in example.target} if kind == "tag" else {e.target for e in examples}
    if len(labels) > 1:
        return
    needs = {"tag": "two tags", "rerank": "positives (1) and negatives (0)"}.get(kind, "two labels")
    what = "tag" if kind == "tag" else "label"
    raise InputError(
        f"{name} has the {what} {labels.pop()!r} in each of its {len(examples):,} rows; training needs {needs}"
    )
