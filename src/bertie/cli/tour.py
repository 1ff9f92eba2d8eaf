"""Run each task on the built-in model, and show its output, the tokens that were read, and the time."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bertie._version import __version__
from bertie.cli.common import add_device, select_device, verb
from bertie.data.terminal import has_color
from bertie.errors import NotFoundError
from bertie.recipes import FOLDER

if TYPE_CHECKING:
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie tour
  bertie tour --json | jq '.steps[] | {verb, seconds}'
"""

BOOK = FOLDER / "examples" / "book.txt"  # the first line is its title
MASKED = "Paris is the [MASK] of France."
REVIEWS = (
    "A delight from start to finish.",
    "What a waste of money, I am so angry.",
    "The train leaves at nine.",
)
ENTITIES = "Ada Lovelace met Charles Babbage in London, and Angela Merkel was born in Hamburg."
NEWS, TOPICS = "The match ended in a draw after extra time.", ("sport", "politics", "cooking")
QUESTION = "Which club was Phileas Fogg a member of?"  # the answer is beyond the model's maximum length
QUERY = "What is the wager about?"
RETRIEVED, SHOWN = 5, 3  # documents retrieved by embeddings; of these, shown after reranking


@dataclass(frozen=True, slots=True)
class TourExample:
    """An input of a task, and its predictions with their scores, best first."""

    input: str
    predictions: tuple[tuple[str, float], ...]
    context: str = ""  # the text around an answer


@dataclass(frozen=True, slots=True)
class Step:
    """One task of the tour."""

    verb: str
    title: str
    examples: tuple[TourExample, ...]
    texts: int  # a question and its document count as one
    tokens_total: int
    tokens_read: int
    windows: int
    seconds: float


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "tour", "try every task on the built-in model", __doc__, EXAMPLE)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    start = time.perf_counter()
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.checkpoints.hub import default_model

    imported = time.perf_counter()
    try:
        name = default_model()
    except NotFoundError:
        raise NotFoundError("the tour needs the built-in model, which this installation does not have") from None
    device = select_device(args.device)
    load_start = time.perf_counter()
    checkpoint = Checkpoint.load(name, device=device)
    info: dict[str, Any] = {
        "bertie": __version__,
        "model": name,
        "parameters": sum(parameter.numel() for parameter in checkpoint.model.parameters()),
        "layers": checkpoint.model.config.depth,
        "width": checkpoint.model.config.width,
        "max_length": checkpoint.max_length,
        "device": device,
        "import_seconds": imported - start,
        "load_seconds": time.perf_counter() - load_start,
    }
    if args.json:
        print(json.dumps(info | {"steps": [asdict(step) for step in steps(checkpoint)]}, ensure_ascii=False))
        return
    page = _Page(has_color(sys.stdout))
    page.write(page.wrap(_introduction(info)))
    for step in steps(checkpoint):
        page.write(page.render(step))
    page.write(["", *page.wrap("Each task is a command: see bertie fill --help, bertie answer --help, …")])


def steps(checkpoint: Checkpoint) -> Iterator[Step]:
    """Run every task that the model has a head for."""
    from bertie.tasks.zero_shot import entailment_label

    yield _measure("fill", "fill-mask", lambda: _fill(checkpoint))
    yield _measure("classify", "text classification", lambda: _classify(checkpoint))
    if any(entailment_label(info) is not None for info in checkpoint.heads.values()):
        title = f"zero-shot classification into {', '.join(TOPICS)}"
        yield _measure("classify --labels", title, lambda: _classify_zero_shot(checkpoint))
    yield _measure("tag", "named entity recognition", lambda: _tag(checkpoint))
    name, text = book()
    title = f"question answering over {len(text.split()):,} words: {name.split('.')[0]}"
    yield _measure("answer", title, lambda: _answer(checkpoint, text))
    documents = passages()
    title = f"search in {len(documents)} paragraphs of this book: the nearest {RETRIEVED} embeddings, reranked"
    yield _measure("embed, rerank", title, lambda: _search(checkpoint, documents))


def book() -> tuple[str, str]:
    """The title and the text of a long document."""
    title, _, text = BOOK.read_text(encoding="utf-8").partition("\n\n")
    return title, text


def passages() -> list[tuple[str, str]]:
    """The paragraphs of the book, each with its first words."""
    paragraphs = book()[1].split("\n\n")
    return [(textwrap.shorten(paragraph, 100, placeholder=" …"), paragraph) for paragraph in paragraphs]


# --- the tasks: examples to show, and the results, which count tokens and windows ---

_Output = tuple[Sequence[TourExample], Sequence[Any]]


def _fill(checkpoint: Checkpoint) -> _Output:
    from bertie.tasks import MaskedLM

    task = MaskedLM(checkpoint)
    (result,) = task.fill([MASKED.replace("[MASK]", task.tokenizer.mask_token or "")], top_k=3)
    predictions = tuple((candidate.text, candidate.score) for candidate in result.masks[0].candidates)
    return [TourExample(MASKED, predictions)], [result]


