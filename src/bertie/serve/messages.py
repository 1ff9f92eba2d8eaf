"""Messages between front ends and engines, over Unix sockets: jobs as token ids, outputs as rows of floats.

A message is a header (its length, its kind and the number of the job) and a payload. Token ids and rows are copied as
they are; all else is pickled, which is safe between processes of one server: the socket is in a folder of their own.

Sockets rather than shared memory: sending a request's data takes one or two microseconds, the kernel wakes the
receiver, and a process that is killed at any moment leaves a closed connection, not a lock or a torn buffer.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from bertie.text.encoding import Encodings

_HEADER = struct.Struct("<IBQ")  # length of the message without this field, kind, number of the job
_JOB = struct.Struct("<IdIIIH")  # task, deadline, windows, tokens, bytes of the parameters and of the owner
_STATS = struct.Struct("<ffII")  # of a ticket: queue_s, device_s, tokens, batch_tokens
_ROWS = struct.Struct("<II")  # rows and columns
_NO_DEADLINE = float("inf")


class Kind(IntEnum):
    """What a message is."""

    TASK = 1  # a task, and the number by which jobs refer to it
    JOB = 2
    CANCEL = 3
    CALL = 4  # a function of the checkpoint
    HELLO = 5  # from an engine: the models it serves
    STATUS = 6  # from an engine: its queues, several times a second
    ROWS = 7  # outputs of equal size
    OBJECT = 8  # other outputs, or the result of a call
    ERROR = 9


class Stats(NamedTuple):
    """What a job used; see `Ticket`."""

    queue_s: float
    device_s: float
    tokens: int
    batch_tokens: int


class Job(NamedTuple):
    """A job as it arrives at an engine."""

    task: int
    windows: Encodings
    parameters: Sequence[Any] | None
    deadline: float | None
    owner: str


def encode(kind: Kind, number: int, *payload: bytes | memoryview) -> bytes:
    """A message."""
    return b"".join([_HEADER.pack(_HEADER.size - 4 + sum(map(len, payload)), kind, number), *payload])


def encode_object(kind: Kind, number: int, value: Any) -> bytes:
    """A message with a pickled payload."""
    return encode(kind, number, pickle.dumps(value, protocol=5))


def encode_job(number: int, job: Job) -> bytes:
    """A job."""
    windows, deadline = job.windows, _NO_DEADLINE if job.deadline is None else job.deadline
    parameters = b"" if job.parameters is None else pickle.dumps(job.parameters, protocol=5)
    owner = job.owner.encode()
    head = _JOB.pack(job.task, deadline, len(windows.lengths), len(windows.ids), len(parameters), len(owner))
    arrays = [array.astype(np.int32).tobytes() for array in (windows.lengths, windows.ids)]
    segments = windows.segments.astype(np.uint8).tobytes()
    return encode(Kind.JOB, number, head, *arrays, segments, owner, parameters)


def decode_job(payload: memoryview) -> Job:
    """A job as it was sent."""
    task, deadline, count, tokens, size, named = _JOB.unpack_from(payload)
    at = _JOB.size
    flat = np.frombuffer(payload, np.int32, count + tokens, at).astype(np.int64)
    at += 4 * (count + tokens)
    segments = np.frombuffer(payload, np.uint8, tokens, at).astype(np.int64)
    at += tokens
    owner = str(payload[at : at + named], "utf-8")
    parameters = pickle.loads(payload[at + named :]) if size else None
    windows = Encodings(flat[count:], segments, flat[:count])
    return Job(task, windows, parameters, None if deadline == _NO_DEADLINE else deadline, owner)


def encode_outputs(number: int, stats: Stats, outputs: Sequence[Any]) -> bytes:
    """The outputs of a job's windows."""
    head, first = _STATS.pack(*stats), outputs[0] if outputs else None
    if isinstance(first, np.ndarray) and first.ndim == 1 and first.dtype == np.float32:
        if len(outputs) == 1:
            return encode(Kind.ROWS, number, head, _ROWS.pack(1, len(first)), first.tobytes())
        if all(isinstance(row, np.ndarray) and row.shape == first.shape for row in outputs):
            rows = np.stack(outputs)
            return encode(Kind.ROWS, number, head, _ROWS.pack(*rows.shape), rows.tobytes())
    return encode(Kind.OBJECT, number, head, pickle.dumps(list(outputs), protocol=5))


def decode_outputs(kind: Kind, payload: memoryview) -> tuple[Stats, Any]:
    """The outputs of a job, or the result of a call, or an error."""
    stats = Stats(*_STATS.unpack_from(payload))
    if kind is Kind.ROWS:
        rows, columns = _ROWS.unpack_from(payload, _STATS.size)
        values = np.frombuffer(payload, np.float32, rows * columns, _STATS.size + _ROWS.size)
        return stats, list(values.reshape(rows, columns).copy())
    value = pickle.loads(payload[_STATS.size :])
    return stats, _restore_error(*value) if kind is Kind.ERROR else value


def encode_result(kind: Kind, number: int, stats: Stats, value: Any) -> bytes:
    """The result of a call, or an error, by its class and fields: many cannot be made from their message alone."""
    if kind is Kind.ERROR:
        value = (type(value), value.args, value.__dict__)
    return encode(kind, number, _STATS.pack(*stats), pickle.dumps(value, protocol=5))


def _restore_error(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class Decoder:
    """Splits a stream of bytes into messages.

    >>> decoder, message = Decoder(), encode(Kind.CANCEL, 7)
    >>> list(decoder.feed(message[:5])), [(kind.name, number) for kind, number, _ in decoder.feed(message[5:])]
    ([], [('CANCEL', 7)])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[Kind, int, memoryview]]:
        """The messages that are complete: kind, number of the job and payload."""
        data = self._rest + data if self._rest else data
        view, at = memoryview(data), 0
        while len(data) - at >= _HEADER.size:
            length, kind, number = _HEADER.unpack_from(data, at)
            if len(data) - at < 4 + length:
                break
            yield Kind(kind), number, view[at + _HEADER.size : at + 4 + length]
            at += 4 + length
        self._rest = data[at:]


class _ReferencePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: Mapping[int, str]) -> None:
        super().__init__(file, protocol=5)
        self._names = names

    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(id(obj))


class _ReferenceUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, values: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._values = values

    def persistent_load(self, name: str) -> Any:
        return self._values[name]


def pickle_with_references(value: Any, references: Mapping[str, Any]) -> bytes:
    """Pickle an object; parts of it that are among `references` only by their names."""
    file = io.BytesIO()
    names = {id(part): name for name, part in references.items() if part is not None}
    _ReferencePickler(file, names).dump(value)
    return file.getvalue()


def unpickle_with_references(data: bytes | memoryview, references: Mapping[str, Any]) -> Any:
    """The same object with this process's own parts."""
    return _ReferenceUnpickler(io.BytesIO(data), references).load()
