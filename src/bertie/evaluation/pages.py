"""Render documents of paragraphs, tables and plots as Markdown and as self-contained HTML."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bertie.evaluation.page_style import PAGE, SCRIPT, STYLE


@dataclass(frozen=True, slots=True)
class Marked:
    """A text in pieces, each with a weight from -1 to 1 that is shown as its colour."""

    pieces: Sequence[tuple[str, float]]

    @property
    def text(self) -> str:
        """The text without weights."""
        return "".join(piece for piece, _ in self.pieces)


Cell = str | Marked


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of plain text. With `for_plot` it repeats a plot's data, and HTML, which has the plot, leaves it out.

    `sortable`: HTML sorts the rows by the column that is clicked. `filtered`: it also has a field to filter them.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    for_plot: bool = False
    sortable: bool = False
    filtered: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """An SVG, for HTML only."""

    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Folded:
    """Blocks that HTML shows when their summary is clicked."""

    summary: str
    blocks: Sequence[str | Table | Plot]


@dataclass(frozen=True, slots=True)
class ForHtml:
    """A table that Markdown leaves out."""

    table: Table


@dataclass(frozen=True, slots=True)
class ForMarkdown:
    """A table that HTML leaves out."""

    table: Table


Block = str | Table | Plot | Folded | ForHtml | ForMarkdown


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its blocks; a str is a paragraph."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline figure; `tone` is "good", "bad" or plain."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Header:
    """The top of a page: warnings, headline figures, and a sentence."""

    notices: Sequence[str] = ()
    tiles: Sequence[Tile] = ()
    lead: str = ""


def to_markdown(title: str, sections: Sequence[Section], header: Header | None = None) -> str:
    """Render paragraphs and tables as Markdown."""
    header = header or Header()
    parts = [f"# {escape_markdown(title)}"]
    parts += [f"> **{escape_markdown(notice)}**" for notice in header.notices]
    parts += [escape_markdown(header.lead)] if header.lead else []
    if header.tiles:
        parts.append(
            "\n".join(
                f"- {escape_markdown(tile.label)}: **{escape_markdown(tile.value)}**"
                + (f" ({escape_markdown(tile.note)})" if tile.note else "")
                for tile in header.tiles
            )
        )
    for section in sections:
        parts.append(f"## {escape_markdown(section.title)}")
        for block in section.blocks:
            parts += _markdown_block(block)
    return clean("\n\n".join(parts) + "\n")


def _markdown_block(block: Block) -> list[str]:
    if isinstance(block, str):
        return [escape_markdown(block)]
    if isinstance(block, Folded):
        inside = [text for part in block.blocks for text in _markdown_block(part)]
        return [f"**{escape_markdown(block.summary)}**", *inside]
    if isinstance(block, Plot | ForHtml):
        return []
    if isinstance(block, ForMarkdown):
        block = block.table
    return [*([escape_markdown(block.caption)] if block.caption else []), markdown_table(block)]


def markdown_table(table: Table) -> str:
    """Render a GitHub-flavoured Markdown table."""
    rows = [[escape_markdown(_plain(cell)) for cell in row] for row in (table.head, *table.rows)]
    rows.insert(1, ["---"] * len(table.head))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _plain(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def escape_markdown(text: str) -> str:
    """Escape Markdown syntax, and join lines."""
    return re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", escape(" ".join(text.split()), quote=False))


def to_html(title: str, sections: Sequence[Section], header: Header | None = None) -> str:
    """Render a self-contained HTML page without external resources.

    Its only script sorts and filters tables, and enlarges heat maps; the content security policy allows that one by
    its hash, and no other.
    """
    header = header or Header()
    names = [f"s{i}" for i in range(len(sections))]
    contents = "".join(
        f'<li><a href="#{name}">{escape(section.title)}</a></li>' for name, section in zip(names, sections, strict=True)
    )
    body = "".join(
        f'<section id="{name}"><h2>{escape(section.title)}</h2>{"".join(map(_block, section.blocks))}</section>'
        for name, section in zip(names, sections, strict=True)
    )
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    fields = {"title": escape(title), "style": STYLE, "script": SCRIPT, "hash": digest, "contents": contents}
    return clean(PAGE.format(**fields, header=_header(header), body=body))


def clean(text: str) -> str:
    """Replace control characters and lone surrogates, which a UTF-8 text file cannot hold, by spaces."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]", " ", text)


def _header(header: Header) -> str:
    notices = "".join(f'<p class="notice">{escape(notice)}</p>' for notice in header.notices)
    lead = f'<p class="lead">{escape(header.lead)}</p>' if header.lead else ""
    tiles = "".join(
        f'<div class="tile {escape(tile.tone)}"><dt>{escape(tile.label)}</dt><dd>{escape(tile.value)}</dd>'
        f'<dd class="note">{escape(tile.note)}</dd></div>'
        for tile in header.tiles
    )
    return notices + (f'<dl class="tiles">{tiles}</dl>' if tiles else "") + lead


def _block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    if isinstance(block, Plot):
        return f"<figure>{block.svg}<figcaption>{escape(block.caption)}</figcaption></figure>"
    if isinstance(block, Folded):
        inside = "".join(map(_block, block.blocks))
        return f"<details><summary>{escape(block.summary)}</summary>{inside}</details>"
    if isinstance(block, ForHtml):
        return _table(block.table)
    return "" if isinstance(block, ForMarkdown) or block.for_plot else _table(block)


_FILTER = (
    '<p class="filter"><input type="search" placeholder="filter rows" aria-label="filter rows"><output></output></p>'
)
_NUMBER = re.compile(r"[-+−]?[\d,.]+(e-?\d+)?%?( \[.*\])?|–|not defined|< 0.001|")


def _table(table: Table) -> str:
    numeric = [
        all(isinstance(row[i], str) and _NUMBER.fullmatch(str(row[i])) for row in table.rows)
        and any(row[i] for row in table.rows)
        for i in range(len(table.head))
    ]
    kinds = [' class="number"' if is_number else "" for is_number in numeric]
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    heads = [f"<button>{escape(cell)}</button>" if table.sortable and cell else escape(cell) for cell in table.head]
    head = "".join(
        f'<th scope="col"{kind}>{cell}</th>' if cell else "<td></td>" for kind, cell in zip(kinds, heads, strict=True)
    )
    rows = "".join(
        f"<tr>{''.join(f'<td{kind}>{_cell(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))}</tr>"
        for row in table.rows
    )
    search = _FILTER if table.filtered else ""
    style = ' class="sortable"' if table.sortable else ""
    body = f"{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    box = "tall" if table.filtered else "scroll"
    return f'<div class="filtered">{search}<div class="{box}"><table{style}>{body}</table></div></div>'


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell).replace("_", "_<wbr>")  # long labels may break there
    marks = (
        escape(piece)
        if abs(weight) < 0.05
        else f'<mark class="{"for" if weight > 0 else "against"}" style="--w:{min(1.0, abs(weight)):.2f}" '
        f'title="{weight:+.2f}">{escape(piece)}</mark>'
        for piece, weight in cell.pieces
    )
    return f'<span class="marked">{"".join(marks)}</span>'
