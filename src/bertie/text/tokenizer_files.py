"""Read the files of a tokenizer; every problem with them is a CheckpointError."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertie.errors import CheckpointError, ConfigError

MAX_BYTES = 1 << 28  # the largest known vocabulary file has 17 MB


@contextmanager
def rust_errors(what: str) -> Iterator[None]:
    """Convert errors of the Rust library to CheckpointError: plain Exceptions, and panics (BaseException).

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
    """Read a file; CheckpointError if it cannot be read or is larger than MAX_BYTES."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; a tokenizer file may have at most {MAX_BYTES}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_text(path: Path) -> str:
    """Read a UTF-8 text file."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error


def parse_json(raw: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object.

    >>> parse_json(b'{"a": 1}', "a.json")
    {'a': 1}
    """
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from error
    result: dict[str, Any] = check_json_type(value, dict, name)
    return result


def check_json_type(value: Any, kind: type, where: str) -> Any:
    """Return the value if it has the expected JSON type."""
    if not isinstance(value, kind):
        raise CheckpointError(f"{where} must be a JSON {kind.__name__}, not {type(value).__name__}")
    return value


def json_bytes(value: dict[str, Any]) -> bytes:
    """A JSON object as the contents of a file."""
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8")
