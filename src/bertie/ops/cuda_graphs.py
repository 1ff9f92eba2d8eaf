"""Passes over small batches, recorded once for each size and then played back by one launch (CUDA graphs).

A small batch on a large GPU waits for Python to launch kernels. `model.graphs = Graphs()` has a model's passes recorded
from the second batch of a size on. A recorded size is a little larger than what it holds: the rest are texts of no
tokens, and texts of whatever lay there before, whose rows nobody reads. What cannot be recorded runs as it is; so does
everything that needs gradients, and everything on a CPU. Weights may change in place; for other changes of a model
than `to`, call `forget`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertie.config import Disentangled
from bertie.ops.torch import varlen_attention as gpu
from bertie.ops.triton import disentangled_attention as disentangled
from bertie.ops.triton.fused import _power_of_2
from bertie.text.batch import Batch, spare_ends

if TYPE_CHECKING:
    from bertie.nn.encoder import Encoder

SHORTEST = 16  # tokens of the longest text; below, attention has the same work
STEP = 64  # tokens: the least that sizes differ by
REMEMBERED = 1024  # sizes that were seen
WARM = 2  # passes before one is recorded: libraries set themselves up, programs are compiled

Run = Callable[[Batch], Tensor]


class Sizes(NamedTuple):
    """What a recording has room for."""

    tokens: int
    texts: int
    longest: int


def sizes_of(lengths: Sequence[int], max_length: int) -> Sizes:
    """The size for a batch of texts: few sizes serve all, with at most a sixteenth of spare tokens, or 63.

    >>> sizes_of([16] * 64, 512), sizes_of([9, 30, 12], 512)
    (Sizes(tokens=1024, texts=96, longest=16), Sizes(tokens=64, texts=8, longest=32))
    """
    tokens = sum(lengths)
    longest = min(max_length, max(SHORTEST, _power_of_2(max(lengths))))
    room = _up(tokens, max(STEP, _power_of_2(tokens) // 32))
    # One more than there can be, so that texts of the longest kind could not fill the room: that bounds are no lengths
    # is what tells them apart (ops/triton/disentangled_attention.py).
    texts = len(lengths) + -(-(room - tokens) // longest) + 1
    return Sizes(room, _up(texts, max(8, _power_of_2(texts) // 4)), longest)


def _up(n: int, step: int) -> int:
    """The first multiple that is not below n."""
    return -(-n // step) * step


def can(encoder: Encoder) -> bool:
    """Whether its passes are the same sequence of kernels for all batches of a size, as things are now."""
    cfg, words = encoder.cfg, encoder.embeddings.words.weight
    if not words.is_cuda or encoder.training or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return False
    if cfg.global_tokens or cfg.conv is not None:
        return False
    q, k = (torch.empty(0, heads, cfg.head_width, dtype=words.dtype, device=words.device) for heads in _heads(encoder))
    if encoder.relative is None:
        return all(gpu.can(q, (1,), pattern, None, None, 0.0) for pattern in set(cfg.patterns))
    if not isinstance(encoder.relative.scheme, Disentangled):
        return False
    return all(disentangled.can(q, k, pattern, None) for pattern in set(cfg.patterns))


def _heads(encoder: Encoder) -> tuple[int, int]:
    return encoder.cfg.heads, encoder.cfg.kv_heads


@dataclass(slots=True)
class _Recording:
    batch: Batch  # which is read when it is played
    play: Callable[[], object]
    out: Tensor


class Graphs:
    """Recordings of a model's passes: at most so many, of batches of at most so many tokens. Threads may share them.

    >>> classifier = Classifier.load("path/to/folder", device="cuda", precision="bf16")         # doctest: +SKIP
    >>> classifier.model.graphs = Graphs()                                                          # doctest: +SKIP
    """

    def __init__(self, most: int = 64, tokens: int = 16384) -> None:
        self.most, self.tokens = most, tokens
        self._lock = Lock()
        self._recordings: OrderedDict[tuple[str, Sizes], _Recording] = OrderedDict()  # the latest used last
        self._seen: OrderedDict[tuple[str, Sizes], bool] = OrderedDict()  # False: cannot be recorded
        self._pool: Any = None
        self._side: Any = None  # the stream that records
        self._done: Any = None  # when the last one played has given its rows

    def __reduce__(self) -> tuple[Any, ...]:
        return Graphs, (self.most, self.tokens)  # a copy of a model records its own

    def __len__(self) -> int:
        return len(self._recordings)

    def forget(self) -> None:
        """Drop all recordings."""
        with self._lock:
            self._settle()
            self._recordings.clear()
            self._seen.clear()
            self._pool = self._side = self._done = None  # they are of a device

    def __call__(self, name: str, run: Run, batch: Batch, *, max_length: int, rows: Literal["token", "text"]) -> Tensor:
        """run(batch), whose rows are of tokens or of texts; `name` says what else it depends on."""
        if not self._takes(batch, max_length):
            return run(batch)
        key = (name, sizes_of(batch.lengths, max_length))
        with self._lock:
            recording = self._found(key, run, batch)
            if recording is not None:
                count = len(batch.ids) if rows == "token" else len(batch)
                with self._in_turn(batch.ids.device):
                    put(batch, recording.batch)
                    recording.play()
                    return recording.out[:count].clone()
        return run(batch)

    def _takes(self, batch: Batch, max_length: int) -> bool:
        return (
            batch.ids.is_cuda
            and batch.global_tokens is None
            and len(batch.ids) <= self.tokens
            and batch.max_len <= max_length
            and sum(batch.lengths) == len(batch.ids)  # else it has spare room already
            and not torch.cuda.is_current_stream_capturing()
        )

    def _found(self, key: tuple[str, Sizes], run: Run, batch: Batch) -> _Recording | None:
        """The recording, made at the second sight of a size; None if there is none."""
        if key in self._recordings:
            self._recordings.move_to_end(key)
            return self._recordings[key]
        again = self._seen.get(key)
        if again is None:
            self._seen[key] = True
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
        if not again:
            return None
        while len(self._recordings) >= max(1, self.most):
            self._settle()
            self._recordings.popitem(last=False)
        # Weights and what is kept beside them are no inference tensors; neither is what is written to later.
        with torch.inference_mode(False), torch.no_grad():
            static = empty(key[1], batch.ids.device)
            try:
                put(batch, static)
                self._recordings[key] = _Recording(static, *self._recorded(run, static))
            except RuntimeError:  # of the device, for which there are no classes; `run` itself will say what is wrong
                self._seen[key] = False
                return None
        return self._recordings[key]

    def _recorded(self, run: Run, static: Batch) -> tuple[Callable[[], object], Tensor]:
        """What plays a pass, and where its rows lie then."""
        device = static.ids.device
        with torch.cuda.device(device):
            if self._side is None:
                self._pool = torch.cuda.graph_pool_handle()
                self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._settle()
            self._side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._side):
                for _ in range(WARM):
                    run(static)
            torch.cuda.current_stream(device).wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on with the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                out = run(static)
        return graph.replay, out

    @contextmanager
    def _in_turn(self, device: torch.device) -> Iterator[None]:
        """Recordings share their memory: on whichever stream, one is played after the other."""
        if self._done is None:
            yield
            return
        stream = torch.cuda.current_stream(device)
        stream.wait_event(self._done)
        with torch.cuda.device(device):
            yield
        self._done.record(stream)

    def _settle(self) -> None:
        if self._done is not None:
            self._done.synchronize()


def empty(sizes: Sizes, device: torch.device) -> Batch:
    """A batch to be filled. What its host side says of lengths are bounds; `cu_seqlens` has the truth."""
    ids = torch.zeros(sizes.tokens, dtype=torch.long)
    ends = torch.zeros(sizes.texts + 1, dtype=torch.int32)
    bounds = (sizes.longest,) * sizes.texts
    return Batch(ids, ids.clone(), ids.clone(), ends, bounds).to(device)


def put(batch: Batch, static: Batch) -> None:
    """Lay a batch into a larger one, in front. Behind it lies what lay there: valid ids, segments and positions."""
    tokens = len(batch.ids)
    for name in ("ids", "segments", "positions"):
        getattr(static, name)[:tokens].copy_(getattr(batch, name))
    more = spare_ends(tokens, len(static.ids), len(static) - len(batch), static.max_len)
    ends = torch.from_numpy(np.concatenate([[0], np.cumsum(batch.lengths), more]).astype(np.int32))
    # By pinned memory: from other memory the host would wait for the device.
    static.cu_seqlens.copy_(ends.pin_memory() if static.ids.is_cuda else ends, non_blocking=True)
