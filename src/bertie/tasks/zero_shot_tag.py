"""Zero-shot token classification with GLiNER: spans with labels that are given in the call.

The labels form a prompt that is prepended to the text, and the model scores every span of up to `max_width` words
against each of them. Every window of a long text repeats the prompt; a span's scores come from the window in which it
has the most context on both sides. All labels of a call share one prompt, as in the package `gliner`, since a label's
scores depend on the other labels: a prompt that takes more than half of a window is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from bertie.arguments import explain_arguments
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.gliner import HEAD, GlinerConfig
from bertie.errors import InputError, NotFoundError
from bertie.nn.model import Model
from bertie.nn.span_head import SpanHead, SpanLayout, span_bounds
from bertie.pipeline.chunk import Chunk, WindowedText
from bertie.pipeline.inputs import TaskInput, check_list, text_inputs
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.tasks.decoding import sigmoid
from bertie.tasks.results import TaggedSpan, TaggingResult
from bertie.tasks.span_decoding import ScoredSpan, candidates, is_best_window, select_spans
from bertie.tasks.trainable import Trainable
from bertie.text.batch import Batch
from bertie.text.encoding import Encodings, IntArray
from bertie.text.prompted_words import encode_prompted, template_ids, text_ranges, word_starts
from bertie.text.tokenizer import Tokenizer, checked_text

CHECK_SPANS = 1024  # spans decoded between checks that somebody is waiting for the result


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The tokens of a prompt, and the index of the token that represents each label."""

    ids: IntArray
    labels: IntArray

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: GlinerConfig, labels: Sequence[str]) -> Prompt:
        """<<ENT>> first label <<ENT>> second label … <<SEP>>."""
        words = [part for label in labels for part in (config.ent_token, label)]
        ids, word = tokenizer.encode_words([[*words, config.sep_token]])[0]
        markers = np.searchsorted(word, 2 * np.arange(len(labels)))
        return cls(ids, markers if config.embed_ent_token else markers + 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    labels: tuple[str, ...]
    prompt: Prompt
    threshold: float
    flat: bool
    multi_label: bool


class WindowWords(NamedTuple):
    """Token indices of the labels and words of a window."""

    labels: IntArray
    words: IntArray


class ZeroShotTagger(Trainable[_Options, FloatArray, TaggingResult]):
    """Finds spans with arbitrary labels, given in the call (GLiNER).

    >>> tagger = ZeroShotTagger.load("path/to/a/gliner/model")                                       # doctest: +SKIP
    >>> tagger.tag("Aspirin eases headaches.", labels=["medicine", "symptom"]).spans[0].label        # doctest: +SKIP
    'medicine'

    To train one from any encoder, pass lists of words with a tag for each, such as "B-medicine":

    >>> tagger = ZeroShotTagger("path/to/any/encoder").fit(words, tags)                              # doctest: +SKIP
    """

    kind = "span"
    needs = "a span head, as GLiNER models have"

    @classmethod
    def _find_head(cls, checkpoint: Checkpoint, name: str | None) -> str:
        if checkpoint.gliner is None:
            have = ", ".join(checkpoint.heads) or "none"
            raise NotFoundError(
                f"zero-shot labels need {cls.needs}; {checkpoint.source} has the heads: {have}. fit(), or bertie "
                "train zero-shot-tag, trains one over any encoder"
            )
        return super()._find_head(checkpoint, name)

    @overload
    def tag(  # type: ignore[overload-overlap]
        self,
        texts: str,
        labels: Sequence[str],
        *,
        threshold: float = 0.5,
        flat: bool = True,
        multi_label: bool = False,
        progress: bool | None = None,
    ) -> TaggingResult: ...
    @overload
    def tag(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        threshold: float = 0.5,
        flat: bool = True,
        multi_label: bool = False,
        progress: bool | None = None,
    ) -> list[TaggingResult]: ...
    @explain_arguments
    def tag(
        self,
        texts: Any,
        labels: Sequence[str],
        *,
        threshold: float = 0.5,
        flat: bool = True,
        multi_label: bool = False,
        progress: bool | None = None,
    ) -> Any:
        """Find the spans of each text with any of these labels; a single text returns a single result.

        `threshold`: only spans with a higher score are returned. `flat`: spans do not overlap; otherwise they may be
        nested. `multi_label`: a span may have several labels. Of conflicting spans, the one with the highest score is
        kept. `progress`: whether to show a progress bar; None: on a terminal or in a notebook.
        """

        def each(texts: Iterable[str]) -> Iterator[TaggingResult]:
            return self.tag_each(texts, labels, threshold=threshold, flat=flat, multi_label=multi_label)

        return self.collect(texts, each, "tag", progress)

    def tag_each(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        threshold: float = 0.5,
        flat: bool = True,
        multi_label: bool = False,
    ) -> Iterator[TaggingResult]:
        """Like `tag`, but yield results one by one."""
        options = self.options(labels, threshold=threshold, flat=flat, multi_label=multi_label)
        return self.run(text_inputs(texts, "tag", options), texts)

    def options(
        self, labels: Sequence[str], *, threshold: float = 0.5, flat: bool = True, multi_label: bool = False
    ) -> _Options:
        """The options of `tag`, checked."""
        names = tuple(
            checked_text(label, f"label {i}") for i, label in enumerate(check_list(labels, "labels=", "labels"))
        )
        if not names or len(set(names)) < len(names) or not all(name.strip() for name in names):
            raise InputError(f"labels={list(names)!r:.80} must be one or more distinct, non-empty labels")
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
            raise InputError(f"threshold={threshold!r:.40} must be a number from 0 to 1")
        return _Options(names, self.prompt(names), float(threshold), bool(flat), bool(multi_label))

    @property
    def settings(self) -> GlinerConfig:
        """The model's prompt tokens and the limits of its spans."""
        config = self.checkpoint.gliner
        assert config is not None  # every checkpoint with a span head has one
        return config

    def prompt(self, labels: Sequence[str]) -> Prompt:
        """The prompt of these labels; refused if it takes more than half of a window."""
        config = self.settings
        for label in labels:
            if config.ent_token in label or config.sep_token in label:
                raise InputError(f"label {label!r:.60} must not contain {config.ent_token} or {config.sep_token}")
        prompt = Prompt.of(self.tokenizer, config, labels)
        size = len(prompt.ids) + sum(map(len, template_ids(self.tokenizer)))
        if size > self.checkpoint.max_length // 2:
            raise InputError(
                f"{len(labels)} labels take {size} tokens, which every window repeats; at most "
                f"{self.checkpoint.max_length // 2} are allowed, half of the maximum length of "
                f"{self.checkpoint.max_length}: use fewer or shorter labels, or several calls (a label's scores depend "
                "on the other labels)"
            )
        return prompt

    # --- the task's stages of the pipeline ---

    def encode_inputs(self, inputs: Sequence[TaskInput[_Options]], tokenizer: Tokenizer) -> Encodings:
        """Tokenize each text word by word, after its prompt."""
        prompts = [task_input.options.prompt.ids for task_input in inputs]
        return encode_prompted(self.tokenizer, prompts, [task_input.texts[0] for task_input in inputs])

    def parameters(self, chunk: Chunk[_Options]) -> Sequence[WindowWords]:
        """Token indices of the labels and words of each window."""
        before = len(template_ids(self.tokenizer)[0])
        result = []
        for text in chunk:
            windows, starts = text.windows, word_starts(text.encoding)
            labels = before + text.input.options.prompt.labels
            for window, (first, end) in zip(windows, text_ranges(windows), strict=True):
                # A word is in a window if its first token is.
                words = starts[np.searchsorted(starts, first) : np.searchsorted(starts, end)]
                result.append(WindowWords(labels, np.searchsorted(window.indices, words)))
        return result

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[WindowWords] | None
    ) -> Sequence[FloatArray]:
        """(S * C,) logits of each window: of all spans, for each label."""
        assert parameters is not None
        layout = SpanLayout.of_windows([p.words for p in parameters], [p.labels for p in parameters], batch)
        logits = self.span_head(model).span_logits(hidden, layout)
        bounds = list(accumulate((x.numel() for x in logits), initial=0))
        flat = torch.cat([x.flatten() for x in logits]).float()
        return PendingCopy(flat, lambda host: [host[start:end] for start, end in pairwise(bounds)], len(batch))

    def span_head(self, model: Model) -> SpanHead:
        """The head of the model, or of a replica."""
        head = model.head(self.head or HEAD)
        assert isinstance(head, SpanHead)
        return head

    def decode(self, text: WindowedText[_Options], outputs: Sequence[FloatArray]) -> TaggingResult:
        """Combine the windows, and choose spans."""
        (content,), options, encoding = text.input.texts, text.input.options, text.encoding
        width, starts = self.settings.head.max_width, word_starts(encoding)
        ranges = text_ranges(text.windows)
        spans: list[ScoredSpan] = []
        for number, ((first, end), logits) in enumerate(zip(ranges, outputs, strict=True)):
            self.pipeline.check()
            words = range(int(np.searchsorted(starts, first)), int(np.searchsorted(starts, end)))
            bounds = words.start + span_bounds(len(words), width)
            scores = sigmoid(logits.reshape(len(bounds), len(options.labels)))
            if len(ranges) > 1:
                own = is_best_window(starts[bounds], ranges, number)
                bounds, scores = bounds[own], scores[own]
            spans += candidates(scores, bounds, options.threshold)
        chosen = select_spans(spans, width, flat=options.flat, multi_label=options.multi_label, check=self._check)
        offsets = encoding.offsets[starts]
        return TaggingResult(tuple(_tagged(span, content, offsets, options.labels) for span in chosen), **text.counts())

    def _check(self, number: int) -> None:
        if number % CHECK_SPANS == 0:
            self.pipeline.check()


def _tagged(span: ScoredSpan, text: str, offsets: IntArray, labels: Sequence[str]) -> TaggedSpan:
    start, end = int(offsets[span.start][0]), int(offsets[span.end][1])
    return TaggedSpan(labels[span.label], start, end, text[start:end], span.score)
