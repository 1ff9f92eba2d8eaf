"""The flags that verbs share: input, model, precision, output."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from bertie.config import PRECISIONS
from bertie.data.readers import STDIN, InputTable, is_data_file, open_table, table_from_texts
from bertie.errors import BertieError, ExistsError, InputError, NotFoundError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Verbs = _SubParsersAction[argparse.ArgumentParser]

INPUT_FORMATS = ("text", "csv", "tsv", "jsonl", "parquet")


class UsageError(BertieError):
    """An invalid command line: exit status 2."""


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, and accepts no abbreviated flags."""

    _intermixed = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)
        self.register("type", float, finite_number)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Allow flags between positional arguments, which argparse does not by default."""
        if self._intermixed or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._intermixed = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        except AttributeError as error:  # argparse restores attributes that it has not yet saved
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise

    def error(self, message: str) -> NoReturn:
        """Raise an error of Bertie."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def finite_number(text: str) -> float:
    """The type of every flag with a number: nan and infinity would pass most comparisons.

    >>> finite_number("1e3")
    1000.0
    """
    number = float(text)
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number")
    return number


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
    """Add the positional texts or file, and --format."""
    parser.add_argument(
        "items",
        nargs="+",
        metavar=metavar,
        help=what or "texts; or one file of texts (.txt, .csv, .tsv, .jsonl, .parquet; .gz, .xz, .zst); or - for stdin",
    )
    parser.add_argument(
        "--format", choices=INPUT_FORMATS, help="format of a file without a known suffix, or of standard input"
    )


def add_column(parser: argparse.ArgumentParser) -> None:
    """Add --column."""
    parser.add_argument("--column", metavar="NAME", help="text column (default: text, or the only one)")


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Add --text-a and --text-b, the columns of text pairs."""
    parser.add_argument("--text-a", metavar="NAME", help="column of the first text of a pair (default: text_a)")
    parser.add_argument("--text-b", metavar="NAME", help="column of the second text of a pair (default: text_b)")


def add_model(parser: argparse.ArgumentParser, *, overflow: bool = True, precision: bool = True) -> None:
    """Add -m/--model, --revision, --device, --precision, --overflow and --deterministic."""
    parser.add_argument("-m", "--model", metavar="MODEL", help="folder or hub id (default: the built-in model)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    if overflow:
        parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU if available)")
        if precision:
            add_precision(parser)
        parser.add_argument(
            "--overflow",
            choices=("window", "error", "truncate"),
            default="window",
            help="text longer than the maximum length: overlapping windows (the default), an error, or truncation",
        )
        if precision:
            text = "one text per forward pass, so that results on a GPU do not depend on the batch (slow)"
            parser.add_argument("--deterministic", action="store_true", help=text)


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add --precision."""
    text = (
        "precision of the model: fp32 (the default); bf16, fp16, fp8 on GPUs; int8 and, where supported, bf16 on CPUs"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help=text)


def check_output_folder(name: str, *, overwrite: bool) -> Path:
    """Return the path of an output folder, which must be new or empty unless `overwrite`."""
    folder = Path(os.path.abspath(name))
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not overwrite)):
        raise ExistsError(f"{name} already exists; pass --overwrite to replace a folder, or another name")
    return folder


def add_head(parser: argparse.ArgumentParser) -> None:
    """Add --head."""
    parser.add_argument(
        "--head", metavar="NAME", help="head of a model with several heads (default: the only one for this task)"
    )


def add_output(parser: argparse.ArgumentParser, *, embeddings: bool = False) -> None:
    """Add -o/--output, --json, --resume and --overwrite."""
    suffixes = ".jsonl, .csv, .tsv, .parquet" + (", .npy" if embeddings else "")
    parser.add_argument("-o", "--output", metavar="OUT", help=f"output file: {suffixes}; also .gz, .xz and .zst")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row instead of a table")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="resume an interrupted output, if there is one; the input must be unchanged",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output file")


def add_top_k(parser: argparse.ArgumentParser, default: int, what: str) -> None:
    """Add -k/--top-k."""
    parser.add_argument("-k", "--top-k", type=int, default=default, metavar="N", help=f"{what} (default: {default})")


def add_weights(parser: argparse._ActionsContainer) -> None:
    """Add --weights, those of the stages of a search."""
    parser.add_argument(
        "--weights",
        type=parse_weights,
        metavar="NAME=W,…",
        help="weighted score fusion of dense, lexical and rerank, instead of reciprocal rank fusion",
    )


def parse_weights(text: str) -> dict[str, float]:
    """Parse the value of --weights.

    >>> parse_weights("dense=1,lexical=0.3")
    {'dense': 1.0, 'lexical': 0.3}
    """
    weights = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        try:
            weights[name.strip()] = float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r:.80} must be like dense=1,lexical=0.3,rerank=2") from None
    return weights


def open_input(items: list[str], format: Any = None, column: str = "text") -> InputTable:
    """Open the positional arguments: a file, standard input, or texts."""
    paths = [item for item in items if _is_path(item)]
    if len(items) > 1 and (paths or STDIN in items):
        raise UsageError(f"{(paths or [STDIN])[0]} is a file among {len(items)} arguments; pass one file, or texts")
    if items == [STDIN] or paths:
        return open_table(items[0], format)
    missing = next((item for item in items if is_data_file(item)), None)
    if missing is not None:
        raise NotFoundError(f"no such file: {missing!r}; pass a text with such a suffix through standard input (-)")
    if format is not None:
        raise UsageError(f"--format {format} is for a file or standard input, and {items[0][:60]!r} is neither")
    return table_from_texts(items, column)


def text_columns(args: argparse.Namespace, table: InputTable) -> list[str]:
    """Return the text column, or the two columns of pairs."""
    if args.column and (args.text_a or args.text_b):
        raise UsageError("--column is for single texts, --text-a and --text-b for pairs; pass one or the other")
    has_both = {"text_a", "text_b"} <= set(table.columns)
    if args.text_a or args.text_b or (has_both and not args.column and "text" not in table.columns):
        first = table.column(["text_a"], args.text_a, "--text-a")
        return [first, table.column(["text_b"], args.text_b, "--text-b")]
    return [table.column(["text"], args.column, "--column", only=True)]


def _is_path(item: str) -> bool:
    try:
        return bool(item) and os.path.exists(item)
    except (OSError, ValueError):  # not a valid file name
        return False


def model_name(args: argparse.Namespace) -> str:
    """Return the model of -m, or the built-in one."""
    if args.model is not None:
        return str(args.model)
    from bertie.checkpoints.hub import default_model

    try:
        return default_model()
    except NotFoundError:
        raise UsageError(
            "there is no built-in model in this installation; pass one with -m: a folder or a hub id"
        ) from None


def select_device(requested: str | None) -> str:
    """Return the requested device, or a GPU if there is one."""
    import torch

    device = requested or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def load(task: type[T], args: argparse.Namespace, **options: Any) -> T:
    """Load the model for a task."""
    if getattr(args, "head", None) is not None:
        options["head"] = args.head
    try:
        options |= {"device": select_device(args.device), "precision": args.precision}
        options |= {"deterministic": True} if getattr(args, "deterministic", False) else {}
        loaded: T = task.load(model_name(args), overflow=args.overflow, revision=args.revision, **options)  # type: ignore[attr-defined]
    except BertieError as error:
        error.args = (str(error).replace("pass head= with", "pass --head with"),)  # arguments are flags here
        raise
    return loaded


def absolute_path(name: str | None) -> str | None:
    """Return the absolute path of an existing file or folder; other names unchanged."""
    return str(Path(name).resolve()) if name and _is_path(name) else name
