"""One file a task: texts in, results out. `load` finds the task that a checkpoint was made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertie.config import HeadName
from bertie.errors import NotFoundError
from bertie.hub import Checkpoint
from bertie.tasks.answer import Reader
from bertie.tasks.base import Long, Task
from bertie.tasks.classify import Classifier, ZeroShot
from bertie.tasks.embed import Embedder
from bertie.tasks.fill_mask import MaskedLM
from bertie.tasks.rerank import Reranker
from bertie.tasks.tag import Tagger

__all__ = ["Classifier", "Embedder", "MaskedLM", "Reader", "Reranker", "Tagger", "ZeroShot", "load"]

_TASKS: dict[HeadName, type[Task[Any, Any, Any]]] = {
    "classify": Classifier,
    "tag": Tagger,
    "answer": Reader,
    "mlm": MaskedLM,
}


def load(name: str | Path, *, long: Long = "window", **options: Any) -> Task[Any, Any, Any]:
    """The task object that fits a checkpoint: a reranker, an embedder, or whatever its head is for.

    A bare encoder embeds. `options` are those of `Checkpoint.load`.
    """
    checkpoint = Checkpoint.load(name, **options)
    if checkpoint.cross_encoder is not None and len(checkpoint.labels) == 1:
        return Reranker(checkpoint, long=long)
    if checkpoint.sentence is not None:
        return Embedder(checkpoint, long=long)
    for head, task in _TASKS.items():
        if head in checkpoint.model.heads:
            return task(checkpoint, long=long)
    if set(checkpoint.model.heads) <= {"pooler"}:
        return Embedder(checkpoint, long=long)
    have = ", ".join(checkpoint.model.heads)
    raise NotFoundError(f"no task is made for the heads of {name} ({have}); load it with bertie.Checkpoint.load")
