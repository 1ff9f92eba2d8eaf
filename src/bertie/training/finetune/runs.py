"""One training with one or several seeds, safe to stop at any moment: data in, the folder of the best model out.

While it runs, all there is lies beside the folder OUT that it makes, in OUT.training:

    asked.json         what was asked for: only the same can go on
    seed-1/            a run's state (`bertie.training.state`), which gives way to
        done.json      what the run says of itself, and
        model/         its model, if it is the best so far

OUT is renamed to its place when all is done: it is there whole, with its report, or not at all.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie._version import __version__
from bertie.data.atomic import atomic_write
from bertie.data.journal import AlreadyComplete
from bertie.errors import CheckpointError, ExistsError, InputError
from bertie.recipe import Recipe
from bertie.tasks import registry
from bertie.training.finetune.base import AnyTrainable, Predictions, fit_labelled, main_metric, training_for
from bertie.training.finetune.data import Labelled, fingerprint

if TYPE_CHECKING:
    from bertie.tasks.base import Overflow
    from bertie.training.callbacks import TrainingHistory
    from bertie.training.distributed import Strategy, World

ASKED, DONE, MODEL, STATE = "asked.json", "done.json", "model", "state.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, on what, and how."""

    task: str  # a trainable one of `bertie.tasks.registry`
    model: str | Path
    train: Labelled
    dev: Labelled | None
    test: Labelled | None
    recipe: Recipe
    seeds: list[int]
    device: str
    overflow: Overflow = "window"

    def asked(self) -> dict[str, Any]:
        """All that the result depends on."""
        data = {"train": self.train, "dev": self.dev, "test": self.test}
        recipe = {name: value for name, value in self.recipe.as_dict().items() if name != "seed"}
        return {
            "bertie": __version__,
            "task": self.task,
            "model": str(Path(self.model).resolve()) if Path(self.model).is_dir() else str(self.model),
            "overflow": self.overflow,
            "seeds": self.seeds,
            **recipe,
            **{name: None if one is None else fingerprint(one) for name, one in data.items()},
        }

    def learner(self, seed: int) -> AnyTrainable:
        """A fresh one."""
        task = registry.get(self.task).trainable_class
        return task.from_recipe(self.model, self.recipe.replace(seed=seed), overflow=self.overflow, device=self.device)


@dataclass(frozen=True, slots=True)
class Done:
    """What a run that is over says of itself. Scores are values without intervals, by metric."""

    seed: int
    history: TrainingHistory
    dev: dict[str, float] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Best:
    """The model of the best seed, as it was saved, and what it said of the data."""

    done: Done
    task: AnyTrainable
    predictions: dict[str, Predictions]  # dev and test, those that there are


