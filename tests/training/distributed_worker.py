"""The work of one of several processes, each with RANK and the like as torchrun sets them: `… FOLDER CASE:SPREAD …`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bertie.errors import TrainingError
from bertie.text.batch import Batch
from bertie.training.callbacks import TrainingHistory
from bertie.training.distributed import Strategy
from bertie.training.loop import Trainer
from bertie.training.objectives import SingleLabelObjective, Targets
from bertie.training.sampling import TrainingTask
from tests.training import tiny

# 33 texts by 8 are 5 steps an epoch, the last of one text. A step has several micro-batches, some more than others.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"epochs": 10},
    "resumed": {"epochs": 4},
    "thaw": {"epochs": 3, "freeze": "encoder", "unfreeze": 1},
    "lora": {"epochs": 2, "lora": 2},
    "two": {"epochs": 2},
}


class Stops(SingleLabelObjective):
    """Sends this process a signal in its n-th call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGTERM)
        return super().losses(outputs, batch, targets)


class Breaks(Stops):
    """Has no loss in its n-th call."""

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        self.left -= 1
        lost = SingleLabelObjective.losses(self, outputs, batch, targets)
        return lost * float("nan") if self.left == 0 else lost


def made(
    case: str,
    strategy: Strategy = "ddp",
    folder: Path | None = None,
    objective: SingleLabelObjective | None = None,
    **options: Any,
) -> Trainer:
    """A run of a case."""
    model = tiny.model()
    held = tiny.items(30, 9)
    first = replace(tiny.source(33, windows=3), objective=objective or SingleLabelObjective())
    sources: list[TrainingTask] = [first, *tiny.two_sources(33)[1:]] if case == "two" else [first]
    how = tiny.recipe(**({"lr": 1e-3, "micro_tokens": 32} | CASES[case]))

    def evaluate() -> dict[str, float]:
        mini = SingleLabelObjective().collate(held)
        loss = SingleLabelObjective().loss(model(mini.batch, "classify"), mini.batch, mini.targets)
        return {"loss": -float(loss) / mini.weight}

    return tiny.trainer(
        model, sources, how, folder=folder, strategy=strategy, evaluate=evaluate, metric="loss", **options
    )


def kept(trainer: Trainer, done: TrainingHistory) -> dict[str, Any]:
    """What came out of a run."""
    return {"weights": tiny.weights(trainer.model), "curve": done.curve, "evaluations": done.evaluations}


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    for asked in cases:
        case, strategy = cast("tuple[str, Strategy]", asked.split(":"))
        into: Any = folder / asked
        result: Any
        if case == "broken":  # in one process only; all must end
            trainer = made("plain", strategy, into, Breaks(9 if rank else 10**9))
            with contextlib.suppress(TrainingError):
                trainer.run()
            result = {"steps": trainer.state.step}
        elif case == "resumed":
            stopped = made(case, strategy, into, Stops(12 if rank else 10**9))
            with contextlib.suppress(KeyboardInterrupt):
                stopped.run()
            trainer = made(case, strategy, into, resume=True)
            result = kept(trainer, trainer.run()) | {"steps": stopped.state.step}
        else:
            trainer = made(case, strategy)
            result = kept(trainer, trainer.run())
        torch.save(result, folder / f"{asked}-{rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
