"""The loop: items in steps, steps in micro-batches, gradients added up, weights updated, all of it safe to stop.

What a step reads and every random number in it follow from the seed and the step's number, so a run that was killed
goes on as if it had not been.
"""

from __future__ import annotations

import io
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from bertie.config import EncoderConfig, HeadConfig
from bertie.data.progress import Progress
from bertie.errors import ConfigError, TrainingError
from bertie.nn.model import Model
from bertie.recipe import Recipe
from bertie.training import distributed, lora
from bertie.training.distributed import Strategy, World
from bertie.training.objectives import ModelObjective
from bertie.training.optimizer import Schedule, apply_freezing, build_optimizer, param_groups
from bertie.training.prefetch import Prefetcher, PreparedStep
from bertie.training.pretrain.monitoring import LossSpikeDetector
from bertie.training.sampling import BatchSampler, ExampleSampler, TrainingTask
from bertie.training.state import Folder, TrainState
from bertie.training.step import Graphs, Loss, Stepper, can_record, out_of_memory

Row = Mapping[str, float]

LOG_EVERY = 10  # steps
SAVE_SECONDS = 300.0
TRIES = 5  # spikes in a row that a run is taken back from
HEADER = "step,epoch,loss,lr,tokens"


@dataclass(slots=True)
class TrainingHistory:
    """What a run says of itself."""

    curve: list[dict[str, float]] = field(default_factory=list)  # rows of the log
    evaluations: list[dict[str, float]] = field(default_factory=list)
    best_step: int = -1
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of this process; a run that was resumed has more
    stopped_early: bool = False


class TrainingCallback(Protocol):
    """Whoever follows a run."""

    def begin(self, rows: Sequence[Row], evaluations: Sequence[Row]) -> None:
        """What there is already, of a run that goes on or was taken back."""

    def row(self, row: Row) -> None:
        """One more row of the log."""

    def evaluated(self, row: Row) -> None:
        """What an evaluation found."""

    def saving(self) -> None:
        """A state is about to be saved."""


