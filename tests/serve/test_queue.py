"""The queue: bounded, fair, and nobody is left without an answer. A clock of its own, so that nothing waits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertie.errors import ConfigError
from bertie.serve.lanes import OWNERS_ROOM, TURN, JobSlice, QueuedJob
from bertie.serve.queue import Queue
from bertie.serve.tickets import Cancelled, Closed, Expired, Refused, Ticket, TokenLimitExceeded


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def job(*lengths: int, name: str = "", deadline: float | None = None, outputs: int = 0) -> QueuedJob:
    """`outputs`: the cost of each window's outputs."""
    return QueuedJob(Ticket(name, deadline), None, lengths, costs=[length + outputs for length in lengths])


def is_long(one: QueuedJob) -> bool:
    return sum(one.costs) > TURN


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
    assert [part.job for part in queue.take(1024)] == [short], "a batch of its own"
    (part,) = queue.take(1024, long=True)
    assert (part.job, part.first, part.last) == (long, 0, 4)


def test_one_batch_of_long_jobs_at_a_time_while_there_are_short_ones() -> None:
    queue = Queue()
    long = [job(*[2048] * 30) for _ in range(3)]
    for one in long:
        queue.put(one)
    alone = [queue.take(512, long=True, wait=False) for _ in range(3)]
    assert [part.job for (part,) in alone] == long, "with nobody else, as many at a time as there are workers"
    assert all(part.last - part.first == 1 for (part,) in alone), "one window each"
    queue.put(job(10))
    assert queue.take(512, long=True, wait=False) == [], "a short job waits"
    (short,) = queue.take(512)
    for left in (2, 1):
        queue.finish(long=True)
        assert queue.take(512, long=True, wait=False) == [], f"a short job runs beside {left} long ones"
    queue.finish(long=True)
    assert queue.take(512, long=True, wait=False), "there is always one of the long ones"
    assert queue.take(512, long=True, wait=False) == []
    answer(queue, [short])
    queue.finish()
    assert queue.take(512, long=True, wait=False), "no short jobs any more"


def test_a_long_job_that_yields_is_woken() -> None:
    queue, got = Queue(), list[list[JobSlice]]()
    queue.put(job(600, 600))
    queue.put(job(10))
    queue.take(512, long=True)
    queue.take(512)
    worker = threading.Thread(target=lambda: got.append(queue.take(512, long=True)), daemon=True)
    worker.start()
    worker.join(0.05)
    assert worker.is_alive(), "it yields"
    queue.finish()
    worker.join(10)
    assert len(got) == 1


def test_long_jobs_count_nothing_for_short_ones() -> None:
    """A short job is refused only if the short ones before it take too long."""
    queue = Queue(1.0, clock=Clock())
    queue.expect(3000.0, least=0)
    queue.put(job(*[2048] * 7))
    queue.put(job(*[2048] * 7))
    with pytest.raises(Refused):
        queue.put(job(*[2048] * 7))
    with pytest.raises(Refused):
        queue.check_long()
    assert not queue.is_full()
    for _ in range(150):
        queue.put(job(20, deadline=1.5))
    queue.put(job(20))
    with pytest.raises(Refused, match=r"takes about 1\.0 s"):
        queue.put(job(20))
    assert queue.is_full()


def test_each_lane_has_its_own_rate() -> None:
    queue = Queue(1.0)
    queue.expect(1000.0, least=0)
    for i in range(200):
        queue.long.record(100, i, i + 1)  # long jobs run slowly beside short ones
    assert queue.short.rate == 1000.0
    assert queue.long.rate == pytest.approx(100.0, rel=0.01)
    for i in range(200):
        queue.short.record(100, i / 2, (i + 3) / 2)  # concurrent batches: their time is counted once
    assert queue.short.rate == pytest.approx(200.0, rel=0.05)


