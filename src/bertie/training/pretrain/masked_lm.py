"""Masked-language modelling losses: the standard one, and DeBERTa's enhanced mask decoder.

Losses are sums, to be divided by counts that are known beforehand (masked tokens, pairs, predicted
tokens), so that a step split into micro-batches has the same gradient.
"""

from __future__ import annotations

from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.config import EncoderConfig
from bertie.errors import ConfigError
from bertie.nn.encoder import Encoder
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.training.objectives import MicroBatch, ModelObjective


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(N, k), (N,) -> () outside autocast."""
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(logits, targets, reduction="sum")


class MaskedLMLoss:
    """Cross-entropy of masked tokens. Only the masked positions go through the head.

    >>> from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned
    >>> cfg = EncoderConfig(
    ...     vocab=50, width=8, layer_map=(0,), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(),), max_length=32)
    >>> model = Model(cfg, {"mlm": HeadConfig(kind="vocabulary", outputs=50, tied=True)})
    >>> batch = Batch.from_ids([[2, 4, 9, 3], [2, 7, 4, 3]])                                       # 4: the mask
    >>> MaskedLMLoss().loss(model, batch, torch.tensor([1, 6]), torch.tensor([21, 30])).shape    # of two tokens
    torch.Size([])
    """

    head: ClassVar[str] = "mlm"

    def logits(self, model: Model, batch: Batch, rows: Tensor, hidden: Tensor | None = None) -> Tensor:
        """(M, V) logits of the tokens at `rows` (M,) of the flat batch, in float32.

        Pass `hidden` (T, D) if another objective has already run the encoder on this batch.
        """
        if hidden is None:
            hidden = model.hidden(batch, self.head)
        logits: Tensor = model.head(self.head)(hidden[rows], batch, model.encoder.embeddings.words.weight)
        return logits.float()

    def loss(self, model: Model, batch: Batch, rows: Tensor, targets: Tensor, hidden: Tensor | None = None) -> Tensor:
        """() the summed cross-entropy of `targets` (M,) at `rows` (M,)."""
        return summed_cross_entropy(self.logits(model, batch, rows, hidden), targets)


class EnhancedMaskDecoder(nn.Module):
    """DeBERTa's enhanced mask decoder: absolute positions for encoders with relative positions,
    added at the end.

    The last block runs `times` times over the hidden states before it. Its queries are these states
    plus a position embedding, then its own output; keys and values stay the same. `positions`
    (max_length, D) is a separate table, which is not saved for inference. Pass the output to
    `MaskedLMLoss.loss` as `hidden`.
    """

    def __init__(self, cfg: EncoderConfig, times: int = 2) -> None:
        super().__init__()
        if cfg.depth < 2 or times < 1:
            raise ConfigError(f"an enhanced mask decoder needs depth={cfg.depth} of at least 2 and times={times} of 1")
        self.positions, self.times = nn.Embedding(cfg.max_length, cfg.width), times
        nn.init.normal_(self.positions.weight, std=cfg.init_std)

    def forward(self, encoder: Encoder, batch: Batch) -> Tensor:
        """-> (T, D)."""
        depth = encoder.cfg.depth
        *_, states = islice(encoder.hidden_states(batch), depth)  # (T, D) the input of the last block
        block, context = encoder.blocks[encoder.cfg.layer_map[-1]], encoder.pass_context(batch)
        queries: Tensor = states + self.positions(batch.positions)
        for _ in range(self.times):
            queries = block(states, batch, context, depth - 1, queries)
        out: Tensor = queries if encoder.norm is None else encoder.norm(queries)
        return out


class EnhancedMaskObjective(ModelObjective):
    """Masked-language modelling with an `EnhancedMaskDecoder` in the model's `auxiliary` modules."""

    def __init__(self, model: Model, seed: int = 0) -> None:
        super().__init__()
        decoder = EnhancedMaskDecoder(model.config).to(model.device)
        generator = torch.Generator(model.device).manual_seed(seed)
        nn.init.normal_(decoder.positions.weight, std=model.config.init_std, generator=generator)
        model.auxiliary["decoder"] = decoder
        self.masked_lm = MaskedLMLoss()

    def loss(self, model: Model, micro_batch: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        batch, targets = micro_batch.batch, micro_batch.targets
        assert targets.rows is not None
        hidden = model.auxiliary["decoder"](model.encoder, batch)
        return self.mean(self.masked_lm.loss(model, batch, targets.rows, targets.values, hidden), "masked")
