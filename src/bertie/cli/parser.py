"""The argument parser of every verb: one-line errors with suggestions for misspelled names."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from bertie.data import terminal
from bertie.errors import BertieError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Verbs = _SubParsersAction[argparse.ArgumentParser]

# Names that other tools use, and the equivalent verbs and flags.
VERB_SYNONYMS = {
    "attention": "attend", "benchmark": "bench", "check": "doctor", "completions": "completion", "config": "doctor",
    "convert": "quantize", "demo": "tour", "encode": "embed", "evaluate": "eval", "finetune": "train",
    "fine-tune": "train", "fit": "train", "info": "inspect", "mask": "fill", "mlm": "fill", "ner": "tag",
    "predict": "classify", "qa": "answer", "query": "search", "sentiment": "classify", "server": "serve",
    "show": "inspect", "test": "eval", "upload": "push", "zero-shot": "classify",
}  # fmt: skip
FLAG_SYNONYMS = {
    "--checkpoint": "--model", "--cpu": "--device", "--cuda": "--device", "--debug": "--verbose",
    "--field": "--column", "--force": "--overwrite", "--gpu": "--device", "--learning-rate": "--lr",
    "--limit": "--top-k", "--long": "--overflow", "--model-name-or-path": "--model", "--num-train-epochs": "--epochs",
    "--out": "--output", "--output-dir": "--output", "--silent": "--quiet", "--dtype": "--precision",
    "--eval": "--dev", "--validation": "--dev", "--valid": "--dev", "-n": "--top-k",
}  # fmt: skip
FLAG_HINTS = {
    "--batch-size": "batches are sized by a token budget; leave it out",
    "--max-length": "longer texts are read in windows, or as --overflow says",
    "--max-seq-length": "longer texts are read in windows, or as --overflow says",
    "--truncate": "use --overflow truncate",
    "--truncation": "use --overflow truncate",
}
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


class UsageError(BertieError):
    """An invalid command line: exit status 2."""


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, and accepts no abbreviated flags."""

    _intermixed = False
    _words: Sequence[str] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)
        self.register("type", float, finite_number)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Allow flags between positional arguments, which argparse does not by default."""
        if self._intermixed or self._subparsers is not None:
            self._words = self._words or list(args or ())
            return super().parse_known_args(args, namespace)
        self._intermixed, self._words = True, list(args or ())
        try:
            namespace, extra = self.parse_known_intermixed_args(args, namespace)
        except AttributeError as error:  # argparse restores attributes that it has not yet saved
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise
        if extra:
            self.error(f"unexpected argument {extra[0]!r:.60}")
        return namespace, []

    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError`. An unknown flag is reported first: other errors often follow from it."""
        flag = next(self._unknown_flags(), None)
        if flag is not None:
            message = f"{self.prog} has no flag {flag}{self._did_you_mean(flag)}"
        elif message.startswith("the following arguments are required") and "|-" in message:
            message += "; - reads standard input"
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _unknown_flags(self) -> Iterator[str]:
        """Words that argparse takes for flags, but that are not known."""
        known = self._option_string_actions
        for word in self._words:
            if word == "--" or (self._subparsers is not None and not word.startswith("-")):
                return  # what follows are arguments, or flags of the verb
            name = word.partition("=")[0]
            is_flag = word.startswith("-") and len(word) > 1 and " " not in word
            if not is_flag or name in known or _NEGATIVE_NUMBER.fullmatch(word):
                continue
            if not word.startswith("--") and word[:2] in known:  # -k5
                continue
            yield name

    def _did_you_mean(self, flag: str) -> str:
        if self._subparsers is not None:
            return f"; flags follow the verb, as in {self.prog} VERB {flag}"
        name = flag.replace("_", "-").lower()
        known = [option for option in self._option_string_actions if option.startswith("--")]
        if name in FLAG_HINTS and "--overflow" in known:
            return f"; {FLAG_HINTS[name]}"
        return did_you_mean(name, known, FLAG_SYNONYMS)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject a value that is not among the choices, naming the closest one."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            hint = did_you_mean(str(value), choices, VERB_SYNONYMS)
            what = str(action.metavar or "command").lower()
            raise UsageError(f"{self.prog} has no {what} {value!r:.60}{hint} (see {self.prog} --help)")
        hint = did_you_mean(str(value), choices, {})
        raise argparse.ArgumentError(action, f"{value!r:.60} must be one of {', '.join(choices)}{hint}")


class GroupedParser(Parser):
    """The top-level parser: its help lists the verbs by group."""

    groups: Mapping[str, Sequence[str]] = {}

    def format_help(self) -> str:
        """Return the help, with a heading for each group of verbs."""
        assert self._subparsers is not None
        (verbs,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        helps = {action.dest: action.help or "" for action in verbs._choices_actions}
        width = max(map(len, helps))
        lines = [f"usage: {self.prog} VERB …", "", self.description or ""]
        for title, names in self.groups.items():
            lines += ["", terminal.style(title, "bold")]
            lines += [f"  {terminal.style(f'{name:<{width}}', 'cyan')}  {helps[name]}" for name in names]
        return "\n".join([*lines, "", self.epilog or "", ""])


def did_you_mean(name: str, known: Sequence[str], synonyms: Mapping[str, str]) -> str:
    """Suggest the closest known name; an empty string if none is close.

    >>> did_you_mean("--outptu", ["--output", "--top-k"], {})
    '; did you mean --output?'
    """
    synonym = synonyms.get(name)
    close = [synonym] if synonym in known else get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def finite_number(text: str) -> float:
    """Parse a number; reject NaN and infinity, which would pass most range checks.

    >>> finite_number("1e3")
    1000.0
    """
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number")
    return number


def verb(verbs: Verbs, name: str, help: str, description: str | None, example: str) -> argparse.ArgumentParser:
    """Declare a verb."""
    return verbs.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's verbs or subcommands, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers without subcommands, which run something."""
    children = subparsers(parser)
    if not children:
        yield parser
    for child in children.values():
        yield from leaves(child)
