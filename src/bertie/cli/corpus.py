"""Clean raw text, drop copies, and tokenize it once into memory-mapped shards for pretraining.

Text files have a paragraph a line and a blank line between documents; tables have a document a row. Folders are read
through in the order of their names. A build that was stopped goes on with --resume, and ends in the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, verb

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie corpus wiki.txt.zst books/ --tokenizer ./my-tokenizer -o corpus --dedup near
  bertie corpus wiki.txt.zst --tokenizer ./my-tokenizer -o corpus --exclude titles.tsv --held-out 0.001 --least-words 50
"""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "corpus", "make raw text ready for pretraining", __doc__, EXAMPLE)
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="files (.txt, .csv, .tsv, .jsonl, .parquet; .gz, .xz, .zst), folders of them, or - for text on stdin",
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", required=True, help="a folder with a tokenizer.json")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="the folder to make")
    parser.add_argument("--column", metavar="NAME", help="a table's column with the texts (text, else the only one)")
    parser.add_argument(
        "--clean",
        metavar="NAMES",
        default="nfc,controls,spaces",
        help="of nfc (Unicode's normal form), controls (drop them), spaces (single ones), letters (drop lines "
        "without), with commas between them, or none (nfc,controls,spaces)",
    )
    parser.add_argument("--least-chars", metavar="N", type=int, default=0, help="drop documents with fewer characters")
    parser.add_argument("--least-words", metavar="N", type=int, default=0, help="drop documents with fewer words")
    parser.add_argument(
        "--dedup",
        choices=("exact", "near", "none"),
        default="exact",
        help="drop documents with the same words as an earlier one (the default), or nearly the same",
    )
    parser.add_argument(
        "--dedup-memory", metavar="GIB", type=float, default=4.0, help="memory that finding copies may take (4)"
    )
    parser.add_argument("--exclude", metavar="FILE", help="titles (first lines) of documents to leave out")
    parser.add_argument("--held-out", metavar="SHARE", type=float, default=0.0, help="documents to put in DIR/heldout")
    parser.add_argument("--seed", type=int, default=0, help="of what is held out (0)")
    parser.add_argument("--shard-tokens", metavar="N", type=int, default=1 << 24, help="tokens of a shard (16777216)")
    parser.add_argument("--resume", action="store_true", help="go on with a build that was stopped, if there is one")
    parser.add_argument("--json", action="store_true", help="print what was made as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    from bertie.text.tokenizer import Tokenizer
    from bertie.training.pretrain.corpus import Settings, build, read_titles

    if args.dedup_memory <= 0:
        raise UsageError(f"--dedup-memory {args.dedup_memory} must be above 0")
    settings = Settings(
        clean=() if args.clean == "none" else tuple(args.clean.split(",")),
        least_characters=args.least_chars,
        least_words=args.least_words,
        dedup=args.dedup,
        memory=int(args.dedup_memory * (1 << 30)),
        held_out=args.held_out,
        seed=args.seed,
        shard_tokens=args.shard_tokens,
        column=args.column,
    )
    exclude = read_titles(args.exclude) if args.exclude else []
    tokenizer = Tokenizer.from_folder(args.tokenizer)
    begun = time.monotonic()
    made = build(args.sources, tokenizer, args.output, settings, exclude=exclude, resume=args.resume, progress=True)
    seconds = time.monotonic() - begun
    if args.json:
        print(json.dumps(made))
        return
    for line in told(made, len(exclude)):
        print(line)
    # Of a build that was gone on with, some tokens were there before.
    rate = "" if args.resume else f", {made['tokens'] / seconds:,.0f} tokens/s"
    print(f"{args.output} took {seconds:,.1f} s{rate}", file=sys.stderr)


def told(made: dict[str, Any], titles: int) -> list[str]:
    """What was made of the documents, for people."""
    counts = made["counts"]
    size = sum(sum(shard["bytes"]) for shard in made["shards"])
    lines = [
        f"{counts['read']:,} documents read",
        f"{counts['kept']:,} kept: {made['tokens']:,} tokens, {made['words']:,} words, {made['lines']:,} lines, "
        f"{len(made['shards']):,} shards of {made['dtype']}, {size / 1e6:,.1f} MB",
    ]
    lines += [
        f"{counts[key]:,} {what}"
        for key, what in (
            ("held_out", "held out"),
            ("short", "empty or too short"),
            ("exact", "with the words of an earlier one"),
            ("near", "nearly the same as an earlier one"),
        )
        if counts[key]
    ]
    if titles:
        lines.append(f"{counts['excluded']:,} left out by {titles:,} titles")
    lines += [
        f"  {one['kind']}: {one['title']!r} ({one['place']}) is {one['similarity']:.0%} of document {one['of']:,}"
        for one in counts["copies"]
    ]
    return lines
