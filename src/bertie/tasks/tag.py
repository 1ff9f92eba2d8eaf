"""Token classification: named-entity recognition, part-of-speech tagging and the like.

Each token's logits come from the window where it has the most context on both sides. The tokens of
a word get one label (`aggregation_strategy`); then adjacent words are joined into spans by the
scheme of the labels: BIO, BIOES, BILOU, or plain labels.

Words are those of the tokenizer (`bertie.text.windows.word_starts`). transformers agrees for WordPiece; for other
tokenizers it splits at spaces only, so that "London." would be one word with its full stop, and a Chinese sentence one
word. Spans have no whitespace at their ends, even where the tokenizer attaches it to a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
from torch import Tensor

from bertie.arguments import explain_arguments
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import InputError, NotFoundError
from bertie.nn.model import Model
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import TaskInput, check_list, text_inputs
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.tasks.base import Task
from bertie.tasks.decoding import owned_rows, softmax, trim_span
from bertie.tasks.results import TaggedSpan, TaggingResult
from bertie.tasks.trainable import Trainable
from bertie.text.batch import Batch
from bertie.text.encoding import Encoding, IntArray
from bertie.text.tokenizer import checked_text
from bertie.text.windows import word_starts

AggregationStrategy = Literal["average", "first", "max", "simple", "none"]
AGGREGATION_STRATEGIES = ("average", "first", "max", "simple", "none")
CHECK_UNITS = 1024  # words or tokens decoded between checks that somebody is waiting for the result


@dataclass(frozen=True, slots=True)
class _Options:
    aggregation_strategy: AggregationStrategy
    ignore_labels: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Unit:
    """A token or a word with its label, split into prefix (B, I, …) and type."""

    label: str
    prefix: str
    type: str
    score: float
    start: int
    end: int


class Tagger(Trainable[_Options, FloatArray, TaggingResult]):
    """Finds labelled spans (named entities, parts of speech, …).

    >>> tagger = Tagger.load("path/to/a/ner/model")                                     # doctest: +SKIP
    >>> tagger.tag(["Ada Lovelace was born in London."])[0].spans[0].text               # doctest: +SKIP
    'Ada Lovelace'

    To train one, pass lists of words with a tag for each:

    >>> tagger = Tagger("path/to/any/encoder").fit(words, tags)                         # doctest: +SKIP
    """

    kind = "tag"
    needs_offsets = True

    @classmethod
    def _find_head(cls, checkpoint: Checkpoint, name: str | None) -> str:
        if checkpoint.gliner is not None and not any(map(cls._fits, checkpoint.heads.values())):
            raise NotFoundError(
                f"{checkpoint.source} has no fixed labels: they are given in each call; use "
                "bertie.ZeroShotTagger, or bertie tag --labels"
            )
        return super()._find_head(checkpoint, name)

    @overload
    def tag(  # type: ignore[overload-overlap]
        self,
        texts: str,
        *,
        aggregation_strategy: AggregationStrategy = "average",
        ignore_labels: Iterable[str] = ("O",),
        progress: bool | None = None,
    ) -> TaggingResult: ...
    @overload
    def tag(
        self,
        texts: Iterable[str],
        *,
        aggregation_strategy: AggregationStrategy = "average",
        ignore_labels: Iterable[str] = ("O",),
        progress: bool | None = None,
    ) -> list[TaggingResult]: ...
    @explain_arguments
    def tag(
        self,
        texts: Any,
        *,
        aggregation_strategy: AggregationStrategy = "average",
        ignore_labels: Iterable[str] = ("O",),
        progress: bool | None = None,
    ) -> Any:
        """Find the labelled spans of each text; a single text returns a single result.

        `aggregation_strategy`: how the tokens of a word get one label: by their mean probabilities
        ("average"), by the first token ("first") or by the most confident one ("max"). "simple" labels
        each token, "none" makes each token a span. The names are those of transformers.
        `ignore_labels`: labels that are not reported as spans.
        `progress`: whether to show a progress bar; None: on a terminal or in a notebook.
        """

        def each(texts: Iterable[str]) -> Iterator[TaggingResult]:
            return self.tag_each(texts, aggregation_strategy=aggregation_strategy, ignore_labels=ignore_labels)

        return self.collect(texts, each, "tag", progress)

    def tag_each(
        self,
        texts: Iterable[str],
        *,
        aggregation_strategy: AggregationStrategy = "average",
        ignore_labels: Iterable[str] = ("O",),
    ) -> Iterator[TaggingResult]:
        """Like `tag`, but yield results one by one."""
        options = self.options(aggregation_strategy=aggregation_strategy, ignore_labels=ignore_labels)
        return self.run(text_inputs(texts, "tag", options), texts)

    def options(
        self, *, aggregation_strategy: AggregationStrategy = "average", ignore_labels: Iterable[str] = ("O",)
    ) -> _Options:
        """The options of `tag`, checked."""
        if aggregation_strategy not in AGGREGATION_STRATEGIES:
            raise InputError(
                f"aggregation_strategy={aggregation_strategy!r} must be one of {', '.join(AGGREGATION_STRATEGIES)}"
            )
        return _Options(aggregation_strategy, frozenset(check_list(ignore_labels, "ignore_labels=", "labels")))

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(n, labels) logits of each window."""
        return PendingCopy.per_token(self.head_outputs(model, hidden, batch), batch)

    def decode(self, text: WindowedText[_Options], outputs: Sequence[FloatArray]) -> TaggingResult:
        """Combine tokens into words, and words into spans."""
        (content,), options, encoding = text.input.texts, text.input.options, text.encoding
        tokens, logits = owned_rows(text.windows, outputs)
        strategy = options.aggregation_strategy
        single = strategy in ("none", "simple")
        starts = np.arange(len(tokens)) if single else np.flatnonzero(word_starts(encoding, tokens, content))
        units = self._units(softmax(logits), encoding.offsets[tokens], starts, strategy)
        spans = []
        for group in ([unit] for unit in units) if strategy == "none" else _join(units):
            first = group[0]
            if options.ignore_labels.isdisjoint((first.label, first.type)):
                start, end = trim_span(content, first.start, group[-1].end)
                score = float(np.mean([unit.score for unit in group]))
                label = first.label if strategy == "none" else first.type
                spans.append(TaggedSpan(label, start, end, content[start:end], score))
        return TaggingResult(tuple(spans), **text.counts())

    def _units(
        self, scores: FloatArray, offsets: IntArray, starts: IntArray, strategy: AggregationStrategy
    ) -> Iterator[_Unit]:
        labels = self.info.labels
        known = frozenset(labels.values())
        for number, (start, end) in enumerate(zip(starts, np.append(starts, len(scores))[1:], strict=True)):
            if number % CHECK_UNITS == 0:
                self.pipeline.check()
            tokens = scores[start:end]
            if strategy == "first" or len(tokens) == 1:
                row = tokens[0]
            elif strategy == "max":
                row = tokens[int(tokens.max(axis=1).argmax())]
            else:
                row = tokens.mean(axis=0)
            best = int(row.argmax())
            yield _Unit(
                labels[best],
                *split_tag(labels[best], known),
                float(row[best]),
                int(offsets[start][0]),
                int(offsets[end - 1][1]),
            )

    @explain_arguments
    def predict(self, X: Iterable[Sequence[str]], *, progress: bool | None = None) -> list[list[str]]:
        """Predict the tag of each word of each list."""
        return [list(tags) for tags, _ in self.collect(check_list(X, "predict"), self.tag_words, "predict", progress)]

    def tag_words(self, X: Iterable[Sequence[str]]) -> Iterator[tuple[Sequence[str], dict[str, int]]]:
        """Predict the tag of each word of each list; yields the tags, and how much of the list was read."""
        task = _WordTagger(self.checkpoint, overflow=self.overflow, head=self.head, deterministic=self.deterministic)
        lists = enumerate(check_list(X, "predict", "lists of words"))
        return task.run((_join_words(words, f"text {i}") for i, words in lists), X)


