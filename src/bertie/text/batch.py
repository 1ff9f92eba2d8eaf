"""From encodings to one flat run of tokens: `Batch`, and the packing of texts into token budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertie.errors import InputError
from bertie.text.tokenizer import Encoding, Flat

Ids = Sequence[int] | np.ndarray
Range = tuple[int, int]  # the smallest and the largest


@dataclass(frozen=True, slots=True)
class Batch:
    """Several texts as one flat run of T tokens. There is no attention mask, because there is no padding.

    >>> batch = Batch.from_ids([[101, 7592, 102], [101, 102]])
    >>> batch.ids.tolist(), batch.cu_seqlens.tolist(), batch.max_len
    ([101, 7592, 102, 101, 102], [0, 3, 5], 3)
    """

    ids: Tensor  # (T,) int64
    segments: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, counted from 0 in each text
    cu_seqlens: Tensor  # (B + 1,) int32: text b is tokens cu_seqlens[b] to cu_seqlens[b + 1]
    lengths: tuple[int, ...]  # the same on the host, so that no kernel has to ask the device
    # (T,) bool: tokens that see, and are seen by, the whole text in models with global tokens; None elsewhere.
    global_tokens: Tensor | None = None
    # What `ranges` found. Not an argument, so that `replace` with other ids or segments forgets it.
    _ranges: tuple[Range, Range] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def max_len(self) -> int:
        """The longest text, in tokens."""
        return max(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def from_encodings(cls, encodings: Sequence[Encoding]) -> Batch:
        """Lay encodings end to end."""
        return cls._flat([e.ids for e in encodings], [e.segments for e in encodings])

    @classmethod
    def from_ids(cls, ids: Sequence[Ids], segments: Sequence[Ids] | None = None) -> Batch:
        """Lay token ids end to end; all segments are 0 unless given."""
        rows = [np.asarray(one, dtype=np.int64) for one in ids]
        if segments is None:
            return cls._flat(rows, [np.zeros_like(row) for row in rows])
        return cls._flat(rows, [np.asarray(one, dtype=np.int64) for one in segments])

    @classmethod
    def _flat(cls, ids: Sequence[np.ndarray], segments: Sequence[np.ndarray]) -> Batch:
        if not ids:
            raise InputError("an empty batch: give at least one text")
        lengths = [len(one) for one in ids]
        for b, (one, segment) in enumerate(zip(ids, segments, strict=True)):
            if one.ndim != 1:
                raise InputError(f"text {b} of the batch has shape {one.shape}; it must be one row of ids")
            if len(segment) != len(one):
                raise InputError(f"text {b} of the batch has {len(one)} ids but {len(segment)} segments")
        every, kinds = (np.concatenate(one, dtype=np.int64) for one in (ids, segments))
        return cls.chosen(Flat(every, kinds, np.array(lengths)), None)

    @classmethod
    def chosen(cls, flat: Flat, texts: Ids | None) -> Batch:
        """Some of the texts of a run of tokens, in the order given, or all as they lie.

        >>> flat = Flat(np.arange(6), np.zeros(6, np.int64), np.array([1, 3, 2]))
        >>> Batch.chosen(flat, [2, 0]).ids.tolist()
        [4, 5, 0]
        """
        if len(flat.lengths) == 1:
            texts = None  # the only one
        lengths = flat.lengths if texts is None else flat.lengths[texts]
        if not lengths.all():
            raise InputError(f"text {lengths.argmin()} of the batch has no tokens; each needs at least one")
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        ids, segments = flat.ids, flat.segments
        if texts is not None:
            at = positions + np.repeat((np.cumsum(flat.lengths) - flat.lengths)[texts], lengths)
            ids, segments = ids[at], segments[at]
        return cls(
            ids=torch.from_numpy(ids),
            segments=torch.from_numpy(segments),
            positions=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            lengths=tuple(lengths.tolist()),
        )

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device. The host does not wait for a GPU to take it."""
        self.ranges()  # cheap here, and a stop for the device if it were asked later
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
        """The same batch with other tokens that are known to lie in the vocabulary: nobody looks at them again."""
        return self._with(ids=ids)

    def with_globals(self, global_tokens: Tensor | None) -> Batch:
        """The same batch with other global tokens."""
        return self._with(global_tokens=global_tokens)

    def _with(self, **changes: Any) -> Batch:
        """`replace` for changes that leave the values of ids and segments as they are."""
        out = replace(self, **changes)
        object.__setattr__(out, "_ranges", self._ranges)
        return out

    def ranges(self) -> tuple[Range, Range]:
        """The smallest and largest of the ids and of the segments: looked up once, on the host for what came from it.

        >>> Batch.from_ids([[101, 7592, 102], [101, 102]]).ranges()
        ((101, 7592), (0, 0))
        """
        if self._ranges is None:
            both = (self.ids, self.segments)
            if self.ids.device.type == "cpu":
                found = tuple((int(x.min()), int(x.max())) for x in (one.numpy() for one in both))
            else:
                found = tuple((int(x.min()), int(x.max())) for x in both)
            object.__setattr__(self, "_ranges", found)
        assert self._ranges is not None
        return self._ranges

    def text_of_token(self) -> Tensor:
        """(T,) the number of the text that each token belongs to."""
        tokens = torch.arange(len(self.ids), dtype=self.cu_seqlens.dtype, device=self.ids.device)
        return torch.searchsorted(self.cu_seqlens[1:], tokens, right=True)  # how many texts have ended by then


def send(x: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on a device. From the host to a GPU it goes by pinned memory: other memory would make the host wait."""
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def spare_ends(tokens: int, room: int, texts: int, longest: int) -> np.ndarray:
    """Where `texts` more texts end that fill a batch of so many tokens up to its room.

    First come texts of no tokens, then as many as it takes, each of at most `longest`.

    >>> spare_ends(10, 16, texts=4, longest=4).tolist()
    [10, 10, 14, 16]
    """
    full = -(-(room - tokens) // longest)
    number = np.arange(1, texts + 1) - (texts - full)
    ends: np.ndarray = np.minimum(room, tokens + np.maximum(number, 0) * longest).astype(np.int32)
    return ends


def pack(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Group texts of like length into batches of at most `budget` tokens, longest first.

    A text longer than the budget is a batch of its own. Indices let the caller restore the order.

    >>> list(pack([3, 9, 2, 4], budget=8))
    [[1], [3, 0], [2]]
    """
    if budget < 1:
        raise InputError(f"budget={budget} must be at least 1 token")
    group: list[int] = []
    used = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if group and used + lengths[index] > budget:
            yield group
            group, used = [], 0
        group.append(index)
        used += lengths[index]
    if group:
        yield group
