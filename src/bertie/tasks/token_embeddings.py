"""Token embeddings: the encoder's last hidden state of every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bertie.nn.model import Model
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.tasks.attention import Token
from bertie.tasks.base import Task
from bertie.tasks.display import Displayed
from bertie.text.batch import Batch
from bertie.text.encoding import Encodings

NUMBERS_PER_TOKEN = 2048  # numbers that take roughly as long to return as a token takes to encode


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TokenEmbeddingsResult(Displayed):
    """The tokens of a text, special tokens included, and the last hidden state of each."""

    tokens: tuple[Token, ...]
    vectors: FloatArray  # (n, D)
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


class TokenEmbedder(Task[None, FloatArray, TokenEmbeddingsResult]):
    """The encoder's last hidden states, each token's from the window that owns it."""

    needs_offsets = True

    def output_costs(self, windows: Encodings, parameters: Sequence[None] | None) -> Sequence[int]:
        """All numbers of all tokens are returned."""
        return [int(n) * self.model.config.width // NUMBERS_PER_TOKEN for n in windows.lengths]

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(n, D) of each window."""
        return PendingCopy.per_token(hidden.float(), batch)

    def decode(self, text: WindowedText[None], outputs: Sequence[FloatArray]) -> TokenEmbeddingsResult:
        """All tokens in order."""
        windows, encoding = text.windows, text.encoding
        indices = np.concatenate([window.indices[window.owned] for window in windows])
        rows = np.concatenate([output[window.owned] for window, output in zip(windows, outputs, strict=True)])
        order = np.argsort(indices, kind="stable")
        at = indices[order]
        columns = (encoding.ids[at].tolist(), encoding.offsets[at].tolist(), encoding.special[at].tolist())
        tokens = tuple(
            Token(self.tokenizer.token(id), start, end, special)
            for id, (start, end), special in zip(*columns, strict=True)
        )
        return TokenEmbeddingsResult(tokens, rows[order], **text.counts())
