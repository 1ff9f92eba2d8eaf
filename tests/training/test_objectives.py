"""Each loss against a plain computation text by text, and that what is not asked never counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bertie.config import HeadConfig
from bertie.nn.model import Model
from bertie.tasks.decoding import average_windows, log_softmax, softmax
from bertie.text.batch import Batch
from bertie.training.objectives import (
    AnswerSpanObjective,
    HeadObjective,
    MaskedLMObjective,
    MicroBatch,
    MultiLabelObjective,
    RegressionObjective,
    RelevanceObjective,
    SingleLabelObjective,
    Targets,
    TokenClassificationObjective,
    TrainingExample,
    TrainingWindow,
)
from bertie.training.step import ObjectiveModule
from tests.training import tiny

K = 5


def _texts(level: str, seed: int = 0, count: int = 6, k: int = K, multi: bool = False) -> list[TrainingExample]:
    """Items of one to four windows, with what each objective wants of them."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        shares = rng.dirichlet(np.ones(int(rng.integers(1, 5))))
        pieces = []
        for share in shares:
            n = int(rng.integers(2, 8))
            asked: dict[str, Any] = {}
            if level == "token":
                asked = {"values": rng.integers(0, k, n), "weights": rng.choice([0.0, 0.5, 2.0], n).astype(np.float32)}
            elif level == "window":
                asked = {"values": np.sort(rng.integers(0, n, 2)), "weights": np.float32(rng.choice([0.5, 1.0]))}
            pieces.append(TrainingWindow(rng.integers(1, 30, n), np.zeros(n, dtype=np.int64), float(share), **asked))
        value: Any = None
        if level == "text":
            value = rng.integers(0, 2, k).astype(np.float32) if multi else np.int64(rng.integers(k))
        found.append(TrainingExample(tuple(pieces), value, float(rng.choice([0.5, 1.0, 3.0]))))
    return found


def _valued(items: list[TrainingExample], seed: int = 1, low: float = 0.0, high: float = 1.0) -> list[TrainingExample]:
    rng = np.random.default_rng(seed)
    return [replace(item, value=np.array(rng.uniform(low, high), dtype=np.float32)) for item in items]


def _windows(items: Sequence[TrainingExample], outputs: Tensor) -> list[list[Tensor]]:
    """The rows of each item's windows."""
    found, at = [], 0
    for item in items:
        found.append([outputs[at + w] for w in range(len(item.windows))])
        at += len(item.windows)
    return found


def _ce(logs: Tensor, wanted: int, smoothing: float) -> Tensor:
    """-Σ q log p, q the wanted class with a part of it spread over all."""
    q = torch.full_like(logs, smoothing / len(logs))
    q[wanted] += 1 - smoothing
    return -(q * logs).sum()


def _one_of_many(items: Sequence[TrainingExample], outputs: Tensor, smoothing: float) -> Tensor:
    total = outputs.new_zeros(())
    for item, rows in zip(items, _windows(items, outputs), strict=True):
        mean = torch.stack([p.share * (row - row.logsumexp(0)) for p, row in zip(item.windows, rows, strict=True)])
        mean = mean.sum(0)
        total = total + item.weight * _ce(mean - mean.logsumexp(0), int(item.value), smoothing)  # type: ignore[arg-type]
    return total


def _any_of_many(items: Sequence[TrainingExample], outputs: Tensor, smoothing: float) -> Tensor:
    total = outputs.new_zeros(())
    for item, rows in zip(items, _windows(items, outputs), strict=True):
        mean = torch.stack([p.share * row for p, row in zip(item.windows, rows, strict=True)]).sum(0)
        wanted = torch.from_numpy(item.value).double() * (1 - smoothing) + smoothing / 2
        p = torch.sigmoid(mean)
        total = total - item.weight * (wanted * p.log() + (1 - wanted) * (1 - p).log()).mean()
    return total


