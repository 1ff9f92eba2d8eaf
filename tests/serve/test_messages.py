"""Messages between processes: what is sent arrives, in pieces of any size."""

from __future__ import annotations

import numpy as np
import pytest

from bertie.serve import messages
from bertie.serve.messages import Decoder, Job, Kind, Stats
from bertie.serve.tickets import Refused
from bertie.text.encoding import Encodings

STATS = Stats(0.5, 0.25, 7, 9)


def test_jobs() -> None:
    windows = Encodings(np.array([101, 30000, 102, 101]), np.array([0, 1, 1, 0]), np.array([3, 1]))
    for parameters, deadline in (([{"k": 1}, None], 12.5), (None, None)):
        data = messages.encode_job(3, Job(2, windows, parameters, deadline, "ключ"))
        ((kind, number, payload),) = Decoder().feed(data)
        job = messages.decode_job(payload)
        assert (kind, number) == (Kind.JOB, 3)
        assert (job.task, job.parameters, job.deadline, job.owner) == (2, parameters, deadline, "ключ")
        for name in ("ids", "segments", "lengths"):
            np.testing.assert_array_equal(getattr(job.windows, name), getattr(windows, name))
            assert getattr(job.windows, name).dtype == np.int64


@pytest.mark.parametrize(
    "outputs",
    [
        [np.arange(3, dtype=np.float32)],
        [np.arange(3, dtype=np.float32), np.ones(3, np.float32)],
        [np.ones((2, 3), np.float32), np.ones((4, 3), np.float32)],
        [np.ones(2, np.float32), np.ones(3, np.float32)],
        [(np.arange(3), np.ones(3, np.float32))],
    ],
    ids=["one row", "rows", "matrices", "rows of different lengths", "tuples"],
)
def test_outputs(outputs: list[object]) -> None:
    ((kind, _, payload),) = Decoder().feed(messages.encode_outputs(5, STATS, outputs))
    stats, values = messages.decode_outputs(kind, payload)
    assert stats == STATS
    assert len(values) == len(outputs)
    for value, output in zip(values, outputs, strict=True):
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (value, output)), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


def test_errors_keep_their_fields() -> None:
    ((kind, _, payload),) = Decoder().feed(messages.encode_result(Kind.ERROR, 1, STATS, Refused("full", 2.5)))
    _, error = messages.decode_outputs(kind, payload)
    assert isinstance(error, Refused)
    assert (str(error), error.retry_after) == ("full", 2.5)


def test_pieces_of_any_size() -> None:
    sent = [messages.encode(Kind.CANCEL, n, b"x" * n) for n in range(40)]
    data = b"".join(sent)
    for size in (1, 3, 12, 13, 14, 1000):
        decoder = Decoder()
        parts = [bytes(p) for at in range(0, len(data), size) for _, _, p in decoder.feed(data[at : at + size])]
        assert parts == [b"x" * n for n in range(40)]


def test_references_are_not_copied() -> None:
    shared = [1, 2, 3]
    data = messages.pickle_with_references({"a": shared, "b": [shared]}, {"shared": shared})
    mine: list[int] = []
    value = messages.unpickle_with_references(data, {"shared": mine})
    assert value["a"] is mine
    assert value["b"][0] is mine
