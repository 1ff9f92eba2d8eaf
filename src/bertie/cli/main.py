"""Parses the command line and turns errors into one line and an exit status.

Results go to standard output, everything else to standard error. 0: done; 1: it failed; 2: wrong use; 130: Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

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
    rerank,
    search,
    serve,
    tag,
    tokenize,
    tokenizer,
    tour,
    train,
    weight_tokens,
)
from bertie.cli import quantize as shrink
from bertie.cli import similarity as similar
from bertie.cli.common import Parser, UsageError
from bertie.data.journal import AlreadyComplete
from bertie.errors import BertieError

VERBS = (
    tour,
    train,
    mine,
    weight_tokens,
    eval,
    fill,
    embed,
    classify,
    tag,
    answer,
    rerank,
    similar,
    index,
    search,
    serve,
    tokenize,
    tokenizer,
    corpus,
    pretrain,
    inspect,
    bench,
    shrink,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    argv = sys.argv[1:] if argv is None else argv
    as_json = "--json" in argv
    try:
        args = grammar().parse_args(argv)
    except UsageError as error:
        _report(error, as_json)
        raise SystemExit(2) from None
    try:
        args.run(args)
    except AlreadyComplete as note:
        print(f"bertie: {note}", file=sys.stderr)
    except UsageError as error:
        _report(error, as_json)
        return 2
    except BrokenPipeError:  # the reader of our output has seen enough
        # Python flushes standard output once more when it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (BertieError, OSError) as error:
        _report(error, as_json)
        return 1
    except KeyboardInterrupt as error:
        print("bertie: " + "; ".join(["interrupted", *_notes(error)]), file=sys.stderr)
        return 130
    return 0


def grammar() -> Parser:
    """All verbs."""
    parser = Parser(prog="bertie", description="One toolkit for encoder-only transformers.")
    parser.add_argument("--version", action="version", version=f"bertie {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", dest="verb", required=True)
    for verb in VERBS:
        verb.add(verbs)
    return parser


def _report(error: Exception, as_json: bool) -> None:
    """One line for people; one object, on standard output, for scripts."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or 'standard output'}: {error.strerror}"
    said = "; ".join(["; ".join(text.splitlines()), *_notes(error)])
    if as_json:
        print(json.dumps({"error": type(error).__name__, "message": said}))
    else:
        print(f"bertie: {said}", file=sys.stderr)


def _notes(error: BaseException) -> list[str]:
    """What was learnt on the error's way up: what is safe, and how to go on."""
    return list(getattr(error, "__notes__", []))
