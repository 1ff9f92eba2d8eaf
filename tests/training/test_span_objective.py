from __future__ import annotations

import numpy as np
import pytest
import torch

from bertie.config import SpanHeadConfig
from bertie.nn.model import Model
from bertie.nn.span_head import SpanHead
from bertie.training.objectives import TrainingExample, TrainingWindow
from bertie.training.span_objective import LABELS, SpanObjective
from tests.training.tiny import model as tiny_model

WIDTH = 3


def span_model() -> Model:
    encoder = tiny_model().config
    built = Model(encoder, {"span": SpanHeadConfig(width=10, max_width=WIDTH, rnn_layers=1)})
    head = built.head("span")
    assert isinstance(head, SpanHead)
    head.initialize(seed=3)
    return built.eval()


def example(seed: int, words: int, labels: int, windows: int = 1) -> TrainingExample:
    draw = np.random.default_rng(seed)
    parts = []
    for _ in range(windows):
        ids = draw.integers(1, 40, 4 + labels + words)
        first = draw.integers(0, words, 2)
        last = np.minimum(first + draw.integers(0, WIDTH, 2), words - 1)
        values = np.stack([first, last, draw.integers(0, labels, 2)], 1)
        rows = 2 + labels + np.arange(words)
        weights = draw.integers(0, 2, words).astype(np.float32)
        parts.append(TrainingWindow(ids, np.zeros_like(ids), 1 / windows, values, weights, rows))
    return TrainingExample(tuple(parts), extras={LABELS: 1 + np.arange(labels)})


EXAMPLES = [example(0, 5, 3), example(1, 1, 2), example(2, 7, 4, windows=2), example(3, 3, 1)]


def plain_loss(model: Model, examples: list[TrainingExample], objective: SpanObjective) -> torch.Tensor:
    """Span by span and label by label, each window by itself."""
    total = torch.zeros(())
    head = model.head("span")
    assert isinstance(head, SpanHead)
    for window, labels in [(w, e.extras[LABELS]) for e in examples for w in e.windows]:
        alone = SpanObjective(WIDTH).collate([TrainingExample((window,), extras={LABELS: labels})])
        hidden = model.hidden(alone.batch, "span")
        words, prompt = (hidden[torch.from_numpy(np.asarray(rows))] for rows in (window.rows, labels))
        assert head.project_hidden is not None and head.rnn is not None  # noqa: PT018
        words = head.rnn(head.project_hidden(words)[None])[0][0]
        label = head.label_down(head.label_up(head.project_hidden(prompt)).relu())
        start, end = (
            down(up(words).relu()) for up, down in ((head.start_up, head.start_down), (head.end_up, head.end_down))
        )
        positives = {tuple(row) for row in window.values.tolist()}
        for first in range(len(words)):
            for last in range(first, min(first + WIDTH, len(words))):
                span = head.span_down(head.span_up(torch.cat([start[first], end[last]]).relu()).relu())
                for c in range(len(labels)):
                    p = torch.sigmoid(span @ label[c])
                    p_true = p if (first, last, c) in positives else 1 - p
                    loss = -torch.log(p_true) * (1 - p_true) ** objective.gamma
                    if objective.alpha >= 0:
                        loss = loss * (objective.alpha if (first, last, c) in positives else 1 - objective.alpha)
                    total = total + loss * float(window.weights[first])  # type: ignore[index]
    return total


@pytest.mark.parametrize(("alpha", "gamma"), [(-1.0, 0.0), (0.75, 2.0)])
def test_loss_and_gradients_equal_a_plain_computation(alpha: float, gamma: float) -> None:
    model, objective = span_model(), SpanObjective(WIDTH, alpha=alpha, gamma=gamma)
    micro_batch = objective.collate(EXAMPLES)
    loss, plain = objective.forward(model, micro_batch, "span"), plain_loss(model, EXAMPLES, objective)
    torch.testing.assert_close(loss, plain, atol=1e-4, rtol=1e-5)
    parameters = list(model.parameters())
    for a, b in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(plain, parameters), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_micro_batches_add_up() -> None:
    model, objective = span_model(), SpanObjective(WIDTH)
    whole = objective.collate(EXAMPLES)
    parts = [objective.collate(EXAMPLES[:1]), objective.collate(EXAMPLES[1:])]
    assert whole.weight == sum(part.weight for part in parts) == sum(map(objective.example_weight, EXAMPLES))
    losses = [objective.forward(model, part, "span") for part in parts]
    torch.testing.assert_close(objective.forward(model, whole, "span"), sum(losses), atol=1e-4, rtol=1e-5)


def test_label_smoothing_pulls_targets_to_the_middle() -> None:
    logits, targets = torch.tensor([2.0, 2.0]), torch.tensor([1.0, 0.0])
    smooth = SpanObjective(WIDTH, smoothing=0.2).losses(logits, targets)
    exact = SpanObjective(WIDTH).losses(logits, targets)
    assert smooth[0] > exact[0]
    assert smooth[1] < exact[1]
