"""A model under test in `benchmarks.builtin`: its checkpoint and the tasks of its heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import HeadInfo
from bertie.errors import BertieError
from bertie.tasks import Classifier, Embedder, Reader, Reranker, Tagger


class Subject:
    """A checkpoint with the tasks of its heads."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.name, self.device = name, device
        self.checkpoint = Checkpoint.load(name, device=device)

    @cached_property
    def embedder(self) -> Embedder:
        return Embedder(self.checkpoint)

    def vectors(self, texts: Sequence[str], prompt: str | None = None) -> np.ndarray:
        """(n, D) normalized embeddings, with the named prompt if there is one. Each distinct text is read once."""
        prompt = prompt if prompt in self.embedder.modules.prompts else None
        index = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        vectors = self.embedder.embed(list(index), prompt_name=prompt).astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors[[index[text] for text in texts]]

    def find_head(self, matches: Callable[[HeadInfo], bool]) -> str | None:
        """The first head that matches."""
        return next((name for name, info in self.checkpoint.heads.items() if matches(info)), None)

    def classifier(self, labels: set[str]) -> Classifier | None:
        """The classification head that has these labels."""
        name = self.find_head(lambda info: info.kind == "classify" and labels <= set(info.labels.values()))
        return None if name is None else Classifier(self.checkpoint, head=name)

    @cached_property
    def reranker(self) -> Reranker | None:
        name = self.find_head(lambda info: info.task == "rerank")
        if name is None and self.checkpoint.cross_encoder is not None and len(self.checkpoint.labels) == 1:
            name = "classify"
        return None if name is None else Reranker(self.checkpoint, head=name)

    @cached_property
    def tagger(self) -> Tagger | None:
        name = self.find_head(lambda info: info.kind == "tag" and any("PER" in tag for tag in info.labels.values()))
        return None if name is None else Tagger(self.checkpoint, head=name)

    @cached_property
    def reader(self) -> Reader | None:
        name = self.find_head(lambda info: info.kind == "answer")
        return None if name is None else Reader(self.checkpoint, head=name)

    @cached_property
    def masked_lm(self) -> tuple[Checkpoint, str] | None:
        """The checkpoint and its MLM head, which the config of a sentence-transformers folder does not mention."""
        name = self.find_head(lambda info: info.kind == "mlm")
        if name is not None:
            return self.checkpoint, name
        try:
            return Checkpoint.load(self.name, head="mlm", device=self.device), "mlm"
        except BertieError:
            return None
