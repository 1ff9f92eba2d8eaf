"""Runs that are killed and go on, in forks of one process: `python -m tests.training.kill_points FOLDER CASE:HOW …`.

HOW is the number of kills, at random times; or "points": at the points of writing files, one after the other. Each case
is trained once without kills, and then with them until it ends. The script prints what differs, or "same" and how many
kills there were.
"""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bertie.training.state import LOG, StateFolder
from tests.training import tiny

CASES: dict[str, dict[str, Any]] = {
    "plain": {"epochs": 4},
    "thaw": {"epochs": 4, "freeze": "encoder", "unfreeze": 1},
    "lora": {"epochs": 4, "lora": 2},
    "two": {"epochs": 3},
}


def train(case: str, folder: Path) -> None:
    """Train to the end, or on to it, and keep what came out."""
    model = tiny.model(dropout=0.1)
    held = tiny.items(30, 9, length=6)
    sources = tiny.two_sources(24, length=6) if case == "two" else [tiny.source(28, length=6)]
    how = tiny.recipe(batch_size=4, micro_tokens=16, evals_per_epoch=2, **CASES[case])

    def evaluate() -> dict[str, float]:
        torch.rand(3)  # evaluating may draw numbers
        return {"accuracy": tiny.accuracy(model, held)}

    done = tiny.trainer(
        model, sources, how, folder=folder, resume=True, save_steps=3, evaluate=evaluate, metric="accuracy"
    ).run()
    kept = (tiny.weights(model), done.curve, done.evaluations, done.best_step, done.steps, done.tokens)
    torch.save(kept, folder / "result")


def forked(work: Callable[[], None]) -> int:
    """Start work in a fork."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def killed(pid: int, after: float) -> bool:
    """Kill a process after so many seconds; False if it had ended by itself."""
    end = time.monotonic() + after
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return False
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def ended(pid: int) -> bool:
    """Wait for a process; False if it was killed, and an error if it failed."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return False
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("the run failed")
    return True


def die_at(point: int) -> None:
    """Have this process killed at the n-th point of writing files: before and after each change, and in its middle."""
    points = [point]
    save, replace, fsync, unlink = torch.save, os.replace, os.fsync, Path.unlink

    def pass_by() -> None:
        points[0] -= 1
        if points[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(real: Callable[..., Any]) -> Callable[..., Any]:
        def with_points(*args: Any, **options: Any) -> Any:
            pass_by()
            out = real(*args, **options)
            pass_by()
            return out

        return with_points

    def half_saved(value: Any, file: Any) -> None:
        if isinstance(file, Path):  # the result
            return save(value, file)
        whole = io.BytesIO()
        save(value, whole)
        data = whole.getvalue()
        file.write(data[: len(data) // 2])
        file.flush()
        pass_by()
        file.write(data[len(data) // 2 :])
        return None

    def half_logged(self: StateFolder, row: str) -> None:
        assert self.path is not None
        with (self.path / LOG).open("a") as log:
            log.write(row[:5])
            log.flush()
            pass_by()
            log.write(row[5:] + "\n")

    torch.save, os.replace, os.fsync = half_saved, around(replace), around(fsync)
    Path.unlink = around(unlink)
    StateFolder.log = half_logged


def difference(a: Path, b: Path) -> str:
    """What two runs differ in; nothing if they are the same bit for bit."""
    ours, theirs = (torch.load(folder / "result", weights_only=True) for folder in (a, b))
    found = [name for name in ours[0] if not torch.equal(ours[0][name], theirs[0][name])]
    parts = ("curve", "evaluations", "best_step", "steps", "tokens")
    found += [name for i, name in enumerate(parts, start=1) if ours[i] != theirs[i]]
    found += [LOG] if (a / LOG).read_bytes() != (b / LOG).read_bytes() else []
    names = [sorted(path.name for path in folder.iterdir()) for folder in (a, b)]
    return ", ".join(found + ([f"files {names}"] if names[0] != names[1] else []))


def main(case: str, how: str, folder: Path) -> str:
    """What differs between a run that was killed again and again and one that was not."""
    whole = folder / "whole"
    began = time.monotonic()
    assert ended(forked(lambda: train(case, whole)))
    seconds = time.monotonic() - began
    draw = random.Random(0)
    kills, runs = 0, 0
    while True:
        broken = folder / f"broken-{runs}"

        def work(point: int = kills + 1, into: Path = broken) -> None:
            if how == "points":
                die_at(point)
            train(case, into)

        if how == "points" or kills >= int(how):
            done = ended(forked(work))
        else:
            done = not killed(forked(work), draw.uniform(0, seconds / 4))
        kills += not done
        if done:
            runs += 1
            if said := difference(whole, broken):
                return f"after {kills} kills: {said}"
            if how == "points" or kills >= int(how):
                return f"same after {kills} kills"


if __name__ == "__main__":
    torch.set_num_threads(1)
    # What torch loads when it is first used, once for all forks.
    torch.optim.AdamW([torch.zeros(1)], fused=True).zero_grad()
    for asked in sys.argv[2:]:
        print(asked, main(*asked.split(":"), Path(sys.argv[1]) / asked), flush=True)  # type: ignore[arg-type, call-arg]
