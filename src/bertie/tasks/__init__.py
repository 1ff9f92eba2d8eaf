"""One file a task: texts in, results out. `load` finds the task that a checkpoint was made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import HeadName
from bertie.errors import NotFoundError
from bertie.tasks.answer import Reader
from bertie.tasks.base import Overflow, Task
from bertie.tasks.classify import Classifier, Regressor, ZeroShot
from bertie.tasks.embed import Embedder
from bertie.tasks.fill_mask import MaskedLM
from bertie.tasks.multi_task import LEARNERS, Heads, task_of
from bertie.tasks.rerank import Reranker
from bertie.tasks.tag import Tagger

__all__ = [
    "Classifier",
    "Embedder",
    "Heads",
    "MaskedLM",
    "Reader",
    "Regressor",
    "Reranker",
    "Tagger",
    "ZeroShot",
    "load",
]

_TASKS: dict[HeadName, type[Task[Any, Any, Any]]] = {
    "classify": Classifier,
    "tag": Tagger,
    "answer": Reader,
    "mlm": MaskedLM,
}


def load(
    name: str | Path | None = None, *, overflow: Overflow = "window", head: str | None = None, **options: Any
) -> Task[Any, Any, Any]:
    """The task object that fits a checkpoint: a reranker, an embedder, or whatever its head is for.

    Without a name it is the built-in model. A bare encoder embeds, and so does a sentence model; `head` names one of
    several heads over one encoder instead. `options` are those of `Checkpoint.load`.

    >>> load(head="ner").tag(["Ada Lovelace was born in London."])[0].spans[0].text              # doctest: +SKIP
    'Ada Lovelace'
    """
    checkpoint, named = Task._loaded(name, head, options)
    if named is not None:
        return _named(checkpoint, named, overflow)
    if checkpoint.cross_encoder is not None and len(checkpoint.labels) == 1:
        return Reranker(checkpoint, overflow=overflow)
    if checkpoint.sentence is not None and head is None:
        return Embedder(checkpoint, overflow=overflow)
    info = checkpoint.heads.get("classify")
    if info is not None and info.problem == "regression" and len(info.labels) == 1:
        return Regressor(checkpoint, overflow=overflow)
    for kind, task in _TASKS.items():
        if kind in checkpoint.spec.heads:
            return task(checkpoint, overflow=overflow)
    beside = [one for one in checkpoint.heads if one not in checkpoint.spec.heads]
    if len(beside) == 1:
        return _named(checkpoint, beside[0], overflow)
    if beside:
        raise NotFoundError(
            f"{checkpoint.source} has several heads: pass head= with one of {', '.join(beside)}, or use bertie.Heads"
        )
    if set(checkpoint.model.heads) <= {"pooler"}:
        return Embedder(checkpoint, overflow=overflow)
    have = ", ".join(checkpoint.model.heads)
    raise NotFoundError(
        f"no task is made for the heads of {checkpoint.source} ({have}); load it with bertie.Checkpoint.load"
    )


def _named(checkpoint: Checkpoint, head: str, overflow: Overflow) -> Task[Any, Any, Any]:
    """The task that a head is for."""
    checkpoint.model.head(head)
    kind = task_of(checkpoint, head)
    if kind is not None:
        return LEARNERS[kind](checkpoint, overflow=overflow, head=head)
    if checkpoint.heads[head].kind == "mlm":
        return MaskedLM(checkpoint, overflow=overflow, head=head)
    raise NotFoundError(f"no task is made for the head {head!r}, which is for {checkpoint.heads[head].kind!r}")
