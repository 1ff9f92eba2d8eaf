"""The documents of raw text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from bertie.data.readers import FORMATS, STDIN, Table, data_suffix, is_data_file, open_table, text_cell
from bertie.errors import InputError, NotFoundError

LONGEST = 1 << 24  # characters of a document; what is longer goes on as the next one


def files_of(sources: Sequence[str]) -> list[str]:
    """The files behind the sources: folders are read through, in the order of their names.

    >>> files_of(["-"])
    ['-']
    """
    found: list[str] = []
    for source in sources:
        folder = Path(source)
        if source != STDIN and not folder.exists():
            raise NotFoundError(f"there is no file or folder {source}")
        if source == STDIN or not folder.is_dir():
            found.append(source)
            continue
        inside = sorted(
            path
            for path in folder.rglob("*")
            if path.is_file()
            and is_data_file(path.name)
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        )
        if not inside:
            raise InputError(f"{source} holds no .txt, .csv, .tsv, .jsonl or .parquet file, compressed or not")
        found += map(str, inside)
    if not found:
        raise InputError("no source: name files or folders of text")
    return found


class Documents:
    """The documents of some files, one after the other; only one is held.

    Text has a paragraph a line and a blank line between documents. Tables have a document a row.
    """

    def __init__(self, files: Sequence[str], column: str | None = None) -> None:
        self.files, self._column = files, column
        self.sizes = [os.path.getsize(name) if os.path.isfile(name) else 0 for name in files]
        self._before = 0
        self._now: Table | None = None  # the table that is being read

    def fraction(self) -> float | None:
        """The share of all bytes that was read so far, if their number is known."""
        if STDIN in self.files or self._now is None:
            return None
        return (self._before + (self._now.fraction() or 0.0) * (self._now.size or 0)) / (sum(self.sizes) or 1)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Names for errors, and documents."""
        self._before = 0
        for name, size in zip(self.files, self.sizes, strict=True):
            self._now = table = open_table(name)
            if _is_plain(name):
                yield from _paragraphs(table)
            else:
                column = table.column(["text"], self._column, "--column", only=True)
                for number, row in enumerate(table.rows([column]), 1):
                    yield f"{table.name}, row {number}", text_cell(table, number, row, column)
            self._before += size


def _paragraphs(table: Table) -> Iterator[tuple[str, str]]:
    lines: list[str] = []
    first = size = 0
    for number, row in enumerate(table.rows(["text"]), 1):
        line = row["text"]
        blank = not line or line.isspace()
        if lines and (blank or size > LONGEST):
            yield f"{table.name}, line {first}", "\n".join(lines)
            lines, size = [], 0
        if not blank:
            first = first if lines else number
            lines.append(line)
            size += len(line)
    if lines:
        yield f"{table.name}, line {first}", "\n".join(lines)


def _is_plain(name: str) -> bool:
    return FORMATS.get(data_suffix(name) or "", "text") == "text"


def read_titles(file: str) -> list[str]:
    """Titles of documents to leave out: a table's column `title`, or a title a line."""
    table = open_table(file)
    column = "text" if _is_plain(file) else table.column(["title"], None, "a header line")
    return [title for row in table.rows([column]) if (title := str(row.get(column) or "")).strip()]
