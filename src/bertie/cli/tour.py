"""Show on the built-in model what Bertie does: each task once, with what was read and how long it took."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie._version import __version__
from bertie.cli.common import select_device, verb
from bertie.errors import NotFoundError

if TYPE_CHECKING:
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie tour
  bertie tour --json | jq '.stops[] | {verb, seconds}'
"""

BOOK = Path(__file__).with_suffix(".txt")  # its first line says what it is
README = Path(__file__).parents[3] / "README.md"  # of a checkout, where the package lies in src
MASKED = "Paris is the [MASK] of France."
OPINIONS = (
    "A delight from start to finish.",
    "What a waste of money, I am so angry.",
    "The train leaves at nine.",
)
NAMES = "Ada Lovelace met Charles Babbage in London, and Angela Merkel was born in Hamburg."
NEWS, TOPICS = "The match ended in a draw after extra time.", ("sport", "politics", "cooking")
QUESTION = "Which club was Phileas Fogg a member of?"  # which the book says beyond the model's max_length
OF_README, OF_BOOK = "How do I train a classifier on my own texts?", "How was the money stolen from the bank?"
NEAREST, BEST = 5, 3  # by their vectors; of these, shown after reranking


@dataclass(frozen=True, slots=True)
class Said:
    """A question to a model, and its answers with their scores, best first."""

    asked: str
    answers: tuple[tuple[str, float], ...]
    note: str = ""  # where the answer comes from


