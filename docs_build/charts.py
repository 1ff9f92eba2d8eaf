"""Bar charts of the tables in benchmarks/RESULTS.md, drawn when the site is built.

A page asks for one with a comment: the heading above the table, how the table's first cell begins, and the columns to
draw, separated by semicolons:

    <!-- chart: CPU inference | int8 | texts/s -->

The column after an asterisk has the accent colour; without one, the rows or columns that name Bertie have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from docs_build.links import ROOT

RESULTS = ROOT / "benchmarks" / "RESULTS.md"
COMMENT = re.compile(r"<!-- chart: (.+?) \| (.*?) \| (.+?) -->")
_NUMBER = re.compile(r"(?<![A-Za-z\d])-?\d[\d,]*(?:\.\d+)?")  # not the 1 of F1


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a Markdown file, and the heading that it stands under."""

    heading: str
    columns: list[str]
    rows: list[list[str]]


def tables(text: str) -> Iterator[Table]:
    """The tables of a Markdown text."""
    headings: dict[int, str] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if match := re.match(r"(#+) (.*)", line):
            headings = {level: name for level, name in headings.items() if level < len(match[1])}
            headings[len(match[1])] = match[2]
        if re.fullmatch(r"\|(---\|)+", line):
            rows = []
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(_cells(row))
            yield Table(" / ".join(headings.values()), _cells(lines[number - 1]), rows)


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def number(cell: str) -> float | None:
    """The first number of a cell.

    >>> number("145,500 (3 runs)"), number("**0.418** †"), number("F1 0.848 [0.799, 0.892]"), number("")
    (145500.0, 0.418, 0.848, None)
    """
    match = _NUMBER.search(cell)
    return None if match is None else float(match[0].replace(",", ""))


def draw_all(text: str, results: Path = RESULTS) -> str:
    """Replace the comments of a page by their charts."""
    known = list(tables(results.read_text("utf-8")))

    def replace(match: re.Match[str]) -> str:
        heading, first, columns = match.groups()
        found = [table for table in known if heading in table.heading and table.columns[0].startswith(first)]
        if not found:
            raise ValueError(f"{match[0]}: {results.name} has no such table")
        return draw(found[0], columns.split("; "))

    return COMMENT.sub(replace, text)


def draw(table: Table, columns: Sequence[str]) -> str:
    """Horizontal bars in HTML, which fit any width: one per row and column."""
    marked = {name[1:] for name in columns if name.startswith("*")}
    columns = [name.removeprefix("*") for name in columns]
    indices = []
    for name in columns:
        if name not in table.columns:
            raise ValueError(f"chart of {table.heading!r}: no column {name!r} among {table.columns}")
        indices.append(table.columns.index(name))
    groups = [
        (row[0], [(columns[i], value) for i, k in enumerate(indices) if (value := number(row[k])) is not None])
        for row in table.rows
    ]
    groups = [(label, bars) for label, bars in groups if bars]
    largest = max(value for _, bars in groups for _, value in bars)
    parts = []
    for label, bars in groups:
        parts.append(f'<div class="label">{escape(re.sub(r"[`*]", "", label))}</div><div>')
        for column, value in bars:
            kind = _kind(column if len(columns) > 1 else label, columns, marked)
            title = escape(f"{label}, {column}: {value:,g}", quote=True)
            bar = f'<span class="{kind}" style="--share: {value / largest:.3f}"></span>'
            parts.append(f'<div class="bar" title="{title}">{bar}{value:,g}</div>')
        parts.append("</div>")
    legend = escape(columns[0])
    if len(columns) > 1:
        keys = ((_kind(column, columns, marked), escape(column)) for column in columns)
        legend = "".join(f'<span class="key {kind}"></span>{name} ' for kind, name in keys)
    return f'<div class="chart">{"".join(parts)}<div></div><div class="legend">{legend}</div></div>'


def _kind(name: str, columns: Sequence[str], marked: set[str]) -> str:
    """The class of a bar: the accent colour, or one of three greys."""
    if name in marked or (not marked and ("bertie" in name.lower() or name == "windows")):
        return "accent"
    return (
        f"other-{[column for column in columns if column not in marked].index(name) % 3}"
        if name in columns
        else "other-0"
    )