WordOffsets = tuple[tuple[int, int], ...]


class _WordTagger(Task[WordOffsets, FloatArray, tuple[Sequence[str], dict[str, int]]]):
    """One tag per given word: that of its beginning, as far as the tokenizer takes it for one word."""

    kind = "tag"
    needs_offsets = True

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        return PendingCopy.per_token(self.head_outputs(model, hidden, batch), batch)

    def decode(
        self, text: WindowedText[WordOffsets], outputs: Sequence[FloatArray]
    ) -> tuple[Sequence[str], dict[str, int]]:
        labels, offsets = self.info.labels, text.input.options
        tokens, logits = owned_rows(text.windows, outputs)
        word, part = align_words(text.encoding, text.input.texts[0], offsets)
        word, part = word[tokens], part[tokens]
        sums = np.zeros((len(offsets), len(labels)))
        used = (word >= 0) & (part == 0)
        np.add.at(sums, word[used], softmax(logits[used]))
        best = sums.argmax(1)  # a word without tokens gets the first label
        return [labels[int(i)] for i in best], text.counts()


def _join_words(words: Sequence[str], name: str) -> TaskInput[WordOffsets]:
    """A list of words as a text, with the words' offsets in it."""
    if isinstance(words, str):
        raise InputError(f"{name} must be a list of words, not a text; use tag() for texts")
    words = [checked_text(word, f"{name}, word {i}") for i, word in enumerate(words)]
    ends = np.cumsum([len(word) + 1 for word in words]).tolist()
    offsets = tuple((end - 1 - len(word), end - 1) for word, end in zip(words, ends, strict=True))
    return TaskInput(name, (" ".join(words),), offsets)


