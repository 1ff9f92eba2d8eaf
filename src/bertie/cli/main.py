"""The entry point of the command line: parse arguments, run a verb, report errors.

Results go to standard output, everything else to standard error. Exit codes: 0 success, 1 error,
2 usage error, 130 interrupted by Ctrl-C, 141 standard output was closed by its reader.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any

from bertie._version import __version__
from bertie.cli import (
    answer,
    ask,
    attend,
    bench,
    calibrate,
    choose,
    classify,
    cluster_texts,
    compare,
    completion,
    corpus,
    dedup,
    detect_replaced,
    doctor,
    drift,
    embed,
    eval,
    export,
    fill,
    index,
    inspect,
    mine,
    outliers,
    pairs,
    pretrain,
    push,
    quantize,
    recipes,
    rerank,
    search,
    serve,
    similarity,
    suggest,
    tag,
    tokenize,
    tokenizer,
    tour,
    train,
    weight_tokens,
)
from bertie.cli.common import add_verbosity, apply_settings
from bertie.cli.output_conflicts import check_output_is_no_input
from bertie.cli.parser import GroupedParser, Parser, UsageError, leaves
from bertie.cli.settings import read_settings
from bertie.cli.standard_output import NAME as STANDARD_OUTPUT
from bertie.cli.standard_output import standard_output
from bertie.cli.task_verb import add_task_verbs
from bertie.data.journal import AlreadyComplete
from bertie.data.readers import STDIN
from bertie.data.terminal import set_color_mode, style
from bertie.errors import BertieError, BertieWarning, InputError
from bertie.pipeline.language_warnings import one_warning

GROUPS = {  # in the order of bertie --help
    "use a model": (tour, fill, embed, similarity, classify, tag, answer, rerank, choose, detect_replaced),
    "groups of texts": (dedup, cluster_texts, pairs, outliers, drift),
    "search": (index, search, ask),
    "serve": (serve,),
    "train": (train, suggest, eval, calibrate, compare, mine, weight_tokens, quantize, export, push, recipes),
    "pretrain": (tokenizer, corpus, pretrain),
    "inspect": (inspect, tokenize, attend, bench, doctor, completion),
}


_HOW_TO_RESUME = re.compile(r"(; |^)(--resume continues.*|--refresh resumes.*|resume=True.*|continue with resume)$")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        with standard_output():
            return _run(argv)
    except BrokenPipeError:  # the consumer of a pipe exited
        return 128 + 13  # like a program killed by SIGPIPE
    except (InputError, OSError) as error:  # raised by standard output itself
        _report(error, as_json=False)
        return 1


def _run(argv: Sequence[str]) -> int:
    as_json, verbose = "--json" in argv, False
    messages = sys.stderr
    try:
        parser = build_parser()
        if not argv:
            parser.print_help(sys.stderr)
            raise SystemExit(2)
        try:
            args = parser.parse_args(argv)
        except UsageError as error:
            _report(error, as_json)
            raise SystemExit(2) from None
        _prepare(args)
        verbose = args.verbose
        with _resume_hint(args, argv), ExitStack() as args.cleanup, _quiet(args.quiet), warnings.catch_warnings():
            warnings.showwarning = _show_warning(warnings.showwarning)
            with one_warning():
                return args.run(args) or 0
    except AlreadyComplete as note:
        print(f"bertie: {note}", file=messages)
    except UsageError as error:
        _report(error, as_json)
        return 2
    except (BertieError, OSError) as error:
        if isinstance(error, OSError) and error.filename == STANDARD_OUTPUT:
            raise
        if verbose:
            traceback.print_exception(error, file=messages)
        _report(error, as_json)
        return 1
    except KeyboardInterrupt as error:
        print("bertie: " + "; ".join(["interrupted", *_notes(error)]), file=messages)
        return 130
    return 0


def _prepare(args: argparse.Namespace) -> None:
    """Apply the settings of the environment and the configuration file, and check the arguments."""
    if args.verb != "doctor":  # which reports an invalid configuration file among other problems
        apply_settings(args)
        set_color_mode(read_settings().color)
    check_output_is_no_input(args)


@contextmanager
def _resume_hint(args: argparse.Namespace, argv: Sequence[str]) -> Iterator[None]:
    """If an interrupted run can be resumed, add the command that resumes it to the error."""
    try:
        yield
    except (BertieError, OSError, KeyboardInterrupt) as error:
        flag = next((name for name in ("resume", "refresh") if hasattr(args, name)), None)
        if flag is not None and (notes := _notes(error)):
            kept = [note for text in notes if (note := _HOW_TO_RESUME.sub("", text))]
            error.__notes__ = [*kept, f"continue with: {resume_command(argv, f'--{flag}')}"]
        raise


def resume_command(argv: Sequence[str], flag: str) -> str:
    """The command that resumes an interrupted one.

    >>> resume_command(["embed", "my texts.csv", "-o", "out.npy", "--overwrite"], "--resume")
    "bertie embed 'my texts.csv' -o out.npy --resume"
    """
    words = [word for word in argv if word not in ("--overwrite", flag)]
    end = words.index("--") if "--" in words else len(words)
    command = shlex.join(["bertie", *words[:end], flag, *words[end:]])
    return f"{command}, with the same standard input" if STDIN in words else command


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """Drop everything but results, which are on standard output, and errors, which are printed after this block."""
    if not quiet:
        yield
        return
    with open(os.devnull, "w") as nothing, redirect_stderr(nothing):
        yield


def build_parser() -> Parser:
    """The argument parser with all verbs."""
    parser = GroupedParser(
        prog="bertie",
        description="One toolkit for encoder-only (BERT-style) transformers.",
        epilog="bertie VERB --help describes a verb, with examples; bertie --version prints the version.",
    )
    parser.add_argument("--version", action="version", version=f"bertie {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", dest="verb", required=True, parser_class=Parser)
    groups: dict[str, list[str]] = {}
    for title, modules in GROUPS.items():
        known = set(verbs.choices)
        for module in modules:
            module.add(verbs)
        groups[title] = [name for name in verbs.choices if name not in known]
    known = set(verbs.choices)
    add_task_verbs(verbs)
    groups[next(iter(GROUPS))] += [name for name in verbs.choices if name not in known]
    for leaf in leaves(parser):
        add_verbosity(leaf)
    parser.groups = groups
    return parser


def _show_warning(show: Callable[..., None]) -> Callable[..., None]:
    """Print Bertie's own warnings as one line; others as before."""

    def show_warning(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if issubclass(category, BertieWarning):
            print(f"{style('bertie:', 'bold', 'yellow', file=sys.stderr)} {message}", file=sys.stderr)
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
        print(f"{style('bertie:', 'bold', 'red', file=sys.stderr)} {message}", file=sys.stderr)


def _notes(error: BaseException) -> list[str]:
    """Notes added to the error: what has been saved, and how to resume."""
    return list(getattr(error, "__notes__", []))
