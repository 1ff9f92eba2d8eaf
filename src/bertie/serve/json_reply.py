"""Replies as JSON, serialized in slices.

orjson holds the interpreter's lock during a call, half a second for 64 MB, and all other requests would wait. In slices
they run in between, and a request that nobody waits for any more stops. A slice has thousands of values: each call
allocates a kilobyte, so that a call per value would need a multiple of the reply's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

SLICE = 4096  # values that are serialized at a time; 16 characters of a text count as one
_SCALARS = {int, float, bool, type(None)}
_FIELDS: dict[Any, tuple[str, ...]] = {}  # of dataclasses


def dump_json(value: Any, check: Callable[[], None] = lambda: None, size: int | None = None) -> bytes:
    """Serialize a reply as `orjson.dumps` does, arrays included. `check` is called before each slice, and may raise.

    `size`: the number of values inside, if it is known.

    >>> dump_json({"results": [1, 2.5, None], "name": "x"})
    b'{"results":[1,2.5,null],"name":"x"}'
    """
    if size is not None and size <= SLICE:
        return _dumps(value)
    parts: list[bytes] = []
    for part in _pieces(value):
        check()
        parts.append(part)
    return b"".join(parts)


def _pieces(value: Any) -> Iterator[bytes]:
    if count_values(value) <= SLICE:
        yield _dumps(value)
    elif isinstance(value, dict):
        yield from _object(value.items())
    elif isinstance(value, list | tuple):
        yield from _list(value)
    elif isinstance(value, np.ndarray):
        yield from _array(value)
    elif names := _field_names(type(value)):  # a dataclass
        yield from _object((name, getattr(value, name)) for name in names)
    else:  # a long text
        yield _dumps(value)


def _object(items: Iterable[tuple[Any, Any]]) -> Iterator[bytes]:
    before = b"{"
    for name, value in items:
        yield before + _dumps(name) + b":"
        yield from _pieces(value)
        before = b","
    yield b"}"


def _list(values: Sequence[Any]) -> Iterator[bytes]:
    """Small elements together, large ones in pieces of their own."""
    before, first, total = b"[", 0, 0
    for number, value in enumerate(values):
        size = count_values(value)
        if total + size > SLICE and first < number:
            yield before + _dumps(values[first:number])[1:-1]
            before, first, total = b",", number, 0
        if size > SLICE:
            yield before
            yield from _pieces(value)
            before, first = b",", number + 1
        else:
            total += size
    if first < len(values):
        yield before + _dumps(values[first:])[1:-1]
    yield b"]"


def _array(values: NDArray[Any]) -> Iterator[bytes]:
    """Some rows at a time; each row in pieces if it is large."""
    rows = SLICE // max(1, values[0].size)
    if not rows:
        yield from _list(list(values))
        return
    for first in range(0, len(values), rows):
        yield (b"," if first else b"[") + _dumps(np.ascontiguousarray(values[first : first + rows]))[1:-1]
    yield b"]"


def count_values(value: Any, limit: int = SLICE) -> int:
    """The number of values inside, or any number above the limit."""
    kind = type(value)
    if kind is str:
        return 1 + len(value) // 16
    if kind is dict:
        inner: Iterable[Any] = value.values()
    elif kind is list or kind is tuple:
        inner = value
    elif isinstance(value, np.ndarray):
        return 1 + value.size
    elif names := _field_names(kind):
        inner = [getattr(value, name) for name in names]
    else:
        return 1
    total = 1
    for item in inner:
        total += 1 if type(item) in _SCALARS else count_values(item, limit - total)
        if total > limit:
            break
    return total


def _field_names(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass that orjson serializes."""
    names = _FIELDS.get(kind)
    if names is None:
        names = tuple(field.name for field in fields(kind) if field.name[0] != "_") if is_dataclass(kind) else ()
        _FIELDS[kind] = names
    return names


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
