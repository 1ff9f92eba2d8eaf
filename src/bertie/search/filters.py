"""Filters on the metadata of documents."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bertie.errors import InputError
from bertie.search.records import MetadataValue

OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "in")


@dataclass(frozen=True, slots=True)
class MetadataFilter:
    """A condition `name op value` on a document's metadata; several filters are combined with AND.

    `op` is one of =, !=, <, <=, >, >=, in. A document without the field only matches !=. Values are
    only compared with values of the same type: text (by code point), number or boolean. "1", 1 and
    True are therefore neither equal nor ordered.

    >>> matches_filters({"year": 1999}, [MetadataFilter("year", ">=", 1990), MetadataFilter("lang", "!=", "de")])
    True
    """

    name: str
    op: str
    value: MetadataValue | tuple[MetadataValue, ...]

    def __post_init__(self) -> None:
        if self.op not in OPERATORS:
            raise InputError(f"where: {self.name} {self.op!r}: the operator must be one of {', '.join(OPERATORS)}")
        if isinstance(self.value, tuple) != (self.op == "in"):
            raise InputError(
                f"where: {self.name} {self.op} {self.value!r:.80}: `in` takes a tuple of values, all other operators "
                "a single one"
            )
        for value in self.values:
            value_type(value, f"where: {self.name}")

    @property
    def values(self) -> tuple[MetadataValue, ...]:
        """The values of `in`, or the single value of any other operator."""
        return self.value if isinstance(self.value, tuple) else (self.value,)


def parse_filters(where: Mapping[str, Any] | Sequence[MetadataFilter]) -> tuple[MetadataFilter, ...]:
    """Parse `{"name op": value}`: the default operator is =, or `in` for a collection of values.

    >>> [(f.name, f.op, f.value) for f in parse_filters({"year >=": 1990, "lang": ["en", "fr"]})]
    [('year', '>=', 1990), ('lang', 'in', ('en', 'fr'))]
    """
    if not isinstance(where, Mapping):
        return tuple(where)
    filters = []
    for key, value in where.items():
        name, op = re.fullmatch(r"(.*?)\s*(!=|<=|>=|=|<|>)?", key.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
        if isinstance(value, list | tuple | set | frozenset) and op in (None, "="):
            filters.append(MetadataFilter(name, "in", tuple(value)))
        else:
            filters.append(MetadataFilter(name, op or "=", value))
    return tuple(filters)


def value_type(value: object, name: str) -> str:
    """Return "text", "number" or "boolean"; reject values that cannot be stored or compared."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        if "\0" in value:  # databases cannot store it
            raise InputError(f"{name}={value!r:.80} contains a NUL character, which cannot be stored")
        return "text"
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name}={value} must be a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InputError(f"{name}={value} must fit into 64 bits")
    if isinstance(value, int | float):
        return "number"
    raise InputError(f"{name}={value!r:.80} must be text, a number or a boolean, not {type(value).__name__}")


def matches_filters(metadata: Mapping[str, MetadataValue], where: Sequence[MetadataFilter]) -> bool:
    """Return whether metadata match all filters: the reference implementation for all stores."""
    return all(_matches(metadata.get(condition.name), condition) for condition in where)


def _matches(value: MetadataValue | None, condition: MetadataFilter) -> bool:
    comparable = [
        operand
        for operand in condition.values
        if value is not None and value_type(value, "") == value_type(operand, "")
    ]
    if condition.op == "!=":
        return value not in comparable
    if not comparable or value is None:
        return False
    if condition.op in ("=", "in"):
        return value in comparable
    less, equal = value < comparable[0], value == comparable[0]  # type: ignore[operator]
    return {"<": less, "<=": less or equal, ">": not less and not equal, ">=": not less}[condition.op]
