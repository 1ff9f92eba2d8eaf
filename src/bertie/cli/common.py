"""The flags that verbs share: input, model, precision, output."""

from __future__ import annotations

import argparse
import os
import sys
import time
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bertie.cli.parser import Parser as Parser
from bertie.cli.parser import UsageError as UsageError
from bertie.cli.parser import verb as verb
from bertie.cli.settings import read_settings
from bertie.config import PRECISIONS
from bertie.data.compression import COMPRESSED_SUFFIXES
from bertie.data.readers import STDIN, InputTable, data_suffix, is_data_file, open_table, table_from_texts
from bertie.errors import BertieError, ExistsError, InputError, NotFoundError

if TYPE_CHECKING:
    from bertie.cli.parser import Verbs as Verbs

INPUT_FORMATS = ("text", "csv", "tsv", "jsonl", "parquet")


T = TypeVar("T")


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
    parser.add_argument(
        "--text", dest="as_text", action="store_true", help="the arguments are texts, even if they look like file names"
    )


def add_column(parser: argparse.ArgumentParser) -> None:
    """Add --column."""
    parser.add_argument("--column", metavar="NAME", help="text column (default: text, or the only one)")


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Add --text-a and --text-b, the columns of text pairs."""
    parser.add_argument("--text-a", metavar="NAME", help="column of the first text of a pair (default: text_a)")
    parser.add_argument("--text-b", metavar="NAME", help="column of the second text of a pair (default: text_b)")


def add_model(
    parser: argparse.ArgumentParser, *, overflow: bool = True, precision: bool = True, from_settings: bool = True
) -> None:
    """Add -m/--model, --revision, --device, --precision, --overflow and --deterministic.

    `from_settings`: whether BERTIE_MODEL and the configuration file may set the default.
    """
    parser.add_argument("-m", "--model", metavar="MODEL", help="folder or hub id (default: the built-in model)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.set_defaults(model_from_settings=from_settings)
    if overflow:
        add_device(parser)
        if precision:
            add_precision(parser)
        parser.add_argument(
            "--overflow",
            choices=("window", "error", "truncate"),
            default="window",
            help="how to handle texts longer than the maximum length: overlapping windows (the default), an error, or "
            "truncation",
        )
        if precision:
            text = "run one text per forward pass, so that results on a GPU do not depend on the batch (slow)"
            parser.add_argument("--deterministic", action="store_true", help=text)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add MODEL as an argument or as -m/--model, and --revision."""
    what = "folder, built-in name or hub id"
    # SUPPRESS: if MODEL is omitted, it must not overwrite the value of -m.
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=what)
    parser.add_argument("-m", "--model", metavar="MODEL", help="the same as MODEL (default: the built-in model)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.set_defaults(model_from_settings=True)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU if available)")


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Add -q/--quiet and -v/--verbose."""
    parser.add_argument("-q", "--quiet", action="store_true", help="print results and errors only")
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also print the model and its device, and stack traces of errors",
    )


def apply_settings(args: argparse.Namespace) -> None:
    """Set flags that were not given from the environment and the configuration file."""
    settings = read_settings()
    for name, default in (("device", settings.device), ("precision", settings.precision or "fp32")):
        if getattr(args, name, "") is None:
            setattr(args, name, default)
    if vars(args).pop("model_from_settings", False) and args.model is None:
        args.model = settings.model
    args.quiet = args.quiet or (settings.quiet and not args.verbose)


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add --precision."""
    text = "precision of the model: fp32 (the default); bf16, fp16 or fp8 on GPUs; int8 or, if supported, bf16 on CPUs"
    parser.add_argument("--precision", choices=PRECISIONS, help=text)


def check_output_folder(name: str, *, overwrite: bool) -> Path:
    """Return the path of an output folder, which must be new or empty unless `overwrite`."""
    folder = Path(os.path.abspath(name))
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not overwrite)):
        raise ExistsError(f"{name} already exists; pass --overwrite to replace a folder, or another name")
    return folder


def add_head(parser: argparse.ArgumentParser) -> None:
    """Add --head."""
    parser.add_argument(
        "--head", metavar="NAME", help="head to use, if the model has several (default: the only one for this task)"
    )


