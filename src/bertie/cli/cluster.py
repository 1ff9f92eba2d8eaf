"""Flags and errors shared by the verbs that also run on a Ray cluster."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from bertie.cli.common import UsageError
from bertie.errors import BertieError


def add_ray(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --ray, --workers and --threads; `what`: what runs on the cluster."""
    group = parser.add_argument_group("Ray cluster")
    group.add_argument(
        "--ray", metavar="ADDRESS", help=f"run on a Ray cluster (host:port, auto, or local for this machine): {what}"
    )
    group.add_argument(
        "--workers", type=int, metavar="N", help="number of actors (default: one per GPU, or as many as cores allow)"
    )
    group.add_argument("--threads", type=int, metavar="N", help="threads per actor without a GPU (default: up to 4)")


def check_ray(args: argparse.Namespace) -> None:
    """Reject the flags of a Ray cluster without --ray."""
    if args.ray is None and (args.workers is not None or args.threads is not None):
        raise UsageError("--workers and --threads need a Ray cluster; pass --ray")


@contextmanager
def on_cluster() -> Iterator[None]:
    """Name flags instead of arguments in errors, and redirect Ray's output to stderr."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except BaseException as error:
        if isinstance(error, BertieError):
            error.args = (_to_flags(str(error)),)
        error.__notes__ = [_to_flags(note) for note in getattr(error, "__notes__", [])]
        raise


def _to_flags(text: str) -> str:
    text = re.sub(r"\b(resume|overwrite)=True", r"--\1", text)
    return re.sub(r"\b(column|device|workers|threads|dimension|prompt|overflow|precision)=", r"--\1 ", text)
