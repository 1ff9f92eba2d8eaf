"""Build requests: inputs are validated as the local task objects do, and split into requests of limited size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bertie.errors import InputError
from bertie.pipeline.inputs import check_list
from bertie.text.tokenizer import checked_text

MAX_ITEMS, MAX_CHARACTERS = 64, 200_000  # per request; a longer text is a request of its own

Text = str | tuple[str, str]
T = TypeVar("T")
R = TypeVar("R")
# Items as JSON has them, each with its number of characters.
Items = Iterable[tuple[Any, int]]


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """A POST of `body`, or a GET; `first` is the index of its first item among all items."""

    path: str
    parse: Callable[[Any], list[T]]  # the decoded JSON of the response
    body: bytes | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class Call(Generic[T, R]):
    """The requests of one method call, and how their results are combined."""

    requests: Iterable[Request[T]]
    combine: Callable[[list[T]], R]


def split_requests(
    path: str,
    field: str,
    items: Items,
    parse: Callable[[Any], list[T]],
    *,
    max_items: int = MAX_ITEMS,
    **options: Any,
) -> Iterator[Request[T]]:
    """Requests with part of the items in `field`, each as soon as it is full. Options that are None are not sent."""
    batch: list[Any] = []
    first = size = 0
    for item, characters in items:
        if batch and (len(batch) == max_items or size + characters > MAX_CHARACTERS):
            yield Request(path, parse, encode_body(options | {field: batch}), first)
            batch, first, size = [], first + len(batch), 0
        batch.append(item)
        size += characters
    if batch:
        yield Request(path, parse, encode_body(options | {field: batch}), first)


def encode_body(fields: Mapping[str, Any]) -> bytes:
    """JSON of the fields that are not None."""
    present = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(present, ensure_ascii=False, separators=(",", ":")).encode()


def check_texts(texts: Iterable[str], method: str, what: str = "text") -> Iterator[tuple[str, int]]:
    """Validate texts."""
    for i, text in enumerate(check_list(texts, method, "queries" if what == "query" else f"{what}s")):
        yield checked_text(text, f"{what} {i}"), len(text)


def check_texts_or_pairs(texts: Iterable[Text], method: str) -> Iterator[tuple[Any, int]]:
    """Validate texts and pairs of texts."""
    for i, text in enumerate(check_list(texts, method)):
        if not isinstance(text, tuple | list):
            yield checked_text(text, f"text {i}"), len(text)
        elif len(text) != 2:
            raise InputError(f"text {i} must be a text or a pair of texts, not {len(text)} items")
        else:
            yield [checked_text(part, f"text {i}") for part in text], sum(map(len, text))


def check_questions(pairs: Iterable[tuple[str, str | Sequence[str]]]) -> Iterator[tuple[Any, int]]:
    """Validate questions with their documents."""
    for i, pair in enumerate(check_list(pairs, "answer", "pairs of a question and its documents")):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"question {i} must be a pair of a question and its documents")
        question, documents = checked_text(pair[0], f"question {i}"), pair[1]
        if isinstance(documents, str):
            documents = [documents]
        else:
            documents = list(check_list(documents, f"question {i}", "documents"))
        for document in documents:
            checked_text(document, f"question {i}, document")
        yield {"question": question, "documents": documents}, len(question) + sum(map(len, documents))
