"""Answer questions by spans of documents: from columns of a file, or from --context."""

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
    load,
    open_input,
    verb,
)
from bertie.cli.stream import READ_COLUMNS, Stream, read_cells, result_schema
from bertie.data.readers import FORMATS, STDIN, data_suffix, read_text_file, text_cell

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie answer "Who wrote Emma?" --context "Emma is a novel by Jane Austen."
  bertie answer "When was it signed?" --context contract.txt --top-k 3 -m deepset/roberta-base-squad2
  bertie answer questions.csv -o answers.jsonl -m ./my-squad-model       # columns: question, context
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "answer", "answers to questions, as spans of documents", __doc__, EXAMPLE)
    what = "questions; or a file with the columns question and context (only question, with --context); or - for stdin"
    add_input(parser, "QUESTION|FILE|-", what)
    parser.add_argument(
        "--context",
        metavar="TEXT|FILE",
        help="what to answer from: a text, a text file as one document, or a table with a document a row",
    )
    parser.add_argument("--question-column", metavar="NAME", help="the column with the questions (question)")
    parser.add_argument("--context-column", metavar="NAME", help="the column with the documents (context)")
    add_model(parser)
    add_head(parser)
    parser.add_argument("--top-k", type=int, default=1, metavar="N", help="answers to each question (1)")
    parser.add_argument(
        "--max-answer-length", type=int, default=30, metavar="N", help="maximum length of an answer, in tokens (30)"
    )
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="by how much an answer must beat there being none (always given)"
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    table = open_input(args.items, args.format, "question")
    documents = None if args.context is None else _documents(args)
    if documents is None:
        if table.is_literal:
            raise UsageError("a question needs something to be answered from: pass --context TEXT|FILE")
        columns = [
            table.column(["question"], args.question_column, "--question-column"),
            table.column(["context"], args.context_column, "--context-column"),
        ]
    else:
        columns = [table.column(["question", "text"], args.question_column, "--question-column", only=True)]
    args.context = absolute_path(args.context)  # for the journal
    stream = Stream(args, table, columns)

    from bertie.tasks import Reader
    from bertie.tasks.results import AnswerResult

    task = load(Reader, args)

    def work(items: list[Any]) -> Iterator[dict[str, Any]]:
        questions = items if documents is None else [(question, documents) for question in items]
        options = {"top_k": args.top_k, "max_answer_length": args.max_answer_length, "threshold": args.threshold}
        return map(asdict, task.answer_each(questions, **options))

    stream.write(
        stream.results(work),
        result_schema(AnswerResult),
        ("row", "answer", "score", "no answer", "document", "characters", *READ_COLUMNS, "question"),
        lambda record, item: [
            (
                record["row"],
                one["text"],
                one["score"],
                record["no_answer_score"],
                "" if one["document"] is None else one["document"] + 1,
                "" if one["start"] is None else f"{one['start']}-{one['end']}",
                *read_cells(record),
                item if isinstance(item, str) else item[0],
            )
            for one in record["answers"]
        ],
    )


def _documents(args: argparse.Namespace) -> list[str]:
    """What --context stands for. A text file is one document; a table has one a row."""
    if args.context == STDIN:
        if STDIN in args.items:
            raise UsageError("the questions and the context cannot both come from standard input")
        return [read_text_file(STDIN)]
    table = open_input([args.context])
    if table.is_literal:
        return [args.context]
    if FORMATS.get(data_suffix(args.context) or "", "text") == "text":
        return [read_text_file(args.context)]
    column = table.column(["context", "text"], args.context_column, "--context-column", only=True)
    return [text_cell(table, number, row, column) for number, row in enumerate(table.rows([column]), 1)]
