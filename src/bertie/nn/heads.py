"""Heads over hidden states: one output row per token, or per text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.config import EncoderConfig, HeadConfig
from bertie.errors import ConfigError, InputError
from bertie.nn.norms import build_norm
from bertie.nn.pooling import Pooling
from bertie.nn.row_blocks import TOKEN_ROWS, in_row_blocks, linear_by_row
from bertie.nn.term_pooling import largest_logits
from bertie.ops import dispatch
from bertie.ops.torch.eager import activation_function
from bertie.text.batch import Batch


class ResidualTransform(nn.Module):
    """A feed-forward layer with residual and norm, like the second half of a block."""

    def __init__(self, cfg: HeadConfig, width: int) -> None:
        super().__init__()
        if cfg.residual is None or cfg.norm is None:
            raise ConfigError("a residual transform needs HeadConfig.residual (its width) and HeadConfig.norm")
        self.up = nn.Linear(width, cfg.residual)
        self.down = nn.Linear(cfg.residual, width)
        self.norm = build_norm(cfg.norm, width)
        self.activation = activation_function(cfg.activation)
        self.dropout = cfg.dropout

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) -> (N, D)."""
        y = self.down(self.activation(self.up(F.dropout(x, self.dropout, self.training))))
        out: Tensor = self.norm(F.dropout(y, self.dropout, self.training) + x)
        return out


