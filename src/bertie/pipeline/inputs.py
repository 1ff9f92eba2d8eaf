"""Inputs of the pipeline: checked texts, with a name for error messages and the options of the call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from bertie.errors import InputError
from bertie.text.tokenizer import checked_text

T = TypeVar("T")
Options = TypeVar("Options")


class TaskInput(NamedTuple, Generic[Options]):
    """One text or pair of texts, with the options of the call it belongs to."""

    name: str  # in error messages, such as "text 3"
    texts: tuple[str, ...]  # the text, or the two texts of a pair
    options: Options
    # Maximum tokens per window, or one window per sentence; None: the model's maximum length. Equal for all of a call.
    window_size: int | Literal["sentence"] | None = None
    repeated: bool = False  # the text of the previous input again, such as with another hypothesis: counted once

    @property
    def item(self) -> str | tuple[str, str]:
        """The text or the pair, in the form that the tokenizer takes."""
        return self.texts[0] if len(self.texts) == 1 else (self.texts[0], self.texts[1])


def check_list(items: Iterable[T], caller: str, what: str = "texts") -> Iterable[T]:
    """Refuse a single text and a table, which would be iterated over by characters or column names.

    Arrays of pyarrow, whose items are not Python strings, are converted.
    """
    if hasattr(items, "to_pylist") and not hasattr(items, "columns"):
        converted: list[T] = items.to_pylist()
        return converted
    if (
        isinstance(items, str | bytes | Mapping | Set)
        or hasattr(items, "columns")
        or not isinstance(items, Iterable)
        or getattr(items, "ndim", 1) == 0
    ):
        raise InputError(f"{caller} takes a list of {what}, not {type(items).__name__}; {_advice(items, what)}")
    return items


def _advice(items: Any, what: str) -> str:
    """Advice on how to pass such an object."""
    if isinstance(items, Mapping) or hasattr(items, "columns"):
        names = list(getattr(items, "column_names", None) or (items if isinstance(items, Mapping) else items.columns))
        if what.startswith("pairs") and len(names) > 1:
            return f"pass its columns, as in list(zip(table[{names[0]!r}], table[{names[1]!r}]))"
        return f"pass the text column, as in table[{names[0]!r}]" if names else "it is empty"
    if isinstance(items, Set):
        return "its order is undefined: pass sorted(texts) or list(texts)"
    if isinstance(items, bytes):
        return 'decode it: data.decode("utf-8")'
    return "wrap a single one in a list"


def check_pair(texts: Any, name: str, what: str = "a pair of texts") -> tuple[str, str]:
    """Check that `texts` is a pair of texts."""
    texts = texts.tolist() if hasattr(texts, "tolist") else texts  # a row of an array
    if not isinstance(texts, tuple | list) or len(texts) != 2:
        got = f"{len(texts)} items" if isinstance(texts, tuple | list) else type(texts).__name__
        raise InputError(f"{name} must be {what}, not {got}")
    return checked_text(texts[0], f"{name}, first text"), checked_text(texts[1], f"{name}, second text")


def text_inputs(texts: Iterable[str], caller: str, options: Options) -> Iterator[TaskInput[Options]]:
    """Create inputs from single texts. Invalid containers are refused immediately, invalid items when reached.

    The characters of a text are checked by the tokenizer.
    """
    return (
        TaskInput(f"text {i}", (text if type(text) is str else checked_text(text, f"text {i}"),), options)
        for i, text in enumerate(check_list(texts, caller))
    )


def check_positive(**values: int | None) -> None:
    """Refuse options that are not whole numbers of at least 1."""
    for name, value in values.items():
        if value is not None and (not isinstance(value, int | np.integer) or isinstance(value, bool)):
            raise InputError(f"{name}={value!r:.40} must be a whole number")
        if value is not None and value < 1:
            raise InputError(f"{name}={value} must be at least 1")
