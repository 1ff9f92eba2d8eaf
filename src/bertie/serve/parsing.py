"""Request bodies to request models, in time and memory proportional to the body.

A validator that reports every error of every union member needs a thousand times the memory of a
hostile body. So counts and nesting are checked before the fields are validated, and a list is
validated up to its first invalid element. Parsing holds the interpreter's lock, and Python objects
need thirty times their bytes: of a large body, arrays, objects and strings are counted before it is
parsed.

A key that occurs twice has its last value, as in Python's json, in JavaScript and in most servers.
NaN, infinite numbers, lone surrogates, a byte order mark and nesting beyond 1,024 levels are no
valid JSON.
"""

from __future__ import annotations

import re
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bertie.serve.api_errors import ApiError
from bertie.serve.fields import is_plain, misspelt, rename_fields, unknown_field
from bertie.serve.limits import Limits

M = TypeVar("M", bound=BaseModel)

MAX_DEPTH = 16  # levels of nesting; requests have up to 4, and fields that are ignored may have more
MIN_ELEMENTS = 64  # that a list or an object may have at any --max-items: lists of labels, keys of a body
LARGE_BODY = 64 * 1024  # bytes; larger ones are parsed one at a time, since Python objects need many times their bytes
SCAN_BYTES = 1 << 18  # that are counted at once
_large_bodies = Lock()
_JSON_MESSAGES = {  # in the terms of JSON rather than of Python
    "list_type": "Input should be a valid array",
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
    "extra_forbidden": "unknown field",
}
_TYPES = ("str", "int", "float", "bool")  # names of a union's members in the place of an error


def parse_body(model: type[M], body: bytes, limits: Limits) -> M:
    """Parse and validate a request body.

    >>> from bertie.serve.api.native import FillRequest
    >>> parse_body(FillRequest, b'{"texts": "a [MASK]"}', Limits()).top_k
    5
    """
    if len(body) <= LARGE_BODY:
        return _parse(model, body, limits)
    check_density(body, limits)
    with _large_bodies:
        return _parse(model, body, limits)


def _parse(model: type[M], body: bytes, limits: Limits) -> M:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise ApiError("invalid_json", "the body is not valid JSON") from None
    if type(value) is not dict:
        raise ApiError("invalid", "the body: Input should be an object")
    check_shape(value, limits)
    return validate(model, value)


def check_density(body: bytes, limits: Limits) -> None:
    """Refuse a body with more arrays, objects, keys, strings or values than a valid request, without parsing it.

    >>> check_density(b'{"inputs": [' + b",".join([b"[]"] * 5000) + b"]}", Limits())
    Traceback (most recent call last):
    ...
    bertie.serve.api_errors.ApiError: the body: 5,002 arrays and objects > maximum of 4,096
    """
    elements = max(limits.items, MIN_ELEMENTS)
    most = {"values": limits.tokens + 8 * elements, "strings": 8 * elements}
    for name, count in count_symbols(body).items():
        limit = most.get(name, 4 * elements)
        if count > limit:
            raise ApiError("too_large", f"the body: {count:,} {name} > maximum of {limit:,}")


def count_symbols(body: bytes) -> dict[str, int]:
    """Count what a JSON text holds: arrays and objects, keys, commas (values but the first of a list), strings.

    >>> count_symbols(b'{"a": ["b", "[,]"]}')
    {'arrays and objects': 2, 'keys': 1, 'values': 1, 'strings': 3}
    """
    if b"\\" in body:  # escaped quotes do not end a string
        body = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    data, outside, quotes = np.frombuffer(body, np.uint8), np.zeros(256, np.int64), 0
    for start in range(0, len(data), SCAN_BYTES):
        part = data[start : start + SCAN_BYTES]
        before = np.cumsum(part == ord('"'), dtype=np.int64) + quotes
        outside += np.bincount(part[before % 2 == 0], minlength=256)  # bytes by value
        quotes = int(before[-1])
    brackets, braces, colons, commas = (int(outside[symbol]) for symbol in b"[{:,")
    return {"arrays and objects": brackets + braces, "keys": colons, "values": commas, "strings": quotes // 2}


def check_shape(body: dict[str, Any], limits: Limits) -> None:
    """Refuse a body with too many elements in a list, keys in an object, token ids or levels of nesting."""
    elements = max(limits.items, MIN_ELEMENTS)
    ids = containers = 0
    waiting: list[tuple[Any, str | None, int]] = [(body, None, 1)]
    while waiting:
        value, field, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ApiError("invalid", f"{_name(field)}: nested more than {MAX_DEPTH} levels deep", field=field)
        if type(value) is list and value and type(value[0]) is int:
            ids += len(value)
            if ids > max(limits.tokens, MIN_ELEMENTS):
                message = f"{ids:,} token ids > maximum of {limits.tokens:,} tokens per request"
                raise ApiError("too_large", message, field=field)
            continue  # the model refuses the list at the first element that is no id
        containers += 1
        if len(value) > elements and type(value) is list:
            message = f"batch size {len(value)} > maximum allowed batch size {limits.items}"
            raise ApiError("too_large", message, field=field)
        if len(value) > elements:
            raise ApiError("too_large", f"{_name(field)}: {len(value):,} keys > maximum of {elements:,}", field=field)
        if containers > 4 * elements:
            message = f"{_name(field)}: too many arrays and objects, of which a body may have {4 * elements:,}"
            raise ApiError("too_large", message, field=field)
        if type(value) is list:
            waiting += [(item, field, depth + 1) for item in value if type(item) is list or type(item) is dict]
        else:
            for key, item in value.items():
                if type(item) is list or type(item) is dict:
                    waiting.append((item, field or _known(key), depth + 1))


def validate(model: type[M], value: dict[str, Any]) -> M:
    """Validate the fields of a parsed body; the error names the invalid field and does not quote the body.

    >>> from bertie.serve.api.native import FillRequest
    >>> validate(FillRequest, {"inputs": "a [MASK]", "topk": 3})
    Traceback (most recent call last):
    ...
    bertie.serve.api_errors.ApiError: topk: unknown field; did you mean `top_k`?
    """
    fields = model.model_fields
    value = rename_fields(fields, value)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
    # Of the members of a union, one that lacks a field or has an invalid item says more than those of another type.
    first = min(errors, key=_precedence)
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        name = str(first["loc"][0])
        raise ApiError("invalid", unknown_field(name, fields, value), field=name if is_plain(name) else None)
    names = [str(part) for part in first["loc"] if isinstance(part, int) or (_known(part) and part not in _TYPES)]
    where = ".".join(names[:4])
    message = _JSON_MESSAGES.get(first["type"], first["msg"])
    if first["type"] == "missing" and len(first["loc"]) == 1 and (likely := misspelt(where, fields, value)):
        message += f"; did you mean it by `{likely}`?"
    raise ApiError("invalid", f"{where or 'the body'}: {message}", field=where or None)


def _precedence(details: ErrorDetails) -> tuple[bool, int, str]:
    return details["type"] not in ("extra_forbidden", "missing"), -len(details["loc"]), details["type"]


def _known(key: str) -> str | None:
    """A key that may be the name of a field."""
    return key if len(key) <= 100 and re.fullmatch(r"[a-z_]+", key) else None


def _name(field: str | None) -> str:
    return field or "the body"
