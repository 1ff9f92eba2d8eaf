"""From rows to examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from bertie.errors import InputError
from bertie.text.tokenizer import checked_text
from bertie.training.finetune.data.cells import (
    FIX,
    as_list,
    as_scalar,
    describe,
    from_json,
    is_missing,
    join_names,
    parse_list,
    parse_text,
)
from bertie.training.finetune.data.choices import parse_choices
from bertie.training.finetune.data.label_spelling import spelling
from bertie.training.finetune.data.tables import INPUTS, Kind, RowSource

Inputs = Literal["", "pairs", "classes", "scores", "lists"]


@dataclass(frozen=True, slots=True)
class Example:
    """One row: texts and their target."""

    texts: tuple[str, ...]  # one or a pair; tag: the words, joined by single spaces; embed: two or more;
    # choose: the context, then its choices
    target: Any  # classify: a label, or a tuple of them; regress, rerank: a float; tag: a tuple of tags, one per word;
    # answer: a tuple of (start, end) characters in the context, empty if it has no answer; embed: by `inputs`;
    # choose: the index of the right choice
    row: int  # counted from 1
    words: tuple[tuple[int, int], ...] = ()  # tag: (start, end) of each word in the text
    answers: tuple[str, ...] = ()  # answer: the texts of the targets


class ExampleReader:
    """Turns rows into examples, collecting the labels and checking that all rows have the same form."""

    def __init__(self, kind: Kind, known: Sequence[str] | None) -> None:
        self.kind = kind
        self.known = known
        self.original: dict[str, Any] = {}
        self.unseen: set[str] = set()  # labels that are not among the known ones
        self.mixed_types: dict[str, tuple[Any, Any]] = {}  # labels with values of two types: 1 and "1"
        self.multi_label: bool | None = None
        self.inputs: Inputs = ""
        self._width = 0

    def example(self, source: RowSource, inputs: Any, target: Any, row: int) -> Example:
        """The example of a row; raises an error that says what is wrong with it."""
        where = f"column {source.target!r}" if source.target else "y"
        if self.kind == "tag":
            return self._tagging_example(source, inputs[0] if source.columns else inputs, target, where, row)
        if self.kind == "choose":
            return Example(*parse_choices(source, inputs, target, where), row)
        if self.kind == "embed":
            return self._embedding_example(source, inputs, target, where, row)
        texts = self._texts(source, inputs)
        if self.kind == "classify":
            return Example(texts, self._labels(source, target, where), row)
        if self.kind == "answer":
            spans, answers = _answers(target, texts[1], where)
            return Example(texts, spans, row, answers=answers)
        return Example(texts, self._score(target, where), row)

    def _texts(self, source: RowSource, inputs: Any) -> tuple[str, ...]:
        if source.columns:
            places = [f"column {column!r}" for column in source.columns]
        else:
            inputs = (inputs,) if (pair := as_list(inputs)) is None else pair
            places = ["X"] if len(inputs) == 1 else ["the first of the pair", "the second of the pair"]
        if self.kind in ("answer", "rerank"):
            if len(inputs) != 2:
                raise InputError(f"{len(inputs)} texts; give two, the {' and the '.join(INPUTS[self.kind][0])}")
        elif len(inputs) not in ((self._width,) if self._width else (1, 2)):
            before = {1: "one", 2: "a pair"}.get(self._width, "one or a pair")
            raise InputError(f"{len(inputs)} texts; give {before}, the same in each row")
        self._width = len(inputs)
        return tuple([parse_text(text, place) for text, place in zip(inputs, places, strict=True)])

    def _embedding_example(self, source: RowSource, inputs: Any, target: Any, where: str, row: int) -> Example:
        """Two or more texts for embeddings, with or without a target."""
        form: Inputs = "pairs"
        if source.role:
            form = {"score": "scores", "label": "classes", "scores": "lists"}[source.role]  # type: ignore[assignment]
        if self.inputs and form != self.inputs:
            raise InputError(f"{form} here and {self.inputs} before; all data must be of one kind")
        self.inputs = form
        values = list(inputs) if source.columns else as_list(inputs)
        if values is None:
            raise InputError(f"{describe(inputs)} in X; give two texts or more, in a tuple")
        texts: list[str] = []
        for i, value in enumerate(values):
            place = f"column {source.columns[i]!r}" if source.columns else f"text {i + 1} of X"
            items = as_list(value)
            if items is None and isinstance(value, str) and i >= (1 if form == "lists" else 2):
                items = from_json(value, list)  # passages or negatives, in a file format without lists
            texts += [parse_text(text, place) for text in ([value] if items is None else items)]
        if len(texts) < 2 or (self._width and len(texts) != self._width):
            raise InputError(f"{len(texts)} texts; give {self._width or 'two or more'}, the same in each row")
        if form in ("scores", "classes") and len(texts) != 2:
            raise InputError(f"{len(texts)} texts with one {source.role}; give two")
        self._width = len(texts)
        return Example(tuple(texts), self._embedding_target(form, source, target, where, len(texts) - 1), row)

    def _embedding_target(self, form: Inputs, source: RowSource, target: Any, where: str, passages: int) -> Any:
        if form == "pairs":
            return None
        if form == "classes":
            return self._label(source, target, where)
        if form == "scores":
            return self._score(target, where)
        scores = tuple([self._score(score, where) for score in parse_list(target, where, "scores")])
        if len(scores) != passages:
            raise InputError(f"{passages} passages and {len(scores)} scores in {where}; each needs one")
        return scores

    def _labels(self, source: RowSource, value: Any, where: str) -> str | tuple[str, ...]:
        items = as_list(value)
        if source.role == "labels" and is_missing(value):
            raise InputError(f"no labels in {where}; {FIX}, or write [] if the text has none")
        if source.role == "labels" and isinstance(value, str):
            items = from_json(value, list)
            if items is None:
                items = [label.strip() for label in value.split("|")]
        if items is None:
            labels: str | tuple[str, ...] = self._label(source, value, where)
        else:
            labels = tuple([self._label(source, item, where) for item in items])
            if len(set(labels)) < len(labels):
                raise InputError(f"a label twice in {where}: {items!r:.60}; list each label of the text once")
        if self.multi_label is None:
            self.multi_label = items is not None
        if self.multi_label != (items is not None):
            this, before = ("one label", "lists") if self.multi_label else ("a list", "one label each")
            raise InputError(f"{this} in {where}, and {before} in the rows before; use lists in all rows, or in none")
        return labels

    def _label(self, source: RowSource, value: Any, where: str, what: str = "label") -> str:
        if type(value) is str and type(self.original.get(value)) is str:
            return value
        value = as_scalar(value)
        if source.classes is not None and type(value) is int:
            # The Hub writes -1 where there is no label.
            value = source.classes[value] if 0 <= value < len(source.classes) else None
        if is_missing(value) or (isinstance(value, str) and not value.strip()):
            raise InputError(f"no {what} in {where}; {FIX}")
        if isinstance(value, float):
            if not value.is_integer():
                raise InputError(f"{what} {value!r} in {where} is not a class; for numbers use regress")
            value = int(value)  # pandas turns a column of integers into floats if one is missing
        if not isinstance(value, str | int):
            raise InputError(f"{describe(value)} in {where} is not a {what}; it must be a str, an int or a bool")
        label = str(value)
        if self.known is not None and label not in self.known:
            near = [name for name in self.known if spelling(name) == spelling(label)]
            if near:  # a mistake in the file, not another class
                hint = f"{near[0]!r} is spelled differently"
                raise InputError(f"{what} {label!r:.60} in {where} is not one of {join_names(self.known, 8)}; {hint}")
            self.unseen.add(label)
        if type(self.original.setdefault(label, value)) is not type(value):
            self.mixed_types.setdefault(label, (self.original[label], value))
        return label

    def _score(self, value: Any, where: str) -> float:
        if is_missing(value):
            raise InputError(f"no score in {where}; {FIX}")
        try:
            score = float(value)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{describe(value)} in {where} is not a number") from None
        if not math.isfinite(score):
            raise InputError(f"score {score!r} in {where} is not finite; {FIX}")
        if self.kind == "rerank" and not 0 <= score <= 1:
            raise InputError(
                f"score {score!r} in {where} is not from 0 (irrelevant) to 1 (relevant); divide grades by the highest"
            )
        return score

    def _tagging_example(self, source: RowSource, words_value: Any, value: Any, where: str, row: int) -> Example:
        place = f"column {source.columns[0]!r}" if source.columns else "X"
        words = parse_list(words_value, place, "words")
        for i, word in enumerate(words, 1):
            if not isinstance(word, str) or not word or word != word.strip():
                raise InputError(
                    f"word {i} in {place} is {describe(word)}; a word must not be empty, or have whitespace at its ends"
                )
        tags = parse_list(value, where, "tags")
        if len(words) != len(tags):
            raise InputError(f"{len(words)} words and {len(tags)} tags; each word needs one tag")
        target = tuple([self._label(source, tag, where, "tag") for tag in tags])
        ends = list(accumulate(map(len, words), lambda end, size: end + 1 + size))
        spans = tuple([(end - len(word), end) for word, end in zip(words, ends, strict=True)])
        return Example((checked_text(" ".join(words), place),), target, row, words=spans)


def _answers(value: Any, context: str, where: str) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:
    """The (start, end) of the answers in the context, and their texts."""
    if isinstance(value, str):
        parsed = from_json(value, (list, dict))
        value = [value] if parsed is None else parsed
    if isinstance(value, Mapping):
        value = _squad_answers(value, where)
    answers = as_list(value)
    if answers is None:
        what = "no answers" if is_missing(value) else f"{describe(value)}, not answers,"
        raise InputError(f"{what} in {where}; {FIX}, or write [] if the answer is not in the context")
    spans = tuple([_span(answer, context, where) for answer in answers])
    return spans, tuple([context[start:end] for start, end in spans])


def _squad_answers(value: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """From lists of texts and starts to answers; a single answer may come without lists."""
    texts, starts = as_list(value.get("text")), as_list(value.get("answer_start"))
    if texts is None:
        return [dict(value)]
    if starts is None or len(starts) != len(texts):
        raise InputError(
            f"{len(texts)} answers and {len(starts or ())} starts in {where}; give both 'text' and 'answer_start', as "
            "lists of the same length"
        )
    return [{"text": text, "start": start} for text, start in zip(texts, starts, strict=True)]


def _span(answer: Any, context: str, where: str) -> tuple[int, int]:
    """The (start, end) of an answer."""
    bounds = as_list(answer)
    if bounds is not None:
        bounds = [as_scalar(bound) for bound in bounds]
        integers = len(bounds) == 2 and all(type(bound) is int for bound in bounds)
        if integers and 0 <= bounds[0] < bounds[1] <= len(context):
            return bounds[0], bounds[1]
        raise InputError(
            f"answer {bounds!r:.60} in {where} is not a (start, end) within the context, which has {len(context):,} "
            "characters"
        )
    text, start = answer, None
    if isinstance(answer, Mapping):
        text, start = answer.get("text"), as_scalar(answer.get("answer_start", answer.get("start")))
    if not isinstance(text, str) or not text.strip():
        raise InputError(
            f"answer {describe(text)} in {where} is not text; write [] if the answer is not in the context"
        )
    if start is not None and type(start) is not int:
        raise InputError(
            f"answer {text!r:.60} in {where} starts at {describe(start)}; it must be an int, counted from 0"
        )
    begin = context.find(text) if start is None else start
    if begin >= 0 and context.startswith(text, begin):
        return begin, begin + len(text)
    around = (context.rfind(text, 0, max(begin, 0) + len(text)), context.find(text, max(begin, 0)))
    near = min((place for place in around if place >= 0), key=lambda place: abs(place - begin), default=None)
    if near is None:
        raise InputError(f"answer {text!r:.60} in {where} is not in the context; copy it from there")
    raise InputError(f"answer {text!r:.60} in {where} is not at character {begin} of the context, but at {near}")
