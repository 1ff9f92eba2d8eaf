"""The training loop: gradient accumulation over micro-batches, evaluation, checkpoints and
rollback.

The examples of a step and all its random numbers follow from the seed and the step number, so that
an interrupted run resumes exactly where it was.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bertie.data.progress import Progress
from bertie.errors import ConfigError, TrainingError
from bertie.nn.model import Model
from bertie.pipeline.reporting import without_progress
from bertie.recipe import Recipe
from bertie.training import distributed, failures, lora
from bertie.training.callbacks import LOG_HEADER, TrainingCallback, TrainingHistory, parse_row
from bertie.training.distributed import Strategy, World
from bertie.training.dropout import random_seed, restore_dropout, set_dropout
from bertie.training.graphed_step import GraphedTrainStep, can_replay
from bertie.training.interrupt import InterruptHandler
from bertie.training.objectives import ModelObjective
from bertie.training.optimizer import apply_freezing, build_optimizer, param_groups
from bertie.training.pace import Pace
from bertie.training.prefetch import Prefetcher, PreparedStep
from bertie.training.sampling import BatchSampler, ExampleSampler, TrainingTask
from bertie.training.schedule import Schedule
from bertie.training.spikes import LossMonitor, LossSpike
from bertie.training.stage import WHOLE, Stage
from bertie.training.state import StateFolder, TrainState
from bertie.training.step import ObjectiveModule, TrainStep, autocast_dtype, is_out_of_memory, uses_bf16_linear

LOG_EVERY = 10  # steps
SAVE_SECONDS = 300.0
MAX_ROLLBACKS = 5  # consecutive spikes before a run fails


class Trainer:
    """Trains heads of a model, and its encoder, by a recipe.

    `evaluate` returns scores; the weights with the highest `metric` are kept. With a `folder` the
    training state is saved at each evaluation, every `save_steps` steps or every five minutes, and
    on Ctrl-C. `fingerprint` identifies data and model: a run resumes only with its own.

    For long runs: `evaluate_at` lists the steps to evaluate after, instead of the ends of epochs.
    `keep="last"` keeps the last weights, whatever their score. With `rollback` a loss spike, or a
    loss that is not finite, restores the last checkpoint and skips the steps since.
    `prefetch_workers` processes prepare the next steps, where reading takes longer than training.
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
        prefetch_workers: int = 0,
        callback: TrainingCallback | None = None,
        stage: Stage = WHOLE,
    ) -> None:
        if strategy not in ("ddp", "fsdp"):
            raise ConfigError(f"strategy={strategy!r} must be ddp or fsdp")
        if save_steps is not None and save_steps < 1:
            raise ConfigError(f"save_steps={save_steps} must be at least 1")
        if resume and folder is None:
            raise ConfigError("resume=True needs the folder of the run")
        self.model, self.recipe, self.evaluate, self.metric = model, recipe.resolve(), evaluate, metric
        self.resume, self.restart, self.save_steps, self.progress = resume, restart, save_steps, progress
        self.keep, self.rollback, self.prefetch_workers = keep, rollback and folder is not None, prefetch_workers
        self.stage = stage
        self.sampler: BatchSampler = ExampleSampler(data, recipe) if isinstance(data, Sequence) else data
        self.heads = self.sampler.heads
        self.device = model.device
        self.world = World.current(self.device)
        self.callback = callback if self.world.is_main else None
        self.strategy: Strategy = strategy
        self._sharded = strategy == "fsdp" and self.world.size > 1
        self._saves = folder is not None  # known to all processes, though only the main one writes
        identity = json.dumps([fingerprint, recipe.as_dict(), self.sampler.fingerprint(), self._sharded])
        self.folder = StateFolder(folder if self.world.is_main else None, identity)
        self.schedule = Schedule(recipe, self.sampler.total_steps)
        epoch_ends = (  # or the ends of parts of an epoch
            start + round(k * (end - start) / recipe.evals_per_epoch)
            for start, end in pairwise(self.sampler.epoch_starts)
            for k in range(1, recipe.evals_per_epoch + 1)
        )
        self._evaluate_at = frozenset(epoch_ends if evaluate_at is None else evaluate_at)
        epoch = self.sampler.epoch_starts[1]
        stop_loss = recipe.stop_loss or 0.0
        self.pace = Pace(self.sampler.total_steps, epoch, stage.deadline, stop_loss, stage.warm_steps)
        self.state = TrainState()
        self._losses = LossMonitor(self.rollback)
        self._detail = ""  # of the progress bar

    def run(self) -> TrainingHistory:
        """Train. Afterwards the model holds the best weights, or the last ones if nothing was evaluated."""
        started = time.monotonic()
        try:
            self._set_up()
            with InterruptHandler(self._saves) as interrupt, self._progress_bar() as progress:
                saved = time.monotonic()
                if self.rollback and self.state.step == 0:
                    self._save()  # a checkpoint to roll back to
                while not self._done:
                    try:
                        progress.update(self._step(), self._detail)
                        self._keep_pace()
                        evaluate = self.state.step in self._evaluate_at or (bool(self.pace.reason) and self._done)
                        save = self.save_steps is not None and self.state.step % self.save_steps == 0
                        overdue, stop = self._agree(time.monotonic() - saved > SAVE_SECONDS, interrupt.requested)
                        if evaluate or save or overdue or stop:
                            self._gather()
                            if evaluate and self.evaluate is not None:
                                self._evaluate(self.evaluate)
                            self._save()
                            saved = time.monotonic()
                    except LossSpike as spike:
                        self._roll_back(spike)
                        stop = False
                    if stop and not self._done:
                        raise failures.interrupted(self.state.step, self.pace.total)
            self._gather()
            if self.state.best_step >= 0 and self.keep == "best":
                best: Any = self.folder.load_best(self.state.best_step) if self.world.is_main else None
                self.model.load_state_dict(self.world.broadcast(best))
            self.world.barrier()  # a process that exited now would cut off one that is still receiving
        finally:
            self._tear_down()
        p, seconds, why = self.state, time.monotonic() - started, self.pace.reason
        curve = [parse_row(row) for row in p.rows[1:]]
        return TrainingHistory(curve, p.evaluations, p.best_step, p.step, p.tokens, seconds, p.stopped, why)

    @property
    def _done(self) -> bool:
        return self.state.stopped or self.state.step >= self.pace.total

    def _agree(self, overdue: bool, stop: bool) -> tuple[bool, bool]:
        """Whether to save and whether to stop: all processes decide at the same step."""
        overdue = overdue and self.save_steps is None
        if self.world.size == 1:
            return overdue, stop
        if self.state.step % LOG_EVERY:  # communication takes time
            return False, False
        votes = self.world.all_reduce(torch.tensor([overdue, stop], dtype=torch.float32, device=self.device))
        return bool(votes[0] > 0), bool(votes[1] > 0)

    # --- setup ---

    def _set_up(self) -> None:
        recipe = self.recipe
        if recipe.lora and not lora.is_on(self.model):
            lora.add(self.model, recipe.lora, recipe.lora_alpha, recipe.seed)
        self._trained = deepcopy(self.model) if self._sharded else self.model
        self._trained.encoder.gradient_checkpointing = recipe.gradient_checkpointing
        self._dropout = set_dropout(self._trained, recipe.dropout)
        saved = self.world.broadcast(self.folder.open(self.resume, self.restart))
        if saved is not None:
            self.state = TrainState(**saved["progress"])
            self._losses = LossMonitor(self.rollback, self.state.recent_losses)
            self.pace.restore(self.state.pace)
            self._trained.load_state_dict(saved["model"])
        self._epoch = self._current_epoch()
        apply_freezing(self._trained, self.heads, recipe, self._epoch)
        self._build()
        if saved is not None:
            self._restore(saved)
        else:
            self._log(LOG_HEADER)
        self._notify_start()
        self._trained.train()
        self._prefetch = Prefetcher(self.sampler, self.prefetch_workers, self.world.rank, self.world.size)

    def _current_epoch(self) -> int:
        return self.sampler.epoch_of(min(self.state.step, self.sampler.total_steps - 1))

    def _build(self) -> None:
        dtype = autocast_dtype(self.recipe.mixed_precision, self.device)
        clip = self.recipe.max_grad_norm
        module = ObjectiveModule(self._trained)
        self._module = self._distribute(module)
        # After distributing: FSDP replaces the parameters.
        groups = param_groups(self._trained, self.heads, self.recipe)
        self.optimizer = build_optimizer(groups, self.device.type, self.recipe)
        self.train_step: TrainStep
        single_head = self.sampler.single_head and len(self.heads) == 1
        if self.world.size == 1 and single_head and can_replay(self._trained, dtype):
            self.train_step = GraphedTrainStep(module, self.optimizer, dtype=dtype, clip=clip)
        else:
            self.train_step = TrainStep(self._module, self.optimizer, dtype=dtype, clip=clip, world=self.world.size)
        self.train_step.bf16_linear = uses_bf16_linear(self.recipe.mixed_precision, self.device)

    def _distribute(self, module: ObjectiveModule) -> torch.nn.Module:
        # A step may train one of several heads, or auxiliary modules, or leave the weights of
        # global tokens unused.
        unused = len(self.heads) > 1 or not self.sampler.single_head or bool(self.model.config.global_tokens)
        blocks = self._trained.encoder.blocks
        return distributed.distribute(module, blocks, self.strategy, self.world, self.device, unused=unused)

    def _restore(self, saved: Mapping[str, Any]) -> None:
        if self._sharded:
            distributed.load_optimizer_state(self._module, self.optimizer, saved["optimizer"])
        else:
            # The groups are those of this device: AdamW's options differ between a CPU and a GPU.
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": saved["optimizer"]["state"], "param_groups": groups})
        if saved["scaler"]:
            self.train_step.scaler.load_state_dict(saved["scaler"])

    def _tear_down(self) -> None:
        """Restore the model for inference, however the run ended."""
        self.folder.close()
        if hasattr(self, "_prefetch"):
            self._prefetch.close()
        if hasattr(self, "_dropout"):
            restore_dropout(self._dropout)
        self.model.encoder.gradient_checkpointing = self.model.encoder.embeddings.words.sparse = False
        self.model.encoder.freeze(0)
        if lora.is_on(self.model):
            lora.merge(self.model)
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)
            parameter.grad = None
        self.model.eval()

    # --- one step ---

    def _step(self) -> int:
        """Train one step; returns its number of texts."""
        p = self.state
        self._unfreeze()
        task, prepared = self._prefetch(p.step, self._micro_tokens)
        loss = self._zero()
        if prepared.total > 0:
            try:
                loss = self._accumulate(task, prepared)
                self.train_step.update(self._rate(p.step))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise failures.out_of_memory(p.step + 1, self._micro_tokens) from None
        # Only losses of the same kind are comparable.
        kind = f"{type(task.objective).__name__} {task.head} {task.sampler}" if task.objective.detect_spikes else ""
        self._losses.add(loss, kind, prepared.total)
        if self.device.type == "cpu" and prepared.total > 0:  # elsewhere the progress bar would wait for the device
            self._detail = self._describe(float(loss) / prepared.total, p.step)
        p.weight += prepared.total
        p.texts += prepared.texts
        p.tokens += prepared.tokens
        p.step += 1
        if p.step % LOG_EVERY == 0 or p.step == self.pace.total:
            self._log_row()
        return prepared.texts

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _unfreeze(self) -> None:
        epoch = self._current_epoch()
        if epoch == self._epoch:
            return
        self._epoch = epoch
        if apply_freezing(self._trained, self.heads, self.recipe, epoch):
            if self.world.size > 1 and not self._sharded:
                # DDP registers only the parameters that require gradients when it wraps a module.
                self._module = self.train_step.module = self._distribute(ObjectiveModule(self._trained))
            self.train_step.reset()

    @property
    def _micro_tokens(self) -> int:
        return self.state.micro_tokens or self.recipe.micro_tokens

    def _accumulate(self, task: TrainingTask, prepared: PreparedStep) -> Tensor:
        """Accumulate the gradients of a step, if need be in smaller micro-batches; returns its loss."""
        while True:
            try:
                return self._backward(task, prepared)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self.world.size > 1 or not prepared.divisible:
                    raise
            # Outside the handler, so that the traceback no longer holds tensors.
            self.train_step.zero_grad()
            self.train_step.reset()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.state.micro_tokens = prepared.divisible // 2
            task, prepared = self._prefetch(self.state.step, self._micro_tokens)

    def _backward(self, task: TrainingTask, prepared: PreparedStep) -> Tensor:
        """Forward and backward pass of this process's micro-batches."""
        objective = task.objective
        if isinstance(objective, ModelObjective):
            objective = objective.with_counts(prepared.counts)
        rank, size = self.world.rank, self.world.size
        loss = self._zero()
        for number, micro_batch in enumerate(prepared.micro_batches):
            seed = random_seed(self.recipe.seed, self.state.step, number * size + rank)
            last = number == len(prepared.micro_batches) - 1
            loss += self.train_step.add(micro_batch, task.head, objective, prepared.total, seed, last)
        return loss

    # --- losses and rollback ---

    def _check_losses(self) -> None:
        try:
            self.state.loss += self._losses.check(self.world, self.state.step)
        except LossSpike as spike:
            if self.rollback:
                raise
            raise self._diverged(f"the loss is {spike.loss:g} at step {spike.step}") from None
        if self.rollback:
            self.state.recent_losses = self._losses.recent

    def _roll_back(self, spike: LossSpike) -> None:
        """Restore the last checkpoint, and continue after the step with the spike."""
        saved = self.world.broadcast(self.folder.last())
        if self._sharded or saved is None:
            raise self._diverged(f"the loss is {spike.loss:g} at step {spike.step}")
        before = TrainState(**saved["progress"])
        if before.consecutive_rollbacks >= MAX_ROLLBACKS:
            raise self._diverged(f"the loss is {spike.loss:g} at step {spike.step}, after {MAX_ROLLBACKS} rollbacks")
        self._print(f"loss {spike.loss:.4g} at step {spike.step}: rolled back to the weights of step {before.step}")
        self._trained.load_state_dict(saved["model"])
        self._restore(saved)
        self.train_step.zero_grad()
        self.train_step.reset()
        before.skipped.append([before.step, spike.step])
        before.step = spike.step
        self.state = before
        self._losses = LossMonitor(self.rollback, before.recent_losses)
        self._notify_start()
        self._save()

    def _notify_start(self) -> None:
        if self.callback is not None:
            self.callback.on_start([parse_row(row) for row in self.state.rows[1:]], self.state.evaluations)

    def _diverged(self, reason: str) -> TrainingError:
        return failures.diverged(reason, self.recipe.lr)

    def _log_row(self) -> None:
        self._check_losses()
        p = self.state
        mean = p.loss / p.weight if p.weight else 0.0
        rate = self._rate(p.step - 1) * self.recipe.lr
        self._detail = self._describe(mean, p.step - 1)
        row = f"{p.step},{self.sampler.epochs_done(p.step):.6g},{mean:.9g},{rate:.6g},{p.tokens}"
        self._log(row)
        if self.callback is not None:
            self.callback.on_log(parse_row(row))
        p.loss = p.weight = 0.0

    def _rate(self, step: int) -> float:
        """The learning rate of a step, as a fraction of its peak."""
        return self.schedule.factor(self.pace.position(self.sampler.schedule_position(step)))

    def _describe(self, loss: float, step: int) -> str:
        return f"loss {loss:.3f}, lr {self._rate(step) * self.recipe.lr:.1e}"

    def _keep_pace(self) -> None:
        """Fit the run to its deadline; shorten it if the loss has been small for long."""
        p, logged = self.state, self.state.step % LOG_EVERY == 0
        if self.pace.deadline is not None and (logged or self.world.size == 1):
            total = self.pace.total_in_time(p.step, () if self.evaluate is None else self._evaluate_at)
            self.pace.fit(p.step, self.world.broadcast(total))
        if logged:
            self.pace.check_loss(p.step, p.rows)
        p.pace = self.pace.state

    def _log(self, row: str) -> None:
        self.state.rows.append(row)
        self.folder.log(row)

    # --- evaluation and checkpoints ---

    def _gather(self) -> None:
        """Gather sharded weights into the model, and check that all weights are finite."""
        self._check_losses()
        if self._sharded:
            distributed.gather_weights(self._trained, self.model)
        sums = torch.stack([parameter.detach().sum(dtype=torch.float32) for parameter in self.model.parameters()])
        if not sums.isfinite().all():
            raise self._diverged(f"weights are not finite after step {self.state.step}")

    def _evaluate(self, evaluate: Callable[[], Mapping[str, float]]) -> None:
        p, started = self.state, time.monotonic()
        self.model.eval()
        with torch.no_grad(), without_progress():  # training shows its own
            scores = {name: float(value) for name, value in self.world.broadcast(dict(evaluate())).items()}
        self._trained.train()
        self.pace.evaluated(time.monotonic() - started)
        p.evaluations.append({"step": p.step, "epoch": self.sampler.epochs_done(p.step), **scores})
        if self.callback is not None:
            self.callback.on_evaluation(p.evaluations[-1])
        if self.keep == "last" and self.metric not in scores:
            line = ", ".join(f"{name} {value:.4g}" for name, value in scores.items() if not name.endswith("_se"))
            self._print(f"step {p.step} of {self.pace.total}: {line}")
            return
        score = scores.get(self.metric)
        if score is None:
            raise ConfigError(f"metric={self.metric!r} must be one of {', '.join(scores)}")
        self._print(f"epoch {self.sampler.epochs_done(p.step):.2f}: dev {self.metric} {score:.4f}")
        if self.keep == "last":
            return
        if p.is_best(score, self.recipe.patience or 0) and self.world.is_main:
            self.folder.save_best(p.step, self.model.state_dict())

    def _save(self) -> None:
        if not self._saves:
            return
        if self.callback is not None:
            self.callback.on_save()
        optimizer = (
            distributed.full_optimizer_state(self._module, self.optimizer)
            if self._sharded
            else self.optimizer.state_dict()
        )
        if self.world.is_main:
            self.folder.save(self.state, self.model.state_dict(), optimizer, self.train_step.scaler.state_dict())
        self.world.barrier()

    def _progress_bar(self) -> Progress:
        fraction, show = (lambda: self.state.step / self.pace.total), self.progress and self.world.is_main
        return self.stage.progress_bar(fraction, self.state.texts, show=show)

    def _print(self, text: str) -> None:
        if self.world.is_main and self.progress:
            print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, file=sys.stderr)
