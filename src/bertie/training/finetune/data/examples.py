"""From a row to an example, or to what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from bertie.errors import InputError
from bertie.text.tokenizer import checked_text
from bertie.training.finetune.data.cells import MEND, as_list, from_json, listed, missing, parts, scalar, shown, text_in
from bertie.training.finetune.data.tables import INPUTS, Kind, Piece

Inputs = Literal["", "pairs", "classes", "scores", "lists"]


@dataclass(frozen=True, slots=True)
class Example:
    """One row: texts, and what a model shall learn to say of them."""

    texts: tuple[str, ...]  # one or a pair; tag: the words, joined by single spaces; embed: two or more
    target: Any  # classify: a label, or a tuple of them; regress, rerank: a float; tag: a tuple of tags, one a word;
    # answer: a tuple of (start, end) characters in the context, empty if the answer is not in it; embed: by `inputs`
    row: int  # counted from 1 in what was given
    words: tuple[tuple[int, int], ...] = ()  # tag: where each word lies in the text
    answers: tuple[str, ...] = ()  # answer: the texts as they were given, one a target


class Reader:
    """Rows to examples. It remembers which labels there were, and what the first row looked like."""

    def __init__(self, kind: Kind, known: Sequence[str] | None) -> None:
        self.kind = kind
        self.known = known
        self.original: dict[str, Any] = {}
        self.multi: bool | None = None
        self.inputs: Inputs = ""
        self._width = 0

    def example(self, piece: Piece, inputs: Any, target: Any, row: int) -> Example:
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

    def _texts(self, piece: Piece, inputs: Any) -> tuple[str, ...]:
        if piece.columns:
            places = [f"column {column!r}" for column in piece.columns]
        else:
            inputs = (inputs,) if (both := as_list(inputs)) is None else both
            places = ["X"] if len(inputs) == 1 else ["the first of the pair", "the second of the pair"]
        if self.kind in ("answer", "rerank"):
            if len(inputs) != 2:
                raise InputError(f"{len(inputs)} texts; give two, the {' and the '.join(INPUTS[self.kind][0])}")
        elif len(inputs) not in ((self._width,) if self._width else (1, 2)):
            before = {1: "one", 2: "a pair"}.get(self._width, "one or a pair")
            raise InputError(f"{len(inputs)} texts; give {before}, the same in each row")
        self._width = len(inputs)
        return tuple([text_in(text, place) for text, place in zip(inputs, places, strict=True)])

    def _several(self, piece: Piece, inputs: Any, target: Any, where: str, row: int) -> Example:
        """Texts to be compared, with what is known of them."""
        found: Inputs = "pairs"
        if piece.role:
            found = {"score": "scores", "label": "classes", "scores": "lists"}[piece.role]  # type: ignore[assignment]
        if self.inputs and found != self.inputs:
            raise InputError(f"{found} here and {self.inputs} before; all data must be of one kind")
        self.inputs = found
        given = list(inputs) if piece.columns else as_list(inputs)
        if given is None:
            raise InputError(f"{shown(inputs)} in X; give two texts or more, in a tuple")
        texts: list[str] = []
        for i, value in enumerate(given):
            place = f"column {piece.columns[i]!r}" if piece.columns else f"text {i + 1} of X"
            many = as_list(value)
            if many is None and isinstance(value, str) and i >= (1 if found == "lists" else 2):
                many = from_json(value, list)  # passages or negatives, where a file has no lists
            texts += [text_in(one, place) for one in ([value] if many is None else many)]
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
        scores = tuple([self._score(one, where) for one in parts(target, where, "scores")])
        if len(scores) != len(texts) - 1:
            raise InputError(f"{len(texts) - 1} passages and {len(scores)} scores in {where}; each needs one")
        return Example(tuple(texts), scores, row)

    def _labels(self, piece: Piece, value: Any, where: str) -> str | tuple[str, ...]:
        several = as_list(value)
        if piece.role == "labels" and missing(value):
            raise InputError(f"no labels in {where}; {MEND}, or write [] if the text has none")
        if piece.role == "labels" and isinstance(value, str):
            several = from_json(value, list)
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

    def _label(self, piece: Piece, value: Any, where: str, what: str = "label") -> str:
        if type(value) is str and value in self.original:
            return value
        value = scalar(value)
        if piece.classes is not None and type(value) is int:
            # The Hub writes -1 where there is no label.
            value = piece.classes[value] if 0 <= value < len(piece.classes) else None
        if missing(value) or (isinstance(value, str) and not value.strip()):
            raise InputError(f"no {what} in {where}; {MEND}")
        if isinstance(value, float):
            if not value.is_integer():
                raise InputError(f"{what} {value!r} in {where} is no class; to learn numbers, use regress")
            value = int(value)  # pandas makes whole numbers floats when one is missing
        if not isinstance(value, str | int):
            raise InputError(f"{shown(value)} in {where} is no {what}; it must be a str, an int or a bool")
        label = str(value)
        if self.known is not None and label not in self.known:
            raise InputError(f"{what} {label!r:.60} in {where} is none of {listed(self.known, 8)}")
        self.original.setdefault(label, value)
        return label

    def _score(self, value: Any, where: str) -> float:
        if missing(value):
            raise InputError(f"no score in {where}; {MEND}")
        try:
            score = float(value)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{shown(value)} in {where} is no number") from None
        if not math.isfinite(score):
            raise InputError(f"score {score!r} in {where} is not finite; {MEND}")
        if self.kind == "rerank" and not 0 <= score <= 1:
            raise InputError(
                f"score {score!r} in {where} is not from 0 (irrelevant) to 1 (relevant); divide grades by the highest"
            )
        return score

    def _tagged(self, piece: Piece, given: Any, value: Any, where: str, row: int) -> Example:
        place = f"column {piece.columns[0]!r}" if piece.columns else "X"
        words = parts(given, place, "words")
        for i, word in enumerate(words, 1):
            if not isinstance(word, str) or not word or word != word.strip():
                raise InputError(
                    f"word {i} in {place} is {shown(word)}; a word is not empty and has no whitespace at its ends"
                )
        tags = parts(value, where, "tags")
        if len(words) != len(tags):
            raise InputError(f"{len(words)} words and {len(tags)} tags; each word needs one tag")
        target = tuple([self._label(piece, tag, where, "tag") for tag in tags])
        ends = list(accumulate(map(len, words), lambda end, size: end + 1 + size))
        spans = tuple([(end - len(word), end) for word, end in zip(words, ends, strict=True)])
        return Example((checked_text(" ".join(words), place),), target, row, words=spans)


def _answers(value: Any, context: str, where: str) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...]]:
    """Where the answers are, and their texts."""
    if isinstance(value, str):
        found = from_json(value, (list, dict))
        value = [value] if found is None else found
    if isinstance(value, Mapping):
        value = _answers_of_squad(value, where)
    given = as_list(value)
    if given is None:
        what = "no answers" if missing(value) else f"{shown(value)}, not answers,"
        raise InputError(f"{what} in {where}; {MEND}, or write [] if the answer is not in the context")
    spans = tuple([_span(one, context, where) for one in given])
    return spans, tuple([context[start:end] for start, end in spans])


def _answers_of_squad(value: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """From lists of texts and starts to answers; a single answer may come without lists."""
    texts, starts = as_list(value.get("text")), as_list(value.get("answer_start"))
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
    bounds = as_list(answer)
    if bounds is not None:
        bounds = [scalar(one) for one in bounds]
        if len(bounds) == 2 and all(type(one) is int for one in bounds) and 0 <= bounds[0] < bounds[1] <= len(context):
            return bounds[0], bounds[1]
        raise InputError(
            f"answer {bounds!r:.60} in {where} is no (start, end) within the {len(context):,} characters of the context"
        )
    text, start = answer, None
    if isinstance(answer, Mapping):
        text, start = answer.get("text"), scalar(answer.get("answer_start", answer.get("start")))
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"answer {shown(text)} in {where} is no text; write [] if the answer is not in the context")
    if start is not None and type(start) is not int:
        raise InputError(f"answer {text!r:.60} in {where} starts at {shown(start)}; it must be an int, counted from 0")
    found = context.find(text) if start is None else start
    if found >= 0 and context.startswith(text, found):
        return found, found + len(text)
    around = (context.rfind(text, 0, max(found, 0) + len(text)), context.find(text, max(found, 0)))
    near = min((place for place in around if place >= 0), key=lambda place: abs(place - found), default=None)
    if near is None:
        raise InputError(f"answer {text!r:.60} in {where} is not in the context; copy it from there")
    raise InputError(f"answer {text!r:.60} in {where} is not at character {found} of the context, but at {near}")
