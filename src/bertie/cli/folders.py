"""The flag and the messages of verbs that read folders."""

from __future__ import annotations

import argparse
import sys

from bertie.data.folders import OnSkip

MAX_LISTED = 10  # skipped files


def add_follow_symlinks(parser: argparse.ArgumentParser) -> None:
    """Add --follow-symlinks."""
    parser.add_argument(
        "--follow-symlinks",
        action="store_true",
        help="follow symbolic links inside folders, even to files outside them (default: skip and list them)",
    )


def report_skipped() -> OnSkip:
    """A function that prints the first few skipped files."""
    count = 0

    def report(path: str, reason: str) -> None:
        nonlocal count
        count += 1
        if count <= MAX_LISTED:
            print(f"bertie: skipped {path}: {reason}", file=sys.stderr)
        elif count == MAX_LISTED + 1:
            print("bertie: skipped more files", file=sys.stderr)

    return report
