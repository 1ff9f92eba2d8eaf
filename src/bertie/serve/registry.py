"""The models that are served, by name: each loaded once, with an engine of its own and a task for each of its heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any, TypeVar

import torch

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.hub import default_model
from bertie.config import Precision
from bertie.errors import BertieError, ConfigError, InputError, NotFoundError
from bertie.serve.engine import Engine, Ran, Stats
from bertie.tasks import Embedder, MaskedLM, Reranker, ZeroShot, registry
from bertie.tasks.base import Task

AnyTask = TypeVar("AnyTask", bound=Task[Any, Any, Any] | ZeroShot)
VARIANTS = 256  # tasks with options of their own (such as dimensions) that are kept; then they are made anew


class Served:
    """One model that is served. What it makes are ordinary tasks whose windows go through its engine.

    >>> with registry.use("bertie-small") as served:                                      # doctest: +SKIP
    ...     served.task(Tagger).tag(["Ada Lovelace was born in London."])
    """

    def __init__(self, name: str, checkpoint: Checkpoint, engine: Engine) -> None:
        self.name, self.checkpoint, self.engine = name, checkpoint, engine
        self.started = time.time()
        self._variants: dict[Any, Any] = {}
        self._lock = Lock()
        self._users = 0
        self._idle = Condition(Lock())
        # By the name of the head; what needs none is "embed", and "zero-shot" uses one of them in its own way.
        self.tasks: dict[str, Task[Any, Any, Any] | ZeroShot] = {}
        if checkpoint.tokenizer is None:
            raise NotFoundError(f"the model {name!r} has no tokenizer, and reading texts needs one")
        for head, info in checkpoint.heads.items():
            row = registry.row_for_head(info)
            if row is not None:
                self.tasks[head] = self.task(_reranking(checkpoint, head) or row.task_class, head=head)
            elif info.kind == "mlm" and checkpoint.tokenizer.mask_id is not None:
                self.tasks[head] = self.task(MaskedLM, head=head)
        self.tasks["embed"] = self.task(Embedder)
        with suppress(BertieError):  # no head for it, or several: then a request names one
            self.tasks["zero-shot"] = self.task(ZeroShot)

    def task(self, kind: type[AnyTask], **options: Any) -> AnyTask:
        """The model as a task of some kind; `options` are those of its constructor (head, long, dimensions, …).

        Without a head it is the one that fits, as everywhere; an error says so where there is none or are several.
        """
        key = (kind, *sorted(options.items()))
        with self._lock:
            found: AnyTask | None = self._variants.get(key)
            if found is None:
                found = kind(self.checkpoint, **options)
                (found._logits if isinstance(found, ZeroShot) else found).compute = self.engine.compute
                if len(self._variants) >= VARIANTS:
                    self._variants.clear()
                self._variants[key] = found
            return found

    @contextmanager
    def use(self) -> Iterator[Served]:
        """While a request is at it, the engine is not closed, even if another model has taken the name."""
        with self._idle:
            self._users += 1
        try:
            yield self
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def retire(self) -> None:
        """Close the engine once nobody uses it."""
        with self._idle:
            self._idle.wait_for(lambda: not self._users)
        self.engine.close()


class Registry:
    """Served models by name.

    `models`: names with what to load for each, or a list of folders, built-in names and hub ids, each as it is or as
    name=what; nothing else is ever served. The first one answers where none is named. `devices`: where to; several are
    replicas of one another. `settings` go to `Engine`.

    >>> registry = Registry(["bertie-small", "minilm=path/to/all-MiniLM-L6-v2"])           # doctest: +SKIP
    >>> list(registry)                                                                     # doctest: +SKIP
    ['bertie-small', 'minilm']
    """

    def __init__(
        self,
        models: Mapping[str, str | Path] | Sequence[str | Path] = (),
        *,
        devices: Sequence[str | torch.device] = (),
        precision: Precision = "fp32",
        watch: Callable[[str, Ran], None] | None = None,
        **settings: Any,
    ) -> None:
        self._sources = dict(models) if isinstance(models, Mapping) else named(models or [default_model()])
        if not self._sources:
            raise ConfigError("models={} must name at least one model")
        self._devices = [torch.device(one) for one in devices] or [torch.device(_usual_device())]
        self._precision, self._watch, self._settings = precision, watch, settings
        self._lock, self._reloading = Lock(), Lock()
        self._retiring: list[Thread] = []
        self._served: dict[str, Served] = {}
        try:
            for name in self._sources:
                self._served[name] = self._load(name)
        except BaseException:
            self.close(drain=False)
            raise

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    @property
    def default(self) -> str:
        """The name of the model that answers where none is named."""
        return next(iter(self._sources))

    def _load(self, name: str) -> Served:
        source = self._sources[name]
        several = [Checkpoint.load(source, device=device, precision=self._precision) for device in self._devices]
        watch = self._watch
        engine = Engine(
            several[0].model,
            replicas=[one.model for one in several[1:]],
            watch=None if watch is None else lambda ran: watch(name, ran),
            **self._settings,
        )
        try:
            return Served(name, several[0], engine)
        except BaseException:
            engine.close(drain=False)
            raise

    def __getitem__(self, name: str) -> Served:
        """A model as it is now. Requests go through `use`, which keeps it from being closed under them."""
        if name not in self._served:
            raise NotFoundError(f"model={name!r:.100} is not served here; there are: {', '.join(self._sources)}")
        return self._served[name]

    @contextmanager
    def use(self, name: str | None = None) -> Iterator[Served]:
        """A model for one request, to its end: if it is reloaded meanwhile, the request keeps the old one."""
        with self._lock:  # between finding it and counting this request, nobody may retire it
            held = self[self.default if name is None else name].use()
            served = held.__enter__()
        try:
            yield served
        finally:
            held.__exit__(None, None, None)

    def reload(self, name: str) -> Served:
        """Load a model anew from where it came from, and let it take over; requests under way keep the old one.

        If it cannot be loaded, the error is raised and the old one stays.
        """
        with self._reloading:  # one at a time: there must be room for both
            old = self[name]
            new = self._load(name)
            with self._lock:
                self._served[name] = new
            thread = Thread(target=old.retire, name=f"retire-{name}", daemon=True)
            thread.start()
            self._retiring = [one for one in self._retiring if one.is_alive()] + [thread]
            return new

    def check(self) -> None:
        """Refuse a request before anything is done for it, if every model would."""
        queues = [one.engine.queue for one in list(self._served.values())]
        if all(queue.waiting > queue.room for queue in queues):
            queues[0].check()

    def stats(self) -> dict[str, Stats]:
        """Of each model's engine."""
        return {name: served.engine.stats() for name, served in list(self._served.items())}

    @property
    def ready(self) -> bool:
        """Whether every model takes requests."""
        return len(self._served) == len(self._sources) and all(one.engine.ready for one in self._served.values())

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Close all engines; with `drain`, what waits is answered first, for `timeout` seconds at most."""
        until = None if timeout is None else time.monotonic() + timeout
        for served in self._served.values():
            served.engine.close(drain=drain, timeout=None if until is None else max(0.0, until - time.monotonic()))
        for thread in self._retiring:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))


def named(models: Sequence[str | Path]) -> dict[str, str | Path]:
    """Names for models: of a folder its own, without the way to it, which is nobody's business.

    >>> named(["bertie-small", "owner/model", "mine=owner/other"])
    {'bertie-small': 'bertie-small', 'owner/model': 'owner/model', 'mine': 'owner/other'}
    """
    if isinstance(models, str | Path):
        raise InputError(f"models={models!r:.100} must be a list; put a single one into a list")
    found: dict[str, str | Path] = {}
    for one in models:
        name, equals, source = str(one).partition("=")
        if not equals or Path(one).is_dir():
            folder = Path(one).expanduser()
            name, source = (folder.resolve().name if folder.is_dir() else str(one)), str(one)
        if not name or not source:
            raise ConfigError(f"model {one!r} must be a folder, a built-in name or a hub id, or name=one of these")
        if name in found:
            raise ConfigError(f"two models have the name {name!r}; give one of them another: other={source}")
        found[name] = source
    return found


def _reranking(checkpoint: Checkpoint, head: str) -> type[Task[Any, Any, Any]] | None:
    """Cross-encoders with one score rerank, as `bertie.load` has it."""
    lone = head in checkpoint.spec.heads and len(checkpoint.heads[head].labels) == 1
    return Reranker if lone and checkpoint.cross_encoder is not None else None


def _usual_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
