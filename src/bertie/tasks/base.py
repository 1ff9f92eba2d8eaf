"""What all tasks share: texts to windows to flat batches to outputs a window, in bounded memory and in order."""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.hub import default_model
from bertie.config import HeadInfo, HeadName
from bertie.errors import InputError, NotFoundError
from bertie.nn.model import Model
from bertie.text.batch import Batch, pack
from bertie.text.encoding import Encoding
from bertie.text.tokenizer import Tokenizer, checked_text
from bertie.text.windows import Window, beginning, windows

Overflow = Literal["window", "error", "truncate"]
OVERFLOW = ("window", "error", "truncate")
FloatArray = NDArray[np.float32]

ITEMS_AT_ONCE = 1024  # read ahead, so that texts of like length can share a batch
CHARACTERS_AT_ONCE = 1 << 20
TOKENS_A_BATCH = 8192  # at most; on a CPU the numbers between two layers are to stay in its cache, too
CACHED = 24 << 20  # bytes of these
TOKENS_ON_GPU = 1 << 16  # the same on a GPU, which is not full with less

Thing = TypeVar("Thing")
Options = TypeVar("Options")
Output = TypeVar("Output")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TaskInput(Generic[Options]):
    """One thing to be read, with the options of the call it came by: many calls may go on at a time."""

    name: str  # what errors call it: "text 3"
    texts: tuple[str, ...]  # the text, or the two of a pair
    options: Options


