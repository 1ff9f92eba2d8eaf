"""The grammar that the verbs share: where texts come from, which model reads them, where results go."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from bertie.config import PRECISIONS
from bertie.data.readers import STDIN, Table, is_data_file, open_table, table_from_texts
from bertie.errors import BertieError, ExistsError, InputError, NotFoundError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Verbs = _SubParsersAction[argparse.ArgumentParser]

KINDS = ("text", "csv", "tsv", "jsonl", "parquet")


class UsageError(BertieError):
    """A command line that makes no sense: exit status 2."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and takes no shortened flags: they break when a flag is added."""

    _mixing = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Flags may stand between texts, which argparse allows only to those who ask for it."""
        if self._mixing or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._mixing = True
        return self.parse_known_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """As our own errors."""
        raise UsageError(f"{message} (see {self.prog} --help)")


T = TypeVar("T")


def verb(verbs: Verbs, name: str, help: str, description: str | None, example: str) -> argparse.ArgumentParser:
    """Declare a verb."""
    return verbs.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_input(parser: argparse.ArgumentParser, metavar: str = "TEXT|FILE|-", what: str = "") -> None:
    """The texts, in all verbs alike."""
    parser.add_argument(
        "items",
        nargs="+",
        metavar=metavar,
        help=what or "texts; or one file of texts (.txt, .csv, .tsv, .jsonl, .parquet; .gz, .xz, .zst); or - for stdin",
    )
    parser.add_argument("--format", choices=KINDS, help="what a file or standard input holds, if no ending says so")


def add_column(parser: argparse.ArgumentParser) -> None:
    """For verbs that read one text a row."""
    parser.add_argument("--column", metavar="NAME", help="the column with the texts (text, else the only one)")


def add_pair(parser: argparse.ArgumentParser) -> None:
    """For verbs that also read pairs."""
    parser.add_argument("--text-a", metavar="NAME", help="the column with the first text of pairs (text_a)")
    parser.add_argument("--text-b", metavar="NAME", help="the column with the second text of pairs (text_b)")


def add_model(parser: argparse.ArgumentParser, *, overflow: bool = True, precision: bool = True) -> None:
    """The model."""
    parser.add_argument("-m", "--model", metavar="MODEL", help="a folder or a hub id (the built-in model)")
    parser.add_argument("--revision", help="of a hub id: a branch, tag or commit")
    if overflow:
        parser.add_argument("--device", help="cpu, cuda, cuda:1, …; a GPU if there is one")
        if precision:
            add_precision(parser)
        parser.add_argument(
            "--overflow",
            choices=("window", "error", "truncate"),
            default="window",
            help="text beyond the model's max_length: read it in overlapping windows (the default), stop, or cut it",
        )


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Of the computation."""
    text = (
        "of the computation: fp32 (the default); bf16, fp16, fp8 on GPUs; int8 and, on chips that have it, bf16 on CPUs"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help=text)


def new_folder(name: str, *, overwrite: bool) -> Path:
    """Where a verb writes a model: nothing, an empty folder, or one that may be replaced."""
    out = Path(os.path.abspath(name))
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not overwrite)):
        raise ExistsError(f"{name} is there already; pass --overwrite to replace a folder, or another name")
    return out


def add_head(parser: argparse.ArgumentParser) -> None:
    """For verbs that read with a head."""
    parser.add_argument("--head", metavar="NAME", help="one of several heads of the model (the only one that fits)")


def add_output(parser: argparse.ArgumentParser, *, vectors: bool = False) -> None:
    """Where the results go."""
    kinds = ".jsonl, .csv, .tsv, .parquet" + (", .npy" if vectors else "")
    parser.add_argument("-o", "--output", metavar="OUT", help=f"a file, by its ending: {kinds}; .gz, .xz and .zst")
    parser.add_argument("--json", action="store_true", help="print one JSON object a row instead of a table")
    parser.add_argument("--resume", action="store_true", help="go on with an output that was stopped, if there is one")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file if it is there")


def add_top_k(parser: argparse.ArgumentParser, default: int, what: str) -> None:
    """Add -k/--top-k."""
    parser.add_argument("-k", "--top-k", type=int, default=default, metavar="N", help=f"{what} ({default})")


def add_weights(parser: argparse._ActionsContainer) -> None:
    """--weights of the stages of a search."""
    parser.add_argument(
        "--weights",
        type=weights_of,
        metavar="NAME=W,…",
        help="add up the scores of dense, lexical and rerank with these weights, in place of ranks",
    )


def weights_of(text: str) -> dict[str, float]:
    """Weights as they are written on the command line.

    >>> weights_of("dense=1,lexical=0.3")
    {'dense': 1.0, 'lexical': 0.3}
    """
    found = {}
    for one in text.split(","):
        name, _, value = one.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r:.80} must be like dense=1,lexical=0.3,rerank=2") from None
    return found


def table_of(items: list[str], kind: Any = None, column: str = "text") -> Table:
    """The rows behind the arguments: a file, standard input, or the texts that they are."""
    paths = [item for item in items if _is_path(item)]
    if len(items) > 1 and (paths or STDIN in items):
        raise UsageError(f"{(paths or [STDIN])[0]} is a file among {len(items)} arguments; give one file, or texts")
    if items == [STDIN] or paths:
        return open_table(items[0], kind)
    missing = next((item for item in items if is_data_file(item)), None)
    if missing is not None:
        raise NotFoundError(f"there is no file {missing!r}; a text that ends so must come through standard input (-)")
    if kind is not None:
        raise UsageError(f"--format {kind} is for a file or standard input, and {items[0][:60]!r} is neither")
    return table_from_texts(items, column)


def pair_or_text(args: argparse.Namespace, table: Table) -> list[str]:
    """The column of single texts, or the two of pairs."""
    if args.column and (args.text_a or args.text_b):
        raise UsageError("--column is for single texts, --text-a and --text-b for pairs; give one or the other")
    has_both = {"text_a", "text_b"} <= set(table.columns)
    if args.text_a or args.text_b or (has_both and not args.column and "text" not in table.columns):
        first = table.column(["text_a"], args.text_a, "--text-a")
        return [first, table.column(["text_b"], args.text_b, "--text-b")]
    return [table.column(["text"], args.column, "--column", only=True)]


def _is_path(item: str) -> bool:
    try:
        return bool(item) and os.path.exists(item)
    except (OSError, ValueError):  # too long for a name, or no name at all
        return False


def model_name(args: argparse.Namespace) -> str:
    """The model that was asked for, or the built-in one."""
    if args.model is not None:
        return str(args.model)
    from bertie.checkpoints.hub import default_model

    try:
        return default_model()
    except NotFoundError:
        raise UsageError(
            "there is no built-in model in this installation; name one with -m: a folder or a hub id"
        ) from None


def device_of(asked: str | None) -> str:
    """The device that was asked for, or a GPU if there is one."""
    import torch

    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def load(task: type[T], args: argparse.Namespace, **options: Any) -> T:
    """The model, put to a task."""
    if getattr(args, "head", None) is not None:
        options["head"] = args.head
    try:
        options |= {"device": device_of(args.device), "precision": args.precision}
        loaded: T = task.load(model_name(args), overflow=args.overflow, revision=args.revision, **options)  # type: ignore[attr-defined]
    except BertieError as error:
        error.args = (str(error).replace("pass head= with", "pass --head with"),)  # options are flags here
        raise
    return loaded


def absolute(name: str | None) -> str | None:
    """The same file or folder by the same name, wherever the command runs; other names as they are."""
    return str(Path(name).resolve()) if name and _is_path(name) else name
