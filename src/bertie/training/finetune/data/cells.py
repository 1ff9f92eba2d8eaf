"""What one cell of a table may hold, of whatever library it is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from bertie.errors import InputError
from bertie.text.tokenizer import checked_text

MEND = "fill it in or leave the row out"


def text_in(value: Any, where: str) -> str:
    """A text with something in it."""
    if isinstance(value, str) and value and not value.isspace():
        return checked_text(value, where)
    if isinstance(value, str) or missing(value):
        raise InputError(f"no text in {where}; {MEND}")
    raise InputError(f"{shown(value)} in {where} is not text")


def parts(value: Any, where: str, what: str) -> list[Any]:
    """A list, its JSON, or what lies between spaces."""
    found = as_list(value)
    if isinstance(value, str):
        found = from_json(value, list)
        if found is None:
            found = value.split()
    if found is None and not missing(value):
        raise InputError(f"{shown(value)} in {where} is no list of {what}")
    if not found:
        raise InputError(f"no {what} in {where}; {MEND}")
    return found


def as_list(value: Any) -> list[Any] | None:
    """A list, tuple or array as a list; None for anything else."""
    if isinstance(value, list | tuple):
        return list(value)
    found = value.tolist() if hasattr(value, "tolist") else None
    return found if isinstance(found, list) else None


def from_json(text: str, kinds: type | tuple[type, ...]) -> Any:
    """The list or dict that a cell holds as JSON; None if it holds anything else."""
    if text[:1] not in ("[", "{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, kinds) else None


def scalar(value: Any) -> Any:
    """A number of numpy as Python's own."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def missing(value: Any) -> bool:
    """None, NaN, or pandas' NA."""
    return value is None or (isinstance(value, float) and math.isnan(value)) or type(value).__name__ == "NAType"


def shown(value: Any) -> str:
    """As errors call it."""
    return f"{type(value).__name__} {value!r:.40}"


def listed(names: Sequence[Any], most: int = 20) -> str:
    """Some names, and how many there are if they are too many."""
    some = ", ".join(map(repr, names[:most]))
    return some if len(names) <= most else f"{some}, … ({len(names)} in all)"
