"""Learn a tokenizer from a corpus, or extend one by a corpus's words."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bertie.cli.common import INPUT_FORMATS as FORMATS
from bertie.cli.common import Parser, UsageError, add_column, verb
from bertie.data.progress import Progress
from bertie.data.readers import STDIN, is_data_file, open_table, text_cell
from bertie.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.data.readers import Format
    from bertie.text.tokenizer import Tokenizer

EXAMPLE = """  bertie tokenizer train corpus/ --kind wordpiece --vocab 30000 -o my-tokenizer
  bertie tokenizer train wiki.txt.zst books.jsonl --kind bpe --style angles --vocab 50048 -o my-tokenizer
  bertie tokenizer extend ./bert-base-uncased clinic.parquet --more 1000 -o clinic-tokenizer
"""


def add(verbs: Verbs) -> None:
    """Declare the verb and its two jobs."""
    parser = verb(verbs, "tokenizer", "learn a tokenizer from a corpus, or extend one", __doc__, EXAMPLE)
    jobs = parser.add_subparsers(metavar="JOB", dest="job", required=True, parser_class=Parser)

    train = jobs.add_parser("train", help="learn one", description="Learn a tokenizer; the same corpus gives the same.")
    _add_corpus(train)
    train.add_argument("--kind", choices=("wordpiece", "bpe", "unigram"), default="wordpiece", help="wordpiece")
    train.add_argument("--vocab", type=int, default=30_000, metavar="N", help="how many tokens (30000)")
    train.add_argument(
        "--style", choices=("brackets", "angles"), default="brackets", help="[CLS] and [SEP], or <s> and </s>"
    )
    case = train.add_mutually_exclusive_group()
    case.add_argument("--lowercase", action="store_true", default=None, help="the default for wordpiece")
    case.add_argument("--cased", dest="lowercase", action="store_false", help="the default for bpe and unigram")
    train.add_argument("--min-count", type=int, default=2, metavar="N", help="leave out what is rarer (2)")
    train.add_argument("--alphabet", type=int, default=1000, metavar="N", help="most different characters (1000)")
    train.add_argument("--special", action="append", default=[], metavar="TOKEN", help="one more special token")
    train.add_argument(
        "--max-length", type=int, default=512, metavar="N", help="the model's max_length in tokens (512)"
    )
    train.set_defaults(run=run_train)

    extend = jobs.add_parser(
        "extend", help="append words", description="Append a corpus's words that a WordPiece tokenizer cuts most."
    )
    extend.add_argument("tokenizer", metavar="FOLDER", help="the tokenizer, or a model with one")
    _add_corpus(extend)
    extend.add_argument("--more", type=int, default=1000, metavar="N", help="most new words (1000)")
    extend.add_argument("--min-count", type=int, default=5, metavar="N", help="leave out what is rarer (5)")
    extend.set_defaults(run=run_extend)


def _add_corpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "corpus",
        nargs="+",
        metavar="CORPUS",
        help="files (.txt, .csv, .tsv, .jsonl, .parquet; .gz, .xz, .zst), folders of them, or - for stdin",
    )
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="the new folder")
    parser.add_argument("--format", choices=FORMATS, help="what the files hold, if their endings do not say so")
    add_column(parser)
    parser.add_argument("--limit-chars", type=int, metavar="N", help="read no more than the first N characters")
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer that is there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_train(args: argparse.Namespace) -> None:
    """Learn a tokenizer."""
    from bertie.text import tokenizer_training as learn

    learn.check_free(args.output, overwrite=args.overwrite)
    corpus = Corpus(args.corpus, args.column, args.format, args.limit_chars)
    tokenizer = learn.train(
        corpus,
        args.kind,
        args.vocab,
        style=args.style,
        lowercase=args.lowercase,
        min_count=args.min_count,
        special=args.special,
        alphabet=args.alphabet,
        max_length=args.max_length,
    )
    learn.save(tokenizer, args.output, overwrite=args.overwrite)
    if tokenizer.vocab_size < args.vocab:
        missing = f"{tokenizer.vocab_size:,} of {args.vocab:,} tokens were found"
        print(f"bertie: {missing}: the corpus has no more; give more text, or --min-count 1", file=sys.stderr)
    _say(args, tokenizer, corpus, {})


def run_extend(args: argparse.Namespace) -> None:
    """Extend a tokenizer."""
    from bertie.text import tokenizer_training as learn
    from bertie.text.tokenizer import Tokenizer

    learn.check_free(args.output, overwrite=args.overwrite)
    before = Tokenizer.from_folder(args.tokenizer).vocab_size
    corpus = Corpus(args.corpus, args.column, args.format, args.limit_chars)
    tokenizer = learn.extend(args.tokenizer, corpus, args.more, min_count=args.min_count)
    learn.save(tokenizer, args.output, overwrite=args.overwrite)
    _say(args, tokenizer, corpus, {"added": tokenizer.vocab_size - before})


def _say(args: argparse.Namespace, tokenizer: Tokenizer, corpus: Corpus, more: dict[str, int]) -> None:
    facts = {"output": args.output, "kind": tokenizer.kind, "vocabulary": tokenizer.vocab_size} | more
    facts |= {"texts": corpus.texts, "characters": corpus.characters}
    if args.json:
        print(json.dumps(facts))
    else:
        added = f", {more['added']:,} of them new" if more else ""
        read = f"{corpus.texts:,} texts with {corpus.characters:,} characters"
        print(f"{args.output}: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens{added}, from {read}")


class Corpus:
    """The texts of files and folders, one after the other, read once; blank ones are left out.

    A folder stands for the files in it and below, sorted by name, whose endings say that they hold texts; or for all of
    them if `kind` says what they hold.
    """

    def __init__(
        self, names: Sequence[str], column: str | None = None, kind: Format | None = None, limit: int | None = None
    ) -> None:
        if limit is not None and limit < 1:
            raise UsageError(f"--limit-chars {limit} must be at least 1")
        if list(names).count(STDIN) > 1:
            raise UsageError("standard input (-) can be read only once")
        self.files = [file for name in names for file in _files(name, kind)]
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


def _files(name: str, kind: Format | None) -> list[str]:
    folder = Path(name)
    if name != STDIN and not folder.exists():
        raise NotFoundError(f"there is no file or folder {name}")
    if name == STDIN or not folder.is_dir():
        return [name]
    found = sorted(str(file) for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    found = [file for file in found if kind is not None or is_data_file(file)]
    if not found:
        raise InputError(f"the folder {name} holds no file that ends as texts do; say what they hold with --format")
    return found
