"""Replies in slices: the same bytes as in one call, and no long call."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertie.serve import json_reply
from bertie.serve.json_reply import dump_json
from bertie.serve.tickets import Cancelled, Ticket
from bertie.tasks.results import FillMaskResult, MaskPrediction, TokenCandidate

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=70) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=100,
)


def whole(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def masks(count: int, candidates: int) -> FillMaskResult:
    tokens = tuple(TokenCandidate(f"tökén{i}", i, 0.5 / (i + 1), '"') for i in range(candidates))
    return FillMaskResult(tuple(MaskPrediction(i, i + 6, tokens) for i in range(count)), 1, 1, 1)


@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_the_same_bytes_as_in_one_call(value: Any) -> None:
    assert dump_json(value) == whole(value)


@pytest.mark.parametrize(
    "value",
    [
        {"model": "m", "results": [masks(3, 5), masks(0, 0)]},
        [np.arange(5, dtype=np.float32), np.array([], np.float32)],
        [np.random.default_rng(0).random((n, 7), np.float32) for n in (0, 1, 31, 32, 33, 100)],
        {"data": [{"embedding": np.ones(3, np.float32), "index": 0}], "empty": [], "none": {}},
        [[1, 2], [3]],
        (1, "two", [3.5]),
    ],
)
def test_the_values_of_replies(value: Any) -> None:
    assert dump_json(value) == whole(value)


@pytest.mark.parametrize(
    "value",
    [
        {"results": [masks(200, 500)]},
        [np.zeros((20_000, 64), np.float32)],
        [np.zeros(384, np.float32) for _ in range(4000)],
        {"data": [{"embedding": np.zeros(384, np.float32), "index": i} for i in range(4000)]},
        list(range(10**6)),
    ],
)
def test_no_call_makes_much_of_a_large_reply(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    dumps = json_reply._dumps
    monkeypatch.setattr(json_reply, "_dumps", lambda value: (sizes.append(len(part := dumps(value))), part)[1])
    total = len(dump_json(value))
    assert total > 3_000_000
    assert max(sizes) < 250_000


def test_a_cancelled_request_stops() -> None:
    ticket, calls = Ticket(), list[int]()

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            ticket.cancelled.set()
        ticket.check()

    with pytest.raises(Cancelled):
        dump_json({"results": [masks(1000, 3)]}, check)
    assert len(calls) == 3


def test_few_calls_for_many_small_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of orjson allocates a kilobyte: one per token took 300 times the memory of the reply."""
    calls: list[int] = []
    dumps = json_reply._dumps
    monkeypatch.setattr(json_reply, "_dumps", lambda value: (calls.append(1), dumps(value))[1])
    token = {"id": 2417, "text": "word", "special": False, "start": 0, "stop": 4}
    value = [[token] * 2000 for _ in range(20)]
    assert dump_json(value) == whole(value)
    assert len(calls) < 200
