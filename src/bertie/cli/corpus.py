"""Clean, deduplicate and tokenize raw text into memory-mapped shards for pretraining.

Text files have one paragraph per line and a blank line between documents; tables have one document per
row. Folders are searched recursively, in sorted order. --resume continues an interrupted build; the
result is byte-identical to that of an uninterrupted one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, verb
from bertie.cli.folders import add_follow_symlinks, report_skipped

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie corpus wiki.txt.zst books/ --tokenizer ./my-tokenizer -o corpus --dedup near
  bertie corpus wiki.txt.zst --tokenizer ./my-tokenizer -o corpus --exclude titles.tsv --held-out 0.001 --min-words 50
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "corpus", "build a pretraining corpus from raw text", __doc__, EXAMPLE)
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="files (.txt, .csv, .tsv, .jsonl, .parquet; .gz, .xz, .zst), folders of them, or - for text on stdin",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        required=True,
        help="folder with a tokenizer.json, or a model whose tokenizer is used",
    )
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="folder to create")
    parser.add_argument("--column", metavar="NAME", help="text column of tables (default: text, or the only one)")
    parser.add_argument(
        "--clean",
        metavar="NAMES",
        default="nfc,controls,spaces",
        help="comma-separated cleaners: nfc (Unicode NFC), controls (remove control characters), spaces (collapse "
        "whitespace), letters (drop lines without letters); or none (default: nfc,controls,spaces)",
    )
    parser.add_argument(
        "--min-characters", metavar="N", type=int, default=0, help="drop documents with fewer characters"
    )
    parser.add_argument("--min-words", metavar="N", type=int, default=0, help="drop documents with fewer words")
    parser.add_argument(
        "--dedup",
        choices=("exact", "near", "none"),
        default="exact",
        help="drop duplicates: exact (same words; the default), near (MinHash), or none",
    )
    parser.add_argument(
        "--dedup-memory", metavar="GIB", type=float, default=4.0, help="memory limit of deduplication (default: 4)"
    )
    parser.add_argument("--exclude", metavar="FILE", help="file of titles (first lines) of documents to exclude")
    parser.add_argument(
        "--held-out",
        metavar="FRACTION",
        type=float,
        default=0.0,
        help="fraction of documents to hold out, in FOLDER/heldout",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the held-out split (default: 0)")
    parser.add_argument(
        "--shard-tokens", metavar="N", type=int, default=1 << 24, help="tokens per shard (default: 16777216)"
    )
    add_follow_symlinks(parser)
    parser.add_argument("--resume", action="store_true", help="continue an interrupted build, if there is one")
    parser.add_argument("--json", action="store_true", help="print the manifest as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Build the corpus, and print a summary."""
    from bertie.checkpoints.hub import resolve
    from bertie.text.tokenizer import Tokenizer
    from bertie.training.pretrain.corpus import CorpusSettings, build_corpus, read_titles

    if args.dedup_memory <= 0:
        raise UsageError(f"--dedup-memory {args.dedup_memory} must be above 0")
    settings = CorpusSettings(
        clean=() if args.clean == "none" else tuple(args.clean.split(",")),
        min_characters=args.min_characters,
        min_words=args.min_words,
        dedup=args.dedup,
        dedup_memory=int(args.dedup_memory * (1 << 30)),
        held_out=args.held_out,
        seed=args.seed,
        shard_tokens=args.shard_tokens,
        column=args.column,
    )
    exclude = read_titles(args.exclude) if args.exclude else []
    tokenizer = Tokenizer.from_folder(resolve(args.tokenizer))
    start = time.monotonic()
    manifest = build_corpus(
        args.sources,
        tokenizer,
        args.output,
        settings,
        exclude=exclude,
        resume=args.resume,
        progress=True,
        follow_symlinks=args.follow_symlinks,
        on_skip=report_skipped(),
    )
    seconds = time.monotonic() - start
    if args.json:
        print(json.dumps(manifest))
        return
    for line in summarize(manifest, len(exclude)):
        print(line)
    # A resumed build did not tokenize everything in this time.
    rate = "" if args.resume else f", {manifest['tokens'] / seconds:,.0f} tokens/s"
    print(f"{args.output} took {seconds:,.1f} s{rate}", file=sys.stderr)


def summarize(manifest: dict[str, Any], titles: int) -> list[str]:
    """Summarize how many documents were kept, and why others were dropped."""
    counts = manifest["counts"]
    size = sum(sum(shard["bytes"]) for shard in manifest["shards"])
    lines = [
        f"{counts['read']:,} documents read",
        f"{counts['kept']:,} kept: {manifest['tokens']:,} tokens, {manifest['words']:,} words, "
        f"{manifest['lines']:,} lines, {len(manifest['shards']):,} shards of {manifest['dtype']}, {size / 1e6:,.1f} MB",
    ]
    lines += [
        f"{counts[key]:,} {label}"
        for key, label in (
            ("held_out", "held out"),
            ("short", "empty or too short"),
            ("exact_duplicates", "exact duplicates"),
            ("near_duplicates", "near-duplicates"),
        )
        if counts[key]
    ]
    if titles:
        lines.append(f"{counts['excluded']:,} excluded by {titles:,} titles")
    lines += [
        f"  {example['kind']}: {example['title']!r} ({example['place']}), similarity {example['similarity']:.0%} to "
        f"document {example['of']:,}"
        for example in counts["examples"]
    ]
    return lines
