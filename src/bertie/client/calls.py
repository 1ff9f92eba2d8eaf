"""What is sent: things of one kind, checked as the local objects check them, in as many requests as they need."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bertie.errors import InputError
from bertie.text.tokenizer import checked_text

ITEMS, CHARACTERS = 64, 200_000  # of one request, at most; a longer text goes alone

Text = str | tuple[str, str]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """A POST of `body`, or a GET; `first` is the number of its first thing among all."""

    path: str
    read: Callable[[Any], list[T]]  # of the reply, as JSON has it
    body: bytes | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class Call(Generic[T, R]):
    """What a verb asks for, and what becomes of all that comes."""

    requests: Iterable[Request[T]]
    finish: Callable[[list[T]], R]


def split(
    path: str,
    name: str,
    things: Iterable[tuple[Any, int]],
    read: Callable[[Any], list[T]],
    *,
    items: int = ITEMS,
    **options: Any,
) -> Iterator[Request[T]]:
    """Requests with some of the things in the field `name` of each, each request as soon as it is full.

    `things`: as JSON has them, and how many characters each has. What is None among the `options` is not sent.
    """
    held: list[Any] = []
    first = size = 0
    for thing, characters in things:
        if held and (len(held) == items or size + characters > CHARACTERS):
            yield Request(path, read, body(options | {name: held}), first)
            held, first, size = [], first + len(held), 0
        held.append(thing)
        size += characters
    if held:
        yield Request(path, read, body(options | {name: held}), first)


def body(fields: Mapping[str, Any]) -> bytes:
    """JSON of what is not None."""
    given = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(given, ensure_ascii=False, separators=(",", ":")).encode()


def listed(things: Iterable[T], verb: str, what: str = "texts") -> Iterable[T]:
    """Things of which there may be several; one alone is a mistake."""
    if isinstance(things, str | bytes | Mapping) or hasattr(things, "columns") or not isinstance(things, Iterable):
        raise InputError(f"{verb} takes a list of {what}, not {type(things).__name__}; put a single one into a list")
    return things


def texts(given: Iterable[str], verb: str, what: str = "text") -> Iterator[tuple[str, int]]:
    """Texts with their lengths."""
    for i, text in enumerate(listed(given, verb, "queries" if what == "query" else f"{what}s")):
        yield checked_text(text, f"{what} {i}"), len(text)


def texts_or_pairs(given: Iterable[Text], verb: str) -> Iterator[tuple[Any, int]]:
    """As `texts`, each of which may be a pair."""
    for i, text in enumerate(listed(given, verb)):
        if not isinstance(text, tuple | list):
            yield checked_text(text, f"text {i}"), len(text)
        elif len(text) != 2:
            raise InputError(f"text {i} must be a text or a pair of texts, not {len(text)} things")
        else:
            yield [checked_text(one, f"text {i}") for one in text], sum(map(len, text))


def questions(given: Iterable[tuple[str, str | Sequence[str]]]) -> Iterator[tuple[Any, int]]:
    """Questions with their documents."""
    for i, one in enumerate(listed(given, "answer", "pairs of a question and its documents")):
        if not isinstance(one, tuple | list) or len(one) != 2:
            raise InputError(f"question {i} must be a pair of a question and its documents")
        question, documents = checked_text(one[0], f"question {i}"), one[1]
        documents = [documents] if isinstance(documents, str) else list(listed(documents, f"question {i}", "documents"))
        for document in documents:
            checked_text(document, f"question {i}, document")
        yield {"question": question, "documents": documents}, len(question) + sum(map(len, documents))
