"""Blocking functions on an event loop: they wait for jobs without blocking it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from bertie.serve.lanes import QueuedJob
from bertie.serve.loop_runner import LoopRunner, current_runner
from bertie.serve.tickets import Expired, Ticket, current_ticket


def finish(job: QueuedJob, output: object) -> None:
    job.outputs, job.unanswered = [output], 0
    job.done()


def waiting(runner: LoopRunner, jobs: list[QueuedJob], deadline: float | None = None) -> Callable[[], object]:
    def request() -> object:
        assert current_runner() is runner
        ticket = Ticket(str(len(jobs)), deadline=deadline)
        current_ticket.set(ticket)
        job = QueuedJob(ticket, None, [1], on_done=runner.wake)
        jobs.append(job)
        runner.wait(job, expire)
        assert current_ticket.get() is ticket, "each request has its own context"
        return job.error or job.outputs[0]

    return request


def expire(job: QueuedJob) -> None:
    job.error, job.unanswered = Expired("late"), 0
    job.done()


def test_requests_wait_for_other_threads() -> None:
    async def main() -> list[object]:
        runner, jobs, results = LoopRunner(asyncio.get_running_loop()), list[QueuedJob](), list[object]()
        for _ in range(50):
            runner.run(waiting(runner, jobs), results.append)
        assert not results
        assert len(jobs) == 50, "all of them run until they wait"
        assert current_ticket.get() is None
        threads = [threading.Thread(target=finish, args=(job, n)) for n, job in enumerate(jobs)]
        for thread in reversed(threads):
            thread.start()
        while len(results) < 50:
            await asyncio.sleep(0.001)
        return results

    assert sorted(asyncio.run(main())) == list(range(50))  # type: ignore[type-var]


def test_a_job_that_is_done_is_not_waited_for() -> None:
    async def main() -> list[object]:
        runner, results = LoopRunner(asyncio.get_running_loop()), list[object]()

        def request() -> object:
            job = QueuedJob(Ticket(), None, [1], on_done=runner.wake)
            finish(job, "done")
            runner.wait(job, expire)
            return job.outputs[0]

        runner.run(request, results.append)
        assert results == ["done"], "at once"
        await asyncio.sleep(0.01)
        return results

    assert asyncio.run(main()) == ["done"]


def test_deadlines() -> None:
    async def main() -> list[object]:
        runner, jobs, results = LoopRunner(asyncio.get_running_loop()), list[QueuedJob](), list[object]()
        runner.run(waiting(runner, jobs, deadline=time.monotonic() - 1), results.append)
        runner.run(waiting(runner, jobs, deadline=time.monotonic() + 100), results.append)
        runner.expire()
        await asyncio.sleep(0.01)
        return results

    (error,) = asyncio.run(main())
    assert isinstance(error, Expired)


def test_a_thread_has_no_runner() -> None:
    assert current_runner() is None