def add_output(parser: argparse.ArgumentParser, *, embeddings: bool = False) -> None:
    """Add -o/--output, --json, --resume and --overwrite."""
    suffixes = ".jsonl, .csv, .tsv, .parquet" + (", .npy" if embeddings else "")
    parser.add_argument("-o", "--output", metavar="OUT", help=f"output file: {suffixes}; also .gz, .xz and .zst")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row instead of a table")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="resume an interrupted run, if there is one; the input must be unchanged",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output file")
    parser.add_argument("--skip-empty", action="store_true", help="skip rows without text")
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip", "null"),
        default="stop",
        help="how to handle rows that cannot be processed: stop (the default), skip them, or write them with the "
        "error and null results (null)",
    )


def add_prompt(
    parser: argparse.ArgumentParser, what: str, default: str, *, prefix: str = "", example: str = "query: "
) -> None:
    """Add --prompt and --prompt-name; with a prefix, --PREFIX-prompt and --PREFIX-prompt-name."""
    group = parser.add_mutually_exclusive_group()
    flag = f"--{prefix}prompt"
    group.add_argument(
        flag, metavar="TEXT", help=f"prompt prepended to {what}, such as {example!r} (default: {default})"
    )
    group.add_argument(
        f"{flag}-name", metavar="NAME", help=f"name of one of the checkpoint's prompts, instead of {flag}"
    )


def add_top_k(parser: argparse.ArgumentParser, default: int | None, what: str) -> None:
    """Add -k/--top-k."""
    help = f"{what} (default: {'all' if default is None else default})"
    parser.add_argument("-k", "--top-k", type=int, default=default, metavar="N", help=help)


def add_rerank(parser: argparse._ActionsContainer, what: str, model: str = "the built-in cross-encoder") -> None:
    """Add --rerank, and --reranker MODEL, which implies it; `model`: the default reranker."""
    parser.add_argument("--rerank", action="store_true", help=f"rerank {what} with {model}")
    parser.add_argument(
        "--reranker", metavar="MODEL", help="rerank with this cross-encoder or ColBERT model (implies --rerank)"
    )


def add_rerank_weight(parser: argparse._ActionsContainer) -> None:
    """Add --rerank-weight."""
    parser.add_argument(
        "--rerank-weight",
        type=float,
        metavar="W",
        help="weight of the reranker's score relative to the retrieval score, from 0 to 1 (default: 1; 0.2 for a model "
        "with several heads, such as the built-in one)",
    )


def check_rerank_weight(args: argparse.Namespace) -> None:
    """Reject a --rerank-weight that is out of range or has no effect."""
    if args.rerank_weight is None:
        return
    if not (args.rerank or args.reranker):
        raise UsageError("--rerank-weight needs --rerank or --reranker MODEL")
    if args.weights is not None or getattr(args, "tune", None) is not None:
        raise UsageError("--weights and --tune include the weight of the reranker: leave out --rerank-weight")
    if not 0 <= args.rerank_weight <= 1:
        raise UsageError(f"--rerank-weight {args.rerank_weight} must be a number from 0 to 1")