class Task(ABC, Generic[Options, Output, Result]):
    """A checkpoint put to one use.

    `overflow` says what becomes of text beyond the model's max_length: read in overlapping windows (how their answers merge is
    each task's own), an error, or cut to its beginning.
    """

    kind: ClassVar[HeadName | None] = None  # of head; None: the task needs none
    needs: ClassVar[str] = "a head of its own kind"
    checkpoint: Checkpoint
    model: Model
    tokenizer: Tokenizer
    head: str | None  # its name in the model
    # Whether each text, or window of one, has a pass of its own: libraries choose how to multiply by the number of
    # rows, so that a text's last bits may depend on its neighbours. Slow on a GPU; of no matter to a server's queue.
    deterministic: bool = False
    # Who turns windows into outputs; None: the task itself, at once. A server puts its queue here.
    compute: Callable[[Any, Sequence[tuple[TaskInput[Any], Window]]], Sequence[Any]] | None = None

    def __init__(self, checkpoint: Checkpoint, *, overflow: Overflow = "window", head: str | None = None) -> None:
        if overflow not in OVERFLOW:
            raise InputError(f"overflow={overflow!r} must be one of {', '.join(OVERFLOW)}")
        self.overflow = overflow
        self._use(checkpoint, head)

    def _use(self, checkpoint: Checkpoint, head: str | None) -> None:
        if checkpoint.tokenizer is None:
            raise NotFoundError(f"{checkpoint.source} has no tokenizer, and reading texts needs one")
        self.head = None if self.kind is None else self._find(checkpoint, head)
        self.checkpoint, self.model, self.tokenizer = checkpoint, checkpoint.model, checkpoint.tokenizer

    @classmethod
    def _fits(cls, info: HeadInfo) -> bool:
        """Whether a head is for this task."""
        return info.kind == cls.kind

    @classmethod
    def _plain(cls, info: HeadInfo) -> bool:
        """Whether a head that fits is what one means who names none, where others fit, too."""
        return True

    @classmethod
    def _find(cls, checkpoint: Checkpoint, asked: str | None) -> str:
        """The head that was asked for, or the only one that fits; of several, the only plain one."""
        fitting = [name for name, info in checkpoint.heads.items() if cls._fits(info)]
        plain = [name for name in fitting if cls._plain(checkpoint.heads[name])]
        if asked is None and cls.kind in fitting:
            asked = cls.kind
        for choice in (fitting, plain):
            if asked is None and len(choice) == 1:
                asked = choice[0]
        if asked is None and len(fitting) > 1:
            raise InputError(
                f"{checkpoint.source} has several heads for this; pass head= with one of {', '.join(fitting)}"
            )
        if asked is None:
            assert cls.kind is not None
            asked = cls.kind
        checkpoint.model.head(asked)
        if asked not in fitting:
            info = checkpoint.heads[asked]
            raise InputError(
                f"{cls.__name__} needs {cls.needs}; the head {asked!r} of {checkpoint.source} is for "
                f"{info.task or info.kind}, with {len(info.labels)} labels"
            )
        return asked

    @property
    def info(self) -> HeadInfo:
        """What the head is for: its labels, its calibration."""
        assert self.head is not None
        return self.checkpoint.heads[self.head]

    @classmethod
    def load(
        cls, name: str | Path | None = None, *, overflow: Overflow = "window", head: str | None = None, **options: Any
    ) -> Self:
        """Load a checkpoint for this task, the built-in model if none is named; `options` are those of
        `Checkpoint.load`.

        `head`: the name of one of several heads over one encoder; or of what kind the only one is, where config.json
        does not say.
        """
        checkpoint, head = cls._loaded(name, head, options)
        return cls(checkpoint, overflow=overflow, head=head)

    @staticmethod
    def _loaded(name: str | Path | None, head: str | None, options: dict[str, Any]) -> tuple[Checkpoint, str | None]:
        """The checkpoint, and the name of the head that was asked for."""
        name = default_model() if name is None else name
        if head in get_args(HeadName):
            return Checkpoint.load(name, head=head, **options), None  # type: ignore[arg-type]
        return Checkpoint.load(name, **options), head

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the checkpoint."""
        self.checkpoint.save(folder, overwrite=overwrite)

    # --- what a task says of itself ---

    @abstractmethod
    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[Options]], group: Sequence[Window]
    ) -> Sequence[Output]:
        """What the head says of each window; `asks` says what each is a window of."""

    @abstractmethod
    def decode(self, ask: TaskInput[Options], found: Sequence[Window], outputs: Sequence[Output]) -> Result:
        """From the windows of one thing and their outputs to its result."""

    # --- the straight line ---

    def run(self, asks: Iterable[TaskInput[Options]]) -> Iterator[Result]:
        """Results one by one, in order. However many there are, few are held at a time."""
        for chunk in chunked(asks, lambda ask: sum(map(len, ask.texts))):
            encoded = self.tokenizer.encode_batch([_one_or_two(ask.texts) for ask in chunk])
            read = [self.windows(ask, encoding) for ask, encoding in zip(chunk, encoded, strict=True)]
            flat = [(ask, window) for ask, found in zip(chunk, read, strict=True) for window in found]
            outputs = deque(self._outputs(flat) if self.compute is None else self.compute(self, flat))
            for ask, found in zip(chunk, read, strict=True):
                yield self.decode(ask, found, [outputs.popleft() for _ in found])

    @torch.inference_mode()
    def _outputs(self, flat: Sequence[tuple[TaskInput[Options], Window]]) -> Sequence[Output]:
        said: list[tuple[list[int], Sequence[Output]]] = []
        for group in pack([len(window) for _, window in flat], self.budget):
            members = [flat[i][1] for i in group]
            batch = Batch.from_encodings([window.encoding for window in members]).to(self.model.device)
            hidden = self.model.hidden(batch, self.head)
            said.append((group, self.outputs(hidden, batch, [flat[i][0] for i in group], members)))
        # Not looked at before all are on their way: see `copied`.
        outputs = {i: output for group, some in said for i, output in zip(group, some, strict=True)}
        return [outputs[i] for i in range(len(flat))]

    @property
    def budget(self) -> int:
        """Tokens a batch. A text that has more is a batch of its own."""
        if self.deterministic:
            return 1
        if self.model.device.type != "cpu":
            return TOKENS_ON_GPU
        shape = self.model.config
        return min(TOKENS_A_BATCH, CACHED // (4 * shape.ff_width * (2 if shape.gated else 1)))

    def windows(self, ask: TaskInput[Options], encoding: Encoding) -> list[Window]:
        """The windows of one thing, as `overflow` says."""
        max_length = self.checkpoint.max_length
        if len(encoding) > max_length and self.overflow == "error":
            raise InputError(
                f"{ask.name} has {len(encoding)} tokens and the model reads {max_length} at once; shorten it, or pass "
                "overflow='window' to read it in windows or overflow='truncate' to read its beginning only"
            )
        cut = beginning if self.overflow == "truncate" else windows
        return cut(encoding, ask.texts, max_length)

    # --- for tasks to use ---

    def rows(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The head's outputs: a row a token or a row a text."""
        assert self.head is not None
        out: Tensor = self.model.head(self.head)(hidden, batch, self.model.encoder.embeddings.words.weight)
        return out.float()

    @staticmethod
    def by_token(rows: Tensor, batch: Batch) -> PendingCopy:
        """(T, n) cut into texts."""
        return PendingCopy(rows, lambda host: np.split(host, np.cumsum(batch.lengths)[:-1]), len(batch))

    @staticmethod
    def by_text(rows: Tensor) -> PendingCopy:
        """(B, n) cut into texts."""
        return PendingCopy(rows, list, len(rows))


class PendingCopy(Sequence[FloatArray]):
    """Rows on their way from a device to the host, which goes on meanwhile; who looks at one waits for all.

    >>> list(PendingCopy(torch.eye(2), list, 2))
    [array([1., 0.], dtype=float32), array([0., 1.], dtype=float32)]
    """

    def __init__(self, rows: Tensor, cut: Callable[[FloatArray], list[FloatArray]], length: int) -> None:
        self._cut, self._length = cut, length
        self._rows, self._done = rows, None
        if rows.is_cuda:
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    @cached_property
    def host(self) -> FloatArray:
        """All rows."""
        if self._done is not None:
            self._done.synchronize()
        return self._rows.cpu().numpy()

    @cached_property
    def _parts(self) -> list[FloatArray]:
        return self._cut(self.host)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[FloatArray]:
        return iter(self._parts)

    def __getitem__(self, index: Any) -> Any:
        return self._parts[index]


