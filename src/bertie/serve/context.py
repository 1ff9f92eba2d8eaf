"""The state of one HTTP request on its way through an endpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bertie.pipeline.read_counts import READ_COUNTS as READ_COUNTS
from bertie.serve.tickets import Ticket

if TYPE_CHECKING:
    from bertie.serve.registry import ServedModel


@dataclass(slots=True)
class RequestContext:
    """One request: its ticket in the queue, the models it uses, and how much of its texts was read."""

    ticket: Ticket
    model: str = ""  # the name of the model that answers
    read: dict[str, int] = field(default_factory=lambda: dict.fromkeys(READ_COUNTS, 0))
    models: dict[str, ServedModel] = field(default_factory=dict)  # by name, in use until `release`
    # For the log:
    known_path: bool = False
    key: str | None = None
    error_code: str | None = None
    body: str | None = None

    def release(self) -> None:
        """Use the models no longer."""
        for served in self.models.values():
            served.release()
        self.models.clear()

    def add_read(self, results: Iterable[Any]) -> None:
        """Add up how much of each text was read."""
        for result in results:
            for name in READ_COUNTS:
                self.read[name] += getattr(result, name)


def read_counts(result: Any) -> dict[str, int]:
    """The counts of one result, for its entry in the response."""
    return {name: getattr(result, name) for name in READ_COUNTS}