def add_weights(parser: argparse._ActionsContainer) -> None:
    """Add --weights, the fusion weights of the search stages."""
    parser.add_argument(
        "--weights",
        type=parse_weights,
        metavar="NAME=W,…",
        help="weighted score fusion of dense, lexical, sparse and rerank, instead of reciprocal rank fusion",
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


def open_input(args: argparse.Namespace, column: str = "text", items: list[str] | None = None) -> InputTable:
    """Open the positional arguments: a file, standard input, or texts."""
    items = args.items if items is None else items
    if args.as_text:
        if args.format is not None:
            raise UsageError(f"--format {args.format} is for a file, and --text makes the arguments texts; pass one")
        return table_from_texts(items, column)
    paths = [item for item in items if _is_path(item)]
    if len(items) > 1 and (paths or STDIN in items):
        name = (paths or [STDIN])[0]
        raise UsageError(
            f"{name} is a file among {len(items)} arguments; pass one file, or texts (--text, if all of them are texts)"
        )
    if items == [STDIN] or paths:
        keep_malformed = getattr(args, "on_error", "stop") != "stop"
        return open_table(items[0], args.format, keep_malformed=keep_malformed)
    for item in items:
        check_not_missing(item)
    if args.format is not None:
        raise UsageError(f"--format {args.format} is for a file or standard input, and {items[0][:60]!r} is neither")
    return table_from_texts(items, column)


def check_not_missing(item: str) -> None:
    """Raise an error if a text looks like the name of a file that does not exist."""
    if looks_like_path(item):
        raise NotFoundError(f"{_no_such_file(item)}; if it is a text, pass --text")


def check_file_exists(name: str) -> None:
    """Raise an error if a file does not exist."""
    if name != STDIN and not _is_path(name):
        raise NotFoundError(_no_such_file(name))


def _no_such_file(name: str) -> str:
    path = Path(name).expanduser()
    try:
        close = get_close_matches(path.name, os.listdir(path.parent), 1)
    except OSError:
        close = []
    return f"no such file: {name!r}" + (f" (did you mean {path.parent / close[0]}?)" if close else "")


def looks_like_path(item: str) -> bool:
    """Whether an argument is more likely the name of a file than a text.

    >>> [looks_like_path(item) for item in ("reviews.csv", "./reviews", "and/or", "See https://a.b/c.csv for data.")]
    [True, True, False, False]
    """
    if is_data_file(item):
        return "://" not in item
    if not item or any(character.isspace() for character in item) or "://" in item:
        return False
    if item.startswith(("/", "./", "../", "~/")) and len(item) > 2:
        return True
    known = (*COMPRESSED_SUFFIXES, ".json", ".md", ".html", ".pdf", ".docx", ".xlsx", ".xml", ".zip")
    folder = item.partition("/")[0]
    return data_suffix(item) in known or (folder != item and _is_path(folder))


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
    """Return the model given by -m, the environment or the configuration file, or the built-in one."""
    name = args.model if args.model is not None else read_settings().model
    return built_in_model() if name is None else str(name)


def built_in_model() -> str:
    """Return the name of the built-in model."""
    from bertie.checkpoints.hub import default_model

    try:
        return default_model()
    except NotFoundError:
        raise UsageError("this installation has no built-in model; pass a folder or a hub id with -m") from None


def select_device(requested: str | None) -> str:
    """Return the requested device, or a GPU if there is one."""
    import torch

    device = requested or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def load(task: type[T], args: argparse.Namespace, *, model: str | None = None, **options: Any) -> T:
    """Load a task with `model`, or with the model given by the arguments."""
    if getattr(args, "head", None) is not None:
        options["head"] = args.head
    started = time.monotonic()
    try:
        on_cpu = args.device is None and args.precision == "int8"  # which GPUs do not support
        options |= {"device": "cpu" if on_cpu else select_device(args.device), "precision": args.precision}
        options |= {"deterministic": True} if getattr(args, "deterministic", False) else {}
        name = model or model_name(args)
        loaded: T = task.load(name, overflow=args.overflow, revision=args.revision, **options)  # type: ignore[attr-defined]
    except BertieError as error:
        error.args = (str(error).replace("pass head= with", "pass --head with"),)  # arguments are flags here
        raise
    if args.verbose:
        _print_loaded(loaded, name, time.monotonic() - started)
    return loaded


def reranker_class(name: str, revision: str | None = None) -> Any:
    """The class that reranks with a model: `LateInteraction` for ColBERT models, `Reranker` for others."""
    from bertie.checkpoints.embedding_kind import embedding_kind
    from bertie.tasks import LateInteraction, Reranker

    return LateInteraction if embedding_kind(name, revision) == "late-interaction" else Reranker


def _print_loaded(task: Any, name: str, seconds: float) -> None:
    import torch

    from bertie.checkpoints.hub import resolve

    model, where = task.model, resolve(name)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"bertie: {type(task).__name__} {name} ({where}): {size:,} parameters, {task.checkpoint.precision} on "
        f"{model.device}, {torch.get_num_threads()} threads, loaded in {seconds:.2f} s",
        file=sys.stderr,
    )


def absolute_path(name: str | None) -> str | None:
    """Return the absolute path of an existing file or folder; other names unchanged."""
    return str(Path(name).resolve()) if name and _is_path(name) else name