def test_outputs_are_part_of_the_cost() -> None:
    """Few tokens with many outputs are a long job, whose outputs others wait for, too."""
    queue = Queue(1.0)
    queue.expect(1000.0, least=0)
    many = job(20, outputs=5000)
    queue.put(many)
    queue.put(job(20))
    assert [part.job for part in queue.take(512)] != [many]
    assert queue.long.waiting == 5020
    with pytest.raises(Refused, match=r"takes about 5\.0 s"):
        queue.put(job(20, outputs=600))
    assert many.ticket.submitted_tokens == 20, "limits of tokens are limits of what is read"
    assert [part.job for part in queue.take(512, long=True)] == [many]
    assert (queue.waiting, many.backlog) == (0, 0)


def test_long_requests_are_not_starved() -> None:
    queue = Queue()
    long = job(*[400] * 6)
    queue.put(long)
    rounds = 0
    while long.taken < 6:
        for _ in range(20):  # as many as fill a batch, each time
            queue.put(job(50))
        queue.take(1000)
        queue.finish()
        if queue.take(1000, long=True, wait=False):
            queue.finish(long=True)
        rounds += 1
        assert rounds < 30
    assert rounds <= 6, "one batch of long jobs for each batch of short ones"


def test_a_window_beyond_the_budget_is_a_batch_of_its_own() -> None:
    queue = Queue()
    small, large = job(600), job(5000)
    queue.put(small)
    queue.put(large)
    assert [part.job for part in queue.take(1000, long=True)] == [small]
    queue.put(job(600))
    assert [part.job for part in queue.take(1000, long=True)] == [large], "it did not fit and goes first now"


def test_requests_that_would_wait_too_long_are_refused() -> None:
    queue = Queue(2.0)
    queue.expect(100.0, least=0)
    for _ in range(5):
        queue.put(job(50))
    with pytest.raises(Refused, match=r"takes about 2\.5 s, and it may wait for 2 s") as refused:
        queue.put(job(50))
    assert refused.value.retry_after == pytest.approx(0.5)
    queue.take(50)
    queue.put(job(50))


def test_the_room_follows_the_rate() -> None:
    queue = Queue(2.0)
    for _ in range(10):
        queue.put(job(50))  # how long they will take is not known yet
    queue.expect(100.0, least=0)
    with pytest.raises(Refused):
        queue.put(job(50))
    queue.expect(250.0, least=0)
    queue.put(job(50))
    queue.expect(1.0, least=0)
    with pytest.raises(Refused):
        queue.put(job(50))
    queue.expect(1.0, least=550)  # however slow it is
    queue.put(job(50))


def test_a_request_counts_for_its_next_turn() -> None:
    queue = Queue()
    queue.put(job(*[100] * 500))
    assert queue.waiting == TURN
    queue.put(job(700, 10))
    assert queue.waiting == TURN + 700
    parts = queue.take(10**9, long=True)
    assert tokens(parts) == 50_710
    assert queue.waiting == 0


def test_cancelled_requests_do_not_count() -> None:
    queue = Queue(2.0)
    queue.expect(90.0, least=0)
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
    queue.expect(100.0, least=0)
    queue.put(job(*[100] * 20))
    queue.put(job(*[100] * 6, deadline=12.0))  # 600 of the first, and itself
    with pytest.raises(Refused, match=r"takes about 18\.0 s, and the deadline is in 17\.0 s") as refused:
        queue.put(job(*[100] * 6, deadline=17.0))
    assert refused.value.retry_after == pytest.approx(1.0)
    with pytest.raises(Refused):
        queue.put(job(*[100] * 30, deadline=17.0))
    queue.put(job(100, deadline=1.1))  # short