@dataclass(frozen=True, slots=True)
class Stop:
    """One task of the tour."""

    verb: str
    about: str
    said: tuple[Said, ...]
    texts: int  # read; a question and its document count as one
    tokens_total: int
    tokens_read: int
    windows: int
    seconds: float


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "tour", "what Bertie does, shown on the built-in model", __doc__, EXAMPLE)
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
        raise NotFoundError("the tour is one of the built-in model, and this installation has none") from None
    device = select_device(None)
    began = time.perf_counter()
    checkpoint = Checkpoint.load(name, device=device)
    facts: dict[str, Any] = {
        "bertie": __version__,
        "model": name,
        "parameters": sum(one.numel() for one in checkpoint.model.parameters()),
        "layers": checkpoint.model.config.depth,
        "width": checkpoint.model.config.width,
        "max_length": checkpoint.max_length,
        "device": device,
        "import_seconds": imported - start,
        "load_seconds": time.perf_counter() - began,
    }
    if args.json:
        print(json.dumps(facts | {"stops": [asdict(stop) for stop in stops(checkpoint)]}, ensure_ascii=False))
        return
    page = _Page(sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    page.write(page.wrapped(_welcome(facts)))
    for stop in stops(checkpoint):
        page.write(page.lines(stop))
    page.write(["", "Each is a verb of its own: bertie fill --help, bertie answer --help, …"])


def stops(checkpoint: Checkpoint) -> Iterator[Stop]:
    """Every task that the model has a head for."""
    from bertie.tasks.zero_shot import entailment_label

    yield _timed("fill", "words for masked places", lambda: _fill(checkpoint))
    yield _timed("classify", "a label for each text", lambda: _classify(checkpoint))
    if any(entailment_label(info) is not None for info in checkpoint.heads.values()):
        about = f"any labels: {', '.join(TOPICS)}"
        yield _timed("classify --labels", about, lambda: _any_labels(checkpoint))
    yield _timed("tag", "names in a text", lambda: _tag(checkpoint))
    title, text = book()
    about = f"a question to {len(text.split()):,} words, {title.split('.')[0]}"
    yield _timed("answer", about, lambda: _answer(checkpoint, text))
    query, documents, source = library()
    about = f"search in {len(documents)} {source}, by vectors, then by reading the best {NEAREST} with the question"
    yield _timed("embed, rerank", about, lambda: _search(checkpoint, query, documents))


def book() -> tuple[str, str]:
    """What the long text is, and the text."""
    title, _, text = BOOK.read_text(encoding="utf-8").partition("\n\n")
    return title, text


def library() -> tuple[str, list[tuple[str, str]], str]:
    """A question, documents with titles to find its answer in, and what they are."""
    if README.is_file() and Path(__file__).parents[2].name == "src":
        first, *rest = re.split(r"^## ", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
        sections = [(one.partition("\n")[0], one) for one in (first.removeprefix("# "), *rest)]
        return OF_README, sections, "sections of the README"
    paragraphs = book()[1].split("\n\n")
    return OF_BOOK, [(textwrap.shorten(one, 70, placeholder=" …"), one) for one in paragraphs], "paragraphs of the same"


# --- the stops: what was said, and the results that say how much was read ---

_Found = tuple[Sequence[Said], Sequence[Any]]


def _fill(checkpoint: Checkpoint) -> _Found:
    from bertie.tasks import MaskedLM

    task = MaskedLM(checkpoint)
    (one,) = task.fill([MASKED.replace("[MASK]", task.tokenizer.mask_token or "")], top_k=3)
    return [Said(MASKED, tuple((word.text, word.score) for word in one.masks[0].candidates))], [one]


def _classify(checkpoint: Checkpoint) -> _Found:
    from bertie.tasks import Classifier

    found = Classifier(checkpoint).classify(OPINIONS)
    return [Said(text, ((one.label, one.score),)) for text, one in zip(OPINIONS, found, strict=True)], found


def _any_labels(checkpoint: Checkpoint) -> _Found:
    from bertie.tasks import ZeroShot

    (one,) = ZeroShot(checkpoint).classify([NEWS], TOPICS)
    return [Said(NEWS, tuple(one.scores.items()))], [one]


def _tag(checkpoint: Checkpoint) -> _Found:
    from bertie.tasks import Tagger

    (one,) = Tagger(checkpoint).tag([NAMES])
    return [Said(NAMES, tuple((f"{span.text} ({span.label})", span.score) for span in one.spans))], [one]


def _answer(checkpoint: Checkpoint, text: str) -> _Found:
    from bertie.tasks import Reader

    (one,) = Reader(checkpoint).answer([(QUESTION, text)])
    best = one.best
    start, end = best.start or 0, best.end or 0
    before, after = text[max(0, start - 60) : start].split("\n")[-1], text[end : end + 60].split("\n")[0]
    note = f"… {before.partition(' ')[2]}{best.text}{after.rpartition(' ')[0]} …"
    return [Said(QUESTION, ((best.text, best.score),), note)], [one]


def _search(checkpoint: Checkpoint, query: str, documents: list[tuple[str, str]]) -> _Found:
    import numpy as np

    from bertie.tasks import Embedder, Reranker

    embedder, (titles, texts) = Embedder(checkpoint), zip(*documents, strict=True)
    asked, *vectors = embedder.embed_each([query, *texts])
    alike = embedder.compare(asked.vector[None], np.stack([one.vector for one in vectors]))[0]  # (N,)
    nearest = np.argsort(-alike, kind="stable")[:NEAREST].tolist()
    ranked = Reranker(checkpoint).rerank(query, [texts[i] for i in nearest])
    best = tuple((titles[nearest[one.index]], one.score) for one in ranked[:BEST])
    return [Said(query, best)], [asked, *vectors, *ranked]


def _timed(verb: str, about: str, work: Callable[[], _Found]) -> Stop:
    start = time.perf_counter()
    said, results = work()
    seconds = time.perf_counter() - start
    read = {name: sum(getattr(one, name) for one in results) for name in ("tokens_total", "tokens_read", "windows")}
    return Stop(verb, about, tuple(said), len(results), **read, seconds=seconds)


# --- for people ---


def _welcome(facts: dict[str, Any]) -> str:
    return (
        f"Bertie {facts['bertie']} with its built-in model, {facts['model']}: {facts['parameters']:,} parameters, "
        f"{facts['layers']} layers of width {facts['width']}, reads {facts['max_length']:,} tokens at once. "
        f"Loaded onto {facts['device']} in {_time(facts['load_seconds'])}, after {_time(facts['import_seconds'])} for "
        "torch and all other code."
    )


class _Page:
    """Lines as wide as the terminal, at most 100; headings stand out where there is one."""

    def __init__(self, colour: bool) -> None:
        self.bold, self.plain = ("\x1b[1m", "\x1b[0m") if colour else ("", "")
        self.width = min(100, shutil.get_terminal_size((100, 24)).columns)

    def write(self, lines: Iterable[str]) -> None:
        """At once: the next stop may take a second."""
        print("\n".join(lines), flush=True)

    def wrapped(self, text: str, first: str = "", then: str = "") -> list[str]:
        """A text as lines."""
        return textwrap.wrap(text, self.width, initial_indent=first, subsequent_indent=then)

    def lines(self, stop: Stop) -> Iterator[str]:
        """A stop as a heading and labelled rows."""
        yield ""
        yield from (f"{self.bold}{line}{self.plain}" for line in self.wrapped(f"{stop.verb}: {stop.about}"))
        for one in stop.said:
            yield from self._row("asked", one.asked)
            # A span's score is a sum of logits: only among spans does it say anything.
            scored = stop.verb != "answer"
            found = [f"{text} {score:.2f}" if scored else text for text, score in one.answers]
            yield from self._row("answer", "; ".join(found) or "nothing found")
            if one.note:
                yield from self._row("where", one.note)
        read = f"{stop.tokens_read:,} of {stop.tokens_total:,} tokens"
        texts, windows = (
            f"{n:,} {name}{'s' * (n != 1)}" for n, name in ((stop.texts, "text"), (stop.windows, "window"))
        )
        yield from self._row("read", f"{read}, {texts} in {windows}; {_time(stop.seconds)}")

    def _row(self, name: str, text: str) -> list[str]:
        return self.wrapped(text, f"  {name:<8}", " " * 10)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