class Trainer:
    """Trains the heads of a model, and the encoder below them, by a recipe.

    `evaluate` gives scores, of which `metric` is the one to be as high as can be; the best weights are kept. With a
    `folder` the run's state is saved there: at each evaluation, every `save_steps` steps or every few minutes, and
    when it is told to stop. `fingerprint` stands for the data and the model: a run goes on only with its own.

    For long runs: `evaluate_at` names the steps after which to evaluate, in place of the ends of epochs. `keep="last"`
    ends with the last weights, whatever the scores. With `rollback` a loss that is out of line, or no number, takes the
    weights back to the last state that was saved, and the run goes on behind the step that brought it. `ahead` is the
    number of processes that read the next steps meanwhile: where a step is long to read and quick to train.
    """

    def __init__(
        self,
        model: Model,
        data: Sequence[TrainingTask] | BatchSampler,
        recipe: Recipe,
        *,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        metric: str = "",
        folder: Path | None = None,
        resume: bool = False,
        save_steps: int | None = None,
        fingerprint: str = "",
        strategy: Strategy = "ddp",
        progress: bool = True,
        evaluate_at: Collection[int] | None = None,
        keep: Literal["best", "last"] = "best",
        restart: bool = False,
        rollback: bool = False,
        ahead: int = 0,
    ) -> None:
        if strategy not in ("ddp", "fsdp"):
            raise ConfigError(f"strategy={strategy!r} must be ddp or fsdp")
        if save_steps is not None and save_steps < 1:
            raise ConfigError(f"save_steps={save_steps} must be at least 1")
        if resume and folder is None:
            raise ConfigError("resume=True needs the folder that holds the run")
        self.model, self.recipe, self.evaluate, self.metric = model, recipe, evaluate, metric
        self.resume, self.restart, self.save_steps, self.progress = resume, restart, save_steps, progress
        self.keep, self.rollback, self.ahead = keep, rollback and folder is not None, ahead
        self.watcher: TrainingCallback | None = None  # of the first process
        self.steps: BatchSampler = ExampleSampler(data, recipe) if isinstance(data, Sequence) else data
        self.heads = self.steps.heads
        self.device = model.device
        self.world = World.here(self.device)
        self.strategy: Strategy = strategy
        self._sharded = strategy == "fsdp" and self.world.size > 1
        self._kept = folder is not None  # by the first process, and all must know
        described = json.dumps([fingerprint, recipe.as_dict(), self.steps.fingerprint(), self._sharded])
        self.folder = Folder(folder if self.world.first else None, described)
        self.schedule = Schedule(recipe, self.steps.total_steps)
        ends = (  # the end of each epoch, or of each part of one
            start + round(k * (end - start) / recipe.evals_per_epoch)
            for start, end in pairwise(self.steps.epoch_starts)
            for k in range(1, recipe.evals_per_epoch + 1)
        )
        self._due = frozenset(ends if evaluate_at is None else evaluate_at)
        self.progressed = TrainState()
        self._losses: list[Tensor] = []  # of the steps that the host has not looked at yet
        self._asked: list[tuple[str, float]] = []  # of the same: what was trained, if losses are steady; weights
        self._spikes: dict[str, LossSpikeDetector] = {}
        self._stop = False

    def run(self) -> TrainingHistory:
        """Train. The model holds the best weights afterwards, or the last ones where nothing was evaluated."""
        began = time.monotonic()
        try:
            self._set_up()
            with _Signals(self._ask_to_stop, on=self._kept), self._progress() as progress:
                saved = time.monotonic()
                if self.rollback and self.progressed.step == 0:
                    self._save()  # to have something to go back to
                while not self._over:
                    try:
                        progress.update(self._step())
                        due = self.progressed.step in self._due
                        often = self.save_steps is not None and self.progressed.step % self.save_steps == 0
                        late, stop = self._agreed(time.monotonic() - saved > SAVE_SECONDS)
                        if due or often or late or stop:
                            self._gather()
                            if due and self.evaluate is not None:
                                self._evaluate(self.evaluate)
                            self._save()
                            saved = time.monotonic()
                    except _Spike as spike:
                        self._roll_back(spike)
                        stop = False
                    if stop and not self._over:
                        interrupt = KeyboardInterrupt()
                        done, total = self.progressed.step, self.steps.total_steps
                        interrupt.add_note(f"the run is saved at step {done} of {total}; go on with resume")
                        raise interrupt
            self._gather()
            if self.progressed.best_step >= 0 and self.keep == "best":
                best: Any = self.folder.best(self.progressed.best_step) if self.world.first else None
                self.model.load_state_dict(self.world.same(best))
            self.world.wait()  # one that ended now would cut off another that is still receiving
        finally:
            self._leave()
        return self._history(time.monotonic() - began)

    @property
    def _over(self) -> bool:
        return self.progressed.stopped or self.progressed.step >= self.steps.total_steps

    def _agreed(self, late: bool) -> tuple[bool, bool]:
        """Whether to save because it has been long, and whether to stop: all processes at the same step."""
        late = late and self.save_steps is None
        if self.world.size == 1:
            return late, self._stop
        if self.progressed.step % LOG_EVERY:  # asking takes time
            return False, False
        said = self.world.sum(torch.tensor([late, self._stop], dtype=torch.float32, device=self.device))
        return bool(said[0] > 0), bool(said[1] > 0)

    # --- setting up ---

    def _set_up(self) -> None:
        recipe = self.recipe
        if recipe.lora and not lora.is_on(self.model):
            lora.add(self.model, recipe.lora, recipe.lora_alpha, recipe.seed)
        self._trained = deepcopy(self.model) if self._sharded else self.model
        self._trained.encoder.gradient_checkpointing = recipe.gradient_checkpointing
        self._dropout = _set_dropout(self._trained, recipe.dropout)
        state = self.world.same(self.folder.begin(self.resume, self.restart))
        if state is not None:
            self.progressed = TrainState(**state["progressed"])
            self._spikes = _spikes(self.progressed)
            self._trained.load_state_dict(state["model"])
        self._epoch = self._epoch_now()
        apply_freezing(self._trained, self.heads, recipe, self._epoch)
        self._build()
        if state is not None:
            self._restore(state)
        else:
            self._log(HEADER)
        self._watched_anew()
        self._trained.train()
        self._ahead = Prefetcher(self.steps, self.ahead, self.world.rank, self.world.size)

    def _epoch_now(self) -> int:
        return self.steps.epoch_of(min(self.progressed.step, self.steps.total_steps - 1))

    def _build(self) -> None:
        """Module, optimizer and stepper."""
        dtype = autocast_dtype(self.recipe.mixed_precision, self.device)
        clip = self.recipe.clip
        module = Loss(self._trained)
        self._module = self._spread(module)
        # Not before: a sharded module has other parameters.
        groups = param_groups(self._trained, self.heads, self.recipe)
        self.optimizer = build_optimizer(groups, self.device.type, self.recipe)
        self.stepper: Stepper
        single_head = self.steps.single_head and len(self.heads) == 1
        if self.world.size == 1 and single_head and can_record(self._trained, dtype):
            self.stepper = Graphs(module, self.optimizer, dtype=dtype, clip=clip)
        else:
            self.stepper = Stepper(self._module, self.optimizer, dtype=dtype, clip=clip, world=self.world.size)

    def _spread(self, module: Loss) -> torch.nn.Module:
        # A step trains one head of several, or what lies auxiliary; of layers with global tokens, only what its texts have.
        unused = len(self.heads) > 1 or not self.steps.single_head or bool(self.model.config.global_tokens)
        blocks = self._trained.encoder.blocks
        return distributed.distribute(module, blocks, self.strategy, self.world, self.device, unused=unused)

    def _restore(self, state: Mapping[str, Any]) -> None:
        if self._sharded:
            distributed.set_optimizer(self._module, self.optimizer, state["optimizer"])
        else:
            # The groups are those of this device: how an optimizer steps differs between a CPU and a GPU.
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        if state["scaler"]:
            self.stepper.scaler.load_state_dict(state["scaler"])

    def _leave(self) -> None:
        """Make the model a plain one again, however the run ended."""
        if hasattr(self, "_ahead"):
            self._ahead.close()
        if hasattr(self, "_dropout"):
            _restore_dropout(self._dropout)
        self.model.encoder.gradient_checkpointing = False
        if lora.is_on(self.model):
            lora.merge(self.model)
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)
            parameter.grad = None
        self.model.eval()

    # --- one step ---

    def _step(self) -> int:
        """Do one; how many texts it read."""
        p = self.progressed
        self._thaw()
        source, ready = self._ahead(p.step, self._micro_tokens)
        self._losses.append(self._learn(source, ready) if ready.total > 0 else self._zero())
        # Losses of one kind are compared with each other, and those of another plan are of another kind.
        kind = f"{type(source.objective).__name__} {source.head} {source.plan}" if source.objective.steady else ""
        self._asked.append((kind, ready.total))
        p.weight += ready.total
        p.texts += ready.texts
        p.tokens += ready.tokens
        p.step += 1
        if p.step % LOG_EVERY == 0 or p.step == self.steps.total_steps:
            self._log_row()
        return ready.texts

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _learn(self, source: TrainingTask, ready: PreparedStep) -> Tensor:
        """Update the weights; the summed loss before that."""
        step = self.progressed.step
        try:
            loss = self._gradients(source, ready)
            self.stepper.update(self.schedule.factor(self.steps.schedule_position(step)))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise TrainingError(
                f"out of memory at step {step + 1}, with {self._micro_tokens} tokens at a time; pass a smaller "
                "micro_tokens, gradient_checkpointing=True or a smaller max_length. The last state that was saved is whole"
            ) from None
        return loss

    def _thaw(self) -> None:
        epoch = self._epoch_now()
        if epoch == self._epoch:
            return
        self._epoch = epoch
        if apply_freezing(self._trained, self.heads, self.recipe, epoch):
            if self.world.size > 1 and not self._sharded:
                # What is wrapped knows only the weights that were trained when it was.
                self._module = self.stepper.module = self._spread(Loss(self._trained))
            self.stepper.reset()

    @property
    def _micro_tokens(self) -> int:
        return self.progressed.micro_tokens or self.recipe.micro_tokens

    def _gradients(self, source: TrainingTask, ready: PreparedStep) -> Tensor:
        """Add up the gradients of a step; its summed loss. Out of memory: once more, in smaller parts."""
        while True:
            try:
                return self._added(source, ready)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or self.world.size > 1 or not ready.divisible:
                    raise
            # Out of the handler, so that what it held is free.
            self.stepper.forget()
            self.stepper.reset()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.progressed.micro_tokens = ready.divisible // 2
            source, ready = self._ahead(self.progressed.step, self._micro_tokens)

    def _added(self, source: TrainingTask, ready: PreparedStep) -> Tensor:
        """This process's part of a step."""
        objective = source.objective
        if isinstance(objective, ModelObjective):
            objective = objective.with_counts(ready.counts)
        rank, size = self.world.rank, self.world.size
        loss = self._zero()
        for number, mini in enumerate(ready.minis):
            seed = _seed(self.recipe.seed, self.progressed.step, number * size + rank)
            last = number == len(ready.minis) - 1
            loss += self.stepper.add(mini, source.head, objective, ready.total, seed, last)
        return loss

    def _settle(self) -> None:
        """Look at the losses of the steps since the last time: the device is not asked after each step."""
        p = self.progressed
        if not self._losses:
            return
        first = p.step - len(self._losses)
        found = self.world.sum(torch.stack(self._losses)).tolist()
        asked = list(self._asked)
        self._losses.clear()
        self._asked.clear()
        for number, (loss, (kind, weight)) in enumerate(zip(found, asked, strict=True), start=first + 1):
            if self.rollback and weight > 0 and self._out_of_line(kind, loss / weight):
                raise _Spike(number, loss / weight)
            if not math.isfinite(loss):
                raise self._diverged(f"the loss is {loss} at step {number}")
            p.loss += loss
        if self.rollback:
            p.recent = {kind: spikes.state for kind, spikes in self._spikes.items()}

    def _out_of_line(self, kind: str, loss: float) -> bool:
        """Whether a loss calls for going back: no number, or, where losses are steady, far above those before it."""
        return self._spikes.setdefault(kind, LossSpikeDetector()).saw(loss) if kind else not math.isfinite(loss)

    def _roll_back(self, spike: _Spike) -> None:
        """Take the weights back to the last state, and go on behind the step that brought the spike."""
        saved = self.world.same(self.folder.last())
        if self._sharded or saved is None:
            raise self._diverged(f"the loss is {spike.loss:g} at step {spike.step}")
        before = TrainState(**saved["progressed"])
        near, end = 0, before.step
        for first, last in reversed(before.skipped):
            if last < end:  # something was learnt since
                break
            near, end = near + 1, first
        if near >= TRIES:
            raise self._diverged(f"the loss is {spike.loss:g} at step {spike.step}, after {TRIES} spikes before it")
        self._say(f"the loss is {spike.loss:.4g} at step {spike.step}: back to the weights of step {before.step}")
        self._trained.load_state_dict(saved["model"])
        self._restore(saved)
        self.stepper.forget()
        self.stepper.reset()
        before.skipped.append([before.step, spike.step])
        before.step = spike.step
        self.progressed = before
        self._spikes = _spikes(before)
        self._losses.clear()
        self._asked.clear()
        self._watched_anew()
        self._save()

    def _watched_anew(self) -> None:
        if self.watcher is not None:
            self.watcher.begin([_row(one) for one in self.progressed.rows[1:]], self.progressed.evaluations)

    def _diverged(self, what: str) -> TrainingError:
        return TrainingError(
            f"{what}: the learning rate ({self.recipe.lr:g}) may be too high for this data, or half precision too "
            "coarse (mixed_precision='fp32'). The last state that was saved is whole"
        )

    def _log_row(self) -> None:
        self._settle()
        p = self.progressed
        mean = p.loss / p.weight if p.weight else 0.0
        rate = self.schedule.factor(self.steps.schedule_position(p.step - 1)) * self.recipe.lr
        row = f"{p.step},{self.steps.epochs_done(p.step):.6g},{mean:.9g},{rate:.6g},{p.tokens}"
        self._log(row)
        if self.watcher is not None:
            self.watcher.row(_row(row))
        p.loss = p.weight = 0.0

    def _log(self, row: str) -> None:
        self.progressed.rows.append(row)
        self.folder.log(row)

    # --- evaluating and saving ---

    def _gather(self) -> None:
        """Bring all weights into the model, and refuse any that are not numbers any more."""
        self._settle()
        if self._sharded:
            distributed.gather(self._trained, self.model)
        sums = torch.stack([parameter.detach().sum(dtype=torch.float32) for parameter in self.model.parameters()])
        if not sums.isfinite().all():
            raise self._diverged(f"there are weights that are not finite after step {self.progressed.step}")

    def _evaluate(self, evaluate: Callable[[], Mapping[str, float]]) -> None:
        p = self.progressed
        self.model.eval()
        with torch.no_grad():
            scores = {name: float(value) for name, value in self.world.same(dict(evaluate())).items()}
        self._trained.train()
        p.evaluations.append({"step": p.step, "epoch": self.steps.epochs_done(p.step), **scores})
        if self.watcher is not None:
            self.watcher.evaluated(p.evaluations[-1])
        if self.keep == "last":
            told = ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
            self._say(f"step {p.step} of {self.steps.total_steps}: {told}")
            return
        score = scores.get(self.metric)
        if score is None:
            raise ConfigError(f"metric={self.metric!r} must be one of {', '.join(scores)}")
        self._say(f"epoch {self.steps.epochs_done(p.step):.2f}: dev {self.metric} {score:.4f}")
        if math.isnan(score):  # as a correlation with what is always the same
            score = -math.inf
        if p.best is None or score > p.best:
            p.best, p.best_step, p.stale = score, p.step, 0
            if self.world.first:
                self.folder.keep_best(p.step, self.model.state_dict())
        else:
            p.stale += 1
            p.stopped = self.recipe.patience is not None and p.stale >= self.recipe.patience

    def _save(self) -> None:
        if not self._kept:
            return
        if self.watcher is not None:
            self.watcher.saving()
        optimizer = (
            distributed.whole_optimizer(self._module, self.optimizer) if self._sharded else self.optimizer.state_dict()
        )
        if self.world.first:
            self.folder.save(self.progressed, self.model.state_dict(), optimizer, self.stepper.scaler.state_dict())
        self.world.wait()

    def _history(self, seconds: float) -> TrainingHistory:
        p = self.progressed
        curve = [_row(row) for row in p.rows[1:]]
        return TrainingHistory(curve, p.evaluations, p.best_step, p.step, p.tokens, seconds, p.stopped)

    def _progress(self) -> Progress:
        file = None if self.progress and self.world.first else io.StringIO()
        before = self.progressed.texts
        return Progress("train", lambda: self.progressed.step / self.steps.total_steps, before=before, file=file)

    def _say(self, text: str) -> None:
        if self.world.first and self.progress:
            print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, file=sys.stderr)

    def _ask_to_stop(self) -> None:
        self._stop = True


