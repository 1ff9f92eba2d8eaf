"""Reading and writing of rows, and keys that tell training from evaluation texts."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bertie.data.readers import open_table

Row = dict[str, Any]
Named = Iterator[tuple[str, list[Row]]]  # the rows of each file, by its name without suffix
SEED = 0

# Datasets never trained on, whatever the split: they are for evaluation, or their licence forbids it.
EVALUATION_ONLY = (
    "ag_news cacm conll2003 cosqa cr cranfield emotion imdb mlqa mr mrpc npl_vaswani pawsx qnli quora_pairs rte "
    "squad_v2_dev sst2 sst5 sts12_16 stsb trecqa wikiqa xnli xquad"
).split()


def read(file: Path) -> Iterator[Row]:
    """Read the rows of a file."""
    table = open_table(str(file))
    return table.rows(table.columns)


def read_if_any(file: Path) -> Iterator[Row]:
    """Read the rows of a file; none, with a note, if it does not exist."""
    if file.exists():
        return read(file)
    print(f"skipped: there is no {file}")
    return iter(())


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write rows as gzipped JSON lines."""
    write(file, (json.dumps(row, ensure_ascii=False) for row in rows))


def write(file: Path, lines: Iterable[str]) -> None:
    """Write lines to a gzip file without a timestamp, so that the same lines give the same bytes."""
    count = 0
    with gzip.GzipFile(file, "wb", mtime=0) as packed, io.TextIOWrapper(packed, "utf-8", newline="\n") as text:
        for line in lines:
            text.write(line + "\n")
            count += 1
    print(f"{file.name}: {count:,} rows, {file.stat().st_size:,} bytes", flush=True)


def key(text: str) -> str:
    """A key that ignores case, spacing and punctuation.

    >>> key("Don't  PANIC !") == key("don't panic!")
    True
    """
    return re.sub(r"\W+", "", text.casefold())


def texts_of(row: Row) -> Iterator[str]:
    """All texts of a row."""
    if "tokens" in row:
        yield " ".join(row["tokens"])
    for name in ("text", "text_a", "text_b", "question", "query", "passage", "context"):
        if isinstance(row.get(name), str):
            yield row[name]


def evaluation_keys(data: Path) -> set[str]:
    """Keys of all evaluation texts: dev and test splits, and the datasets of `EVALUATION_ONLY`."""
    return {
        key(text)
        for file in sorted([*data.glob("*/*.jsonl.gz"), *data.glob("*/*.jsonl.xz")])
        if not file.name.startswith("train") or file.parent.name in EVALUATION_ONLY
        for row in read(file)
        for text in texts_of(row)
    }


def unseen(rows: Iterable[Row], seen: set[str], *columns: str) -> Iterator[Row]:
    """Rows without duplicates, and without those seen before."""
    own: set[str] = set()
    for row in rows:
        text = key(" ".join(" ".join(row[column]) for column in columns))  # of words, or of a text's characters
        if text and text not in seen and text not in own:
            own.add(text)
            yield row