def test_failed_jobs_are_dropped() -> None:
    queue = Queue()
    poisoned, other = job(*[TURN] * 10), job(10)
    queue.put(poisoned)
    queue.put(other)
    first = queue.take(600, long=True) + queue.take(600)
    queue.fail(poisoned, ValueError("poison"))
    answer(queue, first)
    queue.fail(poisoned, ValueError("again"))
    assert done(poisoned)
    assert str(poisoned.error) == "poison"
    queue.finish(long=True)
    assert queue.take(10**6, long=True, wait=False) == []
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
    answer(queue, queue.take(TURN, long=True))
    queue.close(drain=False)
    assert isinstance(one.error, Closed)
    assert isinstance(two.error, Closed)
    assert queue.take(1000) == queue.take(1000, long=True) == []


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
    queue.expect(data.draw(st.sampled_from([0.0, 50.0, 5000.0])), least=data.draw(st.integers(0, 1000)))
    accepted: list[QueuedJob] = []
    running: list[tuple[bool, list[JobSlice]]] = []
    handed: dict[QueuedJob, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["put", "put", "put", "take", "take", "answer", "cancel", "fail", "later"]))
        if step == "put":
            lengths = data.draw(st.lists(st.integers(1, 600), max_size=12))
            deadline = data.draw(st.none() | st.floats(0.1, 30).map(lambda s: clock.now + s))
            one = job(*lengths, deadline=deadline, outputs=data.draw(st.sampled_from([0, 0, 100])))
            after: float | None = None
            try:
                queue.put(one)
                accepted.append(one)
            except Refused as refused:
                after = refused.retry_after
            assert after is None or (after > 0 and queue.lane(one).waiting), "an empty lane refuses nobody"
        elif step == "take":
            budget, long = data.draw(st.integers(1, 2000)), data.draw(st.booleans())
            before = {
                one for one in accepted if one.unanswered and one.taken < len(one.lengths) and is_long(one) == long
            }
            yields = long and queue.long.running and (queue.short.running or queue.short.ring)
            parts = queue.take(budget, long=long, wait=False)
            cost = sum(sum(part.job.costs[part.first : part.last]) for part in parts)
            assert cost <= budget or [part.last - part.first for part in parts] == [1]
            assert bool(parts) == (not yields and any(one.unanswered for one in before))
            for part in parts:
                assert is_long(part.job) == long
                assert not part.job.ticket.cancelled.is_set()
                assert part.job.ticket.deadline is None or part.job.ticket.deadline > clock.now
                handed.setdefault(part.job, []).extend(range(part.first, part.last))
            if parts:
                running.append((long, parts))
        elif step == "answer" and running:
            long, parts = running.pop(data.draw(st.integers(0, len(running) - 1)))
            answer(queue, parts)
            queue.finish(long=long)
        elif step in ("cancel", "fail") and accepted:
            one = data.draw(st.sampled_from(accepted))
            if step == "cancel":
                one.ticket.cancelled.set()
            else:
                queue.fail(one, ValueError())
        elif step == "later":
            clock.now += data.draw(st.floats(0, 10))
        for lane in (queue.short, queue.long):
            assert lane.waiting == sum(max(min(one.backlog, TURN), *one.costs[one.taken :][:1]) for one in lane.ring)
            assert lane.waiting <= lane.room + 2 * 700, "what waits takes no longer than it may, but for the last turn"
    queue.close(drain=data.draw(st.booleans()))
    for long in (False, True):
        queue.short.running = queue.long.running = 0
        while parts := queue.take(1000, long=long):
            running.append((long, parts))
            queue.finish(long=long)
            for part in parts:
                handed.setdefault(part.job, []).extend(range(part.first, part.last))
    for _, parts in running:
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
    """A window at a time: none of the long jobs that wait is more than one ahead."""
    queue = Queue()
    several = [job(*one) for one in lengths if sum(one) > TURN]
    for one in several:
        queue.put(one)
    while queue.take(1, long=True, wait=False):
        waiting = [one.taken for one in several if one.taken < len(one.lengths)]
        assert max(waiting, default=0) - min(waiting, default=0) <= 1
    assert all(one.taken == len(one.lengths) for one in several)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 2 * TURN), min_size=1, max_size=20), max_size=12),
    budgets=st.lists(st.integers(1, 3000), min_size=1, max_size=20),
    before=st.integers(0, 5),
    newcomer=st.sampled_from([7, 700]),
)
def test_a_new_job_waits_for_one_turn_of_each_of_its_lane(
    lengths: list[list[int]], budgets: list[int], before: int, newcomer: int
) -> None:
    queue, long = Queue(), newcomer > TURN
    for one in lengths:
        queue.put(job(*one))
    for budget in budgets[:before]:
        queue.take(budget, long=long, wait=False)
    new = job(newcomer)
    lane = queue.lane(new)
    ahead = sum(max(min(one.backlog, TURN), one.lengths[one.taken]) for one in lane.ring)
    assert ahead == lane.waiting
    queue.put(new)
    seen, n = 0, 0
    queue.short.running = queue.long.running = 0
    while not new.taken:
        seen += tokens(queue.take(1 if ahead == 0 else budgets[n % len(budgets)], long=long, wait=False))
        queue.finish(long=long)
        n += 1
    last = budgets[(n - 1) % len(budgets)]  # the batch that it came in may hold what stands behind it
    assert seen <= ahead + max(last, newcomer)


