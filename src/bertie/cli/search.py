"""Search an index: dense (embeddings), lexical (BM25), sparse (SPLADE) or hybrid, with optional reranking.

If the index was created with --late-interaction, --rerank uses that ColBERT model and the stored token embeddings.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bertie.cli.common import (
    UsageError,
    add_model,
    add_prompt,
    add_rerank,
    add_rerank_weight,
    add_top_k,
    add_weights,
    built_in_model,
    check_rerank_weight,
    load,
    reranker_class,
    verb,
)
from bertie.data.terminal import has_color

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.search.filters import MetadataFilter
    from bertie.search.index import Index, SearchResults
    from bertie.search.records import MetadataValue

EXAMPLE = """  bertie search my-index "how is text split into passages?"
  bertie search my-index "zinc batteries" -k 3 --mode lexical --where "year>=1990" --where lang=en
  bertie search my-index "zinc batteries" --rerank --json
"""
INDEX_RERANKER = "the index's late-interaction (ColBERT) model if it has one, otherwise the built-in cross-encoder"
MAX_CHARACTERS = 320  # of a passage in the table; --json prints it in full
_CONDITION = re.compile(r"\s*(.+?)\s*(!=|<=|>=|=|<|>)\s*(.*?)\s*", re.DOTALL)


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "search", "search an index", __doc__, EXAMPLE)
    parser.add_argument(
        "index", metavar="INDEX", help="a folder written by `bertie index`, postgresql://… or lance://…"
    )
    parser.add_argument("queries", nargs="+", metavar="QUERY", help="one or more queries")
    add_top_k(parser, 10, "passages per query")
    parser.add_argument(
        "--mode",
        choices=("hybrid", "dense", "lexical", "sparse"),
        default="hybrid",
        help="retrieval method (default: hybrid; sparse needs an index created with --sparse)",
    )
    add_rerank(parser, "the retrieved passages", INDEX_RERANKER)
    add_rerank_weight(parser)
    add_weights(parser)
    add_prompt(parser, "each query", "that of the index")
    parser.add_argument("--depth", type=int, default=100, metavar="N", help="passages to fuse or rerank (default: 100)")
    add_where(parser)
    add_model(parser, from_settings=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object per query")
    parser.set_defaults(run=run)


def add_where(parser: argparse.ArgumentParser) -> None:
    """Add --where."""
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="metadata filter with =, !=, <, <=, > or >=; all must match",
    )


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    for flag, value in (("-k", args.top_k), ("--depth", args.depth)):
        if value < 1:
            raise UsageError(f"{flag} {value} must be at least 1")
    check_rerank_weight(args)
    if args.mode in ("lexical", "sparse") and (args.prompt is not None or args.prompt_name is not None):
        raise UsageError(f"--prompt is for dense embeddings, and --mode {args.mode} has none; leave it out")
    where = [condition for text in args.where for condition in parse_condition(text)]

    from bertie.search.index import Index

    with Index.open(args.index) as index:
        if args.mode not in ("lexical", "sparse"):
            from bertie.tasks import Embedder

            args.model = args.model or index.config["model"]
            index = Index(index.store, load(Embedder, args))
            if args.prompt_name is not None:
                args.prompt = index.embedder.prompt_text(prompt_name=args.prompt_name)
        index.progress = True
        reranker = load_reranker(args, index)
        searches = index.search_batch(
            args.queries,
            args.top_k,
            mode=args.mode,
            rerank=reranker,
            rerank_weight=args.rerank_weight,
            where=where,
            depth=args.depth,
            weights=args.weights,
            prompt=args.prompt,
        )
        total = len(index)
        if where and not any(searches) and not args.quiet:
            unfiltered = index.search(args.queries[0], args.top_k, mode=args.mode, prompt=args.prompt)
            print(_unmatched_filters(where, unfiltered), end="", file=sys.stderr)
    for results in searches:
        if args.json:
            record = {"query": results.query, "hits": [asdict(hit) for hit in results], "timings": results.timings}
            print(json.dumps(record, ensure_ascii=False))
        else:
            print(format_results(results, total, color=has_color(sys.stdout)))


def load_reranker(args: argparse.Namespace, index: Index) -> Any:
    """Load the model of --reranker; with --rerank, the index's late-interaction model or the built-in cross-encoder."""
    if args.reranker is None and not args.rerank:
        return None
    stored = index.config.get("late_interaction")
    name = args.reranker or (stored["model"] if stored is not None else built_in_model())
    return load(reranker_class(name), args, model=name)


