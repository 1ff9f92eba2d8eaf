"""What the verbs that also run on a Ray cluster share."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from bertie.cli.common import UsageError
from bertie.errors import BertieError


def add_ray(parser: argparse.ArgumentParser, what: str) -> None:
    """The cluster; `what` says what it does."""
    group = parser.add_argument_group("on many machines")
    group.add_argument(
        "--ray", metavar="ADDRESS", help=f"{what}, by a Ray cluster: host:port, auto, or local for this machine alone"
    )
    group.add_argument("--workers", type=int, metavar="N", help="how many (one a GPU; else as the cores allow)")
    group.add_argument("--threads", type=int, metavar="N", help="of a worker without a GPU (up to 4)")


def check_ray(args: argparse.Namespace) -> None:
    """Without a cluster there are no workers."""
    if args.ray is None and (args.workers is not None or args.threads is not None):
        raise UsageError("--workers and --threads are those of a Ray cluster; name it with --ray")


@contextmanager
def on_cluster() -> Iterator[None]:
    """What Python's users pass is a flag here; and what Ray says of its workers is no result."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except BaseException as error:
        if isinstance(error, BertieError):
            error.args = (_flags(str(error)),)
        error.__notes__ = [_flags(note) for note in getattr(error, "__notes__", [])]
        raise


def _flags(text: str) -> str:
    text = re.sub(r"\b(resume|overwrite)=True", r"--\1", text)
    return re.sub(r"\b(column|device|workers|threads|dimensions|prompt|long)=", r"--\1 ", text)
