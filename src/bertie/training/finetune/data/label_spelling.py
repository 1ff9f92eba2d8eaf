"""Labels that differ only in spaces, case or the form of a number, which are hardly ever meant to be different."""

from __future__ import annotations

import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bertie.errors import BertieWarning
from bertie.training.finetune.data.cells import describe

_MOST = 3  # groups that are named


def spelling(label: str) -> str:
    """Normalize a label, so that labels that differ only in spelling become equal.

    >>> spelling(" Good  News") == spelling("good news"), spelling("1.0") == spelling("1")
    (True, True)
    """
    text = " ".join(unicodedata.normalize("NFKC", label).casefold().split())
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else text


def warn_of_spellings(
    name: str, examples: Sequence[Any], labels: Iterable[str], mixed_types: Mapping[str, tuple[Any, Any]]
) -> None:
    """Warn of labels that differ only in spelling, and of labels whose values have two types."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        groups.setdefault(spelling(label), []).append(label)
    similar = [group for group in groups.values() if len(group) > 1]
    if similar:
        rows = Counter(label for example in examples for label in _labels(example.target))
        shown = "; ".join(
            " and ".join(f"{label!r:.60} ({rows[label]:,} times)" for label in group) for group in similar[:_MOST]
        )
        more = f"; and {len(similar) - _MOST:,} more" if len(similar) > _MOST else ""
        warnings.warn(
            f"{name} has different labels that differ only in spaces, case or the form of a number: {shown}{more}",
            BertieWarning,
            stacklevel=3,
        )
    for first, other in list(mixed_types.values())[:_MOST]:
        warnings.warn(
            f"{name} has labels of two types that are treated as equal: {describe(first)} and {describe(other)}",
            BertieWarning,
            stacklevel=3,
        )


def _labels(target: Any) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else target if isinstance(target, tuple) else ()
