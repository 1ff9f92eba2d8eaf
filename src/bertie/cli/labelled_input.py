"""Arguments of the verbs that read labelled data: train and eval."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError
from bertie.errors import InputError

if TYPE_CHECKING:
    from bertie.training.finetune.data import LabelledDataset


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Add the flag for column names."""
    parser.add_argument(
        "--columns",
        metavar="NAME=COLUMN",
        nargs="+",
        action="extend",
        default=[],
        help="columns of the file under other names than expected, such as text=review label=stars",
    )


def add_resamples(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the bootstrap."""
    parser.add_argument(
        "--resamples",
        metavar="N",
        type=count,
        default=1000,
        help="bootstrap resamples per confidence interval (default: 1000)",
    )


def count(text: str) -> int:
    """Parse an integer of at least 1."""
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def parse_pairs(items: Sequence[str], flag: str, what: str) -> dict[str, str]:
    """Parse `a=b` and `a=b,c=d` into a dict."""
    pairs = {}
    for item in items:
        for pair in item.split(","):
            name, sign, value = pair.partition("=")
            if not (name.strip() and sign and value.strip()):
                raise UsageError(f"{flag} takes {what}, not {pair!r}")
            pairs[name.strip()] = value.strip()
    return pairs


def read_labelled(
    task: str,
    files: Sequence[str],
    columns: Mapping[str, str],
    *,
    training: bool = False,
    like: LabelledDataset | None = None,
) -> LabelledDataset:
    """Read labelled files for training or evaluation; `like`: a dataset whose labels are used."""
    from bertie.tasks import registry
    from bertie.training.finetune.data import read_dataset

    kind: Any = registry.get(task).data_kind
    known = None if like is None else like.labels or None
    try:
        data = read_dataset(kind, [Path(file) for file in files], columns=columns, known=known, training=training)
    except InputError as error:
        message = re.sub(r"columns=\{'(\w+)': \.\.\.\}", r"--columns \1=…", str(error))
        raise InputError(re.sub(r"\bcolumns names\b", "--columns names", message)) from None
    if like is not None and data.multi_label != like.multi_label:
        multi, single = (like, data) if like.multi_label else (data, like)
        raise InputError(f"{multi.name} has lists of labels and {single.name} one label per row; use lists in both")
    return data
