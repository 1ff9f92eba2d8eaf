"""Train a tokenizer on a corpus, or extend the vocabulary of one."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bertie.cli.common import INPUT_FORMATS, Parser, UsageError, add_column, verb
from bertie.cli.folders import add_follow_symlinks, report_skipped
from bertie.data.folders import list_files
from bertie.data.progress import Progress
from bertie.data.readers import STDIN, is_data_file, open_table, text_cell
from bertie.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.data.readers import Format
    from bertie.text.tokenizer import Tokenizer

EXAMPLE = """  bertie tokenizer train corpus/ --kind wordpiece --vocab-size 30000 -o my-tokenizer
  bertie tokenizer train wiki.txt.zst books.jsonl --kind bpe --style angles --vocab-size 50048 -o my-tokenizer
  bertie tokenizer extend ./bert-base-uncased clinic.parquet --new-tokens 1000 -o clinic-tokenizer
"""


def add(verbs: Verbs) -> None:
    """Add the verb and its subcommands to the parser."""
    parser = verb(verbs, "tokenizer", "train a tokenizer on a corpus, or extend one", __doc__, EXAMPLE)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True, parser_class=Parser)
    _add_train(
        commands.add_parser(
            "train",
            help="train a new tokenizer",
            description="Train a tokenizer. The same corpus always gives the same tokenizer.",
        )
    )
    _add_extend(
        commands.add_parser(
            "extend",
            help="add the words of a corpus to a WordPiece vocabulary",
            description="Append the words of a corpus that save the most tokens. Existing ids do not change.",
        )
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_corpus(parser)
    parser.add_argument(
        "--kind", choices=("wordpiece", "bpe", "unigram"), default="wordpiece", help="algorithm (default: wordpiece)"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=30_000, metavar="N", help="size of the vocabulary (default: 30000)"
    )
    parser.add_argument(
        "--style",
        choices=("brackets", "angles"),
        default="brackets",
        help="special tokens: [CLS] and [SEP] (brackets, the default) or <s> and </s> (angles)",
    )
    case = parser.add_mutually_exclusive_group()
    case.add_argument("--lowercase", action="store_true", default=None, help="lowercase texts (wordpiece: the default)")
    case.add_argument(
        "--cased", dest="lowercase", action="store_false", help="keep the case (bpe and unigram: the default)"
    )
    parser.add_argument(
        "--min-frequency", type=int, default=2, metavar="N", help="minimum frequency of a token (default: 2)"
    )
    parser.add_argument(
        "--limit-alphabet",
        type=int,
        default=1000,
        metavar="N",
        help="maximum number of distinct characters (default: 1000)",
    )
    parser.add_argument(
        "--special-token",
        action="append",
        default=[],
        metavar="TOKEN",
        help="additional special token; may be repeated",
    )
    parser.add_argument(
        "--max-length", type=int, default=512, metavar="N", help="maximum length of the model in tokens (default: 512)"
    )
    parser.set_defaults(run=run_train)


def _add_extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tokenizer", metavar="FOLDER", help="folder of the tokenizer, or of a model")
    _add_corpus(parser)
    parser.add_argument(
        "--new-tokens", type=int, default=1000, metavar="N", help="maximum number of new tokens (default: 1000)"
    )
    parser.add_argument(
        "--min-frequency", type=int, default=5, metavar="N", help="minimum frequency of a new word (default: 5)"
    )
    parser.set_defaults(run=run_extend)


def _add_corpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "corpus",
        nargs="+",
        metavar="CORPUS",
        help="files (.txt, .csv, .tsv, .jsonl, .parquet; .gz, .xz, .zst), folders of them, or - for stdin",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="folder to create")
    parser.add_argument("--format", choices=INPUT_FORMATS, help="format of files without a known suffix")
    add_column(parser)
    add_follow_symlinks(parser)
    parser.add_argument("--limit-chars", type=int, metavar="N", help="read only the first N characters")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_train(args: argparse.Namespace) -> None:
    """Train a tokenizer."""
    from bertie.text.tokenizer_training import check_free, save, train

    check_free(args.output, overwrite=args.overwrite)
    corpus = _text_files(args)
    tokenizer = train(
        corpus,
        args.kind,
        args.vocab_size,
        style=args.style,
        lowercase=args.lowercase,
        min_frequency=args.min_frequency,
        special_tokens=args.special_token,
        limit_alphabet=args.limit_alphabet,
        max_length=args.max_length,
    )
    save(tokenizer, args.output, overwrite=args.overwrite)
    if tokenizer.vocab_size < args.vocab_size:
        print(
            f"bertie: the corpus yields only {tokenizer.vocab_size:,} of {args.vocab_size:,} tokens; use more text, or "
            "--min-frequency 1",
            file=sys.stderr,
        )
    _print_summary(args, tokenizer, corpus, {})


def run_extend(args: argparse.Namespace) -> None:
    """Extend a tokenizer."""
    from bertie.text.tokenizer import Tokenizer
    from bertie.text.tokenizer_training import check_free, extend, save

    check_free(args.output, overwrite=args.overwrite)
    before = Tokenizer.from_folder(args.tokenizer).vocab_size
    corpus = _text_files(args)
    tokenizer = extend(args.tokenizer, corpus, args.new_tokens, min_frequency=args.min_frequency)
    save(tokenizer, args.output, overwrite=args.overwrite)
    _print_summary(args, tokenizer, corpus, {"added": tokenizer.vocab_size - before})


def _text_files(args: argparse.Namespace) -> TextFiles:
    return TextFiles(args.corpus, args.column, args.format, args.limit_chars, follow_symlinks=args.follow_symlinks)


def _print_summary(args: argparse.Namespace, tokenizer: Tokenizer, corpus: TextFiles, added: dict[str, int]) -> None:
    summary = {"output": args.output, "kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size} | added
    summary |= {"texts": corpus.texts, "characters": corpus.characters}
    if args.json:
        print(json.dumps(summary))
        return
    new = f", {added['added']:,} of them new" if added else ""
    source = f"{corpus.texts:,} texts with {corpus.characters:,} characters"
    print(f"{args.output}: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens{new}, from {source}")


class TextFiles:
    """The non-blank texts of files and folders, read once, with counts of what was read.

    Folders are searched recursively, in sorted order, for data files; with `kind`, for all files.
    """

    def __init__(
        self,
        names: Sequence[str],
        column: str | None = None,
        kind: Format | None = None,
        limit: int | None = None,
        *,
        follow_symlinks: bool = False,
    ) -> None:
        if limit is not None and limit < 1:
            raise UsageError(f"--limit-chars {limit} must be at least 1")
        if list(names).count(STDIN) > 1:
            raise UsageError("standard input (-) can be read only once")
        self.files = [file for name in names for file in _files(name, kind, follow_symlinks)]
        self._column, self._kind, self._limit = column, kind, limit
        self.texts = self.characters = 0

    def __iter__(self) -> Iterator[str]:
        sizes = [0 if file == STDIN else os.path.getsize(file) for file in self.files]
        before, table = 0, None

        def fraction() -> float | None:
            if self._limit:
                return self.characters / self._limit
            if table is None or STDIN in self.files or not sum(sizes):
                return None
            return (before + (table.fraction() or 0) * (table.size or 0)) / sum(sizes)

        with Progress("read", fraction) as progress:
            for file, size in zip(self.files, sizes, strict=True):
                table = open_table(file, self._kind)
                column = table.column(["text"], self._column, "--column", only=True)
                for number, row in enumerate(table.rows([column]), 1):
                    text = text_cell(table, number, row, column)
                    if self._limit is not None:
                        text = text[: self._limit - self.characters]
                    progress.update(1)
                    if text.strip():
                        self.texts += 1
                        self.characters += len(text)
                        yield text
                    if self.characters == self._limit:
                        return
                before += size


def _files(name: str, kind: Format | None, follow_symlinks: bool) -> list[str]:
    folder = Path(name)
    if name != STDIN and not folder.exists():
        raise NotFoundError(f"there is no file or folder {name}")
    if name == STDIN or not folder.is_dir():
        return [name]
    files = sorted(map(str, list_files(folder, follow_symlinks=follow_symlinks, on_skip=report_skipped())))
    files = [file for file in files if kind is not None or is_data_file(file)]
    if not files:
        raise InputError(f"the folder {name} contains no file with a known suffix; pass --format to read all its files")
    return files
