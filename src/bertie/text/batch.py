"""Flat batches without padding, and the packing of texts into token budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertie.errors import InputError
from bertie.text.encoding import Encoding, Encodings, IntArray

Ids = Sequence[int] | np.ndarray
Range = tuple[int, int]  # minimum and maximum
_ZERO = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class Batch:
    """B texts as one flat sequence of T tokens. There is no attention mask, because there is no padding.

    >>> batch = Batch.from_ids([[101, 7592, 102], [101, 102]])
    >>> batch.ids.tolist(), batch.cu_seqlens.tolist(), batch.max_len
    ([101, 7592, 102, 101, 102], [0, 3, 5], 3)
    """

    ids: Tensor  # (T,) int64
    segments: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, counted from 0 in each text
    cu_seqlens: Tensor  # (B + 1,) int32: text b is tokens cu_seqlens[b] to cu_seqlens[b + 1]
    lengths: tuple[int, ...]  # the same on the host, so that no kernel has to synchronize
    # (T,) bool: tokens with global attention, in models that have it; None elsewhere.
    global_tokens: Tensor | None = None
    # Number of tokens at the beginning of each text that are attended to: the others attend to them, but are masked
    # as keys, as in ColBERT's query expansion. None: all.
    key_lengths: tuple[int, ...] | None = None
    # Cached by `ranges`. Not an argument, so that `replace` with other ids or segments resets it.
    _ranges: tuple[Range, Range] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def max_len(self) -> int:
        """Length of the longest text, in tokens."""
        return max(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def from_encodings(cls, encodings: Sequence[Encoding]) -> Batch:
        """Concatenate encodings."""
        return cls.from_ids([e.ids for e in encodings], [e.segments for e in encodings])

    @classmethod
    def from_ids(cls, ids: Sequence[Ids], segments: Sequence[Ids] | None = None) -> Batch:
        """Concatenate token ids; all segment ids are 0 unless given."""
        if not ids:
            raise InputError("the batch is empty: pass at least one text")
        rows = [np.asarray(row, dtype=np.int64) for row in ids]
        kinds = [np.zeros_like(row) for row in rows] if segments is None else [np.asarray(row) for row in segments]
        for b, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
            if row.ndim != 1:
                raise InputError(f"text {b} of the batch has shape {row.shape}; it must be one row of ids")
            if len(kind) != len(row):
                raise InputError(f"text {b} of the batch has {len(row)} ids but {len(kind)} segments")
        flat, flat_kinds = (np.concatenate(arrays, dtype=np.int64) for arrays in (rows, kinds))
        return cls.select(Encodings(flat, flat_kinds, np.array([len(row) for row in rows])))

    @classmethod
    def select(cls, encodings: Encodings, texts: Ids | None = None) -> Batch:
        """Select the texts with these indices, in this order; if None, all of them without copying.

        >>> encodings = Encodings(np.arange(6), np.zeros(6, np.int64), np.array([1, 3, 2]))
        >>> Batch.select(encodings, [2, 0]).ids.tolist()
        [4, 5, 0]
        """
        if len(encodings.lengths) == 1:
            texts = None  # the only one
        lengths = encodings.lengths if texts is None else encodings.lengths[texts]
        if not lengths.all():
            raise InputError(f"text {lengths.argmin()} of the batch has no tokens; each needs at least one")
        ends = lengths.cumsum()
        positions = np.arange(ends[-1])
        if len(lengths) > 1:
            positions -= np.repeat(ends - lengths, lengths)
        ids, segments = encodings.ids, encodings.segments
        if texts is not None:
            at = positions + np.repeat(encodings.starts[texts], lengths)
            ids, segments = ids[at], segments[at]
        return cls(
            ids=torch.from_numpy(ids),
            segments=torch.from_numpy(segments),
            positions=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(np.concatenate([_ZERO, ends], dtype=np.int32)),
            lengths=tuple(lengths.tolist()),
        )

    def slice(self, first: int, last: int) -> Batch:
        """Texts `first` to `last` (exclusive) as a separate batch."""
        if first == 0 and last == len(self):
            return self
        start = sum(self.lengths[:first])
        tokens = slice(start, start + sum(self.lengths[first:last]))
        return Batch(
            ids=self.ids[tokens],
            segments=self.segments[tokens],
            positions=self.positions[tokens],
            cu_seqlens=self.cu_seqlens[first : last + 1] - start,
            lengths=self.lengths[first:last],
            global_tokens=None if self.global_tokens is None else self.global_tokens[tokens],
            key_lengths=None if self.key_lengths is None else self.key_lengths[first:last],
        )

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to a device, asynchronously."""
        self.ranges()  # cheap here; later it would synchronize with the device
        if self.ids.device == torch.device(device):
            return self
        return self._with(
            ids=send(self.ids, device),
            segments=send(self.segments, device),
            positions=send(self.positions, device),
            cu_seqlens=send(self.cu_seqlens, device),
            global_tokens=None if self.global_tokens is None else send(self.global_tokens, device),
        )

    def with_ids(self, ids: Tensor) -> Batch:
        """The same batch with other token ids that are known to be in the vocabulary: they are not checked again."""
        return self._with(ids=ids)

    def with_globals(self, global_tokens: Tensor | None) -> Batch:
        """The same batch with other global tokens."""
        return self._with(global_tokens=global_tokens)

    def with_key_lengths(self, key_lengths: Sequence[int]) -> Batch:
        """The same batch where only this many tokens at the beginning of each text are attended to."""
        for b, (keys, length) in enumerate(zip(key_lengths, self.lengths, strict=True)):
            if not 1 <= keys <= length:
                raise InputError(f"key_lengths[{b}]={keys} must be from 1 to {length}, the tokens of text {b}")
        return self._with(key_lengths=tuple(key_lengths))

    def _with(self, **changes: Any) -> Batch:
        """`replace`, keeping the cached ranges of ids and segments."""
        out = replace(self, **changes)
        object.__setattr__(out, "_ranges", self._ranges)
        return out

    def ranges(self) -> tuple[Range, Range]:
        """Minimum and maximum of the ids and of the segments; computed once, on the host where possible.

        >>> Batch.from_ids([[101, 7592, 102], [101, 102]]).ranges()
        ((101, 7592), (0, 0))
        """
        if self._ranges is None:
            arrays: tuple[Any, ...] = (self.ids, self.segments)
            if self.ids.device.type == "cpu":
                arrays = tuple(tensor.numpy() for tensor in arrays)
            ids, segments = arrays
            spread = (int(segments.min()), int(segments.max())) if segments.any() else (0, 0)
            object.__setattr__(self, "_ranges", ((int(ids.min()), int(ids.max())), spread))
        assert self._ranges is not None
        return self._ranges

    def text_of_token(self) -> Tensor:
        """(T,) index of the text that each token belongs to."""
        tokens = torch.arange(len(self.ids), dtype=self.cu_seqlens.dtype, device=self.ids.device)
        return torch.searchsorted(self.cu_seqlens[1:], tokens, right=True)  # number of texts that end before it


