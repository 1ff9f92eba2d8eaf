"""Two processes train as one does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bertie.training.distributed import World, local_device
from tests.training import distributed_worker, tiny

STRATEGIES = ("ddp", "fsdp")
RANKS = 2


def _start(folder: Path, cases: list[str]) -> None:
    root = Path(__file__).parents[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.distributed_worker", str(folder), *cases],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that two processes made."""
    into = tmp_path_factory.mktemp("ranks")
    _start(into, [f"{case}:{strategy}" for case in (*distributed_worker.CASES, "broken") for strategy in STRATEGIES])
    return into


@cache
def _alone(case: str) -> dict[str, Any]:
    trainer = distributed_worker.made(case)
    return distributed_worker.kept(trainer, trainer.run())


def _found(folder: Path, case: str, strategy: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case}:{strategy}-{rank}", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", distributed_worker.CASES)
def test_two_processes_train_as_one_does(folder: Path, case: str, strategy: str) -> None:
    alone = _alone(case)
    assert alone["curve"]
    for found in _found(folder, case, strategy):
        for part in ("curve", "evaluations"):
            assert len(found[part]) == len(alone[part])
            for ours, theirs in zip(found[part], alone[part], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5)
        tiny.assert_same(
            tiny.without_key_biases(found["weights"]), tiny.without_key_biases(alone["weights"]), atol=1e-5
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_end_with_the_same_weights(folder: Path, strategy: str) -> None:
    first, second = _found(folder, "plain", strategy)
    tiny.assert_same(first["weights"], second["weights"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_interrupt_in_one_process_ends_all(folder: Path, strategy: str) -> None:
    """At the next step at which they ask each other."""
    assert [found["steps"] for found in _found(folder, "resumed", strategy)] == [10, 10]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_that_is_not_finite_in_one_process_ends_all(folder: Path, strategy: str) -> None:
    steps = [found["steps"] for found in _found(folder, "broken", strategy)]
    assert steps[0] == steps[1] < 50


def test_a_single_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = World.current(torch.device("cpu"))
    assert (world.rank, world.size, world.is_main) == (0, 1, True)
    assert world.broadcast("me") == "me"
    assert world.all_reduce(torch.ones(2)).tolist() == [1, 1]
    world.barrier()


def test_each_process_uses_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device(torch.device("cuda")) == torch.device("cuda", 3)
    assert local_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert local_device(torch.device("cpu")) == torch.device("cpu")
