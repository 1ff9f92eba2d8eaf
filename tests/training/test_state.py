"""A run that is stopped, however it is stopped, goes on as if it had not been."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bertie.errors import CheckpointError, ExistsError, InputError, TrainingError
from bertie.text.batch import Batch
from bertie.training.callbacks import TrainingHistory
from bertie.training.objectives import SingleLabelObjective, Targets
from bertie.training.state import StateFolder, TrainState
from tests.training import tiny


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """Enable Ctrl-C, which a shell disables for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# --- kills ---


def _killed(folder: Path, cases: list[str]) -> None:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.kill_points", str(folder), *cases],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == cases, done.stdout + done.stderr
    for line in lines:
        found = re.fullmatch(r"\w+:(\w+) same after (\d+) kills", line)
        assert found, line
        assert int(found[2]) >= (10 if found[1] == "points" else int(found[1])), line


def test_a_killed_run_resumes_bit_identically(tmp_path: Path) -> None:
    _killed(tmp_path, ["plain:points", "thaw:3", "lora:3", "two:3"])


@pytest.mark.slow
def test_runs_killed_many_times_resume_bit_identically(tmp_path: Path) -> None:
    _killed(tmp_path, ["plain:25", "thaw:20", "lora:20", "two:20", "thaw:points", "lora:points", "two:points"])


# --- Ctrl-C and kill ---


class Signalled(SingleLabelObjective):
    """Is sent signals in the n-th call."""

    def __init__(self, at: int, *numbers: signal.Signals) -> None:
        super().__init__()
        self.at, self.numbers, self.calls = at, numbers, 0

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            for number in self.numbers:
                signal.raise_signal(number)
        return super().losses(outputs, batch, targets)


def _run(
    folder: Path, objective: SingleLabelObjective | None = None, **options: Any
) -> tuple[dict[str, Tensor], TrainingHistory]:
    """A run, new or resumed, with dropout and dev data: 18 steps, evaluated after 6, 12 and 18."""
    model = tiny.model(dropout=0.1)
    held = tiny.items(20, 9)
    source = replace(tiny.source(24), objective=objective or SingleLabelObjective())
    how = tiny.recipe(**({"batch_size": 4, "epochs": 3} | options.pop("recipe", {})))
    said = {"save_steps": 5, "resume": True, "fingerprint": "data"} | options

    def evaluate() -> dict[str, float]:
        return {"accuracy": tiny.accuracy(model, held)}

    done = tiny.trainer(model, source, how, folder=folder, evaluate=evaluate, metric="accuracy", **said).run()
    return tiny.weights(model), done


def _state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
    return found


