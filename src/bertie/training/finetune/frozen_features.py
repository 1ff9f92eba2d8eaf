"""Features of labelled texts from a frozen encoder, for linear models: of texts, of pairs, and of words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.evaluation.baselines import pair_features
from bertie.nn.model import Model
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import TaskInput
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.tasks.base import Task
from bertie.tasks.decoding import owned_rows
from bertie.tasks.embed import Embedder
from bertie.tasks.tag import WordOffsets, align_words
from bertie.text.batch import Batch
from bertie.training.finetune.data import Example


class FrozenEncoder:
    """An encoder that reads the first `max_length` tokens of a text."""

    def __init__(self, model: str | Path, *, max_length: int, device: str = "cpu") -> None:
        checkpoint = Checkpoint.load(model, device=device)
        self.checkpoint = checkpoint.with_max_length(min(max_length, checkpoint.max_length))
        self._texts: dict[str, NDArray[np.float32]] = {}  # embeddings so far: folds share most texts
        self._words: dict[tuple[str, WordOffsets], NDArray[np.float32]] = {}

    def texts(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """(rows, width) embeddings of the texts; of pairs, differences and products of the two."""
        new = [text for text in dict.fromkeys(text for e in examples for text in e.texts) if text not in self._texts]
        embedder = Embedder(self.checkpoint, overflow="truncate", normalize=True)
        self._texts |= zip(new, embedder.embed(new), strict=True)
        sides = [
            np.stack([self._texts[example.texts[side]] for example in examples]).astype(np.float64)
            for side in range(len(examples[0].texts))
        ]
        return pair_features(sides[0], sides[1]) if len(sides) == 2 else sides[0]

    def words(self, examples: Sequence[Example]) -> NDArray[np.float64]:
        """(words, width) the encoder's output, averaged over the tokens of each word of all examples."""
        keys = [(example.texts[0], example.words) for example in examples]
        new = [key for key in dict.fromkeys(keys) if key not in self._words]
        inputs = (TaskInput(f"text {i}", (text,), words) for i, (text, words) in enumerate(new))
        self._words |= zip(new, _WordEmbedder(self.checkpoint).run(inputs, new), strict=True)
        return np.concatenate([self._words[key] for key in keys]).astype(np.float64)


class _WordEmbedder(Task[WordOffsets, FloatArray, FloatArray]):
    """One embedding per given word."""

    needs_offsets = True

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        return PendingCopy.per_token(hidden.float(), batch)

    def decode(self, text: WindowedText[WordOffsets], outputs: Sequence[FloatArray]) -> FloatArray:
        offsets = text.input.options
        tokens, hidden = owned_rows(text.windows, outputs)
        word = align_words(text.encoding, text.input.texts[0], offsets)[0][tokens]
        sums = np.zeros((len(offsets), hidden.shape[1]), dtype=np.float32)
        np.add.at(sums, word[word >= 0], hidden[word >= 0])
        counts = np.maximum(np.bincount(word[word >= 0], minlength=len(offsets)), 1).astype(np.float32)
        return np.asarray(sums / counts[:, None], dtype=np.float32)
