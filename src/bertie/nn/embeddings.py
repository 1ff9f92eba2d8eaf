"""Token embeddings: ids, segments and positions to the first hidden state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.config import EncoderConfig, Learned
from bertie.errors import InputError
from bertie.nn.norms import build_norm
from bertie.ops.dispatch import DispatchTable
from bertie.text.batch import Batch


class InputEmbeddings(nn.Module):
    """Word + segment + position embeddings, normalized, and projected to the encoder's width where that differs."""

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__()
        e = cfg.embeddings
        self.cfg = cfg
        self.learned = next((p for p in cfg.positions if isinstance(p, Learned)), None)
        # padding_idx only keeps the padding row's gradient at zero; no padding is ever embedded.
        self.words = nn.Embedding(cfg.vocab, e.width, padding_idx=cfg.pad_id)
        self.segments = nn.Embedding(e.segments, e.width) if e.segments else None
        self.tasks = nn.Embedding(e.tasks, e.width) if e.tasks else None
        self.positions = (
            nn.Embedding(self.learned.size, e.width, padding_idx=self.learned.skip_id) if self.learned else None
        )
        normed = cfg.width if e.project == "before_norm" else e.width
        self.norm = build_norm(cfg.norm, normed) if e.norm else None
        self.project = nn.Linear(e.width, cfg.width, bias=e.project_bias) if e.project else None

    def forward(self, batch: Batch, ops: DispatchTable) -> Tensor:
        """-> (T, D)."""
        e = self.cfg.embeddings
        tables = [(self.words, batch.ids)]
        if self.segments is not None:
            tables.append((self.segments, batch.segments))
        if self.positions is not None:
            tables.append((self.positions, self.rows(batch)))
        if self.norm is not None and e.scale == 1.0 and self.tasks is None and e.project != "before_norm":
            x = ops.embed_norm(tables, self.norm)
        else:
            x = self.words(batch.ids) * e.scale
            for table, rows in tables[1:]:
                x = x + table(rows)
            if self.tasks is not None:
                x = x + self.tasks.weight[0]
            if self.project is not None and e.project == "before_norm":
                x = self.project(x)
            if self.norm is not None:
                x = self.norm(x)
        x = F.dropout(x, self.cfg.dropout, self.training)
        if self.project is not None and e.project == "after_norm":
            x = self.project(x)
        return x

    def rows(self, batch: Batch) -> Tensor:
        """(T,) row indices of the table of learned positions."""
        assert self.learned is not None
        skip = self.learned.skip_id
        if skip is None:
            return batch.positions
        counted = (batch.ids != skip).long()
        running = torch.cumsum(counted, 0)
        before = F.pad(running, (1, 0))[batch.cu_seqlens[:-1].long()]  # (B,) counted before each text
        return (running - before[batch.text_of_token()]) * counted + skip

    def check(self, batch: Batch) -> None:
        """Raise an error for ids, segments and lengths outside the tables."""
        cfg = self.cfg
        if self.learned is not None and batch.max_len > self.learned.max_length:
            text = max(range(len(batch)), key=lambda b: batch.lengths[b])
            raise InputError(
                f"text {text} of the batch has {batch.max_len} tokens; the model's position table has "
                f"{self.learned.max_length} positions"
            )
        # The batch knows its ranges on the host: reading them from the device would synchronize in every pass.
        ids, segments = batch.ranges()
        for name, (low, high), size in (("ids", ids, cfg.vocab), ("segments", segments, cfg.embeddings.segments)):
            # A model without segments ignores them, as the original does.
            if size and not 0 <= low <= high < size:
                raise InputError(f"{name} holds {low if low < 0 else high}; allowed are 0 to {size - 1}")
