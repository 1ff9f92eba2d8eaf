"""Answer questions from an index: retrieve passages, optionally rerank them, and read the best ones.

Answers are spans of documents. No answer is returned if the probability of "no answer" exceeds --no-answer-threshold,
by default the threshold that was fitted for the question answering model.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from bertie.cli.common import (
    UsageError,
    add_model,
    add_rerank,
    add_top_k,
    load,
    verb,
)
from bertie.cli.search import INDEX_RERANKER, add_where, excerpt, load_reranker, parse_condition, printable
from bertie.data.terminal import has_color, style

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.search.ask import AskResult

EXAMPLE = """  bertie ask my-index "Who wrote Emma?"
  bertie ask my-index "When was it signed?" --top-k 3 --passages 10 --rerank --json
  bertie ask my-index "Who wrote Emma?" --reader deepset/roberta-base-squad2 --where lang=en
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "ask", "answer questions from an index", __doc__, EXAMPLE)
    parser.add_argument(
        "index", metavar="INDEX", help="a folder written by `bertie index`, postgresql://… or lance://…"
    )
    parser.add_argument("questions", nargs="+", metavar="QUESTION", help="one or more questions")
    add_top_k(parser, 1, "answers per question")
    parser.add_argument("--passages", type=int, default=5, metavar="N", help="passages to read (default: 5)")
    parser.add_argument(
        "--reader",
        metavar="MODEL",
        help="question answering model (default: that of the index, if it has such a head, or the built-in one)",
    )
    parser.add_argument(
        "--no-answer-threshold",
        type=float,
        metavar="P",
        help='return no answer if the probability of "no answer" exceeds P, from 0 to 1 (default: the threshold fitted '
        "for the reader, otherwise 1: always answer)",
    )
    parser.add_argument(
        "--mode",
        choices=("hybrid", "dense", "lexical", "sparse"),
        default="hybrid",
        help="retrieval method (default: hybrid)",
    )
    add_rerank(parser, "the retrieved passages", INDEX_RERANKER)
    add_where(parser)
    add_model(parser, from_settings=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object per question")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    for flag, value in (("-k", args.top_k), ("--passages", args.passages)):
        if value < 1:
            raise UsageError(f"{flag} {value} must be at least 1")
    if args.no_answer_threshold is not None and not 0 <= args.no_answer_threshold <= 1:
        raise UsageError(f"--no-answer-threshold {args.no_answer_threshold:g} must be a probability, from 0 to 1")
    where = [condition for text in args.where for condition in parse_condition(text)]

    from bertie.search.ask import default_reader
    from bertie.search.index import Index
    from bertie.tasks import Embedder, Reader

    with Index.open(args.index) as opened:
        args.model = args.model or opened.config["model"]
        index = Index(opened.store, load(Embedder, args))
        index.progress = True
        reranker = load_reranker(args, index)
        reader = default_reader(index) if args.reader is None else load(Reader, args, model=args.reader)
        for question in args.questions:
            result = index.ask(
                question,
                args.passages,
                reader=reader,
                top_k=args.top_k,
                no_answer_threshold=args.no_answer_threshold,
                rerank=reranker,
                mode=args.mode,
                where=where,
            )
            print(json.dumps(asdict(result), ensure_ascii=False) if args.json else format_answers(result))
            sys.stdout.flush()


def format_answers(result: AskResult) -> str:
    """Format answers with their locations and passages."""
    read = f"{len(result.passages)} passages read"
    if not result.answers:
        return f"no answer (p = {result.no_answer_score:.2f}, {read})\n"
    lines = []
    for answer in result.answers:
        hit = answer.passage
        place = printable(" › ".join([f"{answer.document}:{answer.start}-{answer.end}", *hit.headings]))
        shown = excerpt(hit.text, [(answer.start - hit.start, answer.end - hit.start)], color=has_color(sys.stdout))
        lines += [f"{style(printable(answer.text), 'bold')}  (p = {answer.score:.2f})", f"   {place}", f"   {shown}"]
    return "\n".join([*lines, f"   no answer: p = {result.no_answer_score:.2f}; {read}", ""])