def owned(owner: str, *lengths: int) -> QueuedJob:
    return QueuedJob(Ticket(owner, owner=owner), None, list(lengths))


def put_many(queue: Queue, jobs: list[QueuedJob]) -> int:
    """How many jobs are accepted before the first one that is refused."""
    for i, one in enumerate(jobs):
        try:
            queue.put(one)
        except Refused:
            return i
    return len(jobs)


def names(slices: list[JobSlice]) -> list[str]:
    return [part.job.ticket.owner for part in slices]


def test_owners_take_turns() -> None:
    queue = Queue(100.0)
    for _ in range(20):
        queue.put(owned("busy", 100))
    for owner in ("a", "b"):
        queue.put(owned(owner, 100))
    assert names(queue.take(300)) == ["busy", "a", "b"], "one job of each, though twenty came before"
    assert names(queue.take(300)) == ["busy"] * 3


def test_a_window_that_does_not_fit_stays_the_next_one() -> None:
    queue = Queue(100.0)
    for owner, length in (("a", 100), ("b", 400), ("c", 100)):
        queue.put(owned(owner, length))
    assert names(queue.take(300)) == ["a"]
    assert names(queue.take(500)) == ["b", "c"]


def test_an_owner_that_sends_too_much_is_refused_before_others() -> None:
    queue = Queue(1.0, clock=Clock())
    queue.expect(2000.0, least=0)
    for lengths in ((100,), (100, 500)):  # short jobs, and long ones
        assert put_many(queue, [owned("busy", *lengths) for _ in range(100)]) < 100
        queue.put(owned("other", *lengths))
    assert queue.is_full("busy")
    assert not queue.is_full("other")
    assert not queue.is_full("new")
    for lane in (queue.short, queue.long):
        refused = queue.full_owners(lane)
        assert refused.keys() == {"busy"}
        assert refused["busy"] > 0


def test_many_owners_do_not_fill_the_memory() -> None:
    queue = Queue(1.0, clock=Clock())
    queue.expect(1000.0, least=0)
    accepted = put_many(queue, [owned(str(i), 100) for i in range(1000)])
    assert accepted * 100 <= (OWNERS_ROOM + 1) * 1000
    assert queue.full_owners(queue.short)[""] > 0, "nobody is accepted"


def test_only_a_small_job_that_is_alone_is_taken_alone() -> None:
    queue = Queue()
    queue.put(job(20), notify=False)
    assert queue.take_alone(19) == [], "too large"
    queue.put(job(5), notify=False)
    assert queue.take_alone(100) == [], "two wait"
    assert len(queue.take(512)) == 2
    queue.put(job(5), notify=False)
    assert queue.take_alone(100) == [], "a batch runs"
    queue.finish()
    (part,) = queue.take_alone(100)
    assert part.last == 1
    assert not queue.is_empty
    queue.finish()
    assert queue.is_empty
    queue.put(job(600), notify=False)
    assert queue.take_alone(1e9) == [], "a long one"


def test_jobs_that_are_not_taken_alone_wake_workers() -> None:
    queue, got = Queue(), list[Any]()
    worker = threading.Thread(target=lambda: got.append(queue.take(512)), daemon=True)
    worker.start()
    queue.put(job(20), notify=False)
    queue.put(job(20), notify=False)
    queue.take_alone(100)
    worker.join(10)
    assert len(got) == 1
    assert len(got[0]) == 2