class _Spike(Exception):
    """A loss out of line."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(step, loss)
        self.step, self.loss = step, loss


class _Signals:
    """Ctrl-C and kill end a run after its step; a second Ctrl-C ends it at once."""

    def __init__(self, ask: Callable[[], None], on: bool) -> None:
        self.ask = ask
        self.on = on and threading.current_thread() is threading.main_thread()
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if self.on:
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._caught)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.ask()
        signal.signal(number, self.before[number])

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def autocast_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision to compute in: half on GPUs that have bf16, else single."""
    if name == "auto":
        half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if half else torch.float32
    found = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    if found != torch.float32 and device.type == "cpu":
        # torch's bf16 kernels die without an exception on some CPUs; fp16 is slow on all.
        raise ConfigError(f"mixed_precision={name!r} is for GPUs; on a CPU use 'fp32' or 'auto'")
    return found


def _spikes(progressed: TrainState) -> dict[str, LossSpikeDetector]:
    return {kind: LossSpikeDetector(seen=losses) for kind, losses in progressed.recent.items()}


def _row(row: str) -> dict[str, float]:
    """A row of the log by the names of its columns."""
    return dict(zip(HEADER.split(","), map(float, row.split(",")), strict=True))


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _set_dropout(model: Model, rate: float | None) -> list[tuple[Any, str, Any]]:
    """Use another dropout than the checkpoint's; what to put back afterwards."""
    undo: list[tuple[Any, str, Any]] = []
    if rate is None:
        return undo
    for part in model.modules():
        for name in ("cfg", "dropout"):
            value = getattr(part, name, None)
            if isinstance(value, int | float):
                new: Any = rate
            elif isinstance(value, EncoderConfig):
                new = replace(value, dropout=rate, attention_dropout=rate)
            elif isinstance(value, HeadConfig):  # not all have one before their transform
                new = replace(value, dropout=rate, dense_dropout=rate if value.dense_dropout else 0.0)
            else:
                continue
            undo.append((part, name, value))
            setattr(part, name, new)
    return undo


def _restore_dropout(undo: list[tuple[Any, str, Any]]) -> None:
    for part, name, value in undo:
        setattr(part, name, value)
