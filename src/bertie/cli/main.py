"""Parses the command line and turns errors into one line and an exit status.

Results go to standard output, everything else to standard error. 0: done; 1: it failed; 2: wrong use.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from bertie._version import __version__
from bertie.cli import inspect
from bertie.errors import BertieError

VERBS = (inspect,)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="bertie", description="One toolkit for encoder-only transformers.")
    parser.add_argument("--version", action="version", version=f"bertie {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        verb.add(verbs)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except BertieError as error:
        if args.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            print(f"bertie: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bertie: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return 0
    return 0
