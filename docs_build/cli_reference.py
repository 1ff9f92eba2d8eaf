"""The reference of the command line, from its argument parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from bertie.cli.main import build_parser
from bertie.cli.parser import subparsers

_SHARED = {"-h", "-q", "-v"}  # described once, at the top of the page


def render() -> str:
    """Markdown: a section per verb, with its examples, arguments and flags."""
    parser = build_parser()
    verbs = subparsers(parser)
    lines = []
    for title, names in parser.groups.items():  # type: ignore[attr-defined]
        lines += ["", f"## {title.capitalize()}", ""]
        for name in names:
            lines += _verb(verbs[name], 3)
    return "\n".join(lines)


def verb_names() -> list[str]:
    """All verbs, in the order of `bertie --help`."""
    return list(subparsers(build_parser()))


def _verb(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield f"{'#' * level} {parser.prog}\n"
    yield f"{_paragraphs(parser.description or '')}\n"
    children = subparsers(parser)
    if not children:
        yield f"```console\n{_usage(parser)}\n```\n"
    if parser.epilog:
        examples = parser.epilog.removeprefix("example:\n")
        yield "```sh\n" + re.sub(r"(?m)^  ", "", examples).rstrip() + "\n```\n"
    rows = [
        f"| {_flags(action)} | {_help(parser, action)} |"
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not _SHARED & set(action.option_strings)
        and not isinstance(action, argparse._SubParsersAction)
    ]
    if rows:
        yield "\n".join([f"<details markdown><summary>Arguments and flags of <code>{parser.prog}</code></summary>\n"])
        yield "\n".join(["| | |", "|---|---|", *rows]) + "\n\n</details>\n"
    for child in children.values():
        yield from _verb(child, level + 1)


def _usage(parser: argparse.ArgumentParser) -> str:
    """The line to type: required arguments, and that there are flags."""
    words = [parser.prog]
    for action in parser._actions:
        if not action.option_strings:
            formatter = argparse.HelpFormatter(parser.prog)
            words.append(formatter._format_args(action, str(action.metavar or action.dest)))
        elif action.required:
            words.append(f"{action.option_strings[0]} {action.metavar or action.dest.upper()}")
    return " ".join([*words, "[flags]"])


def _flags(action: argparse.Action) -> str:
    if not action.option_strings:
        return _code(action.metavar if isinstance(action.metavar, str) else action.dest)
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if action.nargs == 0:
        return names
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    return f"{names} {_code(value if isinstance(value, str) else ' '.join(value))}"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = argparse.HelpFormatter(parser.prog)._expand_help(action) if action.help else ""
    text = re.sub(r"([*_<>])", r"\\\1", " ".join(text.split()).replace("|", "\\|"))
    # flags are code; a value that follows stays prose
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", text)


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _paragraphs(text: str) -> str:
    """Help text as Markdown: indented parts stay as they are."""
    escaped = re.sub(r"([*_<>])", r"\\\1", text)
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", escaped)
