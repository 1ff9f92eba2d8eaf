"""Progress of calls to the pipeline: batches report to the active progress bar."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar

from bertie.data.progress import Progress
from bertie.data.terminal import is_interactive

# Called with the number of inputs that a batch completes, possibly a fraction of one. None: no progress bar.
_listener: ContextVar[Callable[[float], None] | None] = ContextVar("listener", default=None)


def report(inputs: float) -> None:
    """Report completed inputs."""
    if (listener := _listener.get()) is not None:
        listener(inputs)


@contextmanager
def show_progress(
    label: str,
    total: int | None,
    progress: bool | None,
    unit: str = "texts",
    *,
    fraction: Callable[[], float | None] | None = None,
) -> Iterator[None]:
    """Show a progress bar for calls of the pipeline inside the context, once they have taken a second.

    `progress=None`: only on a terminal or in a notebook, in the main thread. A nested context shows nothing: the outer
    progress bar keeps counting. `fraction`: the completed fraction, if the number of inputs is not known.
    """
    if _listener.get() is not None or not (progress or (progress is None and _is_watched())):
        yield
        return
    done, rows = 0.0, 0

    def advance(inputs: float) -> None:
        nonlocal done, rows
        done += inputs
        bar.update(round(done) - rows)
        rows = round(done)

    def share() -> float | None:
        return min(1.0, done / total) if total else None

    with Progress(label, fraction or share, unit=unit) as bar:
        token = _listener.set(advance)
        try:
            yield
        finally:
            _listener.reset(token)


@contextmanager
def without_progress() -> Iterator[None]:
    """Suppress the progress bars of calls inside the context; the caller shows its own."""
    token = _listener.set(lambda inputs: None)
    try:
        yield
    finally:
        _listener.reset(token)


def length(items: object) -> int | None:
    """The number of items, if that is known before they are read."""
    try:
        return len(items) if isinstance(items, Sized) else None
    except TypeError:  # a 0-dimensional array, which is refused elsewhere
        return None


def _is_watched() -> bool:
    main = threading.current_thread() is threading.main_thread()
    return main and sys.stderr is not None and is_interactive(sys.stderr)
