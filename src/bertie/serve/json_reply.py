"""Replies as JSON, serialized in slices.

orjson holds the interpreter's lock during a call, half a second for 64 MB, and all other requests would wait. In slices
they run in between, and a request that nobody waits for any more stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

SLICE = 32  # elements of a list, or rows of an array, that are serialized at a time
DEPTH = 5  # of dicts, dataclasses and lists that are split; those inside are serialized whole


def dump_json(value: Any, check: Callable[[], None] = lambda: None) -> bytes:
    """Serialize a reply as `orjson.dumps` does, arrays included. `check` is called now and then, and may raise.

    >>> dump_json({"results": [1, 2.5, None], "name": "x"})
    b'{"results":[1,2.5,null],"name":"x"}'
    """
    parts: list[bytes] = []
    for number, part in enumerate(_pieces(value, DEPTH)):
        if number % 16 == 15:
            check()
        parts.append(part)
    return b"".join(parts)


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    if depth and isinstance(value, dict):
        yield from _object(value.items(), depth)
    elif depth and is_dataclass(value) and not isinstance(value, type):
        yield from _object([(f.name, getattr(value, f.name)) for f in fields(value) if f.name[0] != "_"], depth)
    elif depth and isinstance(value, list | tuple):
        yield from _array(value, depth)
    elif isinstance(value, np.ndarray) and value.ndim == 2 and len(value) > SLICE:
        yield from _array(value, 0)
    else:
        yield _dumps(value)


def _object(items: Any, depth: int) -> Iterator[bytes]:
    before = b"{"
    for name, value in items:
        yield before + _dumps(name) + b":"
        yield from _pieces(value, depth - 1)
        before = b","
    yield b"{}" if before == b"{" else b"}"


def _array(values: Sequence[Any] | NDArray[Any], depth: int) -> Iterator[bytes]:
    """A list by elements, if they may be large, else some at a time."""
    before = b"["
    if depth and len(values) and _is_container(values[0]):
        for value in values:
            yield before
            yield from _pieces(value, depth - 1)
            before = b","
    else:
        for first in range(0, len(values), SLICE):
            yield before + _dumps(values[first : first + SLICE])[1:-1]
            before = b","
    yield b"[]" if before == b"[" else b"]"


def _is_container(value: Any) -> bool:
    return (
        isinstance(value, dict | list | tuple)
        or (isinstance(value, np.ndarray) and value.ndim > 1)
        or is_dataclass(value)
    )


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
