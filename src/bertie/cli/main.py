"""The entry point of the command line: parse arguments, run a verb, report errors.

Results go to standard output, everything else to standard error. Exit codes: 0 success, 1 error,
2 usage error, 130 interrupted by Ctrl-C, 141 standard output was closed by its reader.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from bertie._version import __version__
from bertie.cli import (
    answer,
    bench,
    classify,
    corpus,
    embed,
    eval,
    fill,
    index,
    inspect,
    mine,
    pretrain,
    quantize,
    rerank,
    search,
    serve,
    similarity,
    tag,
    tokenize,
    tokenizer,
    tour,
    train,
    weight_tokens,
)
from bertie.cli.common import Parser, UsageError
from bertie.cli.output_conflicts import check_output_is_no_input
from bertie.cli.standard_output import NAME as STANDARD_OUTPUT
from bertie.cli.standard_output import standard_output
from bertie.cli.task_verb import add_task_verbs
from bertie.data.journal import AlreadyComplete
from bertie.errors import BertieError, BertieWarning, InputError

VERBS = (  # in the order of bertie --help
    tour,
    fill,
    embed,
    similarity,
    classify,
    tag,
    answer,
    rerank,
    index,
    search,
    serve,
    train,
    mine,
    weight_tokens,
    eval,
    tokenize,
    tokenizer,
    corpus,
    pretrain,
    inspect,
    bench,
    quantize,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        with standard_output():
            return _run(argv)
    except BrokenPipeError:  # the consumer of a pipe exited
        return 128 + 13  # as a program that is ended by SIGPIPE
    except (InputError, OSError) as error:  # of standard output itself
        _report(error, as_json=False)
        return 1


def _run(argv: Sequence[str]) -> int:
    as_json = "--json" in argv
    try:
        try:
            args = build_parser().parse_args(argv)
        except UsageError as error:
            _report(error, as_json)
            raise SystemExit(2) from None
        check_output_is_no_input(args)
        with ExitStack() as args.cleanup, warnings.catch_warnings():
            warnings.showwarning = _show_warning(warnings.showwarning)
            args.run(args)
    except AlreadyComplete as note:
        print(f"bertie: {note}", file=sys.stderr)
    except UsageError as error:
        _report(error, as_json)
        return 2
    except (BertieError, OSError) as error:
        if isinstance(error, OSError) and error.filename == STANDARD_OUTPUT:
            raise
        _report(error, as_json)
        return 1
    except KeyboardInterrupt as error:
        print("bertie: " + "; ".join(["interrupted", *_notes(error)]), file=sys.stderr)
        return 130
    return 0


def build_parser() -> Parser:
    """The argument parser with all verbs."""
    parser = Parser(
        prog="bertie",
        description="One toolkit for encoder-only (BERT-style) transformers.",
        epilog="bertie VERB --help describes a verb, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"bertie {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", dest="verb", required=True)
    for verb in VERBS:
        verb.add(verbs)
    add_task_verbs(verbs)
    return parser


def _show_warning(show: Callable[..., None]) -> Callable[..., None]:
    """Print Bertie's own warnings as one line; others as before."""

    def show_warning(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if issubclass(category, BertieWarning):
            print(f"bertie: {message}", file=sys.stderr)
        else:
            show(message, category, *place, **options)

    return show_warning


def _report(error: Exception, as_json: bool) -> None:
    """Print one line to standard error or, with --json, one object to standard output."""
    text = str(error)
    if isinstance(error, OSError) and (error.filename or error.strerror):
        text = f"{error.filename}: {error.strerror or error}" if error.filename else str(error.strerror)
    message = "; ".join(["; ".join(text.splitlines()), *_notes(error)])
    if as_json:
        print(json.dumps({"error": type(error).__name__, "message": message}))
    else:
        print(f"bertie: {message}", file=sys.stderr)


def _notes(error: BaseException) -> list[str]:
    """Notes added to the error: what has been saved, and how to resume."""
    return list(getattr(error, "__notes__", []))
