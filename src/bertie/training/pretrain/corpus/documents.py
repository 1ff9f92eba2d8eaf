"""Read documents from text files, tables and folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from bertie.data.folders import OnSkip, list_files
from bertie.data.readers import FORMATS, STDIN, InputTable, data_suffix, is_data_file, open_table, text_cell
from bertie.errors import InputError, NotFoundError

MAX_CHARACTERS = 1 << 24  # of a document; a longer one is split


def list_sources(sources: Sequence[str], *, follow_symlinks: bool = False, on_skip: OnSkip | None = None) -> list[str]:
    """List the files of the sources; folders are searched recursively, in sorted order.

    >>> list_sources(["-"])
    ['-']
    """
    files: list[str] = []
    for source in sources:
        folder = Path(source)
        if source != STDIN and not folder.exists():
            raise NotFoundError(f"there is no file or folder {source}")
        if source == STDIN or not folder.is_dir():
            files.append(source)
            continue
        found = list_files(folder, follow_symlinks=follow_symlinks, on_skip=on_skip)
        inside = [path for path in found if is_data_file(path.name)]
        if not inside:
            raise InputError(f"{source} holds no .txt, .csv, .tsv, .jsonl or .parquet file, compressed or not")
        files += map(str, inside)
    if not files:
        raise InputError("no source: name files or folders of text")
    return files


class Documents:
    """Iterate over the documents of files, with one document in memory at a time.

    Text files have one paragraph per line and a blank line between documents. Tables have one document per row.
    """

    def __init__(self, files: Sequence[str], column: str | None = None) -> None:
        self.files, self._column = files, column
        self.sizes = [os.path.getsize(name) if os.path.isfile(name) else 0 for name in files]
        self._bytes_before = 0  # of the files read so far
        self._table: InputTable | None = None  # the file being read

    def fraction(self) -> float | None:
        """Fraction of all bytes read so far, if their number is known."""
        if STDIN in self.files or self._table is None:
            return None
        return (self._bytes_before + (self._table.fraction() or 0.0) * (self._table.size or 0)) / (sum(self.sizes) or 1)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (location for error messages, document)."""
        self._bytes_before = 0
        for name, size in zip(self.files, self.sizes, strict=True):
            self._table = table = open_table(name)
            if _is_plain(name):
                yield from _paragraphs(table)
            else:
                column = table.column(["text"], self._column, "--column", only=True)
                for number, row in enumerate(table.rows([column]), 1):
                    yield f"{table.name}, row {number}", text_cell(table, number, row, column)
            self._bytes_before += size


def _paragraphs(table: InputTable) -> Iterator[tuple[str, str]]:
    lines: list[str] = []
    first = size = 0
    for number, row in enumerate(table.rows(["text"]), 1):
        line = row["text"]
        blank = not line or line.isspace()
        if lines and (blank or size > MAX_CHARACTERS):
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
    """Read titles of documents to exclude: a table's column `title`, or one title per line."""
    table = open_table(file)
    column = "text" if _is_plain(file) else table.column(["title"], None, "a header line")
    return [title for row in table.rows([column]) if (title := str(row.get(column) or "")).strip()]
