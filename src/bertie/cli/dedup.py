"""Find groups of duplicate texts, and keep one of each.

Duplicates are exact (the same words, ignoring case and punctuation), near (also nearly the same words: Jaccard
similarity of word shingles, estimated by MinHash) or semantic (the same meaning: cosine similarity of embeddings).
OUT contains the rows that are kept, in the format of the input; the .duplicates.jsonl file beside it lists the groups:
which row is kept, which are left out, and why. Without -o the duplicates are printed.

The input is read twice. Memory use is 160 bytes (exact) or 1.3 KiB (near) per unique text; semantic deduplication
needs the embeddings of all unique texts in memory, and time quadratic in their number.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, verb
from bertie.cli.text_groups import TextInput, add_group_flags, check_outputs, shorten, sibling
from bertie.data.atomic import named_errors
from bertie.data.copying import check_same_format, copy_rows, draft
from bertie.data.writers import TableWriter

if TYPE_CHECKING:
    from pathlib import Path

    from bertie.cli.common import Verbs
    from bertie.tasks.deduplicate import Deduplication, DuplicateGroup

EXAMPLE = """  bertie dedup reviews.csv --column review -o unique.csv          # nearly the same words
  bertie dedup pages.jsonl.zst -o unique.jsonl.zst --method exact
  bertie dedup questions.txt --method semantic --threshold 0.85   # print the duplicates only
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "dedup", "find duplicate texts, and keep one of each group", __doc__, EXAMPLE)
    add_group_flags(parser, "output file with the rows that are kept, in the format of the input")
    parser.add_argument(
        "--method", choices=("exact", "near", "semantic"), default="near", help="kind of duplicates (default: near)"
    )
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="minimum similarity (default: 0.8 for near, 0.95 for semantic)"
    )
    parser.add_argument(
        "--keep", choices=("first", "longest"), default="first", help="which text of a group to keep (default: first)"
    )
    parser.add_argument(
        "--shingle-words", type=int, default=3, metavar="N", help="near: words per shingle, 1 to 5 (default: 3)"
    )
    parser.add_argument(
        "--memory", type=float, default=4.0, metavar="GIB", help="exact and near: memory limit (default: 4)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.memory <= 0:
        raise UsageError(f"--memory {args.memory} must be above 0")
    if args.resume and (args.method != "semantic" or args.output is None):
        raise UsageError("--resume needs --method semantic and -o: it reuses the embeddings of an interrupted run")
    paths = [] if args.output is None else check_outputs(args, args.output, sibling(args.output, ".duplicates.jsonl"))
    source = TextInput(args)
    if paths:
        check_same_format(args.output, source.format)

    result = _find(args, source)
    duplicates = len(result.removed)
    if paths:
        _write(paths, source, result)
        source.remove_embeddings()
    counts = {"texts": result.count, "kept": result.count - duplicates, "groups": len(result.groups)}
    if args.json:
        for group in () if paths else result.groups:
            print(json.dumps(_record(group)))
        if paths:
            print(json.dumps({"output": args.output, "duplicates": str(paths[1])} | counts))
        return
    if not paths and result.groups:
        _print(source, result)
    share = duplicates / result.count if result.count else 0
    print(
        f"bertie: texts: {result.count:,}; duplicates: {duplicates:,} ({share:.1%}); groups: {len(result.groups):,}"
        + (f"; {counts['kept']:,} rows in {paths[0]}, groups in {paths[1]}" if paths else ""),
        file=sys.stderr,
    )


def _find(args: argparse.Namespace, source: TextInput) -> Deduplication:
    from bertie.tasks import deduplicate as task

    task.check_options(args.method, args.threshold, args.shingle_words)
    if args.method == "semantic":
        vectors = source.embeddings()
        duplicates = task.semantic_duplicates(source.texts("compare"), vectors, args.threshold)
        return task.group_duplicates(duplicates, source.texts(), args.keep)
    memory = int(args.memory * (1 << 30))
    options: dict[str, Any] = {"shingle_words": args.shingle_words, "memory": memory}
    duplicates = task.word_duplicates(source.texts("dedup"), args.method, args.threshold, **options)
    return task.group_duplicates(duplicates, source.texts(), args.keep)


def _record(group: DuplicateGroup) -> dict[str, Any]:
    """A group as JSON; rows are numbered from 1, as everywhere on the command line."""
    duplicates = [
        {"row": item.index + 1, "of": item.of + 1, "kind": item.kind, "similarity": round(item.similarity, 4)}
        for item in group.duplicates
    ]
    return {"kept": group.kept + 1, "duplicates": duplicates}


def _write(paths: list[Path], source: TextInput, result: Deduplication) -> None:
    """Write the rows, and the groups with their texts, shortened."""
    removed = result.removed
    kept, groups = paths
    copy_rows(source.open(), kept, source.format, lambda number: number - 1 not in removed)
    texts = _texts_of_groups(source, result)
    with draft(groups) as temporary, named_errors(temporary), open(temporary, "w", encoding="utf-8") as file:
        for group in result.groups:
            record = _record(group)
            record = {"kept": record["kept"], "text": texts[group.kept], "duplicates": record["duplicates"]}
            for duplicate in record["duplicates"]:
                duplicate["text"] = texts[duplicate["row"] - 1]
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _texts_of_groups(source: TextInput, result: Deduplication) -> dict[int, str]:
    """The texts of all groups, shortened, by row: duplicates and the texts that are kept."""
    wanted = result.removed | {group.kept for group in result.groups}
    return {number: shorten(text) for number, text in enumerate(source.texts()) if number in wanted}


def _print(source: TextInput, result: Deduplication) -> None:
    texts = _texts_of_groups(source, result)
    rows: list[tuple[object, ...]] = []
    for group in result.groups:
        rows.append((group.kept + 1, "kept", "", "", texts[group.kept]))
        rows += [
            (item.index + 1, item.kind, item.similarity, item.of + 1, texts[item.index]) for item in group.duplicates
        ]
    sys.stdout.write(TableWriter(("row", "kind", "similarity", "of", "text")).text(rows))