def _step(folder: Path) -> int:
    return int(_state(folder)["progress"]["step"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], TrainingHistory]:
    """The run without any interruption."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *_run(folder)


def _assert_as_whole(
    folder: Path,
    found: tuple[dict[str, Tensor], TrainingHistory],
    whole: tuple[Path, dict[str, Tensor], TrainingHistory],
) -> None:
    tiny.assert_same(found[0], whole[1])
    assert asdict(found[1]) | {"seconds": 0} == asdict(whole[2]) | {"seconds": 0}
    assert (folder / "log.csv").read_bytes() == (whole[0] / "log.csv").read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in whole[0].iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [1, 7, 12])
def test_an_interrupt_saves_a_checkpoint(tmp_path: Path, whole: Any, number: signal.Signals, at: int) -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(KeyboardInterrupt) as caught:
        _run(tmp_path, Signalled(at, number))
    assert caught.value.__notes__ == [f"saved at step {at} of 18; continue with resume"]
    assert _step(tmp_path) == at
    assert {one: signal.getsignal(one) for one in before} == before
    _assert_as_whole(tmp_path, _run(tmp_path), whole)


def test_an_interrupt_in_the_last_step_is_ignored(tmp_path: Path, whole: Any) -> None:
    _assert_as_whole(tmp_path, _run(tmp_path, Signalled(18, signal.SIGINT)), whole)


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path, whole: Any) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        _run(tmp_path, Signalled(9, signal.SIGINT, signal.SIGINT))
    assert not hasattr(caught.value, "__notes__")
    assert _step(tmp_path) == 6
    _assert_as_whole(tmp_path, _run(tmp_path), whole)


def test_without_a_folder_ctrl_c_ends_the_run_at_once() -> None:
    source = replace(tiny.source(24), objective=Signalled(3, signal.SIGINT))
    trainer = tiny.trainer(tiny.model(), source, tiny.recipe())
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert trainer.state.step == 2


# --- going on, or not ---


def test_resuming_a_finished_run_returns_the_same(tmp_path: Path, whole: Any) -> None:
    _run(tmp_path)
    before = (tmp_path / "state.pt").read_bytes()
    _assert_as_whole(tmp_path, _run(tmp_path), whole)
    assert (tmp_path / "state.pt").read_bytes() == before


def test_resuming_after_early_stopping_trains_no_further(tmp_path: Path) -> None:
    scores = iter([0.5, 0.4, 0.3, 0.9])
    for _ in range(2):
        done = tiny.trainer(
            tiny.model(), tiny.source(), tiny.recipe(epochs=4, patience=2), folder=tmp_path, resume=True,
            evaluate=lambda: {"f1": next(scores)}, metric="f1",
        ).run()  # fmt: skip
        assert (done.steps, done.best_step, done.stopped_early) == (12, 4, True)
    assert next(scores) == 0.9


def test_an_existing_run_is_refused_without_resume(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, Signalled(7, signal.SIGINT))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ExistsError, match="holds an unfinished run; resume it"):
        _run(tmp_path, resume=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "other",
    [
        {"recipe": {"lr": 2e-3}},
        {"recipe": {"epochs": 4}},
        {"recipe": {"seed": 1}},
        {"recipe": {"lora": 2}},
        {"fingerprint": "other data"},
    ],
)
def test_a_run_resumes_only_with_its_own_recipe_and_data(tmp_path: Path, whole: Any, other: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, Signalled(7, signal.SIGINT))
    with pytest.raises(CheckpointError, match="another recipe, other data or another model"):
        _run(tmp_path, **other)
    _assert_as_whole(tmp_path, _run(tmp_path), whole)


def test_partial_files_of_a_killed_run_are_removed(tmp_path: Path, whole: Any) -> None:
    for name in (".state.pt.draft", ".best-6.pt.draft", "best-6.pt"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "log.csv").write_text("step,epoch,lo")
    found = _run(tmp_path)
    _assert_as_whole(tmp_path, found, whole)
    (tmp_path / "best-model.pt").write_bytes(b"somebody's")
    _run(tmp_path)
    assert (tmp_path / "best-model.pt").read_bytes() == b"somebody's"


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_corrupt_state_is_refused(tmp_path: Path, damage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, Signalled(7, signal.SIGINT))
    file = tmp_path / "state.pt"
    data = file.read_bytes()
    if damage == "other":
        torch.save(torch.zeros(3), file)
    else:
        file.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    with pytest.raises(CheckpointError, match=r"state\.pt .*remove it to start again"):
        _run(tmp_path)


def test_missing_best_weights_are_reported(tmp_path: Path) -> None:
    _, done = _run(tmp_path)
    (tmp_path / f"best-{done.best_step}.pt").unlink()
    with pytest.raises(CheckpointError, match=rf"best-{done.best_step}\.pt cannot be read"):
        _run(tmp_path)


def test_checkpoints_are_written_every_few_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    monkeypatch.setattr(StateFolder, "save", lambda self, progress, *_: saved.append(progress.step))
    monkeypatch.setattr("bertie.training.loop.SAVE_SECONDS", -1.0)
    _run(tmp_path / "a", save_steps=None)
    assert saved == list(range(1, 19))
    saved.clear()
    _run(tmp_path / "b", save_steps=7)
    assert saved == [6, 7, 12, 14, 18]
    saved.clear()
    monkeypatch.setattr("bertie.training.loop.SAVE_SECONDS", 1e9)
    _run(tmp_path / "c", save_steps=None)
    assert saved == [6, 12, 18]


# --- full disks ---


def _failing(monkeypatch: pytest.MonkeyPatch, where: str, at: int, error: OSError) -> None:
    """Let the n-th write fail."""
    calls = [0]

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                if where == "save":  # having written a part
                    args[1].write(b"half")
                raise error
            return real(*args, **options)

        return maybe

    if where == "log":
        real = Path.open

        def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            return (wrapped(real) if mode == "a" else real)(path, mode, *args, **options)

        monkeypatch.setattr(Path, "open", opened)
    else:
        owner = torch if where == "save" else os
        monkeypatch.setattr(owner, where, wrapped(getattr(owner, where)))


@pytest.mark.parametrize("where", ["save", "fsync", "replace", "log"])
@pytest.mark.parametrize(("number", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, os.strerror(errno.EIO))])
def test_a_failed_write_ends_the_run_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any, where: str, number: int, said: str
) -> None:
    at = 2 if where == "log" else 4  # the header and step 10; states 5, 6 (with the best), 10
    with monkeypatch.context() as patch:
        _failing(patch, where, at, OSError(number, os.strerror(number)))
        with pytest.raises(TrainingError, match=rf"(state\.pt|log\.csv) could not be written to .*: {said}.*resume"):
            _run(tmp_path)
    assert _step(tmp_path) == 6
    assert not list(tmp_path.glob(".*"))
    _assert_as_whole(tmp_path, _run(tmp_path), whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
        )
    except OSError:
        pytest.skip("there is no mount here")
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: Path, whole: Any) -> None:
    filler, folder = small_disk / "filler", small_disk / "run"

    class Fills(SingleLabelObjective):
        calls = 0

        def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
            self.calls += 1
            if self.calls == 8:
                with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass
                os.truncate(filler, filler.stat().st_size - 20_000)  # room for less than a state
            return super().losses(outputs, batch, targets)

    with pytest.raises(TrainingError, match=r"state\.pt could not be written to .*: the disk is full"):
        _run(folder, Fills())
    assert _step(folder) == 6
    assert not list(folder.glob(".*"))
    filler.unlink()
    _assert_as_whole(folder, _run(folder), whole)


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"run could not be written to .*file: Not a directory"):
        _run(tmp_path / "file" / "run")


def test_other_errors_propagate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _run(tmp_path)


# --- the folder alone ---


def test_the_state_round_trips(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "mark")
    assert folder.open(resume=False) is None
    progress = TrainState(
        step=3, loss=0.1, weight=2.5, best_step=2, best=-0.5, evaluations=[{"step": 2, "f1": float("nan")}],
        rows=["a,b", "1,2"],
    )  # fmt: skip
    weights = {"w": torch.randn(3, 2)}
    folder.save_best(2, weights)
    folder.save(progress, weights, {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []}, {"scale": 2.0})
    folder.log("9,9")
    with pytest.raises(InputError, match="is being written by another process"):
        StateFolder(tmp_path, "mark").open(resume=True)
    folder.close()
    state = StateFolder(tmp_path, "mark").open(resume=True)
    assert state is not None
    assert repr(TrainState(**state["progress"])) == repr(progress)
    assert torch.equal(state["model"]["w"], weights["w"])
    assert state["optimizer"]["state"][0]["step"] == 3
    assert state["scaler"] == {"scale": 2.0}
    assert (tmp_path / "log.csv").read_text() == "a,b\n1,2\n"
    assert torch.equal(folder.load_best(2)["w"], weights["w"])


def test_old_best_weights_are_removed_after_the_new_state_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StateFolder(tmp_path, "")
    names = lambda: sorted(p.name for p in tmp_path.glob("best*"))  # noqa: E731
    folder.open(resume=False)
    folder.save_best(1, {})
    folder.save(TrainState(step=1, best_step=1), {}, {}, {})
    folder.save_best(2, {})
    with monkeypatch.context() as patch:
        _failing(patch, "replace", 1, OSError(errno.ENOSPC, ""))
        with pytest.raises(TrainingError):
            folder.save(TrainState(step=2, best_step=2), {}, {}, {})
    assert names() == ["best-1.pt", "best-2.pt"]
    folder.save(TrainState(step=2, best_step=2), {}, {}, {})
    assert names() == ["best-2.pt"]


def test_without_a_path_the_best_weights_are_kept_in_memory() -> None:
    folder = StateFolder(None, "")
    weights = {"w": torch.zeros(2)}
    folder.save_best(1, weights)
    weights["w"] += 1
    assert torch.equal(folder.load_best(1)["w"], torch.zeros(2))
    assert folder.open(resume=False) is None
    folder.save(TrainState(), weights, {}, {})
    folder.log("row")
