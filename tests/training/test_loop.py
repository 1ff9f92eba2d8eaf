"""The training loop, against a simple loop written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bertie.errors import ConfigError, TrainingError
from bertie.nn.model import Model
from bertie.ops.torch import bf16_linear
from bertie.text.batch import Batch
from bertie.training import loop
from bertie.training.callbacks import TrainingHistory
from bertie.training.objectives import SingleLabelObjective, Targets, TrainingExample
from bertie.training.sampling import ExampleSampler, TrainingTask
from tests.ops.forced import turn_off
from tests.training import tiny

# --- which items a step reads ---


def _curve(run: TrainingHistory) -> list[float]:
    return [row["loss"] for row in run.curve]


def test_it_learns() -> None:
    model = tiny.model(dropout=0.1)
    held = tiny.items(60, 9, windows=3)
    before = tiny.accuracy(model.eval(), held)
    done = tiny.trainer(model, tiny.source(96, windows=3), tiny.recipe(epochs=8, lr=1e-2)).run()
    assert before < 0.7
    assert _curve(done)[0] > 1.0
    assert _curve(done)[-1] < 0.1
    assert tiny.accuracy(model, held) > 0.95
    assert done.steps == 96
    assert done.tokens == 8 * sum(len(item) for item in tiny.items(96, windows=3))
    assert not done.evaluations
    assert not model.training


def _by_hand(model: Model, how: Any, sources: list[TrainingTask], most: int) -> Iterator[tuple[float, float]]:
    """A plain loop: each step's loss and the norm of its gradient."""
    steps = ExampleSampler(sources, how)
    matrices = [p for p in model.encoder.parameters() if p.ndim > 1]
    vectors = [p for p in model.encoder.parameters() if p.ndim < 2]
    head = model.head("classify").out
    assert head is not None
    groups = [
        {"params": matrices, "lr": how.lr, "weight_decay": how.weight_decay},
        {"params": vectors, "lr": how.lr, "weight_decay": 0.0},
        {"params": [head.weight], "lr": how.head_lr, "weight_decay": how.weight_decay},
        {"params": [head.bias], "lr": how.head_lr, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, how.beta2), eps=1e-8, foreach=False)
    peaks = [group["lr"] for group in adam.param_groups]
    warm = round(how.warmup * steps.total_steps)
    for step in range(min(most, steps.total_steps)):
        factor = (step + 1) / (warm + 1) if step < warm else (steps.total_steps - step) / (steps.total_steps - warm)
        for group, peak in zip(adam.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        _, items = steps.read(step)
        lost, weight = torch.zeros(()), 0.0
        for item in items:
            logs = torch.zeros(tiny.CLASSES)
            for piece in item.windows:
                batch = Batch.from_ids([piece.ids], [piece.segments])
                logs = logs + piece.share * torch.log_softmax(model(batch, "classify")[0], -1)
            lost = lost + item.weight * F.cross_entropy(logs[None], torch.tensor([int(item.value)]))  # type: ignore[arg-type]
            weight += item.weight
        adam.zero_grad()
        (lost / weight).backward()
        norm = torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], how.max_grad_norm or math.inf)
        adam.step()
        yield float(lost.detach()), float(norm)


@pytest.mark.parametrize("clip", [0.3, 0.0])
def test_it_equals_a_simple_loop(monkeypatch: pytest.MonkeyPatch, clip: float) -> None:
    monkeypatch.setattr(loop, "LOG_EVERY", 1)
    turn_off(monkeypatch, "native.training.optimizer")  # it rounds differently
    how = tiny.recipe(epochs=4, lr=1e-3, head_lr=3e-3, batch_size=8, warmup=0.2, max_grad_norm=clip, micro_tokens=24)
    source = tiny.source(40, windows=3)
    plain = tiny.model()
    # The head that is not trained must not move.
    by_hand = list(_by_hand(plain, how, [source], 20))
    ours = tiny.model()
    done = tiny.trainer(ours, source, how).run()
    assert done.steps == 20
    weights = [sum(item.weight for item in ExampleSampler([source], how).read(s)[1]) for s in range(20)]
    assert _curve(done) == pytest.approx([lost / w for (lost, _), w in zip(by_hand, weights, strict=True)], abs=1e-6)
    tiny.assert_same(
        tiny.without_key_biases(tiny.weights(ours)), tiny.without_key_biases(tiny.weights(plain)), atol=1e-6
    )
    if clip:
        assert max(norm for _, norm in by_hand) > 2 * clip  # or there was nothing to clip


