"""Replaced-token detection with the discriminator of ELECTRA or DeBERTa-v3.

Such a model was trained to tell original tokens from those sampled by a small masked-language model. Each token's
probability comes from the window where it has the most context on both sides; the probability of a word is the highest
one of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from torch import Tensor

from bertie.arguments import explain_arguments
from bertie.nn.model import Model
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import text_inputs
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.tasks.base import Task
from bertie.tasks.decoding import owned_rows, sigmoid, trim_span
from bertie.tasks.results import ReplacedToken, ReplacedTokenResult
from bertie.text.batch import Batch
from bertie.text.encoding import IntArray
from bertie.text.windows import word_starts


class ReplacedTokenDetector(Task[None, FloatArray, ReplacedTokenResult]):
    """Finds words that look replaced.

    >>> detector = ReplacedTokenDetector.load("google/electra-small-discriminator")                  # doctest: +SKIP
    >>> result = detector.detect("The chef ate the meal for his guests.")                            # doctest: +SKIP
    >>> [(word.text, word.start, word.score) for word in result.replaced]                            # doctest: +SKIP
    """

    kind = "rtd"
    needs = "a head for replaced-token detection"
    needs_offsets = True

    @overload
    def detect(self, texts: str, *, progress: bool | None = None) -> ReplacedTokenResult: ...  # type: ignore[overload-overlap]
    @overload
    def detect(self, texts: Iterable[str], *, progress: bool | None = None) -> list[ReplacedTokenResult]: ...
    @explain_arguments
    def detect(self, texts: Any, *, progress: bool | None = None) -> Any:
        """Predict the probability that each token and word was replaced; a single text returns a single result.

        `progress`: whether to show a progress bar; None: on a terminal or in a notebook.
        """
        return self.collect(texts, self.detect_each, "detect", progress)

    def detect_each(self, texts: Iterable[str]) -> Iterator[ReplacedTokenResult]:
        """Like `detect`, but yield results one by one."""
        return self.run(text_inputs(texts, "detect", None), texts)

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(n, 1) logits of each window."""
        return PendingCopy.per_token(self.head_outputs(model, hidden, batch), batch)

    def decode(self, text: WindowedText[None], outputs: Sequence[FloatArray]) -> ReplacedTokenResult:
        """The tokens of all windows, and the words that they make up."""
        (content,), encoding = text.input.texts, text.encoding
        indices, logits = owned_rows(text.windows, outputs)
        scores = sigmoid(logits[:, 0])
        offsets = encoding.offsets[indices]
        words = np.flatnonzero(word_starts(encoding, indices, content))
        tokens = self._spans(content, offsets, scores, np.arange(len(indices)))
        return ReplacedTokenResult(self._spans(content, offsets, scores, words), tokens, **text.counts())

    def _spans(
        self, content: str, offsets: IntArray, scores: FloatArray, starts: IntArray
    ) -> tuple[ReplacedToken, ...]:
        """The spans of tokens from each start to the next, with the highest score of each."""
        self.pipeline.check()
        spans = []
        for first, end in zip(starts.tolist(), np.append(starts, len(offsets))[1:].tolist(), strict=True):
            start, stop = trim_span(content, int(offsets[first][0]), int(offsets[end - 1][1]))
            spans.append(ReplacedToken(content[start:stop], start, stop, float(scores[first:end].max())))
        return tuple(spans)
