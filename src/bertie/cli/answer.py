"""Extractive question answering: answer questions with spans of documents.

The documents come from --context, or from a column of the input file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bertie.cli.common import (
    UsageError,
    absolute_path,
    add_head,
    add_input,
    add_model,
    add_output,
    add_top_k,
    load,
    open_input,
    verb,
)
from bertie.cli.stream import READ_COLUMNS, Stream, read_cells, result_schema
from bertie.data.journal import RowDigest
from bertie.data.readers import FORMATS, STDIN, data_suffix, read_text_file, text_cell

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie answer "Who wrote Emma?" --context "Emma is a novel by Jane Austen."
  bertie answer "When was it signed?" --context contract.txt --top-k 3 -m deepset/roberta-base-squad2
  bertie answer questions.csv -o answers.jsonl -m ./my-squad-model       # columns: question, context
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "answer", "extractive question answering", __doc__, EXAMPLE)
    what = "questions; or a file with the columns question and context (only question, with --context); or - for stdin"
    add_input(parser, "QUESTION|FILE|-", what)
    parser.add_argument(
        "--context",
        metavar="TEXT|FILE",
        help="document to answer from: a text, a text file, or a table with one document per row",
    )
    parser.add_argument("--question-column", metavar="NAME", help="column of questions (default: question)")
    parser.add_argument("--context-column", metavar="NAME", help="column of documents (default: context)")
    add_model(parser)
    add_head(parser)
    add_top_k(parser, 1, "answers per question")
    parser.add_argument(
        "--max-answer-length",
        type=int,
        default=30,
        metavar="N",
        help="maximum length of an answer, in tokens (default: 30)",
    )
    parser.add_argument(
        "--no-answer-threshold",
        type=float,
        metavar="P",
        help='return no answer if the probability of "no answer" exceeds P, from 0 to 1 (default: the threshold fitted '
        "for the head, otherwise 1: always answer)",
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.no_answer_threshold is not None and not 0 <= args.no_answer_threshold <= 1:
        raise UsageError(f"--no-answer-threshold {args.no_answer_threshold:g} must be a probability, from 0 to 1")
    table = open_input(args, "question")
    documents = None if args.context is None else _documents(args)
    if documents is None:
        if table.is_literal:
            raise UsageError("a question needs a document: pass --context TEXT|FILE")
        columns = [
            table.column(["question"], args.question_column, "--question-column"),
            table.column(["context"], args.context_column, "--context-column"),
        ]
    else:
        columns = [table.column(["question", "text"], args.question_column, "--question-column", only=True)]
    args.context, args.context_digest = absolute_path(args.context), _digest(documents)  # for the journal
    stream = Stream(args, table, columns)

    from bertie.tasks import Reader
    from bertie.tasks.results import AnswerResult

    task = load(Reader, args)

    def work(items: list[Any]) -> Iterator[dict[str, Any]]:
        questions = items if documents is None else [(question, documents) for question in items]
        options = {
            "top_k": args.top_k,
            "max_answer_length": args.max_answer_length,
            "no_answer_threshold": args.no_answer_threshold,
        }
        return map(asdict, task.answer_each(questions, **options))

    stream.write(
        stream.results(work),
        result_schema(AnswerResult),
        ("row", "answer", "score", "no answer", "document", "characters", *READ_COLUMNS, "question"),
        lambda record, item: [
            (
                record["row"],
                f"no answer (p = {answer['score']:.2f})" if answer["start"] is None else answer["text"],
                answer["score"],
                record["no_answer_score"],
                "" if answer["document"] is None else answer["document"] + 1,
                "" if answer["start"] is None else f"{answer['start']}-{answer['end']}",
                *read_cells(record),
                item if isinstance(item, str) else item[0],
            )
            for answer in record["answers"]
        ],
    )


def _digest(documents: list[str] | None) -> str | None:
    if documents is None:
        return None
    digest = RowDigest()
    digest.update(documents)
    return digest.hexdigest()


def _documents(args: argparse.Namespace) -> list[str]:
    """Read --context: a text, a text file as one document, or a table with one document per row."""
    if args.context == STDIN:
        if STDIN in args.items:
            raise UsageError("the questions and the context cannot both come from standard input")
        return [read_text_file(STDIN)]
    table = open_input(args, items=[args.context])
    if table.is_literal:
        return [args.context]
    if FORMATS.get(data_suffix(args.context) or "", "text") == "text":
        return [read_text_file(args.context)]
    column = table.column(["context", "text"], args.context_column, "--context-column", only=True)
    return [text_cell(table, number, row, column) for number, row in enumerate(table.rows([column]), 1)]