def test_the_log(tmp_path: Path) -> None:
    how = tiny.recipe(epochs=2.5, batch_size=4, lr=1e-3, warmup=0.1)
    source = tiny.source(36)
    done = tiny.trainer(tiny.model(), source, how, folder=tmp_path).run()
    rows = [line.split(",") for line in (tmp_path / "log.csv").read_text().splitlines()]
    assert rows[0] == ["step", "epoch", "loss", "lr", "tokens"]
    assert [int(row[0]) for row in rows[1:]] == [10, 20, 22]
    assert float(rows[-1][1]) == pytest.approx(2.5)
    assert int(rows[-1][4]) == done.tokens
    assert float(rows[3][3]) == pytest.approx(1e-3 * (1 / 20), rel=1e-4)
    assert done.curve == [dict(zip(rows[0], map(float, row), strict=True)) for row in rows[1:]]


def _moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def _group(name: str) -> str:
    parts = name.split(".")
    return parts[1] if parts[1] in ("embeddings", "classify", "tag") else f"{parts[1]}.{parts[2]}"


def _snapshots(model: Model, how: Any, **options: Any) -> list[dict[str, Tensor]]:
    """Weights before, and after each epoch."""
    found = [tiny.weights(model)]

    def evaluate() -> dict[str, float]:
        found.append(tiny.weights(model))
        return {"score": float(len(found))}

    tiny.trainer(model, tiny.source(), how, evaluate=evaluate, metric="score", **options).run()
    return found


def test_freezing_and_unfreezing() -> None:
    model = tiny.model()
    found = _snapshots(model, tiny.recipe(epochs=4, freeze="encoder", unfreeze=1))
    moved = [{_group(n) for n in _moved(a, b)} for a, b in pairwise(found)]
    top, all_ = {"classify", "blocks.1"}, {"classify", "blocks.1", "blocks.0", "embeddings"}
    assert moved == [{"classify"}, top, all_, all_]
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_lora_trains_its_factors_only_and_is_merged() -> None:
    model = tiny.model()
    before, names = tiny.weights(model), [name for name, _ in model.named_parameters()]
    held = tiny.items(40, 9)
    how = tiny.recipe(epochs=20, lr=1e-2, lora=2)
    scores: list[float] = []

    def evaluate() -> dict[str, float]:
        scores.append(tiny.accuracy(model, held))
        return {"score": scores[-1] + 1e-9 * len(scores)}  # the last of equals

    tiny.trainer(model, tiny.source(64), how, evaluate=evaluate, metric="score").run()
    assert [name for name, _ in model.named_parameters()] == names
    moved = _moved(before, tiny.weights(model))
    assert {n for n in moved if n.startswith("encoder")} == {
        n for n in names if n.startswith("encoder.blocks") and before[n].ndim == 2
    }
    assert max(scores) > 0.9
    assert tiny.accuracy(model, held) == max(scores)  # merged


def _scored(model: Model, values: list[float]) -> tuple[Callable[[], dict[str, float]], list[dict[str, Tensor]]]:
    seen: list[dict[str, Tensor]] = []

    def evaluate() -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        seen.append(tiny.weights(model))
        return {"score": values[len(seen) - 1]}

    return evaluate, seen


