"""A cache of recent embeddings, between pipelines and the engine: the least recently used ones are dropped first.

A row is found again only by everything that determines it: the loaded model, the task with its options, token ids,
segment ids and the parameters of the window. A model that was reloaded, or whose engine was restarted, is another one.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from bertie.pipeline.pipeline import NonFiniteError
from bertie.serve.tickets import Ticket, TokenLimitExceeded, current_ticket
from bertie.text.encoding import Encodings

if TYPE_CHECKING:
    from bertie.serve.engine import Engine
    from bertie.serve.engine_client import RemoteEngine

ENTRY_BYTES = 512  # of an entry besides its row: its key, and the objects around it
_serial_numbers = itertools.count()  # of the loaded models of this process


class EmbeddingCache:
    """Rows by key, up to `max_bytes` in total. May be used by many threads.

    >>> cache = EmbeddingCache(2 * (ENTRY_BYTES + 4))
    >>> for key in "abc":
    ...     cache.put(key, np.ones(1, np.float32))
    >>> [row is not None for row in cache.get(["a", "b", "c"])], cache.hits, cache.misses
    ([False, True, True], 2, 1)
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = self.hits = self.misses = 0
        self._rows: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, keys: Sequence[Hashable]) -> list[np.ndarray | None]:
        """The row of each key, or None."""
        with self._lock:
            rows = [self._rows.get(key) for key in keys]
            for key, row in zip(keys, rows, strict=True):
                if row is not None:
                    self._rows.move_to_end(key)
            hits = sum(row is not None for row in rows)
            self.hits += hits
            self.misses += len(rows) - hits
        return rows

    def put(self, key: Hashable, row: np.ndarray) -> None:
        """Keep a copy of a row: it may be a view of a whole batch."""
        size = row.nbytes + ENTRY_BYTES
        if size > self.max_bytes:
            return
        row = row.copy()
        row.flags.writeable = False
        with self._lock:
            if key in self._rows:
                return
            self._rows[key] = row
            self.bytes += size
            while self.bytes > self.max_bytes:
                self.bytes -= self._rows.popitem(last=False)[1].nbytes + ENTRY_BYTES


class ModelCache:
    """The part of a cache that belongs to one loaded model."""

    def __init__(self, cache: EmbeddingCache, engine: Engine | RemoteEngine) -> None:
        self.cache, self.engine, self._serial = cache, engine, next(_serial_numbers)

    def executor(self, task: Hashable) -> CachedExecutor:
        """An executor for the task that this key names: its class and its options."""
        return CachedExecutor(self.engine, self.cache, (self._serial, task))


class CachedExecutor:
    """An executor that computes only the windows whose rows are not in the cache."""

    def __init__(self, engine: Engine | RemoteEngine, cache: EmbeddingCache, key: Hashable) -> None:
        self._engine, self._cache, self._key = engine, cache, key

    def compute(self, task: Any, windows: Encodings, parameters: Sequence[Any] | None = None) -> list[Any]:
        """The task's outputs for windows; those that are cached count as read, but not as computed."""
        keys = self._keys(windows, parameters)
        outputs: list[Any] = list(self._cache.get(keys))
        missing = [i for i, row in enumerate(outputs) if row is None]
        if len(missing) == len(outputs):
            return self._store(keys, self._engine.compute(task, windows, parameters))
        hits = int(windows.lengths.sum() - windows.lengths[missing].sum())
        _count(current_ticket.get(), hits)
        if missing:
            own = None if parameters is None else [parameters[i] for i in missing]
            try:
                computed = self._engine.compute(task, _select(windows, missing), own)
            except NonFiniteError as error:
                raise NonFiniteError(missing[error.window]) from None
            for i, row in zip(missing, self._store([keys[i] for i in missing], computed), strict=True):
                outputs[i] = row
        return outputs

    def admit(self, characters: int) -> AbstractContextManager[None]:
        """A context to tokenize texts in; see `Engine.admit`."""
        return self._engine.admit(characters)

    def check(self) -> None:
        """Raise an error if nobody waits for the result of this request any more."""
        self._engine.check()

    def _keys(self, windows: Encodings, parameters: Sequence[Any] | None) -> list[Hashable]:
        # The version is read before the forward pass: what an engine computes while it is replaced is not found again.
        prefix = (self._key, self._engine.version)
        ids, segments = windows.ids.astype(np.int32), windows.segments.astype(np.uint8)
        keys: list[Hashable] = []
        start = 0
        for i, length in enumerate(windows.lengths.tolist()):
            end = start + length
            digest = hashlib.sha256(ids[start:end].tobytes() + segments[start:end].tobytes()).digest()
            keys.append((prefix, digest, None if parameters is None else parameters[i]))
            start = end
        return keys

    def _store(self, keys: Sequence[Hashable], rows: list[Any]) -> list[Any]:
        for key, row in zip(keys, rows, strict=True):
            if isinstance(row, np.ndarray) and row.ndim == 1 and row.dtype == np.float32:
                self._cache.put(key, row)
        return rows


def _count(ticket: Ticket | None, tokens: int) -> None:
    """Count cached tokens towards the limit of a request: whether it is refused must not depend on the cache."""
    if ticket is not None:
        ticket.check()
        ticket.submitted_tokens += tokens
        if ticket.max_tokens is not None and ticket.submitted_tokens > ticket.max_tokens:
            raise TokenLimitExceeded(f"a request may have at most {ticket.max_tokens:,} tokens in all its windows")


def _select(windows: Encodings, indexes: Sequence[int]) -> Encodings:
    """Some of the windows."""
    starts, lengths = windows.starts[list(indexes)], windows.lengths[list(indexes)]
    tokens = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    return Encodings(windows.ids[tokens], windows.segments[tokens], lengths)