class Head(nn.Module):
    """Pool (heads over texts), transform, project: each step only where the config has it."""

    def __init__(self, cfg: HeadConfig, encoder: EncoderConfig, words: Tensor) -> None:
        super().__init__()
        self.cfg = cfg
        width = encoder.width
        self.dense = nn.Linear(width, cfg.dense, bias=cfg.dense_bias) if cfg.dense else None
        self.norm = build_norm(cfg.norm, width if cfg.add_first else cfg.dense) if cfg.norm and cfg.dense else None
        self.activation = activation_function(cfg.activation)
        self.residual = ResidualTransform(cfg, width) if cfg.residual else None
        self.out = self.bias = None
        width = cfg.dense or width
        if cfg.tied:
            if width != words.shape[1]:
                raise ConfigError(f"a tied head of width {width} cannot use word embeddings of width {words.shape[1]}")
            self.bias = nn.Parameter(torch.zeros(len(words))) if cfg.output_bias else None
        elif cfg.outputs is not None:
            self.out = nn.Linear(width, cfg.outputs, bias=cfg.output_bias)

    def forward(self, hidden: Tensor, batch: Batch, words: Tensor) -> Tensor:
        """(T, D) -> (T, outputs), or (B, outputs) for a head over texts. Tied heads use `words` (V, E)."""
        cfg = self.cfg
        x = hidden
        if cfg.add_first:
            x = self._add_first(x, batch)
        per_text = cfg.kind == "text" and cfg.pooling != "late"
        if per_text:
            x = take_first(x, batch) if cfg.pooling == "first" else pool_mean(x, batch)
        x = in_row_blocks(lambda rows: self.project(rows, words), x, 1 if per_text else TOKEN_ROWS)
        return pool_mean(x, batch) if cfg.kind == "text" and cfg.pooling == "late" else x

    def _add_first(self, x: Tensor, batch: Batch) -> Tensor:
        """(T, D) -> (T, D) each token plus the first one of its text, normalized."""
        assert self.norm is not None
        out: Tensor = self.norm(x + take_first(x, batch)[batch.text_of_token()])
        return out

    def vocabulary_logits(self, x: Tensor, words: Tensor) -> Tensor:
        """(N, D) -> (N, V) for few rows, such as masked tokens; on a CPU bit-identical whatever the other rows are."""
        if x.device.type != "cpu" or not len(x):
            return self.project(x, words)
        matrix, bias = (words, self.bias) if self.out is None else (self.out.weight, self.out.bias)
        return linear_by_row(in_row_blocks(self._transform, x), matrix, bias)

    def project(self, x: Tensor, words: Tensor) -> Tensor:
        """(N, D) -> (N, outputs), row by row."""
        x = self._transform(x)
        if self.cfg.tied:
            return F.linear(x, words, self.bias)
        return x if self.out is None else self.out(x)

    def _transform(self, x: Tensor) -> Tensor:
        """(N, D) -> (N, E), the input of the output projection."""
        cfg = self.cfg
        if self.dense is not None:
            x = self.activation(self.dense(F.dropout(x, cfg.dense_dropout, self.training)))
        if self.norm is not None and not cfg.add_first:
            x = self.norm(x)
        if self.residual is not None:
            x = self.residual(x)
        return x if self.out is None else F.dropout(x, cfg.dropout, self.training)

    def fused_linear_cross_entropy(self, hidden: Tensor, words: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum () of cross-entropies of `targets` (N,) under the logits of `hidden` (N, D).

        The logits, which are large over a vocabulary, need not be stored.
        """
        matrix, bias = (words, self.bias) if self.out is None else (self.out.weight, self.out.bias)
        x = self._transform(hidden)
        run = dispatch.row_for("cross_entropy", x).run
        assert run is not None
        out: Tensor = run(x, matrix, bias, targets, weights)
        return out

    def largest_logits(self, hidden: Tensor, words: Tensor, lengths: Sequence[int]) -> Tensor:
        """(T, D) -> (B, V) the largest logit of each term over the tokens of each text, for training."""
        matrix, bias = (words, self.bias) if self.out is None else (self.out.weight, self.out.bias)
        return largest_logits(self._transform(hidden), matrix, bias, lengths)

    def add_segments(self, batch: Batch) -> Batch:
        """The batch with the segment ids that this head derives for texts that have none."""
        if self.cfg.segments == "given":
            return batch
        text = batch.text_of_token()
        largest = batch.segments.new_zeros(len(batch)).scatter_reduce(0, text, batch.segments, "amax")  # (B,) 0: none
        separator = self._first_separators(batch)
        # Without a separator, the original takes the first token for it.
        separator = torch.where(separator == batch.max_len, 0, separator)
        derived = (batch.positions > separator[text]).long()
        return replace(batch, segments=torch.where(largest[text] == 0, derived, batch.segments))

    def _first_separators(self, batch: Batch) -> Tensor:
        """(B,) the position of each text's first separator; `max_len` where there is none."""
        is_separator = batch.ids == self.cfg.separator_id
        nowhere = torch.full((len(batch),), batch.max_len, device=batch.ids.device)
        text = batch.text_of_token()[is_separator]
        return nowhere.scatter_reduce(0, text, batch.positions[is_separator], "amin")

    def global_tokens(self, batch: Batch) -> Tensor | None:
        """(T,) which tokens are global for this head, in models that have global tokens."""
        cfg = self.cfg
        if cfg.globals == "none":
            return None
        if cfg.globals == "first":
            return batch.positions == 0
        separator = self._first_separators(batch)
        if int(separator.max()) == batch.max_len:
            text = int(separator.argmax())
            raise InputError(
                f"text {text} of the batch has no separator (id {cfg.separator_id}); this head needs pairs"
            )
        distance = batch.positions - separator[batch.text_of_token()]
        # The first separator is followed by a second one, then by the second text.
        return distance < 0 if cfg.globals == "before_separator" else distance > 1


def take_first(x: Tensor, batch: Batch) -> Tensor:
    """(T, D) -> (B, D) each text's first token."""
    # An empty text, which only a batch with spare room has, may start past the last token.
    return x[batch.cu_seqlens[:-1].long().clamp(max=len(x) - 1)]


def pool_mean(x: Tensor, batch: Batch) -> Tensor:
    """(T, D) -> (B, D) the mean over each text's tokens."""
    out: Tensor = Pooling("mean")(x, batch)
    return out