@pytest.mark.parametrize("kept", [False, True])
def test_the_best_weights_are_kept_and_patience_ends_the_run(tmp_path: Path, kept: bool) -> None:
    model = tiny.model()
    evaluate, seen = _scored(model, [0.1, 0.5, 0.4, 0.5, 0.3, 0.9])
    trainer = tiny.trainer(
        model,
        tiny.source(),
        tiny.recipe(epochs=6, patience=3),
        evaluate=evaluate,
        metric="score",
        folder=tmp_path if kept else None,
    )
    done = trainer.run()
    assert done.stopped_early
    assert done.best_step == 8
    assert done.steps == 20
    assert [(e["step"], e["epoch"], e["score"]) for e in done.evaluations] == [
        (4, 1, 0.1), (8, 2, 0.5), (12, 3, 0.4), (16, 4, 0.5), (20, 5, 0.3)
    ]  # fmt: skip
    tiny.assert_same(tiny.weights(model), seen[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == (["best-8.pt", "log.csv", "state.pt"] if kept else [])


def test_without_patience_all_epochs_are_run_and_the_last_may_be_best() -> None:
    model = tiny.model()
    evaluate, seen = _scored(model, [0.1, 0.5, 0.4, 0.9])
    done = tiny.trainer(model, tiny.source(), tiny.recipe(epochs=4), evaluate=evaluate, metric="score").run()
    assert (done.steps, done.best_step, done.stopped_early) == (16, 16, False)
    tiny.assert_same(tiny.weights(model), seen[3])


def test_a_nan_score_is_never_the_best() -> None:
    model = tiny.model()
    evaluate, seen = _scored(model, [math.nan, -0.5, math.nan])
    done = tiny.trainer(model, tiny.source(), tiny.recipe(epochs=3), evaluate=evaluate, metric="score").run()
    assert done.best_step == 8
    tiny.assert_same(tiny.weights(model), seen[1])


def test_evaluations_per_epoch() -> None:
    model = tiny.model()
    evaluate, _ = _scored(model, [0.0] * 9)
    how = tiny.recipe(epochs=1.5, batch_size=3, evals_per_epoch=3)
    done = tiny.trainer(model, tiny.source(30), how, evaluate=evaluate, metric="score").run()
    assert [e["step"] for e in done.evaluations] == [3, 7, 10, 12, 13, 15]


def test_the_size_of_micro_batches_makes_no_difference() -> None:
    found = []
    for micro in (1, 20, 10_000):
        model = tiny.model()
        tiny.trainer(model, tiny.source(windows=3), tiny.recipe(lr=1e-3, micro_tokens=micro)).run()
        found.append(tiny.without_key_biases(tiny.weights(model)))
    tiny.assert_same(found[0], found[1], atol=1e-6)
    tiny.assert_same(found[0], found[2], atol=1e-6)


def test_gradient_checkpointing_makes_no_difference_even_with_dropout() -> None:
    found = []
    for on in (False, True):
        model = tiny.model(dropout=0.2)
        tiny.trainer(model, tiny.source(16), tiny.recipe(epochs=1, gradient_checkpointing=on)).run()
        assert not model.encoder.gradient_checkpointing
        found.append(tiny.weights(model))
    tiny.assert_same(*found)  # type: ignore[arg-type]


def test_the_seed_determines_the_run() -> None:
    found = []
    for seed, state in ((1, 5), (1, 6), (2, 5)):
        model = tiny.model(dropout=0.2)
        torch.manual_seed(state)  # what the process drew before does not matter
        tiny.trainer(model, tiny.source(16), tiny.recipe(epochs=1, seed=seed)).run()
        found.append(tiny.weights(model))
    tiny.assert_same(found[0], found[1])
    assert _moved(found[0], found[2])


def test_dropout_can_be_overridden_for_the_run() -> None:
    found = {}
    for name, own, asked in (("none", 0.0, None), ("off", 0.4, 0.0), ("own", 0.4, None), ("on", 0.0, 0.4)):
        model = tiny.model(dropout=own)
        config = model.config
        tiny.trainer(model, tiny.source(16), tiny.recipe(epochs=1, dropout=asked)).run()
        assert model.config is config
        assert model.encoder.blocks[0].dropout == own
        assert model.head("classify").cfg.dropout == own
        found[name] = tiny.weights(model)
    tiny.assert_same(found["none"], found["off"])
    tiny.assert_same(found["own"], found["on"])
    assert _moved(found["off"], found["own"])


def test_a_step_without_any_weight_changes_nothing() -> None:
    model = tiny.model()
    before = tiny.weights(model)
    weightless = [replace(item, weight=0.0) for item in tiny.items(8)]
    done = tiny.trainer(
        model, TrainingTask("classify", SingleLabelObjective(), weightless), tiny.recipe(epochs=1)
    ).run()
    tiny.assert_same(before, tiny.weights(model))
    assert _curve(done) == [0.0]


def test_two_heads_are_trained_over_one_encoder() -> None:
    model = tiny.model()
    before = tiny.weights(model)
    tiny.trainer(model, tiny.two_sources(96), tiny.recipe(epochs=8, lr=1e-2)).run()
    held = tiny.tagged(30, 8)
    batch = Batch.from_ids([item.windows[0].ids for item in held])
    with torch.no_grad():
        said = model(batch, "tag").argmax(1)
    inside = batch.positions > 0
    assert float((said == batch.ids % 2)[inside].double().mean()) > 0.9
    assert tiny.accuracy(model, tiny.items(60, 9)) > 0.9
    assert {_group(name) for name in _moved(before, tiny.weights(model))} >= {"classify", "tag", "embeddings"}


# --- what can go wrong ---


class Breaks(SingleLabelObjective):
    """Does something in the n-th call."""

    def __init__(self, at: int, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.at, self.what, self.calls = at, what, 0

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        self.calls += 1
        lost = super().losses(outputs, batch, targets)
        return self.what(lost) if self.calls == self.at else lost


@pytest.mark.parametrize(("at", "saved"), [(1, None), (7, 6), (9, 8), (16, 15)])
def test_a_loss_that_is_not_finite_ends_the_run_and_is_never_saved(tmp_path: Path, at: int, saved: int | None) -> None:
    calls: list[int] = []

    def evaluate() -> dict[str, float]:
        calls.append(1)
        return {"score": 1.0}

    model = tiny.model()
    source = replace(tiny.source(), objective=Breaks(at, lambda lost: lost * math.nan))
    how = tiny.recipe(epochs=4)
    trainer = tiny.trainer(
        model, source, how, folder=tmp_path, save_steps=3, evaluate=evaluate, metric="score", fingerprint="x"
    )
    with pytest.raises(TrainingError, match=rf"the loss is nan at step {at}\b.*learning rate \(0\.003\)"):
        trainer.run()
    assert len(calls) == (at - 1) // 4  # never of what is broken
    assert not model.training
    assert [p.name for p in tmp_path.glob(".*")] == []
    if saved is None:
        assert not (tmp_path / "state.pt").exists()
        return
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["progress"]["step"] == saved
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    # It can go on from there.
    done = tiny.trainer(
        tiny.model(), tiny.source(), how, folder=tmp_path, resume=True, evaluate=evaluate, metric="score",
        fingerprint="x",
    ).run()  # fmt: skip
    assert done.steps == 16


def test_a_gradient_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    """The loss is finite, and what it makes of the weights is not."""

    def steep(lost: Tensor) -> Tensor:
        return lost + torch.sqrt((lost * 0).sum())  # 0, with an infinite slope

    source = replace(tiny.source(), objective=Breaks(6, steep))
    trainer = tiny.trainer(tiny.model(), source, tiny.recipe(epochs=4), folder=tmp_path, save_steps=3)
    with pytest.raises(TrainingError, match="weights are not finite after step 6"):
        trainer.run()
    assert torch.load(tmp_path / "state.pt", weights_only=True)["progress"]["step"] == 4  # the end of an epoch


class Hungry(SingleLabelObjective):
    """Has memory for so many tokens."""

    def __init__(self, room: int, error: Exception) -> None:
        super().__init__()
        self.room, self.error = room, error
        self.largest = 0

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        if len(batch.ids) > self.room:
            raise self.error
        self.largest = max(self.largest, len(batch.ids))
        return super().losses(outputs, batch, targets)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_out_of_memory_retries_smaller_micro_batches_with_the_same_result(tmp_path: Path, error: Exception) -> None:
    how = tiny.recipe(epochs=2, lr=1e-3)
    small = tiny.model()
    tiny.trainer(small, tiny.source(windows=3), how.replace(micro_tokens=30)).run()
    model, objective = tiny.model(), Hungry(30, error)
    trainer = tiny.trainer(
        model, replace(tiny.source(windows=3), objective=objective), how, folder=tmp_path, save_steps=1
    )
    trainer.run()
    assert 15 < objective.largest <= 30
    assert trainer.state.micro_tokens <= 60
    tiny.assert_same(
        tiny.without_key_biases(tiny.weights(small)), tiny.without_key_biases(tiny.weights(model)), atol=1e-6
    )
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["progress"]["micro_tokens"] == trainer.state.micro_tokens


def test_out_of_memory_within_a_step_restarts_the_step() -> None:
    def no_memory(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    found = []
    how = tiny.recipe(epochs=1, lr=1e-3, micro_tokens=30)
    for objective in (SingleLabelObjective(), Breaks(2, no_memory)):
        model = tiny.model()
        tiny.trainer(model, replace(tiny.source(8), objective=objective), how).run()
        found.append(tiny.without_key_biases(tiny.weights(model)))
    tiny.assert_same(found[0], found[1], atol=1e-6)


def test_a_single_text_too_large_for_memory_ends_the_run_with_advice() -> None:
    """Beside smaller ones that can be cut apart, and alone."""
    rng = np.random.default_rng(0)
    large = TrainingExample((tiny.piece(rng, 1, 30),), np.int64(1))
    for items in ([large, *tiny.items(7, length=4)], [large]):
        objective = Hungry(20, torch.OutOfMemoryError("CUDA out of memory."))
        trainer = tiny.trainer(tiny.model(), TrainingTask("classify", objective, items), tiny.recipe())
        with pytest.raises(TrainingError, match=r"out of memory at step 1, .*gradient_checkpointing=True"):
            trainer.run()


def test_out_of_memory_in_the_optimizer_update(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: Any, factor: float) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(loop.TrainStep, "update", update)  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="out of memory at step 1"):
        tiny.trainer(tiny.model(), tiny.source(), tiny.recipe()).run()


def test_other_errors_propagate_and_the_model_is_restored() -> None:
    def broken(_: Tensor) -> Tensor:
        raise RuntimeError("sizes do not match")

    model = tiny.model(dropout=0.3)
    config, names = model.config, list(model.state_dict())
    source = replace(tiny.source(), objective=Breaks(3, broken))
    with pytest.raises(RuntimeError, match="sizes do not match"):
        tiny.trainer(model, source, tiny.recipe(lora=2, dropout=0.1, gradient_checkpointing=True)).run()
    assert model.config is config
    assert list(model.state_dict()) == names
    assert not model.training
    assert not model.encoder.gradient_checkpointing
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_invalid_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, source, how = tiny.model(), tiny.source(), tiny.recipe(epochs=1)
    for options, said in (
        ({"strategy": "tp"}, "strategy='tp' must be ddp or fsdp"),
        ({"save_steps": 0}, "save_steps=0 must be at least 1"),
        ({"resume": True}, "resume=True needs the folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            tiny.trainer(model, source, how, **options)
    with pytest.raises(ConfigError, match="nothing to train on"):
        tiny.trainer(model, TrainingTask("classify", SingleLabelObjective(), []), how)
    with pytest.raises(ConfigError, match="metric='f2' must be one of accuracy, f1"):
        tiny.trainer(model, source, how, evaluate=lambda: {"accuracy": 0.5, "f1": 0.4}, metric="f2").run()
    monkeypatch.setattr(bf16_linear, "is_supported", lambda: False)
    for name in ("bf16", "fp16"):
        with pytest.raises(ConfigError, match=f"mixed_precision='{name}' is for GPUs"):
            tiny.trainer(model, source, how.replace(mixed_precision=name)).run()


def test_it_learns_with_linear_layers_in_bf16_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not bf16_linear.is_supported():  # where torch's bf16 kernels may kill the process
        pytest.skip("no bf16 on this CPU")
    monkeypatch.setattr(bf16_linear, "MIN_ROWS", 2)
    model, held = tiny.model(), tiny.items(60, 9, windows=3)
    how = tiny.recipe(epochs=8, lr=1e-2)
    done = tiny.trainer(model, tiny.source(96, windows=3), how.replace(mixed_precision="bf16")).run()
    exact = tiny.trainer(tiny.model(), tiny.source(96, windows=3), how).run()
    assert _curve(done) != _curve(exact)
    np.testing.assert_allclose(_curve(done)[0], _curve(exact)[0], rtol=0.01)
    assert tiny.accuracy(model, held) > 0.95
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_progress_is_printed_unless_it_is_off(capfd: pytest.CaptureFixture[str]) -> None:
    for progress in (True, False):
        tiny.trainer(
            tiny.model(),
            tiny.source(),
            tiny.recipe(epochs=1),
            evaluate=lambda: {"f1": 0.25},
            metric="f1",
            progress=progress,
        ).run()
        out, err = capfd.readouterr()
        assert out == ""
        assert ("epoch 1.00: dev f1 0.2500" in err) is progress
