"""How busy an engine is, as other processes and metrics see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bertie.serve.tickets import Refused


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The queue of one model.

    `refused`: the owners whose short jobs are refused, and the seconds after which they may be accepted again; under
    "" those of an owner without any. `refused_long`: the same for long jobs.
    """

    waiting_tokens: int = 0
    waiting_requests: int = 0
    budget: int = 0  # tokens per batch
    rate: float = 0.0  # recent throughput in tokens per second
    refused: Mapping[str, float] = field(default_factory=dict)
    refused_long: Mapping[str, float] = field(default_factory=dict)
    warm: bool = True  # whether the first batches have run

    def is_full(self, owner: str = "") -> bool:
        """Whether any new job of an owner would be refused."""
        return _seconds(self.refused, owner) is not None and _seconds(self.refused_long, owner) is not None

    def check(self, owner: str = "") -> None:
        """Raise `Refused` if any new job of an owner would be refused."""
        short, long = _seconds(self.refused, owner), _seconds(self.refused_long, owner)
        if short is not None and long is not None:
            raise Refused("the queue is full", min(short, long))

    def check_long(self, owner: str = "") -> None:
        """Raise `Refused` if a new long job of an owner would be refused."""
        seconds = _seconds(self.refused_long, owner)
        if seconds is not None:
            raise Refused("the queue of long jobs is full", seconds)


def _seconds(refused: Mapping[str, float], owner: str) -> float | None:
    return refused.get(owner, refused.get(""))
