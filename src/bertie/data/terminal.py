"""Colours and the width of the terminal. Colours are used on terminals only."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Literal, TextIO

ColorMode = Literal["auto", "always", "never"]
COLOR_MODES: tuple[ColorMode, ...] = ("auto", "always", "never")
STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

_mode: ColorMode = "auto"


def set_color_mode(mode: ColorMode) -> None:
    """Set when colours are used; `auto` follows the terminal and the environment."""
    global _mode
    _mode = mode


def has_color(file: TextIO | None) -> bool:
    """Whether to write colours to a file: on a terminal, unless NO_COLOR is set; anywhere with FORCE_COLOR."""
    if _mode != "auto":
        return _mode == "always"
    if os.environ.get("NO_COLOR"):  # https://no-color.org
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return file is not None and file.isatty() and os.environ.get("TERM") != "dumb"


def style(text: str, *names: str, file: TextIO | None = None) -> str:
    """Return a text in the given styles if `file`, by default standard output, has colours.

    >>> style("accuracy", "bold", "green")
    'accuracy'
    """
    if not text or not has_color(sys.stdout if file is None else file):
        return text
    return f"\x1b[{';'.join(STYLES[name] for name in names)}m{text}\x1b[0m"


def is_interactive(file: TextIO) -> bool:
    """Whether a person watches a file: a terminal, or the output of a notebook cell."""
    return file.isatty() or "ipykernel" in type(file).__module__


def width() -> int:
    """The number of columns of the terminal; 80 where it is unknown."""
    return shutil.get_terminal_size().columns
