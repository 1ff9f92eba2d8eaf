"""What an engine has done, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from bertie.errors import NotFoundError
from bertie.tasks import registry
from bertie.tasks.late_interaction import TokenVectorEncoder
from bertie.tasks.sparse import SparseEmbedder
from bertie.tasks.token_embeddings import TokenEmbedder
from bertie.tasks.zero_shot import ZeroShot

TASK_NAMES: dict[type, str] = {
    ZeroShot: "zero-shot",
    TokenEmbedder: "embed",
    SparseEmbedder: "embed",
    TokenVectorEncoder: "late-interaction",
}


@dataclass(frozen=True, slots=True)
class BatchStats:
    """One batch, for metrics. Seconds are divided among tasks by tokens."""

    windows: int
    tokens: int
    padding_avoided: int  # tokens that a padded batch would have had in addition
    seconds: float
    tasks: dict[str, tuple[int, float]]  # tokens and seconds by task


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started, and the current state of the queue."""

    requests: int = 0
    refused: int = 0
    failed: int = 0  # batches, or halves of them, that raised an error
    batches: int = 0
    windows: int = 0
    tokens: int = 0
    padding_avoided: int = 0
    device_s: float = 0.0
    task_tokens: dict[str, int] = field(default_factory=dict)
    task_s: dict[str, float] = field(default_factory=dict)
    waiting_tokens: int = 0
    waiting_requests: int = 0
    budget: int = 0
    rate: float = 0.0  # recent throughput in tokens per second


@cache
def task_name(task: Any) -> str:
    """The name of a task's class in metrics."""
    for kind in task.__mro__:
        if kind in TASK_NAMES:
            return TASK_NAMES[kind]
    try:
        return registry.row_of_class(task).name
    except NotFoundError:
        return "other"