def parse_condition(text: str) -> list[MetadataFilter]:
    """Parse a --where condition; a numeric value matches both the number and the text.

    >>> [(f.name, f.op, f.value) for f in parse_condition("year>=1990")]
    [('year', '>=', 1990)]
    >>> [(f.name, f.op, f.value) for f in parse_condition("year = 1990")]
    [('year', 'in', ('1990', 1990))]
    """
    from bertie.search.filters import MetadataFilter

    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(f"--where {text!r:.80} must be NAME=VALUE, or use !=, <, <=, > or >= instead of =")
    name, op, value = match.groups()
    values = (value, *_typed_values(value))
    if op == "=":
        return [MetadataFilter(name, "in", values)]
    if op == "!=":
        return [MetadataFilter(name, op, value) for value in values]
    return [MetadataFilter(name, op, values[-1])]


def _unmatched_filters(where: Sequence[MetadataFilter], unfiltered: SearchResults) -> str:
    """A note on names of --where that the passages found without it do not have, for a search without results."""
    names = sorted({name for hit in unfiltered for name in hit.metadata})
    unknown = [condition.name for condition in where if condition.name not in names]
    if not unknown or not names:
        return ""
    known = ", ".join(map(repr, names[:20]))
    return f"bertie: --where {unknown[0]!r:.80}: the best passages have no such metadata, only {known}\n"


def _typed_values(text: str) -> list[MetadataValue]:
    """Return the boolean or number that a text spells, if any."""
    if text in ("true", "false"):
        return [text == "true"]
    for number in (int, float):
        try:
            return [number(text)]
        except ValueError:
            continue
    return []


def format_results(results: SearchResults, total: int, *, color: bool) -> str:
    """Format hits with scores and highlighted query terms, and the time per stage."""
    lines = []
    for number, hit in enumerate(results, 1):
        scores = "  ".join(f"{name} {score:.4g}" for name, score in hit.scores.items())
        location = printable(" › ".join([f"{hit.document}:{hit.start}-{hit.end}", *hit.headings]))
        shown = excerpt(hit.text, hit.highlights, color=color)
        lines += [f"{number}. {_style(location, '1', color)}", f"   {scores}", f"   {shown}", ""]
    timings = "  ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in results.timings.items())
    lines.append(f"{len(results)} of {total:,} passages  {timings}")
    return "\n".join(lines)


def excerpt(text: str, highlights: Sequence[tuple[int, int]], *, color: bool) -> str:
    """Return the part of a passage with the most highlighted spans."""
    start, end = _excerpt_span(len(text), highlights)
    while start and not text[start - 1].isspace() and text[start - 1 : start + 1].isalnum():
        start -= 1  # to a word boundary
    while end < len(text) and text[end - 1 : end + 1].isalnum():
        end += 1
    parts, position = ["…"] if start else [], start
    for first, last in highlights:
        if start <= first and last <= end:
            parts += [printable(text[position:first]), _style(printable(text[first:last]), "1;33", color)]
            position = last
    parts += [printable(text[position:end]), "…" if end < len(text) else ""]
    return "".join(parts).strip()


def _excerpt_span(length: int, highlights: Sequence[tuple[int, int]]) -> tuple[int, int]:
    if length <= MAX_CHARACTERS:
        return 0, length
    starts = [max(0, first - MAX_CHARACTERS // 8) for first, _ in highlights] or [0]

    def covered(start: int) -> int:
        return sum(start <= first and last <= start + MAX_CHARACTERS for first, last in highlights)

    best = max(starts, key=lambda start: (covered(start), -start))
    return best, min(best + MAX_CHARACTERS, length)


def printable(text: str) -> str:
    """Put text on one line, without control characters that a terminal would interpret."""
    return "".join(letter if letter.isprintable() else " " for letter in re.sub(r"\s+", " ", text))


def _style(text: str, code: str, color: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if color else text