def _value(items: Sequence[TrainingExample], outputs: Tensor, variance: float) -> Tensor:
    total = outputs.new_zeros(())
    for item, rows in zip(items, _windows(items, outputs), strict=True):
        mean = sum(p.share * row[0] for p, row in zip(item.windows, rows, strict=True))
        total = total + item.weight * (mean - float(item.value)) ** 2 / variance  # type: ignore[arg-type]
    return total


def _relevance(items: Sequence[TrainingExample], outputs: Tensor, _: float) -> Tensor:
    total = outputs.new_zeros(())
    for item, rows in zip(items, _windows(items, outputs), strict=True):
        p = torch.sigmoid(max(rows, key=lambda row: row.item())[0])
        y = float(item.value)  # type: ignore[arg-type]
        total = total - item.weight * (y * p.log() + (1 - y) * (1 - p).log())
    return total


def _each_token(items: Sequence[TrainingExample], outputs: Tensor, smoothing: float) -> Tensor:
    total, at = outputs.new_zeros(()), 0
    for piece in (p for item in items for p in item.windows):
        for value, weight in zip(piece.values, piece.weights, strict=True):  # type: ignore[arg-type]
            row = outputs[at]
            total = total + float(weight) * _ce(row - row.logsumexp(0), int(value), smoothing)
            at += 1
    return total


def _span(items: Sequence[TrainingExample], outputs: Tensor, _: float) -> Tensor:
    total, at = outputs.new_zeros(()), 0
    for piece in (p for item in items for p in item.windows):
        rows = outputs[at : at + len(piece)]
        start, end = (F.cross_entropy(rows[:, side][None], torch.tensor([piece.values[side]])) for side in (0, 1))  # type: ignore[index]
        total = total + float(piece.weights) * (start + end) / 2  # type: ignore[arg-type]
        at += len(piece)
    return total


CASES = {
    "one of many": (SingleLabelObjective(), _texts("text"), K, _one_of_many, 0.0),
    "one of many, smoothed": (SingleLabelObjective(0.2), _texts("text", 3), K, _one_of_many, 0.2),
    "any of many": (MultiLabelObjective(), _texts("text", multi=True), K, _any_of_many, 0.0),
    "any of many, smoothed": (MultiLabelObjective(0.1), _texts("text", 4, multi=True), K, _any_of_many, 0.1),
    "value": (RegressionObjective(2.5), _valued(_texts("text"), high=5.0), 1, _value, 2.5),
    "relevance": (RelevanceObjective(), _valued(_texts("text")), 1, _relevance, 0.0),
    "each token": (TokenClassificationObjective(), _texts("token"), K, _each_token, 0.0),
    "each token, smoothed": (TokenClassificationObjective(0.3), _texts("token", 6), K, _each_token, 0.3),
    "span": (AnswerSpanObjective(), _texts("window"), 2, _span, 0.0),
}
each_case = pytest.mark.parametrize(("objective", "items", "k", "plain", "extra"), CASES.values(), ids=CASES)


def _rows(objective: HeadObjective, mini: MicroBatch) -> int:
    return len(mini.batch) if objective.level == "text" else len(mini.batch.ids)


def _outputs(objective: HeadObjective, mini: MicroBatch, k: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(_rows(objective, mini), k, generator=draw)).requires_grad_()


