"""An encoder with its heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bertie.config import EncoderConfig, HeadConfig, HeadName
from bertie.errors import NotFoundError
from bertie.nn.encoder import Encoder
from bertie.nn.heads import Head
from bertie.text.batch import Batch


class Model(nn.Module):
    """One encoder and any number of heads that share its pass."""

    def __init__(self, encoder: EncoderConfig, heads: Mapping[HeadName, HeadConfig]) -> None:
        super().__init__()
        self.encoder = Encoder(encoder)
        words = self.encoder.embeddings.words.weight
        self.heads = nn.ModuleDict({name: Head(cfg, encoder, words) for name, cfg in heads.items()})
        self.encoder.initialize(self.heads)

    @property
    def config(self) -> EncoderConfig:
        """The encoder's config."""
        return self.encoder.cfg

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.encoder.embeddings.words.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' precision."""
        return self.encoder.embeddings.words.weight.dtype

    def head(self, name: HeadName) -> Head:
        """A head by name."""
        if name not in self.heads:
            have = ", ".join(self.heads) or "none"
            raise NotFoundError(f"this checkpoint has no head {name!r}; it has: {have}")
        head = self.heads[name]
        assert isinstance(head, Head)
        return head

    def forward(self, batch: Batch, head: HeadName) -> Tensor:
        """The head's outputs: a row a token or a row a text."""
        out: Tensor = self.head(head)(self.hidden(batch, head), batch, self.encoder.embeddings.words.weight)
        return out

    def hidden(self, batch: Batch, head: HeadName | None = None) -> Tensor:
        """(T, D) the last hidden state; as `head` wants it, where heads differ in global tokens or in segments."""
        if head is not None:
            batch = self.head(head).segmented(batch)
        if self.config.global_tokens and head is not None and batch.global_tokens is None:
            batch = batch.with_globals(self.head(head).global_tokens(batch))
        out: Tensor = self.encoder(batch)
        return out
