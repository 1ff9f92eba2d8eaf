"""Heads over hidden states: a row a token, or a row a text."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.config import EncoderConfig, HeadConfig
from bertie.errors import ConfigError, InputError
from bertie.nn.norms import build_norm
from bertie.nn.pooling import Pooling
from bertie.ops import dispatch
from bertie.ops.torch.eager import activation_function
from bertie.text.batch import Batch


class Residual(nn.Module):
    """A feed-forward with residual and norm, as one more half block."""

    def __init__(self, cfg: HeadConfig, width: int) -> None:
        super().__init__()
        if cfg.residual is None or cfg.norm is None:
            raise ConfigError("a residual transform needs its width and its norm")
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
    """Pool (of a text), transform, project: each step only where the config has it."""

    def __init__(self, cfg: HeadConfig, encoder: EncoderConfig, words: Tensor) -> None:
        super().__init__()
        self.cfg = cfg
        width = encoder.width
        self.dense = nn.Linear(width, cfg.dense, bias=cfg.dense_bias) if cfg.dense else None
        self.norm = build_norm(cfg.norm, cfg.dense) if cfg.norm and cfg.dense else None
        self.activation = activation_function(cfg.activation)
        self.residual = Residual(cfg, width) if cfg.residual else None
        self.out = self.bias = None
        width = cfg.dense or width
        if cfg.tied:
            if width != words.shape[1]:
                raise ConfigError(f"a tied head of width {width} cannot use word embeddings of width {words.shape[1]}")
            self.bias = nn.Parameter(torch.zeros(len(words))) if cfg.output_bias else None
        elif cfg.outputs is not None:
            self.out = nn.Linear(width, cfg.outputs, bias=cfg.output_bias)

    def forward(self, hidden: Tensor, batch: Batch, words: Tensor) -> Tensor:
        """(T, D) -> (T, outputs), or (B, outputs) if the head reads texts. `words` (V, E) serve a tied head."""
        cfg = self.cfg
        x = hidden
        if cfg.kind == "text" and cfg.pooling != "late":
            x = first(x, batch) if cfg.pooling == "first" else mean(x, batch)
        x = self._transform(x)
        if cfg.tied:
            x = F.linear(x, words, self.bias)
        elif self.out is not None:
            x = self.out(x)
        return mean(x, batch) if cfg.kind == "text" and cfg.pooling == "late" else x

    def _transform(self, x: Tensor) -> Tensor:
        """(N, D) -> (N, E) what the outputs are made of."""
        cfg = self.cfg
        if self.dense is not None:
            x = self.activation(self.dense(F.dropout(x, cfg.dense_dropout, self.training)))
        if self.norm is not None:
            x = self.norm(x)
        if self.residual is not None:
            x = self.residual(x)
        return x if self.out is None else F.dropout(x, cfg.dropout, self.training)

    def fused_linear_cross_entropy(self, hidden: Tensor, words: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """() the sum of weight · cross-entropy of `targets` (N,) over the outputs for `hidden` (N, D).

        As of the outputs that `forward` gives; but these, which are large over a vocabulary, need not be kept.
        """
        matrix, bias = (words, self.bias) if self.out is None else (self.out.weight, self.out.bias)
        x = self._transform(hidden)
        run = dispatch.row_for("cross_entropy", x).run
        assert run is not None
        out: Tensor = run(x, matrix, bias, targets, weights)
        return out

    def segmented(self, batch: Batch) -> Batch:
        """The batch with the segments that this head makes for texts that have none."""
        if self.cfg.segments == "given":
            return batch
        owner = batch.text_of_token()
        named = batch.segments.new_zeros(len(batch)).scatter_reduce(0, owner, batch.segments, "amax")  # (B,) 0: none
        at = self._first_separators(batch)
        at = torch.where(at == batch.max_len, 0, at)  # without a separator, the original takes the first token for it
        made = (batch.positions > at[owner]).long()
        return replace(batch, segments=torch.where(named[owner] == 0, made, batch.segments))

    def _first_separators(self, batch: Batch) -> Tensor:
        """(B,) the place of each text's first separator; `max_len` where there is none."""
        found = batch.ids == self.cfg.separator_id
        nowhere = torch.full((len(batch),), batch.max_len, device=batch.ids.device)
        return nowhere.scatter_reduce(0, batch.text_of_token()[found], batch.positions[found], "amin")

    def global_tokens(self, batch: Batch) -> Tensor | None:
        """(T,) which tokens this head wants to be global, in models that have such tokens."""
        cfg = self.cfg
        if cfg.globals == "none":
            return None
        if cfg.globals == "first":
            return batch.positions == 0
        at = self._first_separators(batch)
        if int(at.max()) == batch.max_len:
            raise InputError(
                f"text {int(at.argmax())} of the batch has no separator (id {cfg.separator_id}); this head needs pairs"
            )
        place = batch.positions - at[batch.text_of_token()]
        # Past the first separator comes a second one, then the second text.
        return place < 0 if cfg.globals == "before_separator" else place > 1


def first(x: Tensor, batch: Batch) -> Tensor:
    """(T, D) -> (B, D) each text's first token."""
    # A text of no tokens, which only a batch with spare room has, may begin where all have ended.
    return x[batch.cu_seqlens[:-1].long().clamp(max=len(x) - 1)]


def mean(x: Tensor, batch: Batch) -> Tensor:
    """(T, D) -> (B, D) the mean over each text's tokens."""
    out: Tensor = Pooling("mean")(x, batch)
    return out