def _classify(checkpoint: Checkpoint) -> _Output:
    from bertie.tasks import Classifier

    results = Classifier(checkpoint).classify(REVIEWS)
    examples = [
        TourExample(text, ((result.label, result.score),)) for text, result in zip(REVIEWS, results, strict=True)
    ]
    return examples, results


def _classify_zero_shot(checkpoint: Checkpoint) -> _Output:
    from bertie.tasks import ZeroShot

    (result,) = ZeroShot(checkpoint).classify([NEWS], TOPICS)
    return [TourExample(NEWS, tuple(result.scores.items()))], [result]


def _tag(checkpoint: Checkpoint) -> _Output:
    from bertie.tasks import Tagger

    (result,) = Tagger(checkpoint).tag([ENTITIES])
    return [TourExample(ENTITIES, tuple((f"{span.text} ({span.label})", span.score) for span in result.spans))], [
        result
    ]


def _answer(checkpoint: Checkpoint, text: str) -> _Output:
    from bertie.tasks import Reader

    (result,) = Reader(checkpoint).answer([(QUESTION, text)])
    best = result.best
    start, end = best.start or 0, best.end or 0
    before, after = text[max(0, start - 60) : start].split("\n")[-1], text[end : end + 60].split("\n")[0]
    context = f"… {before.partition(' ')[2]}{best.text}{after.rpartition(' ')[0]} …"
    return [TourExample(QUESTION, ((best.text, best.score),), context)], [result]


def _search(checkpoint: Checkpoint, documents: list[tuple[str, str]]) -> _Output:
    import numpy as np

    from bertie.tasks import Embedder, Reranker

    embedder, (titles, texts) = Embedder(checkpoint), zip(*documents, strict=True)
    query_result, *results = embedder.embed_each([QUERY, *texts])
    similarities = embedder.compare(query_result.vector[None], np.stack([result.vector for result in results]))[0]
    retrieved = np.argsort(-similarities, kind="stable")[:RETRIEVED].tolist()
    ranked = Reranker(checkpoint).rerank(QUERY, [texts[i] for i in retrieved])
    best = tuple((titles[retrieved[document.index]], document.score) for document in ranked[:SHOWN])
    return [TourExample(QUERY, best)], [query_result, *results, *ranked]


def _measure(verb: str, title: str, task: Callable[[], _Output]) -> Step:
    """Run a task and time it."""
    start = time.perf_counter()
    examples, results = task()
    seconds = time.perf_counter() - start
    counts = {
        name: sum(getattr(result, name) for result in results) for name in ("tokens_total", "tokens_read", "windows")
    }
    return Step(verb, title, tuple(examples), len(results), **counts, seconds=seconds)


# --- output as text ---


def _introduction(info: dict[str, Any]) -> str:
    return (
        f"Bertie {info['bertie']} with its built-in model {info['model']}: {info['parameters']:,} parameters, "
        f"{info['layers']} layers of width {info['width']}, maximum length {info['max_length']:,} tokens. "
        f"Loaded on {info['device']} in {_format_time(info['load_seconds'])}, after "
        f"{_format_time(info['import_seconds'])} to import torch and Bertie."
    )


class _Page:
    """Lines as wide as the terminal, at most 100 columns; headings are bold on a terminal."""

    def __init__(self, bold: bool) -> None:
        self.bold, self.reset = ("\x1b[1m", "\x1b[0m") if bold else ("", "")
        self.width = min(100, shutil.get_terminal_size((100, 24)).columns)

    def write(self, lines: Iterable[str]) -> None:
        """Print lines without buffering: the next step may take a second."""
        print("\n".join(lines), flush=True)

    def wrap(self, text: str, initial_indent: str = "", subsequent_indent: str = "") -> list[str]:
        """Wrap a text into lines."""
        return textwrap.wrap(text, self.width, initial_indent=initial_indent, subsequent_indent=subsequent_indent)

    def render(self, step: Step) -> Iterator[str]:
        """A step as a heading and labelled rows."""
        yield ""
        yield from (f"{self.bold}{line}{self.reset}" for line in self.wrap(f"{step.verb}: {step.title}"))
        for example in step.examples:
            yield from self._row("input", example.input)
            # The score of an answer is its probability among the best spans only.
            scored = step.verb != "answer"
            predictions = [f"{text} {score:.2f}" if scored else text for text, score in example.predictions]
            yield from self._row("output", "; ".join(predictions) or "none")
            if example.context:
                yield from self._row("context", example.context)
        tokens = f"{step.tokens_read:,} of {step.tokens_total:,} tokens"
        texts, windows = (
            f"{n:,} {name}{'s' * (n != 1)}" for n, name in ((step.texts, "text"), (step.windows, "window"))
        )
        yield from self._row("read", f"{tokens}, {texts} in {windows}; {_format_time(step.seconds)}")

    def _row(self, name: str, text: str) -> list[str]:
        return self.wrap(text, f"  {name:<8}", " " * 10)


def _format_time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