@each_case
def test_losses_and_gradients_equal_a_simple_computation(
    objective: HeadObjective, items: list[TrainingExample], k: int, plain: Any, extra: float
) -> None:
    mini = objective.collate(items)
    outputs = _outputs(objective, mini, k)
    loss = objective.loss(outputs, mini.batch, mini.targets)
    (grad,) = torch.autograd.grad(loss, outputs)
    exact = outputs.detach().double().requires_grad_()
    wanted = plain(items, exact, extra)
    (wanted_grad,) = torch.autograd.grad(wanted, exact)
    torch.testing.assert_close(loss.double(), wanted, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(grad.double(), wanted_grad, atol=1e-6, rtol=1e-5)
    assert mini.weight == pytest.approx(sum(objective.example_weight(item) for item in items))


@each_case
def test_micro_batches_add_up_to_the_step(
    objective: HeadObjective, items: list[TrainingExample], k: int, plain: Any, extra: float
) -> None:
    """However a step is cut into micro-batches, loss and gradient are the same."""
    mini = objective.collate(items)
    outputs = _outputs(objective, mini, k)
    whole = objective.loss(outputs, mini.batch, mini.targets)
    (wanted,) = torch.autograd.grad(whole, outputs)
    for size in (1, 2, 4):
        loss, grads, at = torch.zeros(()), [], 0
        for part in (objective.collate(items[i : i + size]) for i in range(0, len(items), size)):
            rows = outputs.detach()[at : at + _rows(objective, part)].clone().requires_grad_()
            at += len(rows)
            one = objective.loss(rows, part.batch, part.targets)
            grads.append(torch.autograd.grad(one, rows)[0])
            loss = loss + one.detach()
        torch.testing.assert_close(loss, whole.detach(), atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(torch.cat(grads), wanted, atol=1e-6, rtol=0)


def _filled(objective: HeadObjective, mini: MicroBatch) -> MicroBatch:
    """With empty texts in the middle and at the end and a text that nobody asks for, as steppers fill batches up."""
    batch, targets = mini.batch, mini.targets
    tokens, more = len(batch.ids), 4
    filled = replace(
        batch,
        ids=F.pad(batch.ids, (0, 3)),
        segments=F.pad(batch.segments, (0, 3)),
        positions=F.pad(batch.positions, (0, 3)),
        cu_seqlens=torch.cat([batch.cu_seqlens, torch.tensor([tokens, tokens, tokens + 3, tokens + 3])]).int(),
        lengths=(*batch.lengths, 0, 0, 3, 0),
    )
    count = tokens + 3 if objective.level == "token" else len(batch) + more
    rest = count - len(targets.weights)
    return MicroBatch(
        filled,
        Targets(
            F.pad(targets.values, (0, 0) * (targets.values.ndim - 1) + (0, rest)),
            F.pad(targets.weights, (0, rest)),
            torch.cat([targets.owner, torch.arange(len(batch), len(batch) + more)]),
            F.pad(targets.share, (0, more)),
        ),
        mini.weight,
    )


@pytest.mark.parametrize("junk", [0.0, 1e30, float("inf"), float("nan")])
@each_case
def test_entries_without_weight_add_exactly_nothing(
    objective: HeadObjective, items: list[TrainingExample], k: int, plain: Any, extra: float, junk: float
) -> None:
    mini = objective.collate(items)
    outputs = _outputs(objective, mini, k)
    wanted = objective.loss(outputs, mini.batch, mini.targets)
    (wanted_grad,) = torch.autograd.grad(wanted, outputs)
    filled = _filled(objective, mini)
    more = torch.full((_rows(objective, filled) - len(outputs), k), junk)
    wide = torch.cat([outputs.detach(), more]).requires_grad_()
    loss = objective.loss(wide, filled.batch, filled.targets)
    (grad,) = torch.autograd.grad(loss, wide)
    torch.testing.assert_close(loss, wanted, atol=0, rtol=1e-6)
    torch.testing.assert_close(grad[: len(outputs)], wanted_grad, atol=1e-7, rtol=0)
    assert torch.equal(grad[len(outputs) :], torch.zeros_like(more))


@each_case
def test_without_any_weight_loss_and_gradient_are_zero(
    objective: HeadObjective, items: list[TrainingExample], k: int, plain: Any, extra: float
) -> None:
    mini = objective.collate(items)
    targets = replace(mini.targets, weights=torch.zeros_like(mini.targets.weights))
    outputs = torch.full((_rows(objective, mini), k), float("nan"), requires_grad=True)
    loss = objective.loss(outputs, mini.batch, targets)
    (grad,) = torch.autograd.grad(loss, outputs)
    assert loss.item() == 0.0
    assert torch.equal(grad, torch.zeros_like(grad))


class _Window:
    def __init__(self, weight: float) -> None:
        self.weight = weight


def test_windows_are_pooled_as_the_classifier_pools_them() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, K)).astype(np.float32) * 2
    found: Any = [_Window(w) for w in (5.0, 2.5, 7.0)]
    probabilities = softmax(average_windows(found, [log_softmax(row) for row in logits]))
    pieces = tuple(TrainingWindow(np.array([1, 2]), np.array([0, 0]), w.weight / 14.5) for w in found)
    for label in range(K):
        objective = SingleLabelObjective()
        mini = objective.collate([TrainingExample(pieces, np.int64(label))])
        loss = objective.loss(torch.from_numpy(logits), mini.batch, mini.targets)
        assert loss.item() == pytest.approx(-np.log(probabilities[label]), abs=1e-5)