def claim(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse a place for a model where something else is, before any work is done."""
    state = state_of(out)
    there = out.is_dir() and any(out.iterdir())
    if out.exists() and not out.is_dir():
        raise ExistsError(f"{out} is a file; a model is a folder")
    if there and not any((out / name).is_file() for name in ("config.json", "modules.json")):
        raise ExistsError(f"{out} holds other things than a model; choose another folder, or an empty one")
    tidied = any(state.glob(f"*/{DONE}")) and not any(state.glob(f"*/{MODEL}"))  # killed with nothing left but to do so
    if resume and state.is_dir() and not (there and tidied):
        return
    if there and resume and not overwrite:
        _remove(state)
        raise AlreadyComplete(f"{out} is there, and nothing that was stopped: there is nothing to resume")
    if there and not overwrite:
        raise ExistsError(f"{out} holds a model already; pass --overwrite, or another name")
    if state.exists() and not overwrite:
        raise ExistsError(
            f"{state} holds a run that was stopped; pass --resume to go on with it, or --overwrite to begin anew"
        )
    above = next(one for one in out.absolute().parents if one.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(f"{out} cannot be written: no permission in {above}")


def state_of(out: Path) -> Path:
    """Where the state lies of a run that makes this folder."""
    return out.absolute().with_name(out.absolute().name + ".training")


class Runs:
    """The runs of a job, a seed each. Every process of a job makes one; only the first of them writes."""

    def __init__(self, out: Path, job: Job, world: World, *, resume: bool = False) -> None:
        self.out, self.job, self.world, self.resume = out.absolute(), job, world, resume
        self.state = state_of(out)
        self.done: dict[int, Done] = {}
        self._judged: dict[int, dict[str, Predictions]] = {}
        if world.is_main:
            self._open()
        self.done = self._shared(self.done)

    def _open(self) -> None:
        asked = json.loads(json.dumps(self.job.asked()))
        if self.resume and (self.state / ASKED).is_file():
            self._agree(asked)
            self.done = {seed: done for seed in self.job.seeds if (done := self._read(seed)) is not None}
            return
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.mkdir(parents=True)
        atomic_write(self.state / ASKED, json.dumps(asked).encode())

    def _agree(self, asked: dict[str, Any]) -> None:
        before = _read_json(self.state / ASKED)
        for key in {**asked, **before}:
            if asked.get(key) != before.get(key):
                was, now = (f"{one.get(key)!r:.80}" for one in (before, asked))
                what = f"other {key} data" if key in ("train", "dev", "test") else f"{key}={was}, and now it is {now}"
                raise CheckpointError(
                    f"{self.state} was begun with {what}; ask for the same, or pass --overwrite without --resume to "
                    "begin anew"
                )

    def _read(self, seed: int) -> Done | None:
        from bertie.training.callbacks import TrainingHistory

        file = self._folder(seed) / DONE
        if not file.is_file():
            return None
        raw = _read_json(file)
        return Done(**raw | {"history": TrainingHistory(**raw["history"])})

    def _folder(self, seed: int) -> Path:
        return self.state / f"seed-{seed}"

    def _model(self, seed: int) -> Path:
        return self._folder(seed) / MODEL

    def _shared(self, done: dict[int, Done]) -> dict[int, Done]:
        """What the first process knows, in all: they may not see its disk."""
        if self.world.size == 1:
            return done
        import torch
        import torch.distributed as dist

        from bertie.training.distributed import local_device

        held = [done]
        dist.broadcast_object_list(held, src=0, device=local_device(torch.device(self.job.device)))
        return held[0]

    # --- a seed ---

    def train(
        self, seed: int, *, save_steps: int | None = None, strategy: Strategy = "ddp", progress: bool = True
    ) -> Done:
        """Train with one seed, unless that is done already."""
        if seed in self.done:
            return self.done[seed]
        job, folder = self.job, self._folder(seed)
        try:
            task = fit_labelled(
                job.learner(seed),
                job.train,
                job.dev,
                folder=folder,
                resume=self.resume,
                save_steps=save_steps,
                strategy=strategy,
                progress=progress,
            )
        except BaseException:
            if self.world.is_main and not self.done and not (folder / STATE).exists():  # nothing that could go on
                shutil.rmtree(self.state, ignore_errors=True)
            raise
        predictions = self._judge(task)
        values = {
            name: {metric: score.value for metric, score in training_for(task).scores(one, resamples=0).items()}
            for name, one in predictions.items()
        }
        done = self.done[seed] = Done(seed, task.history_, **values)
        self._judged[seed] = predictions
        if self.world.is_main:
            task.save(self._model(seed), overwrite=True)
            atomic_write(folder / DONE, json.dumps(asdict(done)).encode())
            for state in (*folder.glob("*.pt"), folder / "log.csv"):
                state.unlink(missing_ok=True)
        self._forget_worse()
        return done

    def _judge(self, task: AnyTrainable) -> dict[str, Predictions]:
        data = {"dev": self.job.dev, "test": self.job.test}
        training = training_for(task)
        return {name: training.predict_labelled(one) for name, one in data.items() if one is not None}

    def _forget_worse(self) -> None:
        best = self.best_seed()
        for seed in self.done:
            if seed != best:
                self._judged.pop(seed, None)
                if self.world.is_main:
                    shutil.rmtree(self._model(seed), ignore_errors=True)

    def best_seed(self) -> int:
        """That of the highest dev score; the first where there is no dev data."""

        def worth(seed: int) -> float:
            dev = self.done[seed].dev
            value = dev.get(self.metric, -math.inf)
            return value if math.isfinite(value) else -math.inf

        return max((seed for seed in self.job.seeds if seed in self.done), key=worth)

    @property
    def metric(self) -> str:
        """The one that chooses."""
        return self.job.recipe.metric or main_metric(self.job.train if self.job.dev is None else self.job.dev)

    # --- the end ---

    def best(self) -> Best:
        """The best model, read from where it was saved: what is reported on is what is kept."""
        job, seed = self.job, self.best_seed()
        task = registry.get(job.task).trainable_class.load(self._model(seed), overflow=job.overflow, device=job.device)
        # A seed that was done before this process began was predictions in another one.
        return Best(self.done[seed], task, self._judged.get(seed) or self._judge(task))

    def finish(self, write: Callable[[Path], None]) -> None:
        """Let `write` put a report beside the best model, then give the folder its name."""
        model = self._model(self.best_seed())
        write(model)
        rename(model, self.out, self.state)


def rename(model: Path, out: Path, state: Path) -> None:
    """Give a finished model its name, in place of what is there, and remove the state of its run."""
    out.parent.mkdir(parents=True, exist_ok=True)
    before = state / "replaced"
    if out.exists():
        os.rename(out, before)
    try:
        os.rename(model, out)
    except BaseException:
        if before.exists():
            os.rename(before, out)
        raise
    _remove(state)


def _remove(state: Path) -> None:
    """Half of a state must not be taken for a run that can go on: it gets another name first."""
    away = state.with_name(f".{state.name}")
    shutil.rmtree(away, ignore_errors=True)
    with suppress(FileNotFoundError):  # another process of the same job was faster
        os.rename(state, away)
    shutil.rmtree(away, ignore_errors=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); pass --overwrite without --resume to begin anew") from None
    return found
