"""Render documents of paragraphs, tables and plots as Markdown and as self-contained HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of plain text. With `for_plot` it repeats a plot's data, and HTML, which has the plot, leaves it out."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    for_plot: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """An SVG, for HTML only."""

    svg: str
    caption: str


Block = str | Table | Plot


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its blocks; a str is a paragraph."""

    title: str
    blocks: Sequence[Block]


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """Render paragraphs and tables as Markdown."""
    parts = [f"# {escape_markdown(title)}"]
    for section in sections:
        parts.append(f"## {escape_markdown(section.title)}")
        for block in section.blocks:
            if isinstance(block, str):
                parts.append(escape_markdown(block))
            elif isinstance(block, Table):
                parts += [escape_markdown(block.caption)] if block.caption else []
                parts.append(markdown_table(block))
    return clean("\n\n".join(parts) + "\n")


def markdown_table(table: Table) -> str:
    """Render a GitHub-flavoured Markdown table."""
    rows = [table.head, ["---"] * len(table.head), *table.rows]
    cells = [[cell if i == 1 else escape_markdown(cell) for cell in row] for i, row in enumerate(rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def escape_markdown(text: str) -> str:
    """Escape Markdown syntax, and join lines."""
    return re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", escape(" ".join(text.split()), quote=False))


def to_html(title: str, sections: Sequence[Section]) -> str:
    """Render a self-contained HTML page without scripts or external resources."""
    body = "".join(
        f"<section><h2>{escape(section.title)}</h2>{''.join(map(_block, section.blocks))}</section>"
        for section in sections
    )
    return clean(_PAGE.format(title=escape(title), style=_STYLE, body=body))


def clean(text: str) -> str:
    """Replace control characters and lone surrogates, which a UTF-8 text file cannot hold, by spaces."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]", " ", text)


def _block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    if isinstance(block, Plot):
        return f"<figure>{block.svg}<figcaption>{escape(block.caption)}</figcaption></figure>"
    if block.for_plot:
        return ""
    caption = f"<caption>{escape(block.caption)}</caption>" if block.caption else ""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in block.head)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in block.rows)
    return f"<div><table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main><h1>{title}</h1>{body}</main>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2024; --faint: #667079; --rule: #dde1e5; }
:root { --a: #1f5fa8; --b: #b8500b; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --ink: #e6e9ec; --faint: #99a3ad; --rule: #333a41; --a: #79b5f5; --b: #f5a15e; }
}
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
div { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption, figcaption { text-align: left; color: var(--faint); font-size: .85rem; padding: .3rem 0; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td { overflow-wrap: anywhere; min-width: 4rem; } th { font-weight: 600; }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
svg .end { text-anchor: end; } svg .mid { text-anchor: middle; } svg .name { fill: var(--faint); }
svg .small { font-size: 10px; }
svg .grid { stroke: var(--rule); }
svg polyline { fill: none; stroke-width: 1.8; } svg line.a, svg line.b { stroke-width: 2; }
svg .a { stroke: var(--a); } svg .b { stroke: var(--b); } svg .faint { stroke: var(--faint); stroke-dasharray: 4 4; }
svg circle.a { fill: var(--a); } svg circle.b { fill: var(--b); }
svg .cell { fill: var(--a); stroke: var(--rule); } svg .wrong { fill: var(--b); }
"""
