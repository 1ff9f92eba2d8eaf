"""Inputs that are encoded, batched and decoded together, in flat arrays; details of a text are computed on access."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic

import numpy as np

from bertie.pipeline.inputs import Options, TaskInput
from bertie.pipeline.language_warnings import LanguageCounter
from bertie.pipeline.read_counts import READ_COUNTS
from bertie.text.encoding import Encoding, Encodings, IntArray
from bertie.text.windows import Window, whole_window

Split = Callable[[TaskInput[Any], Encoding], list[Window]]


class WindowedText(Generic[Options]):
    """One input and its windows."""

    __slots__ = ("_chunk", "_index", "input")

    def __init__(self, chunk: Chunk[Any], index: int, task_input: TaskInput[Options]) -> None:
        self._chunk, self._index, self.input = chunk, index, task_input

    def with_options(self, options: Any) -> WindowedText[Any]:
        """The same text with the options of another task."""
        return WindowedText(self._chunk, self._index, self.input._replace(options=options))

    @property
    def windows(self) -> list[Window]:
        """The windows; a text that fits has one."""
        return self._chunk.windows_of(self._index)

    @property
    def encoding(self) -> Encoding:
        """The whole text's encoding."""
        return self.windows[0].whole

    def counts(self) -> dict[str, int]:
        """How much of the text was read, for its result."""
        return dict(zip(READ_COUNTS, self._chunk.counts[self._index], strict=True))


class Chunk(Sequence[WindowedText[Options]]):
    """A chunk of inputs. `windows` holds the token ids of all windows; those of input i begin at `starts[i]`."""

    def __init__(
        self,
        inputs: Sequence[TaskInput[Options]],
        encodings: Encodings,
        max_length: int,
        split: Split,
        unknown: IntArray | None = None,  # (N,) tokens of each input; None: there are none
        non_english: IntArray | None = None,  # the same
    ) -> None:
        self.inputs, self.encodings, self.unknown, self.non_english = inputs, encodings, unknown, non_english
        self._long: dict[int, list[Window]] = {}
        self.windows, self.starts = encodings, np.arange(len(inputs) + 1)
        if encodings.lengths.max() > max_length:
            long = np.flatnonzero(encodings.lengths > max_length).tolist()
            self._long = {i: split(inputs[i], encodings[i]) for i in long}
            counts = np.ones(len(inputs) + 1, np.int64)
            counts[0] = 0
            for i, windows in self._long.items():
                counts[i + 1] = len(windows)
            self.starts = np.cumsum(counts)
            self.windows = self._flatten()

    def _flatten(self) -> Encodings:
        """The windows of all inputs, concatenated."""
        parts: list[tuple[IntArray, IntArray]] = []
        bounds = [0, *np.cumsum(self.encodings.lengths).tolist()]
        ids, segments = self.encodings.ids, self.encodings.segments
        for i in range(len(self.inputs)):
            if (windows := self._long.get(i)) is None:
                tokens = slice(bounds[i], bounds[i + 1])
                parts.append((ids[tokens], segments[tokens]))
            else:
                at = [bounds[i] + window.indices for window in windows]
                parts += [(ids[tokens], segments[tokens]) for tokens in at]
        lengths = np.array([len(tokens) for tokens, _ in parts], np.int64)
        return Encodings(np.concatenate([p for p, _ in parts]), np.concatenate([s for _, s in parts]), lengths)

    @property
    def has_long(self) -> bool:
        """Whether any text did not fit into the model's maximum length."""
        return bool(self._long)

    def windows_of(self, index: int) -> list[Window]:
        """The windows of one input."""
        return self._long.get(index) or [whole_window(self.encodings[index])]

    @cached_property
    def counts(self) -> list[tuple[int, ...]]:
        """`READ_COUNTS` of each input; special tokens do not count."""
        totals = self.token_totals
        none = [0] * len(totals)
        unknown = none if self.unknown is None else self.unknown.tolist()
        other = none if self.non_english is None else self.non_english.tolist()
        counts: list[tuple[int, ...]] = [
            (total, total, 1, *rest) for total, *rest in zip(totals, unknown, other, strict=True)
        ]
        for i, windows in self._long.items():
            counts[i] = (totals[i], sum(window.tokens_read for window in windows), len(windows), *counts[i][3:])
        return counts

    @property
    def token_totals(self) -> list[int]:
        """Number of tokens of each input, without special tokens."""
        totals: list[int] = (self.encodings.lengths - self.encodings.special_counts).tolist()
        return totals

    def count_languages(self, counter: LanguageCounter) -> None:
        """Count the inputs that consist largely of unknown tokens, or are not in English."""
        repeated = [task_input.repeated for task_input in self.inputs]
        counter.texts += len(self) - sum(repeated)
        if self.unknown is None and self.non_english is None:
            return
        for task_input, (total, _, _, unknown, other) in zip(self.inputs, self.counts, strict=True):
            if (unknown or other) and not task_input.repeated:
                counter.add(task_input.texts, unknown, other, total)

    def __len__(self) -> int:
        return len(self.inputs)

    def __iter__(self) -> Iterator[WindowedText[Options]]:
        return (WindowedText(self, i, task_input) for i, task_input in enumerate(self.inputs))

    def __getitem__(self, index: Any) -> Any:  # an int
        return WindowedText(self, index, self.inputs[index])
