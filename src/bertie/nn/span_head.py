"""A head over spans of words, which scores each span against the labels of a prompt (GLiNER, Zaratiana et al. 2023).

A window reads the labels and then the text. The hidden state of each label's marker stands for the label, and that of
each word's first token for the word. A span is represented by its first and last word, through a feed-forward layer,
and its logit for a label is the product of both representations.

The representation of a span, (H,), is never computed. Its logits are linear in the activations of the feed-forward
layer below, so that its output matrix is multiplied with the labels first: a few labels instead of thousands of spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from bertie.config import EncoderConfig, HeadConfig, SpanHeadConfig
from bertie.errors import InputError
from bertie.nn.heads import Head
from bertie.nn.row_blocks import TOKEN_ROWS, in_row_blocks
from bertie.text.batch import Batch, send

SPAN_ROWS = 64  # spans of a block, see `in_row_blocks`
PRIOR_LOGIT = -4.0  # of a fresh head


@dataclass(frozen=True, slots=True)
class SpanLayout:
    """Where the words and the labels of each window are, in a flat batch."""

    words: Tensor  # (W,) index of each word's first token
    labels: Tensor  # (L,) index of the token that stands for each label
    word_counts: Sequence[int]  # of each window
    label_counts: Sequence[int]

    @classmethod
    def of_windows(
        cls, words: Sequence[NDArray[np.int64]], labels: Sequence[NDArray[np.int64]], batch: Batch
    ) -> SpanLayout:
        """From the positions of words and labels within each window."""
        starts = np.cumsum([0, *batch.lengths[:-1]])

        def rows(parts: Sequence[NDArray[np.int64]]) -> Tensor:
            flat = np.concatenate([own + start for own, start in zip(parts, starts, strict=True)])
            return send(torch.from_numpy(flat.astype(np.int64)), batch.ids.device)

        return cls(rows(words), rows(labels), [len(own) for own in words], [len(own) for own in labels])


def span_bounds(words: int, max_width: int) -> NDArray[np.int64]:
    """(S, 2) first and last word of all spans of a window, in the order of the head's logits: by width, then start.

    >>> span_bounds(3, 2).tolist()
    [[0, 0], [1, 1], [2, 2], [0, 1], [1, 2]]
    """
    parts = [np.stack([np.arange(words - k), np.arange(k, words)], 1) for k in range(min(words, max_width))]
    return np.concatenate([np.empty((0, 2), np.int64), *parts])


class SpanHead(Head):
    """Scores the spans of each window against its labels."""

    cfg: SpanHeadConfig

    def __init__(self, cfg: SpanHeadConfig, encoder: EncoderConfig, words: Tensor) -> None:
        super().__init__(cfg, encoder, words)
        width = cfg.width
        self.project_hidden = nn.Linear(encoder.width, width) if encoder.width != width else None
        self.rnn = (
            nn.LSTM(width, width // 2, cfg.rnn_layers, batch_first=True, bidirectional=True) if cfg.rnn_layers else None
        )
        self.start_up, self.start_down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.end_up, self.end_down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.span_up, self.span_down = nn.Linear(2 * width, 4 * width), nn.Linear(4 * width, width)
        self.label_up, self.label_down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, batch: Batch, words: Tensor) -> Tensor:
        """Refused: the spans and labels of each text have to be known; see `span_logits`."""
        raise InputError("a span head needs the words and the labels of each text; use bertie.ZeroShotTagger")

    def span_logits(self, hidden: Tensor, layout: SpanLayout) -> list[Tensor]:
        """(T, D) -> for each window (S, C), its spans in the order of `span_bounds`, and its labels."""
        words = self._contextualize(self._project(hidden[layout.words]), layout.word_counts)  # (W, H)
        labels = in_row_blocks(self._labels, self._project(hidden[layout.labels]))  # (L, H)
        first = in_row_blocks(self._first, words, TOKEN_ROWS)  # (W, 4H)
        last = in_row_blocks(self._last, words, TOKEN_ROWS)
        counts = layout.word_counts
        each = zip(_split(first, counts), _split(last, counts), _split(labels, layout.label_counts), strict=True)
        return [self._window(*parts) for parts in each]

    def _window(self, first: Tensor, last: Tensor, labels: Tensor) -> Tensor:
        """(W, 4H), (W, 4H), (C, H) -> (S, C)."""
        count = len(first)
        widths = range(min(count, self.cfg.max_width))
        if not widths:
            return labels.new_zeros(0, len(labels))
        spans = torch.cat([first[: count - k] + last[k:] for k in widths])  # (S, 4H)
        spans = self._drop(F.relu(spans))
        matrix = labels @ self.span_down.weight  # (C, 4H)
        bias = labels @ self.span_down.bias  # (C,)
        return in_row_blocks(lambda rows: F.linear(rows, matrix, bias), spans, SPAN_ROWS)

    def _project(self, x: Tensor) -> Tensor:
        return x if self.project_hidden is None else in_row_blocks(self.project_hidden, x, TOKEN_ROWS)

    def _contextualize(self, words: Tensor, counts: Sequence[int]) -> Tensor:
        """(W, H) -> (W, H) through the LSTM, window by window."""
        if self.rnn is None or not len(words):
            return words
        parts = [part for part in _split(words, counts) if len(part)]
        if words.device.type == "cpu" and not torch.is_grad_enabled():
            # Each by itself: in a batch, the order of summation would depend on its size.
            return torch.cat([self.rnn(part)[0] for part in parts])
        packed, _ = self.rnn(pack_sequence(parts, enforce_sorted=False))
        return torch.cat(unpack_sequence(packed))

    def _first(self, x: Tensor) -> Tensor:
        """(N, H) -> (N, 4H): what a span's first word adds to its activations, with the bias."""
        start = F.relu(self.start_down(self._drop(F.relu(self.start_up(x)))))
        return F.linear(start, self.span_up.weight[:, : self.cfg.width], self.span_up.bias)

    def _last(self, x: Tensor) -> Tensor:
        """(N, H) -> (N, 4H): what a span's last word adds to its activations."""
        end = F.relu(self.end_down(self._drop(F.relu(self.end_up(x)))))
        return F.linear(end, self.span_up.weight[:, self.cfg.width :])

    def _labels(self, x: Tensor) -> Tensor:
        """(N, H) -> (N, H)."""
        out: Tensor = self.label_down(self._drop(F.relu(self.label_up(x))))
        return out

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.cfg.dropout, self.training)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw initial weights as torch does: uniform up to 1 / sqrt(inputs); the same on every device.

        The biases of spans and labels start opposite to each other, so that logits start near `PRIOR_LOGIT`: few spans
        have any label, and there is no bias of the logits themselves to learn that (Lin et al. 2017).
        """
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.LSTM):
                inputs = module.in_features if isinstance(module, nn.Linear) else module.hidden_size
                for parameter in module.parameters(recurse=False):
                    values = torch.rand(parameter.shape, generator=generator) * 2 - 1
                    parameter.copy_(values * inputs**-0.5)
        direction = F.normalize(torch.randn(self.cfg.width, generator=generator), dim=0) * (-PRIOR_LOGIT) ** 0.5
        self.label_down.bias.copy_(direction)
        self.span_down.bias.copy_(-direction)


def _split(x: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split(x, list(counts))


def build_head(cfg: HeadConfig, encoder: EncoderConfig, words: Tensor) -> Head:
    """The head of a config."""
    return SpanHead(cfg, encoder, words) if isinstance(cfg, SpanHeadConfig) else Head(cfg, encoder, words)
