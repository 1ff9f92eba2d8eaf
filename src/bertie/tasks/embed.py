"""Texts to vectors.

Over several windows, the pooled vectors are averaged with the tokens that each window answers for as weights, before
whatever follows the pooling (a dense layer, the scaling to length 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bertie.errors import InputError
from bertie.hub import Checkpoint
from bertie.sentence import SentenceModules
from bertie.tasks.base import Ask, FloatArray, Long, Task, default_model, pooled, reading, singles
from bertie.text.batch import Batch
from bertie.text.windows import Window

POOLING = {"cls": "cls", "mean": "mean", "max": "max", "last": "lasttoken", "weighted-mean": "weightedmean"}


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A text's vector."""

    vector: NDArray[np.float32]
    tokens_total: int
    tokens_read: int
    windows: int


@dataclass(frozen=True, slots=True)
class _Options:
    prompt_tokens: int  # that pooling may be told to leave out, with the special one before them


class Embedder(Task[_Options, FloatArray, Embedding]):
    """Turns each text into one vector, as the checkpoint's sentence-transformers modules say.

    A checkpoint without such modules is pooled by the mean over tokens, unless `pooling` says otherwise: cls, mean,
    max, last or weighted-mean. `normalize` scales vectors to length 1; `dimensions` keeps their first numbers, as
    models trained for it allow, before the scaling.

    >>> embedder = Embedder.load("sentence-transformers/all-MiniLM-L6-v2")       # doctest: +SKIP
    >>> embedder.embed(["A cat sat on the mat.", "The feline rested."]).shape    # doctest: +SKIP
    (2, 384)
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        long: Long = "window",
        pooling: Literal["cls", "mean", "max", "last", "weighted-mean"] | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
    ) -> None:
        super().__init__(checkpoint, long=long)
        if pooling is not None and pooling not in POOLING:
            raise InputError(f"pooling={pooling!r} must be one of {', '.join(POOLING)}")
        width = checkpoint.model.config.width
        if pooling is None:
            self.modules = checkpoint.sentence or SentenceModules.fresh(width, normalize=False)
        else:
            self.modules = SentenceModules.fresh(width, pooling=POOLING[pooling], normalize=False)
            if checkpoint.sentence is not None:
                self.modules.prompts = checkpoint.sentence.prompts
                self.modules.default_prompt = checkpoint.sentence.default_prompt
                self.modules.lower_case = checkpoint.sentence.lower_case
        if dimensions is not None and not 1 <= dimensions <= self.modules.dimension:
            raise InputError(f"dimensions={dimensions} must lie between 1 and {self.modules.dimension}")
        self.normalize, self.dimensions = normalize, dimensions

    @classmethod
    def load(cls, name: str | Path | None = None, *, long: Long = "window", **options: Any) -> Self:
        """Load a checkpoint, the built-in model if none is named.

        `options` are `pooling`, `normalize`, `dimensions`, and those of `Checkpoint.load`.
        """
        mine = {key: options.pop(key) for key in ("pooling", "normalize", "dimensions") if key in options}
        return cls(Checkpoint.load(default_model() if name is None else name, **options), long=long, **mine)

    @property
    def dimension(self) -> int:
        """The length of a vector."""
        return self.dimensions or self.modules.dimension

    def embed(self, texts: Iterable[str], *, prompt: str | None = None) -> NDArray[np.float32]:
        """(N, dimension) one vector a text, in order. `prompt` names one of the checkpoint's prompts."""
        vectors = [one.vector for one in self.embed_each(texts, prompt=prompt)]
        return np.stack(vectors) if vectors else np.empty((0, self.dimension), dtype=np.float32)

    def embed_each(self, texts: Iterable[str], *, prompt: str | None = None) -> Iterator[Embedding]:
        """As `embed`, one by one, each with how much of its text was read."""
        name = prompt if prompt is not None else self.modules.default_prompt
        if name is not None and name not in self.modules.prompts:
            known = ", ".join(self.modules.prompts) or "none"
            raise InputError(f"prompt={name!r} is not one of the checkpoint's prompts: {known}")
        before = self.modules.prompts[name] if name is not None else ""
        asks = singles(texts, "embed", _Options(self._tokens(before)))
        return self.run(replace(ask, texts=(self._prepared(before + ask.texts[0]),)) for ask in asks)

    def _prepared(self, text: str) -> str:
        return text.lower() if self.modules.lower_case else text

    def _tokens(self, prompt: str) -> int:
        """How many tokens a prompt has, with the special one before it and without the one after it."""
        if not prompt:
            return 0
        encoding = self.tokenizer.encode(self._prepared(prompt))
        return len(encoding) - int(encoding.special[-1])

    def similarity(self, a: Iterable[str], b: Iterable[str] | None = None) -> NDArray[np.float32]:
        """(N, M) how alike each of `a` is to each of `b`, or of `a` itself: by cosine, or as the checkpoint says."""
        one = self.embed(a)
        return self.compare(one, one if b is None else self.embed(b))

    def compare(self, one: NDArray[np.float32], two: NDArray[np.float32]) -> NDArray[np.float32]:
        """(N, D), (M, D) -> (N, M) as `similarity`, of vectors that are there already."""
        name = self.modules.similarity or "cosine"
        if name in ("euclidean", "manhattan"):
            distance = torch.cdist(torch.from_numpy(one), torch.from_numpy(two), p=2.0 if name == "euclidean" else 1.0)
            found: NDArray[np.float32] = -distance.numpy()
            return found
        if name == "cosine":
            one, two = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (one, two))
        return one @ two.T

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[Ask[_Options]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(width,) the pooled state of each window."""
        skips = []
        for ask, window in zip(asks, group, strict=True):
            skip = ask.options.prompt_tokens
            # Of several windows only the first begins with the prompt.
            holds = 0 < skip < len(window) and window.places[skip - 1] == skip - 1
            skips.append(skip if holds else 0)
        return self.by_text(self.modules.pooling(hidden, batch, skips).float())

    def decode(self, ask: Ask[_Options], found: Sequence[Window], outputs: Sequence[FloatArray]) -> Embedding:
        """Average the windows; what follows the pooling is done for many at once, in `run`."""
        return Embedding(pooled(found, outputs), **reading(found))

    def run(self, asks: Iterable[Ask[_Options]]) -> Iterator[Embedding]:
        """As all tasks run, with what follows the pooling at the end."""
        found = super().run(asks)
        while some := list(islice(found, 256)):
            for one, vector in zip(some, self._finish([one.vector for one in some]), strict=True):
                yield replace(one, vector=vector)

    @torch.inference_mode()
    def _finish(self, vectors: Sequence[FloatArray]) -> Sequence[FloatArray]:
        rows = torch.from_numpy(np.stack(vectors)).to(self.model.device)
        rows = self.modules.to(rows.device).project(rows)[:, : self.dimensions]
        return self.by_text(F.normalize(rows, dim=-1) if self.normalize else rows)
