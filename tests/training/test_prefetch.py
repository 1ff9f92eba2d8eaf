from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bertie.errors import TrainingError
from bertie.training.objectives import TrainingExample
from bertie.training.prefetch import Prefetcher, prepare_step
from bertie.training.sampling import ExampleSampler, TrainingTask
from tests.training import tiny
from tests.training.pretrain import objective_runs

CASES = ["mlm", "growing", "pairs", "tied", "taught", "mixed"]


@pytest.mark.parametrize("case", CASES)
def test_prefetching_does_not_change_a_run(case: str, tmp_path: Path) -> None:
    alone, helped = (
        objective_runs.kept(objective_runs.made(case, tmp_path, dropout=0.1, prefetch_workers=n)) for n in (0, 2)
    )
    assert alone["curve"] == helped["curve"]
    assert alone["weights"].keys() == helped["weights"].keys()
    assert all(torch.equal(alone["weights"][name], helped["weights"][name]) for name in alone["weights"])


class Told:
    """A plan that tells who reads which step, and fails at one of them."""

    def __init__(self, folder: Path, wrong: int = -1) -> None:
        inner = ExampleSampler([tiny.source(32, length=6)], tiny.recipe(epochs=2, batch_size=4))
        self.inner, self.folder, self.wrong, self.total_steps, self.single_head = (
            inner,
            folder,
            wrong,
            inner.total_steps,
            True,
        )
        self.heads, self.epoch_starts, self.epoch_of = inner.heads, inner.epoch_starts, inner.epoch_of
        self.epochs_done, self.schedule_position, self.fingerprint = (
            inner.epochs_done,
            inner.schedule_position,
            inner.fingerprint,
        )

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        (self.folder / f"{step}-{os.getpid()}").touch()
        if step == self.wrong:
            raise ValueError(f"step {step} cannot be read")
        return self.inner.read(step)


@pytest.fixture
def opened() -> Any:
    """Makes such readers, and ends them."""
    all_of_them: list[Prefetcher] = []

    def make(plan: Told, workers: int) -> Prefetcher:
        all_of_them.append(Prefetcher(plan, workers))
        return all_of_them[-1]

    yield make
    for one in all_of_them:
        one.close()


def same(ahead: Prefetcher, plan: Told, step: int, micro: int = 64) -> None:
    source, found = ahead(step, micro)
    expected_source, expected = prepare_step(plan.inner, step, micro)
    assert source.objective is expected_source.objective
    assert (found.total, found.texts, found.tokens) == (expected.total, expected.texts, expected.tokens)
    assert len(found.micro_batches) == len(expected.micro_batches)
    for a, b in zip(found.micro_batches, expected.micro_batches, strict=True):
        assert torch.equal(a.batch.ids, b.batch.ids)
        assert torch.equal(a.targets.values, b.targets.values)


def test_workers_prepare_steps_in_any_order(tmp_path: Path, opened: Any) -> None:
    plan = Told(tmp_path)
    ahead = opened(plan, 2)
    for step in (0, 1, 2, 9, 10, 3, 3, plan.total_steps - 1):
        same(ahead, plan, step)
    same(ahead, plan, 3, micro=8)  # in smaller parts
    readers = {name.split("-")[1] for name in os.listdir(tmp_path)}
    assert len(readers - {str(os.getpid())}) == 2
    assert not (tmp_path / f"1-{os.getpid()}").exists()


def test_systems_without_fork(tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertie.training.prefetch.get_all_start_methods", lambda: ["spawn"])
    plan = Told(tmp_path)
    same(opened(plan, 2), plan, 0)
    assert [name.split("-")[1] for name in os.listdir(tmp_path)] == [str(os.getpid())]


def test_errors_of_workers_are_raised_in_the_training_process(tmp_path: Path, opened: Any) -> None:
    plan = Told(tmp_path, wrong=3)
    ahead = opened(plan, 2)
    for step in range(3):
        same(ahead, plan, step)
    with pytest.raises(ValueError, match="step 3 cannot be read"):
        ahead(3, 64)
    same(ahead, plan, 4)


def test_a_killed_worker(tmp_path: Path, opened: Any) -> None:
    plan = Told(tmp_path)
    ahead = opened(plan, 1)
    same(ahead, plan, 0)
    (reader,) = {int(name.split("-")[1]) for name in os.listdir(tmp_path)} - {os.getpid()}
    os.kill(reader, signal.SIGKILL)

    def rest() -> None:
        for step in range(1, plan.total_steps):
            ahead(step, 64)

    with pytest.raises(TrainingError, match="a prefetch worker died before step"):
        rest()


def test_workers_end_with_the_run(tmp_path: Path, opened: Any) -> None:
    plan = Told(tmp_path)
    ahead = opened(plan, 2)
    same(ahead, plan, 0)
    same(ahead, plan, 1)
    readers = {int(name.split("-")[1]) for name in os.listdir(tmp_path)} - {os.getpid()}
    ahead.close()
    for _ in range(100):
        if not any(_runs(reader) for reader in readers):
            return
        time.sleep(0.05)
    pytest.fail(f"{readers} still run")


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
