"""What all tasks share: texts to windows to flat batches to outputs a window, in bounded memory and in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertie.config import HeadName
from bertie.errors import InputError, NotFoundError
from bertie.hub import Checkpoint
from bertie.text.batch import Batch, pack
from bertie.text.tokenizer import Encoding
from bertie.text.windows import Window, beginning, windows

Long = Literal["window", "error", "truncate"]
LONG = ("window", "error", "truncate")
FloatArray = NDArray[np.float32]

ITEMS_AT_ONCE = 1024  # read ahead, so that texts of like length can share a batch
CHARACTERS_AT_ONCE = 1 << 20
TOKENS_A_BATCH = 8192

Item = TypeVar("Item")
Result = TypeVar("Result")


class Task(ABC, Generic[Item, Result]):
    """A checkpoint put to one use.

    `long` says what becomes of text beyond the model's reach: read in overlapping windows (how their answers merge is
    each task's own), an error, or cut to its beginning.
    """

    head: ClassVar[HeadName | None] = None

    def __init__(self, checkpoint: Checkpoint, *, long: Long = "window") -> None:
        if long not in LONG:
            raise InputError(f"long={long!r} must be one of {', '.join(LONG)}")
        if checkpoint.tokenizer is None:
            raise NotFoundError(f"{checkpoint.source} has no tokenizer, and reading texts needs one")
        if self.head is not None:
            checkpoint.model.head(self.head)
        self.checkpoint = checkpoint
        self.model = checkpoint.model
        self.tokenizer = checkpoint.tokenizer
        self.long = long

    @classmethod
    def load(cls, name: str | Path, *, long: Long = "window", **options: Any) -> Self:
        """Load a checkpoint for this task; `options` are those of `Checkpoint.load`."""
        return cls(Checkpoint.load(name, **options), long=long)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the checkpoint."""
        self.checkpoint.save(folder, overwrite=overwrite)

    # --- what a task says of itself ---

    @abstractmethod
    def texts(self, item: Item) -> tuple[str, ...]:
        """The text, or the two texts, that an item is read as."""

    @abstractmethod
    def outputs(self, hidden: Tensor, batch: Batch, group: Sequence[Window]) -> Sequence[FloatArray]:
        """What the head says of each window."""

    @abstractmethod
    def decode(self, item: Item, found: Sequence[Window], outputs: Sequence[FloatArray]) -> Result:
        """From the windows of one item and their outputs to its result."""

    # --- the straight line ---

    def run(self, items: Iterable[Item]) -> Iterator[Result]:
        """Results one by one, in the order of the items. However many there are, few are held at a time."""
        waiting = iter(items)
        while chunk := list(self._some(waiting)):
            yield from self._chunk(chunk)

    def _some(self, items: Iterator[Item]) -> Iterator[Item]:
        size = 0
        for item in islice(items, ITEMS_AT_ONCE):
            yield item
            size += sum(map(len, self.texts(item)))
            if size > CHARACTERS_AT_ONCE:
                return

    @torch.inference_mode()
    def _chunk(self, items: Sequence[Item]) -> Iterator[Result]:
        texts = [self.texts(item) for item in items]
        encoded = self.tokenizer.encode_batch([pair if len(pair) == 2 else pair[0] for pair in texts])
        read = [self.windows(index, *one) for index, one in enumerate(zip(encoded, texts, strict=True))]
        flat = [window for found in read for window in found]
        outputs: list[FloatArray | None] = [None] * len(flat)
        for group in pack([len(window) for window in flat], TOKENS_A_BATCH):
            members = [flat[i] for i in group]
            batch = Batch.from_encodings([window.encoding for window in members]).to(self.model.device)
            hidden = self.model.hidden(batch, self.head)
            for i, output in zip(group, self.outputs(hidden, batch, members), strict=True):
                outputs[i] = output
        start = 0
        for item, found in zip(items, read, strict=True):
            yield self.decode(item, found, [o for o in outputs[start : start + len(found)] if o is not None])
            start += len(found)

    def windows(self, index: int, encoding: Encoding, texts: tuple[str, ...]) -> list[Window]:
        """The windows of one item, as `long` says."""
        reach = self.checkpoint.reach
        if len(encoding) > reach and self.long == "error":
            raise InputError(
                f"text {index} has {len(encoding)} tokens and the model reads {reach} at once; shorten it, or pass "
                "long='window' to read it in windows or long='truncate' to read its beginning only"
            )
        cut = beginning if self.long == "truncate" else windows
        return cut(encoding, texts, reach)

    # --- for tasks to use ---

    def rows(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The head's outputs: a row a token or a row a text."""
        assert self.head is not None
        out: Tensor = self.model.head(self.head)(hidden, batch, self.model.encoder.embeddings.words.weight)
        return out.float()

    @staticmethod
    def by_token(rows: Tensor, batch: Batch) -> list[FloatArray]:
        """(T, n) cut into texts."""
        return np.split(rows.cpu().numpy(), np.cumsum(batch.lengths)[:-1])

    @staticmethod
    def by_text(rows: Tensor) -> list[FloatArray]:
        """(B, n) cut into texts."""
        return list(rows.cpu().numpy())


def reading(found: Sequence[Window]) -> dict[str, int]:
    """How much of a text was read: for every result."""
    return {
        "tokens_total": int((found[0].whole.sources >= 0).sum()),
        "tokens_read": sum(window.tokens_read for window in found),
        "windows": len(found),
    }


def pooled(found: Sequence[Window], outputs: Sequence[FloatArray]) -> FloatArray:
    """The mean of the windows' outputs, weighted by the tokens that each answers for. One window is itself."""
    if len(outputs) == 1:
        return outputs[0]
    weights = np.array([window.tokens_read for window in found], dtype=np.float64)
    mean = np.average(np.stack(outputs).astype(np.float64), axis=0, weights=weights)
    return mean.astype(np.float32)


def owned(found: Sequence[Window], outputs: Sequence[FloatArray]) -> FloatArray:
    """(n, …) for each token of the whole, the row of the window that answers for it. Unread tokens have nan."""
    if len(outputs) == 1 and len(found[0]) == len(found[0].whole):
        return outputs[0]
    out = np.full((len(found[0].whole), *outputs[0].shape[1:]), np.nan, dtype=np.float32)
    for window, rows in zip(found, outputs, strict=True):
        out[window.places[window.owned]] = rows[window.owned]
    return out


def softmax(x: FloatArray) -> FloatArray:
    """Over the last axis."""
    y = np.exp(x - x.max(axis=-1, keepdims=True))
    out: FloatArray = y / y.sum(axis=-1, keepdims=True)
    return out


def log_softmax(x: FloatArray) -> FloatArray:
    """Over the last axis."""
    y = x - x.max(axis=-1, keepdims=True)
    out: FloatArray = y - np.log(np.exp(y).sum(axis=-1, keepdims=True))
    return out


def sigmoid(x: FloatArray) -> FloatArray:
    """1 / (1 + exp(−x)), without overflow."""
    out: FloatArray = np.exp(-np.logaddexp(0, -x))
    return out