def test_smoothing_is_that_of_torch() -> None:
    """One window a text: nothing is pooled."""
    objective, draw = SingleLabelObjective(0.3), torch.Generator().manual_seed(0)
    items = [TrainingExample((TrainingWindow(np.array([1]), np.array([0])),), np.int64(i % K)) for i in range(7)]
    mini, outputs = objective.collate(items), torch.randn(7, K, generator=draw)
    wanted = F.cross_entropy(outputs, mini.targets.values, label_smoothing=0.3, reduction="sum")
    torch.testing.assert_close(objective.loss(outputs, mini.batch, mini.targets), wanted)


def test_large_logits_stay_finite() -> None:
    """Spans are normalized by their highest logit, and so is everything else."""
    for objective, items, k, _, _ in CASES.values():
        mini = objective.collate(items)
        outputs = (_outputs(objective, mini, k).detach() * 1e4).requires_grad_()
        loss = objective.loss(outputs, mini.batch, mini.targets)
        (grad,) = torch.autograd.grad(loss, outputs)
        assert loss.isfinite()
        assert grad.isfinite().all()


def test_a_micro_batch_concatenates_examples() -> None:
    items = _texts("token", count=3)
    mini = TokenClassificationObjective().collate(items)
    pieces = [p for item in items for p in item.windows]
    want = Batch.from_ids([p.ids for p in pieces])
    assert torch.equal(mini.batch.ids, want.ids)
    assert torch.equal(mini.batch.cu_seqlens, want.cu_seqlens)
    assert mini.targets.owner.tolist() == [i for i, item in enumerate(items) for _ in item.windows]
    assert mini.targets.values.tolist() == [v for p in pieces for v in p.values.tolist()]
    assert mini.to("cpu").targets.weights.tolist() == mini.targets.weights.tolist()


def test_logits_are_computed_for_masked_tokens_only() -> None:
    """The loss is that of the full table of logits at the hidden tokens, and no other logit is computed."""
    torch.manual_seed(0)
    head = HeadConfig(kind="vocabulary", outputs=tiny.VOCAB, dense=16, activation="gelu", tied=True)
    made = Model(tiny.model().config, {"mlm": head})
    draw = np.random.default_rng(0)
    items, labels, at, start = [], [], [], 0
    for n in (5, 1, 9, 4):
        rows = np.sort(draw.choice(n, max(1, n // 3), replace=False))
        values = draw.integers(0, tiny.VOCAB, len(rows))
        weights = np.ones(len(rows), dtype=np.float32)
        ids = draw.integers(5, tiny.VOCAB, n)
        items.append(
            TrainingExample(
                (TrainingWindow(ids, np.zeros(n, dtype=np.int64), values=values, weights=weights, rows=rows),)
            )
        )
        labels += values.tolist()
        at += (rows + start).tolist()
        start += n
    objective = MaskedLMObjective()
    mini = objective.collate(items)
    assert mini.weight == len(at)
    seen: list[int] = []
    dense = made.head("mlm").dense
    assert dense is not None
    dense.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    loss = ObjectiveModule(made)(mini, "mlm", objective)
    assert seen == [len(at)]
    loss.backward()
    got = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    hidden = made.hidden(mini.batch, "mlm")
    hidden.retain_grad()
    table = made.head("mlm")(hidden, mini.batch, made.encoder.embeddings.words.weight)
    expected = torch.nn.functional.cross_entropy(table[at], torch.tensor(labels), reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, msg=name)
    assert hidden.grad is not None
    others = [t for t in range(start) if t not in at]
    assert not hidden.grad[others].any()
