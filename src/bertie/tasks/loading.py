"""Load a checkpoint as the task it was trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, overload

from bertie.arguments import explain_options
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import PAIR_LABELS
from bertie.errors import NotFoundError
from bertie.pipeline.pipeline import Overflow
from bertie.tasks import registry
from bertie.tasks.answer import Reader
from bertie.tasks.base import Task
from bertie.tasks.choose import Chooser
from bertie.tasks.classify import Classifier, Regressor
from bertie.tasks.embed import Embedder
from bertie.tasks.fill_mask import MaskedLM
from bertie.tasks.late_interaction import LateInteraction
from bertie.tasks.replaced_tokens import ReplacedTokenDetector
from bertie.tasks.rerank import Reranker
from bertie.tasks.sparse import SparseEmbedder
from bertie.tasks.tag import Tagger
from bertie.tasks.zero_shot_tag import ZeroShotTagger

LoadedTask = (
    Classifier
    | Regressor
    | Tagger
    | ZeroShotTagger
    | Reader
    | Reranker
    | Embedder
    | MaskedLM
    | Chooser
    | ReplacedTokenDetector
    | SparseEmbedder
    | LateInteraction
)


@overload
def load(
    name: str | Path | None = None, *, overflow: Overflow = "window", head: Literal["tag"], **options: Any
) -> Tagger: ...
@overload
def load(
    name: str | Path | None = None, *, overflow: Overflow = "window", head: Literal["answer"], **options: Any
) -> Reader: ...
@overload
def load(
    name: str | Path | None = None, *, overflow: Overflow = "window", head: Literal["mlm"], **options: Any
) -> MaskedLM: ...
@overload
def load(
    name: str | Path | None = None, *, overflow: Overflow = "window", head: Literal["nsp", "sop"], **options: Any
) -> Classifier: ...
@overload
def load(
    name: str | Path | None = None, *, overflow: Overflow = "window", head: Literal["choice"], **options: Any
) -> Chooser: ...
@overload
def load(
    name: str | Path | None = None, *, overflow: Overflow = "window", head: Literal["rtd"], **options: Any
) -> ReplacedTokenDetector: ...
@overload
def load(
    name: str | Path | None = None, *, overflow: Overflow = "window", head: Literal["classify"], **options: Any
) -> Classifier | Regressor | Reranker: ...
@overload
def load(
    name: str | Path | None = None, *, overflow: Overflow = "window", head: str | None = None, **options: Any
) -> LoadedTask: ...
@explain_options(Checkpoint.load)
def load(
    name: str | Path | None = None, *, overflow: Overflow = "window", head: str | None = None, **options: Any
) -> Task[Any, Any, Any]:
    """Load a model as the task it was trained for: a reranker, an embedder, or the task of its head.

    Without a name, the built-in model is loaded. A bare encoder or a sentence-embedding model becomes an `Embedder`, a
    SPLADE model a `SparseEmbedder`, a ColBERT model a `LateInteraction`. `head` selects one of several heads instead.
    `options` are passed to `Checkpoint.load`.

    >>> load(head="ner").tag(["Ada Lovelace was born in London."])[0].spans[0].text              # doctest: +SKIP
    'Ada Lovelace'
    """
    checkpoint, named = Task._load_checkpoint(name, head, options)
    if named is not None:
        return _task_of_head(checkpoint, named, overflow)
    return _main_task(checkpoint, overflow, head)


def load_checkpoint(
    checkpoint: Checkpoint, head: str | None = None, *, overflow: Overflow = "window"
) -> Task[Any, Any, Any]:
    """Like `load`, for a checkpoint that is already loaded."""
    if head is not None:
        return _task_of_head(checkpoint, head, overflow)
    return _main_task(checkpoint, overflow)


def _main_task(checkpoint: Checkpoint, overflow: Overflow, kind: str | None = None) -> Task[Any, Any, Any]:
    """The task that a checkpoint was trained for, preferably of its head of this kind; without heads, embedding."""
    if checkpoint.cross_encoder is not None and len(checkpoint.labels) == 1:
        return Reranker(checkpoint, overflow=overflow)
    if checkpoint.splade is not None and kind is None:
        return SparseEmbedder(checkpoint, overflow=overflow)
    if checkpoint.late_interaction is not None and kind is None:
        return LateInteraction(checkpoint, overflow=overflow)
    if checkpoint.sentence is not None and kind is None:
        return Embedder(checkpoint, overflow=overflow)
    own = [row for row in registry.TASKS.values() if row.head_kind in checkpoint.spec.heads]
    own.sort(key=lambda row: row.head_kind != kind)
    if own:
        info = checkpoint.heads[str(own[0].head_kind)]
        regression = info.problem == "regression" and len(info.labels) == 1
        return (Regressor if regression else own[0].task_class)(checkpoint, overflow=overflow)
    for pairs in PAIR_LABELS:
        if pairs in checkpoint.spec.heads:
            return _task_of_head(checkpoint, pairs, overflow)
    named_heads = [name for name in checkpoint.heads if name not in checkpoint.spec.heads]
    if len(named_heads) == 1:
        return _task_of_head(checkpoint, named_heads[0], overflow)
    if named_heads:
        raise NotFoundError(
            f"{checkpoint.source} has several heads: pass head= with one of {', '.join(named_heads)}, or use "
            "bertie.MultiTask"
        )
    if set(checkpoint.model.heads) <= {"pooler"}:
        return Embedder(checkpoint, overflow=overflow)
    raise NotFoundError(
        f"there is no task for the heads of {checkpoint.source} ({', '.join(checkpoint.model.heads)}); load it with "
        "bertie.Checkpoint.load"
    )


def _task_of_head(checkpoint: Checkpoint, head: str, overflow: Overflow) -> Task[Any, Any, Any]:
    """The task that a head was trained for."""
    checkpoint.model.head(head)
    info = checkpoint.heads[head]
    row = registry.row_for_head(info)
    if row is not None:
        return row.trainable_class(checkpoint, overflow=overflow, head=head)
    if info.kind in PAIR_LABELS:
        return Classifier(checkpoint, overflow=overflow, head=head)
    for row in registry.TASKS.values():
        if row.head_kind == info.kind and row.training is None:
            return row.task_class(checkpoint, overflow=overflow, head=head)
    raise NotFoundError(f"there is no task for the head {head!r} of kind {info.kind!r}")
