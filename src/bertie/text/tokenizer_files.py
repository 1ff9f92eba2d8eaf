"""Reading a tokenizer's files so that whatever is wrong with them ends in a CheckpointError."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertie.errors import CheckpointError, ConfigError

MAX_BYTES = 1 << 28  # the largest known vocabulary file has 17 MB; beyond this it is an accident or an attack


@contextmanager
def rust_errors(what: str) -> Iterator[None]:
    """Turn what the Rust library raises into a CheckpointError: bare Exceptions, and panics that are not even those.

    >>> import tokenizers
    >>> with rust_errors("tokenizer.json"):
    ...     tokenizers.Tokenizer.from_str("{")
    Traceback (most recent call last):
    bertie.errors.CheckpointError: tokenizer.json is broken: EOF while parsing an object at line 1 column 1
    """
    try:
        yield
    except (CheckpointError, ConfigError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what} is broken: {str(error)[:300]}") from error


def read_bytes(path: Path) -> bytes:
    """A file's bytes; a file that cannot be read or is absurdly big is a CheckpointError."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; a tokenizer file may have {MAX_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_text(path: Path) -> str:
    """A file's text; anything but UTF-8 is a CheckpointError."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error


def parse_json(raw: bytes, name: str) -> dict[str, Any]:
    """A JSON object; anything else is a CheckpointError.

    >>> parse_json(b'{"a": 1}', "a.json")
    {'a': 1}
    """
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from error
    result: dict[str, Any] = typed(value, dict, name)
    return result


def typed(value: Any, kind: type, where: str) -> Any:
    """A value of the JSON type that a file must hold there."""
    if not isinstance(value, kind):
        raise CheckpointError(f"{where} must hold a JSON {kind.__name__}, not {type(value).__name__}")
    return value
