"""Shared code of the verbs on groups of texts: an input that is read repeatedly, its embeddings, and outputs."""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.cli.common import add_column, add_input, add_model, load, open_input
from bertie.cli.stream import Stream
from bertie.data.journal import AlreadyComplete
from bertie.data.progress import Progress
from bertie.data.readers import FORMATS, STDIN, Format, InputTable, data_suffix, open_table, text_cell
from bertie.errors import ExistsError, InputError

if TYPE_CHECKING:
    from bertie.pipeline.outputs import FloatArray

MAX_CHARACTERS = 200  # of a text in a list of groups
PROGRESS_ROWS = 256  # between two updates of a progress bar
# The arguments that embeddings depend on; changing others does not prevent resuming.
EMBEDDING_ARGUMENTS = (
    *("verb", "items", "as_text", "format", "column", "model", "revision", "device", "precision", "overflow"),
    *("deterministic", "resume", "overwrite", "json", "quiet", "verbose", "cleanup"),
)


def add_group_flags(parser: argparse.ArgumentParser, output: str) -> None:
    """Add the texts, the model, -o/--output, --json, --resume and --overwrite; `output`: the help of -o."""
    add_input(parser)
    add_column(parser)
    add_model(parser)
    parser.add_argument("-o", "--output", metavar="OUT", help=output)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--resume", action="store_true", help="reuse the embeddings of an interrupted run")
    parser.add_argument("--overwrite", action="store_true", help="replace existing output files")


class TextInput:
    """Texts that can be read several times: standard input and pipes are copied to a temporary file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._copy = args, ""
        item = args.items[0]
        self._stream: Stream | None = None
        if len(args.items) == 1 and not args.as_text and (item == STDIN or _is_pipe(item)):
            self._copy = _copied(item, args)
        table = self.open()
        self.name = "standard input" if item == STDIN else table.name
        self.column = table.column(["text"], args.column, "--column", only=True)
        self.format: Format = (
            "text" if table.is_literal else args.format or FORMATS.get(data_suffix(item) or "", "text")
        )

    def open(self) -> InputTable:
        """Open the input again."""
        return open_table(self._copy, self._args.format or "text") if self._copy else open_input(self._args)

    def texts(self, label: str | None = None) -> Iterator[str]:
        """Read the texts; `label`: that of a progress bar."""
        table = self.open()
        with nullcontext() if label is None else Progress(label, table.fraction) as progress:
            number = 0
            for number, row in enumerate(table.rows([self.column]), 1):
                yield text_cell(table, number, row, self.column)
                if progress is not None and number % PROGRESS_ROWS == 0:
                    progress.update(PROGRESS_ROWS)
            if progress is not None:
                progress.update(number % PROGRESS_ROWS)

    def embeddings(self) -> FloatArray:
        """(n, D) embeddings of the texts, memory-mapped from a file beside the output, which `--resume` reuses."""
        from bertie.tasks import Embedder

        values = {key: getattr(self._args, key) for key in EMBEDDING_ARGUMENTS}
        if self._args.output is None:
            folder = tempfile.TemporaryDirectory(prefix="bertie-")
            self._args.cleanup.callback(folder.cleanup)
            values |= {"output": os.path.join(folder.name, "embeddings.npy"), "resume": False}
        else:
            values["output"] = f"{self._args.output}.embeddings.npy"
        options = argparse.Namespace(**values, on_error="stop", skip_empty=False)
        stream = Stream(options, self.open(), [self.column], embeddings=True, has_on_error=False)
        task = load(Embedder, self._args)

        def work(texts: list[str]) -> Iterator[dict[str, Any]]:
            return map(asdict, task.embed_each(texts))

        self._stream = stream
        vectors: FloatArray = stream.store_vectors(stream.results(work), task.dimension)
        return vectors

    def remove_embeddings(self) -> None:
        """Remove the file of embeddings, once the outputs are complete."""
        if self._stream is not None:
            self._stream.remove_stored()


def _is_pipe(name: str) -> bool:
    try:
        return not stat.S_ISREG(mode := os.stat(name).st_mode) and not stat.S_ISDIR(mode)
    except (OSError, ValueError):  # a text
        return False


def _copied(item: str, args: argparse.Namespace) -> str:
    folder = tempfile.TemporaryDirectory(prefix="bertie-")
    args.cleanup.callback(folder.cleanup)
    path = os.path.join(folder.name, "input")
    if item == STDIN and sys.stdin is None:
        raise InputError("standard input is closed; redirect a file or a pipe to it")
    with open(path, "wb") as copy:
        if item == STDIN:
            shutil.copyfileobj(sys.stdin.buffer, copy, 1 << 20)
        else:
            with open(item, "rb") as pipe:
                shutil.copyfileobj(pipe, copy, 1 << 20)
    return path


def check_outputs(args: argparse.Namespace, *names: str) -> list[Path]:
    """The paths of output files, which must be new unless --overwrite is given.

    With both --overwrite and --resume, an interrupted run that replaces them is resumed.
    """
    paths = [Path(name) for name in names]
    for path in paths:
        if path.is_dir():
            raise ExistsError(f"{path} is a folder; pass the name of a file")
        if not path.absolute().parent.is_dir():
            raise InputError(f"{path} cannot be written: there is no folder {path.parent}")
    existing = [path for path in paths if path.exists()]
    if args.resume and not args.overwrite and existing == paths:
        raise AlreadyComplete(f"{', '.join(names)}: complete, there is nothing to resume")
    if existing and not (args.overwrite or args.resume):
        raise ExistsError(f"{existing[0]} already exists; pass --overwrite, or another name")
    return paths


def sibling(output: str, ending: str) -> str:
    """The name of a file beside the output.

    >>> sibling("out/kept.csv.gz", ".duplicates.jsonl")
    'out/kept.duplicates.jsonl'
    """
    suffix = data_suffix(output)
    path = Path(output)
    while suffix is not None and path.suffix and path.name.lower().rfind(suffix) > 0:
        path = path.with_suffix("")
    return str(path) + ending


def shorten(text: str) -> str:
    """Truncate a long text for display."""
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
