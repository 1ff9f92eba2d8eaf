"""Graceful interruption: Ctrl-C and SIGTERM end a run after the current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class InterruptHandler:
    """Context manager that records Ctrl-C and SIGTERM in `requested`; a second Ctrl-C ends the run at once."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled and threading.current_thread() is threading.main_thread()
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> InterruptHandler:
        if self.enabled:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, self._previous[number])

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
