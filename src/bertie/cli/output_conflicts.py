"""Refuse to overwrite the input, before any file is opened."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bertie.cli.common import UsageError
from bertie.data.readers import STDIN

WORKING_FILES = ("", ".part", ".part.json", ".part.parquet", ".part.lock")  # of an output file
# Arguments that name files and folders to read.
FILES = (
    *("items", "file", "files", "paths", "sources", "pairs", "corpus", "context", "exclude", "recipe", "beir"),
    *("train", "dev", "test", "texts", "folders", "labelled", "reference"),
)
MODELS = ("model", "tokenizer", "teacher", "baseline", "reranker", "sparse", "late_interaction")  # folders
ADDS_FILES = ("eval", "index")  # verbs that add files to an output folder; others replace it


def check_output_is_no_input(args: argparse.Namespace) -> None:
    """Refuse a command whose output is one of its inputs: by name, by a symbolic link or by a hard link."""
    inputs = [(key, name) for key in (*FILES, *MODELS) for name in _names(getattr(args, key, None))]
    if args.verb == "train":
        inputs = inputs[1:]  # the task
    _check_standard_output(inputs)
    output = getattr(args, "output", None)
    if not output or output == STDIN:
        return
    adds_files = args.verb in ADDS_FILES
    for key, name in inputs:
        if not (adds_files and key in MODELS):  # a report may be put beside the model
            check_distinct(output, name, replaces_folder=not adds_files, is_model=key in MODELS)


def check_distinct(output: str, name: str, *, replaces_folder: bool = True, is_model: bool = False) -> None:
    """Refuse an output that is the file or folder `name`, or holds it, or is a part of the model `name`."""
    status = _stat(name)
    if status is None:
        return
    for suffix in WORKING_FILES:
        other = _stat(output + suffix)
        if other is not None and os.path.samestat(status, other):
            what = "the input" if not suffix else f"the input, and a working file of {output}"
            raise UsageError(f"-o {output}: {_title(name)} is {what}; pass another name with -o")
    if name == STDIN or not os.path.isdir(output):
        return
    out, path = Path(output).resolve(), Path(name).resolve()
    if replaces_folder and out in path.parents:
        raise UsageError(f"-o {output}: the input {name} is in this folder, which would be replaced; pass another one")
    if is_model and path in out.parents and any(out.iterdir()):
        raise UsageError(f"-o {output}: this folder is a part of {name}; pass another one")


def _check_standard_output(inputs: Iterable[tuple[str, str]]) -> None:
    try:
        status = os.fstat(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or not a file
        return
    if not stat.S_ISREG(status.st_mode):
        return
    for _, name in inputs:
        other = _stat(name)
        if other is not None and os.path.samestat(status, other):
            raise UsageError(f"{_title(name)} is both the input and the output; redirect the output to another file")


def _names(value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [name for name in values if isinstance(name, str)]


def _stat(name: str) -> os.stat_result | None:
    """The file's status; None for anything that is not an existing file or folder."""
    try:
        if name == STDIN:
            status = os.fstat(sys.stdin.fileno())
            return status if stat.S_ISREG(status.st_mode) else None
        return os.stat(name) if name else None
    except (OSError, ValueError, AttributeError):  # a text that is no file name, or no standard input
        return None


def _title(name: str) -> str:
    return "standard input" if name == STDIN else name
