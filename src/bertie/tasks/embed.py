"""Texts to vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.errors import InputError
from bertie.hub import Checkpoint
from bertie.sentence import SentenceModules
from bertie.text.batch import Batch, pack
from bertie.text.tokenizer import Encoding

TOKENS_A_BATCH = 8192


class Embedder:
    """A checkpoint that turns each text into one vector, as its sentence-transformers modules say.

    A checkpoint without such modules is pooled by the mean over tokens.

    >>> embedder = Embedder.load("path/to/all-MiniLM-L6-v2")                    # doctest: +SKIP
    >>> embedder.embed(["A cat sat on the mat.", "The feline rested."]).shape   # doctest: +SKIP
    (2, 384)
    """

    def __init__(self, checkpoint: Checkpoint, *, long: Literal["error", "truncate"] = "error") -> None:
        if long not in ("error", "truncate"):
            raise InputError(f"long={long!r} must be 'error' or 'truncate'")
        if checkpoint.tokenizer is None:
            raise InputError(f"{checkpoint.source} has no tokenizer, and embedding texts needs one")
        self.checkpoint = checkpoint
        self.tokenizer = checkpoint.tokenizer
        self.modules = checkpoint.sentence or SentenceModules.fresh(checkpoint.model.config.width, normalize=False)
        self.long = long

    @classmethod
    def load(cls, name: str | Path, *, long: Literal["error", "truncate"] = "error", **options: Any) -> Embedder:
        """Load a checkpoint; `options` are those of `Checkpoint.load`."""
        return cls(Checkpoint.load(name, **options), long=long)

    @property
    def dimension(self) -> int:
        """The length of a vector."""
        return self.modules.dimension

    @torch.inference_mode()
    def embed(self, texts: Sequence[str], *, prompt: str | None = None) -> NDArray[np.float32]:
        """(N, dimension) one vector a text, in the order given. `prompt` names one of the checkpoint's prompts.

        A text beyond the model's reach is an error, or, if the embedder was made so, cut; never cut unasked.
        """
        if isinstance(texts, str):
            raise InputError("embed takes a list of texts; put a single text into a list")
        prefix = self._prefix(prompt)
        if self.modules.lower_case:
            texts = [text.lower() for text in texts]
        encodings = [self._fit(i, e) for i, e in enumerate(self.tokenizer.encode_batch([prefix + t for t in texts]))]
        # The prompt with what precedes it and without what follows: tokens that pooling may be told to leave out.
        skip = len(self.tokenizer.encode(prefix)) - 1 if prefix else 0
        out = np.empty((len(encodings), self.dimension), dtype=np.float32)
        for group in pack([len(e) for e in encodings], TOKENS_A_BATCH):
            batch = Batch.from_encodings([encodings[i] for i in group]).to(self.checkpoint.model.device)
            vectors = self.modules(self.checkpoint.model.hidden(batch), batch, [skip] * len(group))
            out[group] = vectors.float().cpu().numpy()
        return out

    def _prefix(self, name: str | None) -> str:
        name = name if name is not None else self.modules.default_prompt
        if name is None:
            return ""
        if name not in self.modules.prompts:
            known = ", ".join(self.modules.prompts) or "none"
            raise InputError(f"prompt={name!r} is not one of the checkpoint's prompts: {known}")
        return self.modules.prompts[name]

    def _fit(self, index: int, encoding: Encoding) -> Encoding:
        reach = self.checkpoint.reach
        if len(encoding) <= reach:
            return encoding
        if self.long == "error":
            raise InputError(
                f"text {index} has {len(encoding)} tokens and the model reads {reach}; "
                "shorten it, or make the embedder with long='truncate' to read its beginning only"
            )
        return cut(encoding, reach)


def cut(encoding: Encoding, length: int) -> Encoding:
    """The first tokens of an encoding, with the special tokens that close it."""
    closing = int(np.argmin(encoding.special[::-1])) if not encoding.special.all() else 0
    keep = np.r_[0 : length - closing, len(encoding) - closing : len(encoding)]
    return Encoding(**{f.name: getattr(encoding, f.name)[keep] for f in fields(encoding)})
