"""The soak test would notice what it looks for."""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
import pytest
from benchmarks.serve_load import Link
from benchmarks.soak import SLACK, WARM_UP, Case, Soak, near

from bertie.tasks.tag import Span, Tagged


def spans(score: float, label: str = "PER") -> list[Tagged]:
    return [Tagged((Span(label, 0, 3, "Ada", score),), 5, 5, 1)]


def test_near() -> None:
    assert near(spans(0.5), spans(0.500001))
    assert not near(spans(0.5), spans(0.51))
    assert not near(spans(0.5), spans(0.5, "LOC"))
    assert not near(spans(0.5), [])
    assert not near({"a": 1.0}, {"b": 1.0})
    assert near([np.ones(3)], [np.ones(3) + 1e-6])
    assert not near([np.ones(3)], [np.ones(4)])


CASE = Case("/embed", b"{}", list, [1.0, 2.0])
GOOD = b"http/1.1 200 ok\r\nx-request-id: a"


def soaking() -> Soak:
    return Soak("127.0.0.1", 1, [CASE], 0, time.monotonic() + 60)


def replied(body: object, head: bytes = GOOD, unasked: int = 0) -> Link:
    made = Link()
    made.head, made.body, made.unasked = head, json.dumps(body).encode(), unasked
    return made


def test_a_right_answer_is_one() -> None:
    one = soaking()
    assert one.predictions(CASE, replied([1.0, 2.000001]), "200", "a")
    assert one.counts["answered"] == 1
    assert not one.problems


@pytest.mark.parametrize(
    ("made", "status", "words"),
    [
        (replied([1.0, 2.1]), "200", "is not"),
        (replied([1.0]), "200", "is not"),
        (replied(None), "200", "unreadable"),
        (replied([1.0, 2.0], GOOD, 3), "200", "answered twice"),
        (replied([1.0, 2.0], b"http/1.1 200 ok\r\nx-request-id: b"), "200", "another request"),
        (replied({"error": "x"}), "500", "status 500"),
        (replied({"error": "x"}), "429", "status 429"),  # without a word on when to come back
        (replied({"error": "x"}), "422", "status 422"),
        (None, "hung up", "no worker was killed"),
    ],
)
def test_a_wrong_one_is_noticed(made: Link | None, status: str, words: str) -> None:
    one = soaking()
    one.predictions(CASE, made, status, "a")
    assert any(words in problem for problem in one.problems)


def test_what_is_announced_or_due_to_a_kill_is_asked_again() -> None:
    one = soaking()
    assert not one.predictions(CASE, replied({}, GOOD + b"\r\nretry-after: 1"), "429", "a")
    one.kills.append(time.monotonic())
    assert not one.predictions(CASE, None, "hung up", "a")
    assert not one.problems
    assert one.counts == {"refused with 429": 1, "asked again after a kill": 1}


def test_wrong_doers_may_be_cut_off_but_not_crash_it() -> None:
    one = soaking()
    for status in ("400", "413", "200", "refused", "cut off"):
        one.wronged("garbage", status)
    assert not one.problems
    for status in ("500", "timeout", "503", "504"):
        one.wronged("garbage", status)
    assert len(one.problems) == 4


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (b"HTTP/1.1 422 No\r\na: b\r\n\r\n", "422"),
        (b"HTTP/1.1 503 Later\r\nretry-after: 1\r\n\r\n", "refused"),
        (b"HTTP/1.1 503 Later\r\na: b\r\n\r\n", "503"),
        (b"", "cut off"),
    ],
)
def test_a_refusal_says_when_to_come_back(reply: bytes, status: str) -> None:
    async def read() -> str:
        reader = asyncio.StreamReader()
        reader.feed_data(reply)
        reader.feed_eof()
        return await soaking().status(reader, 5)

    assert asyncio.run(read()) == status


def test_memory_is_compared_after_the_warm_up() -> None:
    one = soaking()
    one.memory = [(float(i), SLACK if i <= WARM_UP else SLACK * i) for i in range(160)]
    first, last = one.thirds()
    assert 60 * SLACK < first < 100 * SLACK
    assert last > 120 * SLACK
