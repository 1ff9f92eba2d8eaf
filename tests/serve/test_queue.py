"""The queue: bounded, fair, and nobody is left without an answer. A clock of its own, so that nothing waits."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertie.errors import ConfigError
from bertie.serve.queue import (
    TURN,
    Cancelled,
    Closed,
    Expired,
    JobSlice,
    Queue,
    QueuedJob,
    Refused,
    Ticket,
    TokenLimitExceeded,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def job(*lengths: int, name: str = "", deadline: float | None = None) -> QueuedJob:
    return QueuedJob(Ticket(name, deadline), None, lengths)


def tokens(parts: list[JobSlice]) -> int:
    return sum(sum(part.job.lengths[part.first : part.last]) for part in parts)


def answer(queue: Queue, parts: list[JobSlice]) -> None:
    queue.answer((part.job, i, i) for part in parts for i in range(part.first, part.last))


def done(one: QueuedJob) -> bool:
    return one.wait(0)


def test_short_requests_do_not_wait_for_long_ones() -> None:
    queue = Queue()
    long, short = job(*[256] * 500), job(10)
    queue.put(long)
    queue.put(short)
    first = queue.take(1024)
    assert [(part.job, part.first, part.last) for part in first] == [(long, 0, 3), (short, 0, 1)]
    assert tokens(first) <= 1024


def test_long_requests_are_not_starved() -> None:
    queue = Queue()
    long = job(*[400] * 6)
    queue.put(long)
    rounds = 0
    while long.taken < 6:
        for _ in range(20):  # as many as fill a batch, each time
            queue.put(job(50))
        queue.take(1000)
        rounds += 1
        assert rounds < 30
    # Of each round of the ring it gets one turn; the ring grows by 20 a batch.
    assert rounds <= 20


def test_a_window_beyond_the_budget_is_a_batch_of_its_own() -> None:
    queue = Queue()
    small, large = job(10), job(5000)
    queue.put(small)
    queue.put(large)
    assert [part.job for part in queue.take(1000)] == [small]
    queue.put(job(10))
    assert [part.job for part in queue.take(1000)] == [large], "it did not fit and goes first now"


def test_requests_that_would_wait_too_long_are_refused() -> None:
    queue = Queue(2.0)
    queue.rate = 100.0
    for _ in range(5):
        queue.check()
        queue.put(job(50))
    with pytest.raises(Refused, match=r"takes about 2\.5 s, and it may wait for 2 s") as refused:
        queue.put(job(50))
    assert refused.value.retry_after == pytest.approx(0.5)
    with pytest.raises(Refused):
        queue.check()
    queue.take(50)
    queue.put(job(50))


def test_the_room_follows_the_rate() -> None:
    queue = Queue(2.0)
    for _ in range(10):
        queue.put(job(50))  # how long they will take is not known yet
    queue.rate = 100.0
    with pytest.raises(Refused):
        queue.put(job(50))
    queue.rate = 250.0
    queue.put(job(50))
    queue.rate = 1.0
    with pytest.raises(Refused):
        queue.put(job(50))
    queue.least = 550  # however slow it is
    queue.put(job(50))


def test_a_request_counts_for_its_next_turn() -> None:
    queue = Queue()
    queue.put(job(*[100] * 500))
    assert queue.waiting == TURN
    queue.put(job(700, 10))
    assert queue.waiting == TURN + 700
    parts = queue.take(10**9)
    assert tokens(parts) == 50_710
    assert queue.waiting == 0


def test_cancelled_requests_do_not_count() -> None:
    queue = Queue(2.0)
    queue.rate = 90.0
    gone = [job(50) for _ in range(4)]
    for one in gone:
        queue.put(one)
    gone[1].ticket.cancelled.set()
    late = job(50)
    queue.put(late)
    assert done(gone[1])
    assert isinstance(gone[1].error, Cancelled)
    gone[0].ticket.cancelled.set()
    assert [part.job for part in queue.take(1000)] == [gone[2], gone[3], late]
    assert isinstance(gone[0].error, Cancelled)
    assert queue.waiting == 0


def test_all_jobs_of_a_request_count_towards_its_token_limit() -> None:
    queue, ticket = Queue(), Ticket(max_tokens=100)
    queue.put(QueuedJob(ticket, None, [60]))
    queue.put(QueuedJob(ticket, None, [40]))
    with pytest.raises(TokenLimitExceeded, match="at most 100 tokens"):
        queue.put(QueuedJob(ticket, None, [1]))
    assert (len(queue), ticket.submitted_tokens) == (2, 101)


def test_deadlines() -> None:
    clock = Clock()
    queue = Queue(clock=clock)
    late, soon = job(10, deadline=5.0), job(10, deadline=20.0)
    queue.put(late)
    queue.put(soon)
    clock.now = 6.0
    assert [part.job for part in queue.take(1000)] == [soon]
    assert isinstance(late.error, Expired)
    assert soon.ticket.queue_s == pytest.approx(6.0)
    with pytest.raises(Expired, match="before the request was queued"):
        queue.put(job(10, deadline=6.0))


def test_deadlines_that_cannot_be_met_are_refused() -> None:
    queue = Queue(60.0, clock=Clock())
    queue.rate = 100.0
    queue.put(job(*[100] * 20))
    queue.put(job(100, deadline=7.0))  # 512 of the first, and itself
    with pytest.raises(Refused, match=r"takes about 7\.1 s, and the deadline is in 7\.0 s") as refused:
        queue.put(job(100, deadline=7.0))
    assert refused.value.retry_after == pytest.approx(0.12)
    with pytest.raises(Refused):
        queue.put(job(*[100] * 30, deadline=7.0))


def test_failed_jobs_are_dropped() -> None:
    queue = Queue()
    poisoned, other = job(*[TURN] * 10), job(10)
    queue.put(poisoned)
    queue.put(other)
    first = queue.take(600)
    queue.fail(poisoned, ValueError("poison"))
    answer(queue, first)
    queue.fail(poisoned, ValueError("again"))
    assert done(poisoned)
    assert str(poisoned.error) == "poison"
    assert queue.take(10**6, wait=False) == []
    assert queue.waiting == 0
    assert (poisoned.taken, other.taken) == (1, 1)


def test_closing() -> None:
    queue = Queue()
    one, two = job(TURN, 10), job(10)
    queue.put(one)
    queue.put(two)
    queue.close(drain=True)
    with pytest.raises(Closed):
        queue.put(job(1))
    answer(queue, queue.take(TURN))
    queue.close(drain=False)
    assert isinstance(one.error, Closed)
    assert isinstance(two.error, Closed)
    assert queue.take(1000) == []


def test_take_blocks_until_there_is_work() -> None:
    queue, got = Queue(), list[list[JobSlice]]()
    worker = threading.Thread(target=lambda: got.extend((queue.take(100), queue.take(100))))
    worker.start()
    one = job(10)
    queue.put(one)
    while not got and not one.taken:
        pass
    queue.close()
    worker.join(10)
    assert [[part.job for part in parts] for parts in got] == [[one], []]


def test_empty_jobs() -> None:
    queue = Queue()
    nothing = job()
    queue.put(nothing)
    assert done(nothing)
    assert queue.take(10, wait=False) == []
    with pytest.raises(ConfigError, match="wait=0"):
        Queue(0)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_job_is_answered_once(data: st.DataObject) -> None:
    """Any order of coming, leaving, taking and failing."""
    clock = Clock()
    queue = Queue(data.draw(st.floats(0.1, 10)), clock=clock)
    queue.rate = data.draw(st.sampled_from([0.0, 50.0, 5000.0]))
    queue.least = data.draw(st.integers(0, 1000))
    accepted: list[QueuedJob] = []
    running: list[list[JobSlice]] = []
    handed: dict[QueuedJob, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["put", "put", "put", "take", "answer", "cancel", "fail", "later"]))
        if step == "put":
            lengths = data.draw(st.lists(st.integers(1, 600), max_size=12))
            deadline = data.draw(st.none() | st.floats(0.1, 30).map(lambda s: clock.now + s))
            one = job(*lengths, deadline=deadline)
            after: float | None = None
            try:
                queue.put(one)
                accepted.append(one)
            except Refused as refused:
                after = refused.retry_after
            assert after is None or (after > 0 and queue.waiting), "an empty queue refuses nobody"
        elif step == "take":
            budget = data.draw(st.integers(1, 2000))
            before = {one for one in accepted if one.unanswered and one.taken < len(one.lengths)}
            parts = queue.take(budget, wait=False)
            assert tokens(parts) <= budget or [part.last - part.first for part in parts] == [1]
            assert bool(parts) == any(one.unanswered for one in before)
            for part in parts:
                assert not part.job.ticket.cancelled.is_set()
                assert part.job.ticket.deadline is None or part.job.ticket.deadline > clock.now
                handed.setdefault(part.job, []).extend(range(part.first, part.last))
            running.append(parts)
        elif step == "answer" and running:
            answer(queue, running.pop(data.draw(st.integers(0, len(running) - 1))))
        elif step in ("cancel", "fail") and accepted:
            one = data.draw(st.sampled_from(accepted))
            if step == "cancel":
                one.ticket.cancelled.set()
            else:
                queue.fail(one, ValueError())
        elif step == "later":
            clock.now += data.draw(st.floats(0, 10))
        ahead = [max(min(one.backlog, TURN), *one.lengths[one.taken :][:1]) for one in queue._ring]
        assert queue.waiting == sum(ahead)
        assert queue.waiting <= queue.room + 2 * 600, "what waits takes no longer than it may, but for the last turn"
    queue.close(drain=data.draw(st.booleans()))
    while parts := queue.take(1000):
        running.append(parts)
        for part in parts:
            handed.setdefault(part.job, []).extend(range(part.first, part.last))
    for parts in running:
        answer(queue, parts)
    for one in accepted:
        assert done(one), "answered"
        assert not done(one), "and only once"
        windows = handed.get(one, [])
        assert windows == list(range(len(windows))), "each window once, in order"
        if one.error is None:
            assert one.outputs == list(range(len(one.lengths)))


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(1, 2 * TURN), min_size=1, max_size=12), min_size=2, max_size=8))
def test_round_robin(lengths: list[list[int]]) -> None:
    """A window at a time: none of those who wait is more than one ahead."""
    queue = Queue()
    several = [job(*one) for one in lengths]
    for one in several:
        queue.put(one)
    while queue.take(1, wait=False):
        waiting = [one.taken for one in several if one.taken < len(one.lengths)]
        assert max(waiting, default=0) - min(waiting, default=0) <= 1
    assert all(one.taken == len(one.lengths) for one in several)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 2 * TURN), min_size=1, max_size=20), max_size=12),
    budgets=st.lists(st.integers(1, 3000), min_size=1, max_size=20),
    before=st.integers(0, 5),
)
def test_a_new_job_waits_for_one_turn_of_each(lengths: list[list[int]], budgets: list[int], before: int) -> None:
    queue = Queue()
    for one in lengths:
        queue.put(job(*one))
    for budget in budgets[:before]:
        queue.take(budget, wait=False)
    ahead = sum(max(min(one.backlog, TURN), one.lengths[one.taken]) for one in queue._ring)
    newcomer = job(7)
    queue.put(newcomer)
    seen, n = 0, 0
    while not newcomer.taken:
        seen += tokens(queue.take(1 if ahead == 0 else budgets[n % len(budgets)], wait=False))
        n += 1
    last = budgets[(n - 1) % len(budgets)]  # the batch that it came in may hold what stands behind it
    assert seen <= ahead + max(last, 7)


def test_a_ticket_says_when_nobody_waits_any_more() -> None:
    ticket = Ticket(deadline=time.monotonic() + 60)
    ticket.check()
    Ticket().check()
    ticket.deadline = time.monotonic()
    with pytest.raises(Expired):
        ticket.check()
    ticket.cancelled.set()
    with pytest.raises(Cancelled):
        ticket.check()
