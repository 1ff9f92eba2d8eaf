"""Training over vectors: cached gradients, processes, kills, and which rows a step compares."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.errors import ConfigError
from bertie.nn.sentence_layers import Dense
from bertie.training.embedding import losses
from bertie.training.embedding import similarity_functions as similarity
from bertie.training.embedding.losses import EmbeddingLoss
from bertie.training.embedding.objective import EmbeddingObjective, Output, make_row, named_loss
from bertie.training.objectives import TrainingWindow
from bertie.training.prefetch import split_micro_batches
from bertie.training.step import ObjectiveModule, TrainStep
from tests.training import tiny
from tests.training.embedding import objective_runs
from tests.training.kill_points import forked

DOT = losses.InfoNCELoss(scale=1.0, score=similarity.DotProduct())
ALL: dict[str, tuple[EmbeddingLoss, int, Output]] = {
    "infonce": (losses.InfoNCELoss(), 2, "dense"),
    "hard": (losses.InfoNCELoss(symmetric=True), 4, "dense"),
    "triplet": (losses.TripletLoss(), 3, "dense"),
    "softmax": (losses.SoftmaxLoss(3), 2, "dense"),
    "cosine": (losses.CosineSimilarityLoss(), 2, "dense"),
    "cosent": (losses.CoSENTLoss(), 2, "dense"),
    "contrastive": (losses.ContrastiveLoss(), 2, "dense"),
    "matryoshka": (losses.MatryoshkaLoss(losses.SoftmaxLoss(3), (12, 4)), 2, "dense"),
    "margin-mse": (losses.MarginMSELoss(), 4, "dense"),
    "kl": (losses.KLDivergenceLoss(), 4, "dense"),
    "neighbours": (losses.SimilarityDistillationLoss(), 1, "dense"),
    "colbert": (losses.InfoNCELoss(scale=1.0, score=similarity.MaxSim()), 3, "tokens"),
    "splade": (losses.SpladeLoss(DOT, 0.01, 0.01), 3, "sparse"),
}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ALL)
def test_cached_gradients_are_those_of_one_graph(name: str, dropout: float) -> None:
    loss, columns, output = ALL[name]
    items = objective_runs.rows(loss.inputs, 13, columns)
    parts = split_micro_batches(items, 64)
    assert len(parts) > 2
    head = "mlm" if output == "sparse" else ""

    # All graphs at once, and the loss by hand.
    model, objective = objective_runs.begun(loss, dropout, output)
    minis = [objective.collate(part) for part in parts]
    model.train()
    result = []
    for number, mini in enumerate(minis):
        torch.manual_seed(100 + number)
        result.append(objective.embed(model, mini, head))
    expected = objective.step_loss(model, torch.cat(result), minis, len(items))
    expected.backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    again, objective = objective_runs.begun(loss, dropout, output)
    again.train()
    stepper = TrainStep(ObjectiveModule(again), torch.optim.SGD(again.parameters()), dtype=torch.float32, clip=0.0)
    message = [
        stepper.add(mini, head, objective, len(items), 100 + number, number == len(minis) - 1)
        for number, mini in enumerate(minis)
    ]
    torch.testing.assert_close(sum(message), expected * len(items), atol=1e-5, rtol=1e-5)
    ours = {key: p.grad for key, p in again.named_parameters() if p.grad is not None and p.grad.any()}
    assert any(key.startswith("encoder.blocks.0") for key in ours)
    if output != "sparse":
        assert any(key.startswith("auxiliary.sentence") for key in ours)
    if "softmax" in name or name == "matryoshka":
        assert any(key.startswith("auxiliary.loss") for key in ours)
    for key, grad in grads.items():
        torch.testing.assert_close(ours.get(key, torch.zeros_like(grad)), grad, atol=1e-5, rtol=5e-6)


@pytest.mark.parametrize("name", ALL)
def test_one_micro_batch_or_many(name: str) -> None:
    loss, columns, output = ALL[name]
    items = objective_runs.rows(loss.inputs, 10, columns)
    result = []
    for tokens in (10_000, 48):
        model, objective = objective_runs.begun(loss, output=output)
        stepper = TrainStep(ObjectiveModule(model), torch.optim.SGD(model.parameters()), dtype=torch.float32, clip=0.0)
        parts = split_micro_batches(items, tokens)
        head = "mlm" if output == "sparse" else ""
        for number, part in enumerate(parts):
            stepper.add(objective.collate(part), head, objective, len(items), 0, number == len(parts) - 1)
        result.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None and p.grad.any()})
    assert result[0].keys() == result[1].keys()
    for key in result[0]:
        # CoSENT's gradients are above 10, where float32 has a resolution of 1e-6.
        torch.testing.assert_close(result[0][key], result[1][key], atol=1e-5, rtol=2e-6)


def test_a_long_text_is_the_mean_of_its_windows() -> None:
    model, objective = objective_runs.begun(losses.InfoNCELoss())
    rng = np.random.default_rng(0)
    one, two = tiny.piece(rng, 0, 5), tiny.piece(rng, 1, 7)
    weights = (0.25, 0.75)
    parts = [TrainingWindow(p.ids, p.segments, share) for p, share in zip((one, two), weights, strict=True)]
    model.eval()
    whole = objective.embed(model, objective.collate([make_row([parts, [one]])]), "")
    alone = objective.embed(model, objective.collate([make_row([[one], [two]])]), "")
    modules = model.auxiliary["sentence"]
    assert isinstance(modules, SentenceModules)
    bare = [
        modules.pooling(model.hidden(mini.batch), mini.batch)
        for mini in (objective.collate([make_row([[p], [p]])]) for p in (one, two))
    ]
    mean = weights[0] * bare[0][:1] + weights[1] * bare[1][:1]
    torch.testing.assert_close(whole[:1], modules.project(mean), atol=1e-6, rtol=0)
    torch.testing.assert_close(whole[1:], alone[:1], atol=1e-6, rtol=0)


def test_no_more_tokens_at_a_time_than_a_micro_batch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    rows = EmbeddingObjective.embed

    def counted(self: EmbeddingObjective, model: Any, mini: Any, head: str) -> torch.Tensor:
        held.append(len(mini.batch.ids) if torch.is_grad_enabled() else 0)
        return rows(self, model, mini, head)

    monkeypatch.setattr(EmbeddingObjective, "embed", counted)
    items = objective_runs.rows("pairs", 200, 2)
    recipe = {"batch_size": 200, "micro_tokens": 100, "epochs": 1}
    objective_runs.trainer(losses.InfoNCELoss(), items, recipe=recipe).run()
    assert sum(map(len, items)) > 2000
    assert sum(held) == sum(map(len, items))
    assert max(held) <= 100


@pytest.mark.parametrize("name", ["infonce", "triplet", "colbert", "splade"])
def test_the_loss_falls(name: str) -> None:
    loss, columns, output = ALL[name]
    items = objective_runs.rows(loss.inputs, 60, max(2, columns))
    recipe = {"batch_size": 20, "micro_tokens": 150, "epochs": 12, "lr": 1e-2}
    done = objective_runs.trainer(loss, items, output=output, recipe=recipe).run()
    assert done.curve[-1]["loss"] < 0.8 * done.curve[0]["loss"]  # two rows may be about one thing


# --- stopped, and over several processes ---


class Dies(losses.InfoNCELoss):
    """Kills this process in its n-th call."""

    left = 0

    def loss(self, *args: Any) -> torch.Tensor:
        type(self).left -= 1
        if type(self).left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(*args)


def run(folder: Path, die: int = 0) -> None:
    """A run with dropout and several micro-batches a step; what is left is saved."""
    torch.set_num_threads(1)
    Dies.left = die
    recipe = {"batch_size": 8, "micro_tokens": 48, "epochs": 3}
    items = objective_runs.rows("pairs", 30, 3)
    one = objective_runs.trainer(
        Dies(), items, dropout=0.1, recipe=recipe, folder=folder, resume=folder.exists(), save_steps=2
    )
    done = one.run()
    torch.save((tiny.weights(one.model), done.curve), folder / "result")


def test_killed_and_resumed_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    for kill in (0, 5):
        pid = forked(lambda kill=kill: run(tmp_path / str(kill), kill))
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) == bool(kill)
    _, status = os.waitpid(forked(lambda: run(tmp_path / "5")), 0)
    assert status == 0
    (a, curve), (b, resumed) = (torch.load(tmp_path / name / "result") for name in ("0", "5"))
    tiny.assert_same(a, b)
    assert curve == resumed
    assert any(name.startswith("auxiliary.sentence") for name in a)


SPREAD = {"hard": "ddp", "softmax": "ddp", "cosent": "ddp", "colbert": "ddp", "infonce": "fsdp"}


def spread_run(name: str, how: str) -> dict[str, torch.Tensor]:
    loss, columns, output = ALL[name]
    # 3 steps, the last of one row: one of two processes has none. Of tokens there must be some.
    recipe = {"batch_size": 8, "micro_tokens": 64, "epochs": 1, "lr": 1e-3}
    items = objective_runs.rows(loss.inputs, 18 if output == "tokens" else 17, columns)
    one = objective_runs.trainer(loss, items, output=output, recipe=recipe, strategy=how)
    one.run()
    return tiny.without_key_biases(tiny.weights(one.model))


def test_two_processes_are_one(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    script = (
        "import os, sys, torch; torch.set_num_threads(1)\n"
        "from tests.training.embedding.test_objective import SPREAD, spread_run\n"
        "for name, how in SPREAD.items():\n"
        "    torch.save(spread_run(name, how), sys.argv[1] + '/' + name + '-' + os.environ['RANK'])\n"
    )
    around = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], env=around | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    assert [process.wait(120) for process in started] == [0, 0]
    for name in SPREAD:
        first, second = (torch.load(tmp_path / f"{name}-{rank}") for rank in range(2))
        tiny.assert_same(first, second)
        tiny.assert_same(first, spread_run(name, "ddp"), atol=2e-5)


# --- names ---


def test_losses_by_name() -> None:
    assert named_loss("infonce") == losses.InfoNCELoss()
    assert named_loss("triplet:margin=0.2,distance=cosine") == losses.TripletLoss(0.2, "cosine")
    assert named_loss("softmax", classes=4) == losses.SoftmaxLoss(4)
    assert named_loss("infonce:symmetric=true") == losses.InfoNCELoss(symmetric=True)
    for text, message in {
        "nce": "must be one of infonce, triplet",
        "infonce:scale": "must be one of scale, symmetric",
        "infonce:score=dot": "must be one of scale, symmetric",
        "infonce:scale=big": "must be a number",
        "infonce:symmetric=1": "must be true or false",
        "cosine:scale=1": "must be one of nothing",
    }.items():
        with pytest.raises(ConfigError, match=message):
            named_loss(text)


def test_what_is_trained_beside_goes_away() -> None:
    model, objective = objective_runs.begun(losses.SoftmaxLoss(3))
    assert list(model.auxiliary) == ["sentence", "loss"]
    objective.detach(model)
    assert isinstance(model.auxiliary, nn.ModuleDict)
    assert not model.auxiliary
    assert isinstance(Dense(2, 2), nn.Module)
    with pytest.raises(ConfigError, match="output='words' must be one of dense, tokens, sparse"):
        EmbeddingObjective(losses.InfoNCELoss(), "words")  # type: ignore[arg-type]


def test_what_a_loss_trains_cannot_be_sharded() -> None:
    model, objective = objective_runs.begun(losses.SoftmaxLoss(3))
    module: Any = ObjectiveModule(model)
    module.set_requires_gradient_sync = lambda on: None  # as FSDP gives it
    stepper = TrainStep(module, torch.optim.SGD(model.parameters()), dtype=torch.float32, clip=0.0)
    mini = objective.collate(objective_runs.rows("classes", 2, 2))
    with pytest.raises(ConfigError, match="strategy='fsdp' cannot train the parameters of SoftmaxLoss"):
        stepper.add(mini, "", objective, 2, 0, True)
