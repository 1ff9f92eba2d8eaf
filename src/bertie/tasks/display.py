"""How tasks and results are displayed: `repr` in a console, small HTML tables in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from html import escape
from typing import Any

import numpy as np

MAX_ITEMS, MAX_CHARACTERS = 8, 80  # shown of a list, and of a text


def shorten(value: Any) -> str:
    """The `repr` of a value, with rounded numbers and shortened texts and lists.

    >>> shorten({"label": "good", "score": 0.98765432, "vector": list(range(100))})
    "{'label': 'good', 'score': 0.9877, 'vector': [0, 1, 2, 3, 4, 5, 6, 7, … 100 in all]}"
    """
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_CHARACTERS else value[: MAX_CHARACTERS - 1] + "…")
    if isinstance(value, np.ndarray):
        return f"array{value.shape} of {value.dtype}"
    if isinstance(value, Mapping):
        items = [f"{shorten(key)}: {shorten(item)}" for key, item in list(value.items())[:MAX_ITEMS]]
        return "{" + ", ".join([*items, *_rest(value)]) + "}"
    if isinstance(value, list | tuple):
        items = [*map(shorten, value[:MAX_ITEMS]), *_rest(value)]
        text = ", ".join(items) + ("," if isinstance(value, tuple) and len(items) == 1 else "")
        return f"({text})" if isinstance(value, tuple) else f"[{text}]"
    return repr(value)


def _rest(items: Sequence[Any] | Mapping[Any, Any]) -> list[str]:
    return [f"… {len(items):,} in all"] if len(items) > MAX_ITEMS else []


def html_table(title: str, facts: Mapping[str, object]) -> str:
    """A table of names and values; both are escaped.

    >>> html_table("Tagger", {"device": "<cpu>"})[-93:]
    '<tbody><tr><td align="left">device</td><td align="left">&lt;cpu&gt;</td></tr></tbody></table>'
    """
    rows = [[name, _cell(value)] for name, value in facts.items() if value is not None]
    return html_rows(rows, caption=title)


def html_rows(rows: Iterable[Sequence[object]], header: Sequence[str] = (), caption: str = "") -> str:
    """A table of cells, which are escaped."""

    def line(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f'<{tag} align="left">{escape(str(cell))}</{tag}>' for cell in cells) + "</tr>"

    head = f"<thead>{line(header, 'th')}</thead>" if header else ""
    title = f'<caption style="text-align:left"><b>{escape(caption)}</b></caption>' if caption else ""
    return f"<table>{title}{head}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>"


class Displayed:
    """A dataclass whose `repr` is short, and which is a table in a notebook.

    `tokens_total`, `tokens_read` and `windows` are shown if a text was truncated or read in several windows,
    `tokens_unknown` and `tokens_non_english` if there are any.
    """

    __slots__ = ()

    def _facts(self) -> dict[str, Any]:
        facts = {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]
        hidden = {name for name in ("tokens_unknown", "tokens_non_english") if not facts.get(name)}
        if len(hidden) == 2:
            hidden.add("tokens_total")
        if facts.get("windows") == 1 and facts["tokens_read"] == facts["tokens_total"]:
            hidden |= {"tokens_read", "windows"}
        else:
            hidden -= {"tokens_total"}
        return {name: value for name, value in facts.items() if name not in hidden}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={shorten(value)}" for name, value in self._facts().items())
        return f"{type(self).__name__}({values})"

    def _repr_html_(self) -> str:
        facts = self._facts()
        for name, value in facts.items():
            if isinstance(value, tuple) and value and all(isinstance(part, Displayed) for part in value):
                return _parts_table(type(self).__name__, value)
            if name == "scores" and isinstance(value, Mapping):
                ranked = sorted(value.items(), key=lambda pair: -pair[1])
                rows = [[label, f"{score:.4g}"] for label, score in ranked[: 2 * MAX_ITEMS]]
                return html_rows(rows, ("label", "score"), type(self).__name__)
        return html_table(type(self).__name__, facts)


def _parts_table(title: str, parts: Sequence[Displayed]) -> str:
    """One row per part of a result: spans, answers, masks."""
    rows = [part._facts() for part in parts[: 4 * MAX_ITEMS]]
    header = list(rows[0])
    return html_rows([[_cell(row.get(name)) for name in header] for row in rows], header, title)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value if len(value) <= MAX_CHARACTERS else value[: MAX_CHARACTERS - 1] + "…"
    return "" if value is None else shorten(value)