def align_words(encoding: Encoding, text: str, offsets: WordOffsets) -> tuple[IntArray, IntArray]:
    """Align tokens with given words.

    Returns (n,) the index of the word that each token belongs to, -1 for none, and (n,) which of the tokenizer's own
    words inside that word it belongs to.
    """
    word = np.full(len(encoding), -1, dtype=np.int64)
    part = np.zeros(len(encoding), dtype=np.int64)
    inside = np.flatnonzero((encoding.sequence_ids == 0) & (encoding.offsets[:, 1] > encoding.offsets[:, 0]))
    if not len(inside) or not offsets:
        return word, part
    starts, ends = np.array(offsets, dtype=np.int64).T
    last = encoding.offsets[inside, 1] - 1  # some tokenizers attach the space before a word to it
    owner = np.searchsorted(starts, last, side="right") - 1
    valid = (owner >= 0) & (last < ends[owner])
    word[inside[valid]] = owner[valid]
    group = np.cumsum(word_starts(encoding, inside, text))[valid]
    _, first, inverse = np.unique(owner[valid], return_index=True, return_inverse=True)
    part[inside[valid]] = group - group[first][inverse]
    return word, part


_FIRST, _LAST = "BSU", "ESLU"  # BIO: Begin, Inside; BIOES adds End and Single; BILOU has Last and Unit instead


def split_tag(label: str, known: frozenset[str]) -> tuple[str, str]:
    """Split a label into prefix and type; a plain label counts as inside a span of its own type."""
    prefix, dash, kind = label.partition("-")
    # "E-mail" is a plain label.
    scheme = prefix in ("B", "I") or (prefix in ("E", "S", "L", "U") and f"B-{kind}" in known)
    return (prefix, kind) if dash and scheme else ("I", label)


def _join(units: Iterable[_Unit]) -> Iterator[list[_Unit]]:
    """Join adjacent units of one type, until a prefix begins or ends a span."""
    group: list[_Unit] = []
    for unit in units:
        if group and (unit.type != group[-1].type or unit.prefix in _FIRST or group[-1].prefix in _LAST):
            yield group
            group = []
        group.append(unit)
    if group:
        yield group
