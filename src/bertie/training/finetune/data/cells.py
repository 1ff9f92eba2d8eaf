"""Values of table cells, from any library."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from bertie.errors import InputError
from bertie.text.tokenizer import checked_text

FIX = "fill it in or leave the row out"


def parse_text(value: Any, where: str) -> str:
    """A text that is not blank."""
    if isinstance(value, str) and value and not value.isspace():
        return checked_text(value, where)
    if isinstance(value, str) or is_missing(value):
        raise InputError(f"no text in {where}; {FIX}")
    raise InputError(f"{describe(value)} in {where} is not text")


def parse_list(value: Any, where: str, what: str) -> list[Any]:
    """A list, a list in JSON, or a text split at whitespace."""
    items = as_list(value)
    if isinstance(value, str):
        items = from_json(value, list)
        if items is None:
            items = value.split()
    if items is None and not is_missing(value):
        raise InputError(f"{describe(value)} in {where} is not a list of {what}")
    if not items:
        raise InputError(f"no {what} in {where}; {FIX}")
    return items


def as_list(value: Any) -> list[Any] | None:
    """A list, tuple or array as a list; None for anything else."""
    if isinstance(value, list | tuple):
        return list(value)
    items = value.tolist() if hasattr(value, "tolist") else None
    return items if isinstance(items, list) else None


def from_json(text: str, kinds: type | tuple[type, ...]) -> Any:
    """The list or dict in a cell with JSON; None if it holds anything else."""
    if text[:1] not in ("[", "{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kinds) else None


def as_scalar(value: Any) -> Any:
    """A NumPy scalar as a Python one."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or pandas' NA."""
    return value is None or (isinstance(value, float) and math.isnan(value)) or type(value).__name__ == "NAType"


def describe(value: Any) -> str:
    """A value as error messages show it."""
    return f"{type(value).__name__} {value!r:.40}"


def join_names(names: Sequence[Any], most: int = 20) -> str:
    """Names for an error message, shortened if there are too many."""
    text = ", ".join(map(repr, names[:most]))
    return text if len(names) <= most else f"{text}, … ({len(names)} in all)"