def chunked(things: Iterable[Thing], characters: Callable[[Thing], int]) -> Iterator[list[Thing]]:
    """As many at a time as are read ahead."""
    chunk: list[Thing] = []
    size = 0
    for thing in things:
        chunk.append(thing)
        size += characters(thing)
        if len(chunk) >= ITEMS_AT_ONCE or size > CHARACTERS_AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def ahead(call: Callable[[Thing], Output], things: Iterable[Thing], threads: int) -> Iterator[tuple[Thing, Output]]:
    """Each thing with what the call makes of it, in order; made by so many threads while earlier ones are in use.

    With no threads, nothing is taken from `things` before its turn.

    >>> list(ahead(str.upper, ["a", "b", "c"], threads=2))
    [('a', 'A'), ('b', 'B'), ('c', 'C')]
    """
    if not threads:
        yield from ((thing, call(thing)) for thing in things)
        return
    waiting: deque[tuple[Thing, Future[Output]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for thing in things:
                waiting.append((thing, pool.submit(call, thing)))
                if len(waiting) > threads:
                    first, made = waiting.popleft()
                    yield first, made.result()
            while waiting:
                first, made = waiting.popleft()
                yield first, made.result()
        finally:  # nobody waits for the rest if one failed
            for _, made in waiting:
                made.cancel()


def _one_or_two(texts: tuple[str, ...]) -> str | tuple[str, str]:
    return (texts[0], texts[1]) if len(texts) == 2 else texts[0]


# --- what comes in ---


def listed(things: Iterable[Thing], verb: str, what: str = "texts") -> Iterable[Thing]:
    """The things, unless they are a single text or a table, which would be read by letters or by names of columns."""
    if isinstance(things, str | bytes | Mapping) or hasattr(things, "columns") or not isinstance(things, Iterable):
        kind = type(things).__name__
        raise InputError(f"{verb} takes a list of {what}, not {kind}; put a single one into a list")
    return things


def single(text: Any, name: str) -> tuple[str]:
    """One text, checked."""
    return (checked_text(text, name),)


def pair(texts: Any, name: str, what: str = "a pair of texts") -> tuple[str, str]:
    """Two texts, checked."""
    if not isinstance(texts, tuple | list) or len(texts) != 2:
        got = f"{len(texts)} things" if isinstance(texts, tuple | list) else type(texts).__name__
        raise InputError(f"{name} must be {what}, not {got}")
    return checked_text(texts[0], f"{name}, first of its pair"), checked_text(texts[1], f"{name}, second of its pair")


def singles(texts: Iterable[str], verb: str, options: Options) -> Iterator[TaskInput[Options]]:
    """Texts with their numbers. What is no list is refused at once, what is no text when it is reached."""
    named = ((text, f"text {i}") for i, text in enumerate(listed(texts, verb)))
    return (TaskInput(name, single(text, name), options) for text, name in named)


def at_least_one(**values: int | None) -> None:
    """Refuse an option below 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise InputError(f"{name}={value} must be at least 1")


# --- what goes out ---


def reading(found: Sequence[Window]) -> dict[str, int]:
    """How much of a text was read: for every result."""
    first = found[0]
    total = first.whole.text_tokens
    read = total if len(first) == len(first.whole) else sum(window.tokens_read for window in found)
    return {"tokens_total": total, "tokens_read": read, "windows": len(found)}


def pooled(found: Sequence[Window], outputs: Sequence[FloatArray]) -> FloatArray:
    """The mean of the windows' outputs, weighted by the tokens that each answers for. One window is itself."""
    if len(outputs) == 1:
        return outputs[0]
    weights = np.array([window.weight for window in found])
    mean = np.average(np.stack(outputs).astype(np.float64), axis=0, weights=weights)
    return mean.astype(np.float32)


def owned(found: Sequence[Window], outputs: Sequence[FloatArray]) -> tuple[NDArray[np.int64], FloatArray]:
    """The tokens of the whole that were read, special ones left out, each with the row of the window it belongs to."""
    mine = [window.owned & (window.encoding.sequence_ids >= 0) for window in found]
    places = np.concatenate([window.places[own] for window, own in zip(found, mine, strict=True)])
    rows = np.concatenate([output[own] for output, own in zip(outputs, mine, strict=True)])
    order = np.argsort(places, kind="stable")
    return places[order], rows[order]


def trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The same stretch of text without spaces at its ends, and with the accents of its last letter.

    Some tokenizers count a space to the word beside it, and some drop accents before they count.
    """
    while text[end : end + 1] and unicodedata.category(text[end])[0] == "M":
        end += 1
    inside = text[start:end]
    if not inside.strip():
        return start, end
    return start + len(inside) - len(inside.lstrip()), end - len(inside) + len(inside.rstrip())


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
