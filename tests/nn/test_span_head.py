from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.config import EncoderConfig, SpanHeadConfig
from bertie.errors import ConfigError, InputError
from bertie.nn.span_head import SpanHead, SpanLayout, span_bounds
from bertie.text.batch import Batch
from tests.training.tiny import model

LENGTHS, WORDS, LABELS = (9, 4, 12, 5), (5, 1, 8, 0), (3, 1, 2, 2)


def encoder() -> EncoderConfig:
    return model().config


def head(width: int = 12, rnn_layers: int = 1) -> SpanHead:
    built = SpanHead(SpanHeadConfig(width=width, max_width=3, rnn_layers=rnn_layers), encoder(), torch.empty(0))
    built.initialize(seed=1)
    return built.eval()


def window_inputs(seed: int = 0) -> tuple[Tensor, Batch, list[np.ndarray], list[np.ndarray]]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sum(LENGTHS), encoder().width, generator=generator)
    batch = Batch.from_ids([np.ones(n, np.int64) for n in LENGTHS])
    labels = [np.arange(n) for n in LABELS]
    words = [LENGTHS[b] - n + np.arange(n) - 1 for b, n in enumerate(WORDS)]
    return hidden, batch, words, labels


def reference(head: SpanHead, words: Tensor, labels: Tensor) -> Tensor:
    """Each span's representation, then its products with the labels, as in the original."""

    def feed_forward(x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
        return down(F.relu(up(x)))

    if head.project_hidden is not None:
        words, labels = head.project_hidden(words), head.project_hidden(labels)
    if head.rnn is not None and len(words):
        words = head.rnn(words[None])[0][0]
    start = feed_forward(words, head.start_up, head.start_down)
    end = feed_forward(words, head.end_up, head.end_down)
    bounds = span_bounds(len(words), head.cfg.max_width)
    both = F.relu(torch.cat([start[bounds[:, 0]], end[bounds[:, 1]]], 1))
    spans = feed_forward(both, head.span_up, head.span_down)
    return spans @ feed_forward(labels, head.label_up, head.label_down).T


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("width", "rnn_layers"), [(12, 0), (12, 1), (16, 2)])
def test_logits_and_gradients_equal_the_reference(width: int, rnn_layers: int, gradients: bool) -> None:
    built = head(width, rnn_layers)
    hidden, batch, words, labels = window_inputs()
    hidden.requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        ours = built.span_logits(hidden, SpanLayout.of_windows(words, labels, batch))
        starts = np.cumsum([0, *LENGTHS])
        theirs = [reference(built, hidden[starts[b] + words[b]], hidden[starts[b] + labels[b]]) for b in range(4)]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    if not gradients:
        return
    inputs = [hidden, *built.parameters()]
    found = torch.autograd.grad(sum((x**2).sum() for x in ours), inputs)  # type: ignore[arg-type]
    expected = torch.autograd.grad(sum((x**2).sum() for x in theirs), inputs)  # type: ignore[arg-type]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_window_does_not_depend_on_the_others_to_the_bit() -> None:
    built = head()
    hidden, batch, words, labels = window_inputs()
    with torch.inference_mode():
        together = built.span_logits(hidden, SpanLayout.of_windows(words, labels, batch))
        for b, start in enumerate(np.cumsum([0, *LENGTHS[:-1]])):
            layout = SpanLayout.of_windows([words[b]], [labels[b]], batch.slice(b, b + 1))
            (alone,) = built.span_logits(hidden[start : start + LENGTHS[b]], layout)
            assert torch.equal(alone, together[b])
            assert alone.shape == (len(span_bounds(WORDS[b], 3)), LABELS[b])


def test_initial_weights_depend_on_the_seed_alone() -> None:
    first, again = head(), head()
    torch.manual_seed(7)
    other = head()
    other.initialize(seed=2)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.span_up.weight, other.span_up.weight)


def test_other_uses_are_refused() -> None:
    hidden, batch, _, _ = window_inputs()
    with pytest.raises(InputError, match="words and the labels"):
        head()(hidden, batch, hidden)
    with pytest.raises(ConfigError, match="even width"):
        SpanHeadConfig(width=11, rnn_layers=1)
    with pytest.raises(ConfigError, match="max_width"):
        SpanHeadConfig(width=12, max_width=0)
