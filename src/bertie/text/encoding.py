"""What a tokenizer returns: `Encoding` for one text, `Encodings` for many texts in flat arrays.

Token ids and segment ids are computed eagerly. Character offsets, word ids and the like double the cost, and few
callers need them: they are read from the `tokenizers` library when they are first accessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise
from typing import Any, overload

import numpy as np
import tokenizers
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

_HINTS = {  # attributes of transformers' encodings
    "attention_mask": "; flat batches need no attention mask",
    "input_ids": "; use .ids",
    "tokens": "; use [tokenizer.token(id) for id in encoding.ids]",
}


def _empty() -> IntArray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """The tokens of one text, or of one pair of texts.

    >>> e = Encoding(*(np.zeros(s, np.int64) for s in (3, 3, (3, 2), 3)), special=np.array([True, False, True]))
    >>> len(e)
    3
    """

    ids: IntArray  # (n,)
    segments: IntArray  # (n,) segment ids, as the model expects them
    offsets: IntArray  # (n, 2) character offsets into the first or second text
    word_ids: IntArray  # (n,) index of the word that a token belongs to; -1 for special tokens
    special: NDArray[np.bool_]  # (n,) tokens added by the template, not special tokens spelled out in the text
    # (n,) 0: first text, 1: second text, -1: special token. Segment ids do not tell: many models have only one.
    sequence_ids: IntArray = field(default_factory=_empty)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def text_tokens(self) -> int:
        """Number of tokens that are not special tokens of the template."""
        return int((self.sequence_ids >= 0).sum())


class LazyEncoding(Encoding):
    """An encoding that reads all fields but `ids` and `segments` from the library on first access."""

    __slots__ = ("_load", "_paired", "_raw", "_template")

    @classmethod
    def create(
        cls,
        ids: IntArray,
        segments: IntArray,
        load: Callable[[], tokenizers.Encoding],
        paired: bool,
        template: tuple[int, int] | None = None,
    ) -> LazyEncoding:
        """Create a lazy encoding; `template`: number of special tokens before and after a single text."""
        self, put = cls.__new__(cls), object.__setattr__  # frozen
        put(self, "ids", ids)
        put(self, "segments", segments)
        put(self, "_load", load)
        put(self, "_paired", paired)
        put(self, "_template", None if paired else template)
        return self

    def __getattr__(self, name: str) -> Any:
        """Compute a field that has no value yet."""
        value: Any
        if name == "_raw":
            value = self._load()
        elif name == "offsets":
            value = np.fromiter(chain.from_iterable(self._raw.offsets), np.int64, 2 * len(self)).reshape(-1, 2)
        elif name == "word_ids":
            value = np.array([-1 if w is None else w for w in self._raw.word_ids], np.int64)
        elif name == "special" and self._template is not None:  # without the library: a long text takes it seconds
            value = np.zeros(len(self), np.bool_)
            before, after = self._template
            value[:before] = value[len(self) - after :] = True
        elif name == "special":
            value = np.array(self._raw.special_tokens_mask, np.bool_)
        elif name == "sequence_ids" and self._paired:
            value = np.array([-1 if s is None else s for s in self._raw.sequence_ids], np.int64)
        elif name == "sequence_ids":
            value = np.where(self.special, np.int64(-1), np.int64(0))
        else:
            raise AttributeError(f"an encoding has no {name!r}" + _HINTS.get(name, ""))
        object.__setattr__(self, name, value)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoding, tuple(getattr(self, part.name) for part in fields(Encoding))  # a copy has all fields


@dataclass(frozen=True, slots=True, eq=False)
class Encodings(Sequence[Encoding]):
    """The tokens of many texts, concatenated in flat arrays; indexing returns the `Encoding` of one text.

    >>> flat = Encodings(np.arange(6), np.zeros(6, np.int64), np.array([1, 3, 2]))
    >>> flat[1].ids.tolist()
    [1, 2, 3]
    """

    ids: IntArray  # (T,)
    segments: IntArray  # (T,)
    lengths: IntArray  # (N,) tokens per text
    special_counts: IntArray | int = 0  # (N,) special tokens per text, or one number for all
    load: Callable[[int], tokenizers.Encoding] | None = None  # the library's encoding of a text, for its details
    paired: NDArray[np.bool_] | None = None  # (N,) which are pairs; None: none
    template: tuple[int, int] | None = None  # special tokens before and after a single text, where known
    in_text: NDArray[np.bool_] | None = None  # (T,) tokens of the texts, if there are others than special ones: prompts

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> IntArray:
        """(N,) index of each text's first token."""
        starts: IntArray = np.cumsum(self.lengths) - self.lengths
        return starts

    @overload
    def __getitem__(self, index: int) -> Encoding: ...
    @overload
    def __getitem__(self, index: slice) -> list[Encoding]: ...
    def __getitem__(self, index: int | slice) -> Encoding | list[Encoding]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = int(self.lengths[:index].sum())
        return self._encoding(index, start, start + int(self.lengths[index]))

    def __iter__(self) -> Iterator[Encoding]:
        bounds = [0, *np.cumsum(self.lengths).tolist()]
        return (self._encoding(i, start, end) for i, (start, end) in enumerate(pairwise(bounds)))

    def _encoding(self, index: int, start: int, end: int) -> Encoding:
        load = self.load

        def details() -> tokenizers.Encoding:
            if load is None:
                raise AttributeError("these encodings were created from token ids: they have no character offsets")
            return load(index)

        paired = self.paired is not None and bool(self.paired[index])
        return LazyEncoding.create(self.ids[start:end], self.segments[start:end], details, paired, self.template)


def merge(parts: Sequence[tuple[IntArray, Encodings]]) -> Encodings:
    """Merge encodings of disjoint sets of texts; `parts` are the indices of the texts with their encodings."""
    if len(parts) == 1 and (len(parts[0][0]) < 2 or (np.diff(parts[0][0]) > 0).all()):
        return parts[0][1]
    order = np.argsort(np.concatenate([index for index, _ in parts]))
    lengths = np.concatenate([part.lengths for _, part in parts])
    starts, lengths = (np.cumsum(lengths) - lengths)[order], lengths[order]
    at = ranges(starts, lengths)
    return Encodings(
        np.concatenate([part.ids for _, part in parts])[at],
        np.concatenate([part.segments for _, part in parts])[at],
        lengths,
    )


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenated ranges of consecutive integers, one from each start.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    out: IntArray = np.repeat(starts - (ends - lengths), lengths) + np.arange(total)
    return out