def send(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device; to a GPU via pinned memory, without which the copy would block the host."""
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def spare_ends(tokens: int, room: int, texts: int, longest: int) -> np.ndarray:
    """End offsets of `texts` dummy texts that fill a batch of `tokens` tokens up to `room`.

    Empty texts come first, then as many as are needed, each of at most `longest` tokens.

    >>> spare_ends(10, 16, texts=4, longest=4).tolist()
    [10, 10, 14, 16]
    """
    full = -(-(room - tokens) // longest)
    number = np.arange(1, texts + 1) - (texts - full)
    ends: np.ndarray = np.minimum(room, tokens + np.maximum(number, 0) * longest).astype(np.int32)
    return ends


def pack(lengths: Sequence[int] | IntArray, budget: int) -> Iterator[list[int]]:
    """Group texts of similar length into batches of at most `budget` tokens, longest first.

    A text longer than the budget forms a batch by itself. The groups are indices into `lengths`.

    >>> list(pack([3, 9, 2, 4], budget=8))
    [[1], [3, 0], [2]]
    """
    if budget < 1:
        raise InputError(f"budget={budget} must be at least 1 token")
    sizes = np.asarray(lengths, np.int64)
    order = np.argsort(-sizes, kind="stable")
    totals = np.cumsum(sizes[order])
    order_list, first, used = order.tolist(), 0, 0
    while first < len(order_list):
        last = max(first + 1, int(np.searchsorted(totals, used + budget, side="right")))
        yield order_list[first:last]
        first, used = last, int(totals[last - 1])
