"""Find the passages of an index that answer a query, by meaning, by words, or by both."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from bertie.cli.common import UsageError, add_model, add_weights, load, verb

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.search.index import SearchHit, SearchResults
    from bertie.search.records import MetadataFilter, MetadataValue

EXAMPLE = """  bertie search my-index "how are texts cut into passages?"
  bertie search my-index "zinc batteries" -k 3 --mode lexical --where "year>=1990" --where lang=en
  bertie search my-index "zinc batteries" --rerank --json
"""
SHOWN = 320  # characters of a passage; --json has them all
_CONDITION = re.compile(r"\s*(.+?)\s*(!=|<=|>=|=|<|>)\s*(.*?)\s*", re.DOTALL)


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "search", "find passages in an index", __doc__, EXAMPLE)
    parser.add_argument("index", metavar="INDEX", help="a folder that `bertie index` made; postgresql://… or lance://…")
    parser.add_argument("queries", nargs="+", metavar="QUERY", help="what to look for")
    parser.add_argument("-k", type=int, default=10, metavar="N", help="how many passages (10)")
    parser.add_argument("--mode", choices=("hybrid", "dense", "lexical"), default="hybrid", help="how (hybrid)")
    parser.add_argument("--rerank", action="store_true", help="let a cross-encoder order the best (the built-in model)")
    parser.add_argument("--reranker", metavar="MODEL", help="as --rerank, by this one")
    add_weights(parser)
    parser.add_argument("--depth", type=int, default=100, metavar="N", help="passages that are fused or reranked (100)")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="in metadata: =, !=, <, <=, >, >=; all hold",
    )
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object a query")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    for name in ("k", "depth"):
        if getattr(args, name) < 1:
            raise UsageError(f"{'-k' if name == 'k' else '--depth'} {getattr(args, name)} must be at least 1")
    where = [one for text in args.where for one in condition(text)]

    from bertie.search.index import Index

    with Index.open(args.index) as index:
        if args.mode != "lexical":
            from bertie.tasks import Embedder

            args.model = args.model or index.about["model"]
            index = Index(index.store, load(Embedder, args))
        index.progress = True
        reranker = None
        if args.rerank or args.reranker:
            from bertie.tasks import Reranker

            args.model = args.reranker
            reranker = load(Reranker, args)
        found = index.search_each(
            args.queries,
            args.k,
            mode=args.mode,
            rerank=reranker,
            where=where,
            depth=args.depth,
            weights=args.weights,
        )
        total = len(index)
    for results in found:
        if args.json:
            said = {"query": results.query, "hits": [asdict(hit) for hit in results], "timings": results.timings}
            print(json.dumps(said, ensure_ascii=False))
        else:
            print(shown(results, total, color=sys.stdout.isatty()))


def condition(text: str) -> list[MetadataFilter]:
    """A condition as it is written on the command line. What may be a number may also be text that looks like one.

    >>> [(one.name, one.op, one.value) for one in condition("year>=1990")]
    [('year', '>=', 1990)]
    >>> [(one.name, one.op, one.value) for one in condition("year = 1990")]
    [('year', 'in', ('1990', 1990))]
    """
    from bertie.search.records import MetadataFilter

    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(f"--where {text!r:.80} must be NAME=VALUE, or one with !=, <, <=, > or >=")
    name, op, value = match.groups()
    values = (value, *_typed(value))
    if op == "=":
        return [MetadataFilter(name, "in", values)]
    if op == "!=":
        return [MetadataFilter(name, op, one) for one in values]
    return [MetadataFilter(name, op, values[-1])]


def _typed(text: str) -> list[MetadataValue]:
    """What a value may be beside text."""
    if text in ("true", "false"):
        return [text == "true"]
    for kind in (int, float):
        try:
            return [kind(text)]
        except ValueError:
            continue
    return []


def shown(results: SearchResults, total: int, *, color: bool) -> str:
    """For people: each passage with its place, its scores and the words of the query; and how long it took."""
    lines = []
    for number, hit in enumerate(results, 1):
        scores = "  ".join(f"{name} {score:.4g}" for name, score in hit.scores.items())
        place = _plain(" › ".join([f"{hit.document}:{hit.start}-{hit.end}", *hit.headings]))
        lines += [f"{number}. {_lit(place, '1', color)}", f"   {scores}", f"   {_passage(hit, color)}", ""]
    took = "  ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in results.timings.items())
    lines.append(f"{len(results)} of {total:,} passages  {took}")
    return "\n".join(lines)


def _passage(hit: SearchHit, color: bool) -> str:
    """The stretch with the most words of the query, these lit up."""
    start, end = _stretch(len(hit.text), hit.highlights)
    while start and not hit.text[start - 1].isspace() and hit.text[start - 1 : start + 1].isalnum():
        start -= 1  # not within a word
    while end < len(hit.text) and hit.text[end - 1 : end + 1].isalnum():
        end += 1
    parts, at = ["…"] if start else [], start
    for first, last in hit.highlights:
        if start <= first and last <= end:
            parts += [_plain(hit.text[at:first]), _lit(_plain(hit.text[first:last]), "1;33", color)]
            at = last
    parts += [_plain(hit.text[at:end]), "…" if end < len(hit.text) else ""]
    return "".join(parts).strip()


def _stretch(length: int, highlights: Sequence[tuple[int, int]]) -> tuple[int, int]:
    if length <= SHOWN:
        return 0, length
    starts = [max(0, first - SHOWN // 8) for first, _ in highlights] or [0]
    best = max(starts, key=lambda start: (sum(start <= a and b <= start + SHOWN for a, b in highlights), -start))
    return best, min(best + SHOWN, length)


def _plain(text: str) -> str:
    """On one line, and without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in re.sub(r"\s+", " ", text))


def _lit(text: str, how: str, color: bool) -> str:
    return f"\x1b[{how}m{text}\x1b[0m" if color else text
