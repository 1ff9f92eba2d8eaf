"""The served models by name: each is loaded once, with an engine of its own and a task for each of its heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any, TypeVar

import torch

from bertie.checkpoints.checkpoint import Checkpoint, default_device
from bertie.checkpoints.hub import default_model, is_local_folder, to_string
from bertie.config import PAIR_LABELS, Precision
from bertie.errors import BertieError, ConfigError, InputError, NotFoundError
from bertie.serve.engine import BatchStats, Engine, EngineStats
from bertie.tasks import (
    Classifier,
    Embedder,
    LateInteraction,
    MaskedLM,
    ReplacedTokenDetector,
    Reranker,
    SparseEmbedder,
    ZeroShot,
    registry,
)
from bertie.tasks.base import Task

AnyTask = TypeVar("AnyTask", bound=Task[Any, Any, Any] | ZeroShot)
VARIANTS = 256  # cached tasks with options of their own, such as a dimension


class ServedModel:
    """A served model. Its tasks are ordinary ones whose forward pass runs in its engine.

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
        # By name of the head; embeddings need none of their own, and "zero-shot" uses one of them in its own way.
        self.tasks: dict[str, Task[Any, Any, Any] | ZeroShot] = {}
        if checkpoint.tokenizer is None:
            raise NotFoundError(f"the model {name!r} has no tokenizer, and reading texts needs one")
        for head, info in checkpoint.heads.items():
            row = registry.row_for_head(info)
            if row is not None:
                self.tasks[head] = self.task(_reranking(checkpoint, head) or row.task_class, head=head)
            elif info.kind == "mlm" and checkpoint.tokenizer.mask_id is not None:
                self.tasks[head] = self.task(MaskedLM, head=head)
            elif info.kind == "rtd":
                self.tasks[head] = self.task(ReplacedTokenDetector, head=head)
            elif info.kind in PAIR_LABELS:
                self.tasks[head] = self.task(Classifier, head=head)
        if checkpoint.splade is not None:
            self.tasks["sparse"] = self.task(SparseEmbedder)
        elif checkpoint.late_interaction is not None:
            self.tasks["late-interaction"] = self.task(LateInteraction)
        else:
            self.tasks["embed"] = self.task(Embedder)
        with suppress(BertieError):  # no NLI head, or several: then a request names one
            self.tasks["zero-shot"] = self.task(ZeroShot)

    def task(self, kind: type[AnyTask], **options: Any) -> AnyTask:
        """The model as a task; `options` are those of the task's constructor (head, overflow, dimension, …)."""
        key = (kind, *sorted(options.items()))
        with self._lock:
            task: AnyTask | None = self._variants.get(key)
            if task is None:
                task = kind(self.checkpoint, **options)
                task.pipeline.executor = self.engine
                if len(self._variants) >= VARIANTS:
                    self._variants.clear()
                self._variants[key] = task
            return task

    @contextmanager
    def use(self) -> Iterator[ServedModel]:
        """Keep the engine open during a request, even if the model is replaced meanwhile."""
        with self._idle:
            self._users += 1
        try:
            yield self
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def retire(self) -> None:
        """Close the engine once no request uses it."""
        with self._idle:
            self._idle.wait_for(lambda: not self._users)
        self.engine.close()


class Registry:
    """Served models by name.

    `models`: a mapping from names to folders, built-in names or hub ids, or a list of these, each plain or as
    name=source; nothing else is ever served. The first one is the default. `devices`: one replica per device.
    `on_batch` is called with the model's name and the statistics of each batch; `settings` are options of `Engine`.

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
        on_batch: Callable[[str, BatchStats], None] | None = None,
        **settings: Any,
    ) -> None:
        self._sources = dict(models) if isinstance(models, Mapping) else name_models(models or [default_model()])
        if not self._sources:
            raise ConfigError("models={} must name at least one model")
        self._devices = [torch.device(device) for device in devices or [default_device()]]
        self._precision, self._on_batch, self._settings = precision, on_batch, settings
        self._lock, self._reloading = Lock(), Lock()
        self._retiring: list[Thread] = []
        self._served: dict[str, ServedModel] = {}
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
        """The name of the default model."""
        return next(iter(self._sources))

    def _load(self, name: str) -> ServedModel:
        source = self._sources[name]
        checkpoints = [Checkpoint.load(source, device=device, precision=self._precision) for device in self._devices]
        on_batch = self._on_batch
        engine = Engine(
            checkpoints[0].model,
            replicas=[checkpoint.model for checkpoint in checkpoints[1:]],
            on_batch=None if on_batch is None else lambda batch: on_batch(name, batch),
            **self._settings,
        )
        try:
            return ServedModel(name, checkpoints[0], engine)
        except BaseException:
            engine.close(drain=False)
            raise

    def __getitem__(self, name: str) -> ServedModel:
        """The current model of that name. Requests go through `use`, which keeps it open."""
        if name not in self._served:
            raise NotFoundError(f"model={name!r:.100} is not served here; there are: {', '.join(self._sources)}")
        return self._served[name]

    @contextmanager
    def use(self, name: str | None = None) -> Iterator[ServedModel]:
        """A model for one request: if it is reloaded meanwhile, the request keeps the old one."""
        with self._lock:  # it must not be retired before this request is counted
            held = self[self.default if name is None else name].use()
            served = held.__enter__()
        try:
            yield served
        finally:
            held.__exit__(None, None, None)

    def reload(self, name: str) -> ServedModel:
        """Load a model again from its source and replace it; requests in progress keep the old one.

        If loading fails, the error is raised and the old model stays.
        """
        with self._reloading:  # one at a time: both must fit into memory
            old = self[name]
            new = self._load(name)
            with self._lock:
                self._served[name] = new
            thread = Thread(target=old.retire, name=f"retire-{name}", daemon=True)
            thread.start()
            self._retiring = [other for other in self._retiring if other.is_alive()] + [thread]
            return new

    def check(self) -> None:
        """Refuse a request early, if every model would."""
        queues = [served.engine.queue for served in list(self._served.values())]
        if all(queue.is_full for queue in queues):
            queues[0].check()

    def stats(self) -> dict[str, EngineStats]:
        """Statistics of each model's engine."""
        return {name: served.engine.stats() for name, served in list(self._served.items())}

    @property
    def ready(self) -> bool:
        """Whether every model accepts requests."""
        return len(self._served) == len(self._sources) and all(served.engine.ready for served in self._served.values())

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Close all engines; with `drain`, waiting requests are finished first, within `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        for served in self._served.values():
            served.engine.close(drain=drain, timeout=None if until is None else max(0.0, until - time.monotonic()))
        for thread in self._retiring:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))


def name_models(models: Sequence[str | Path]) -> dict[str, str | Path]:
    """Names for models. A folder has its own name, without the path, which is not to be disclosed.

    >>> name_models(["bertie-small", "owner/model", "mine=owner/other"])
    {'bertie-small': 'bertie-small', 'owner/model': 'owner/model', 'mine': 'owner/other'}
    """
    if isinstance(models, str | Path):
        raise InputError(f"models={models!r:.100} must be a list; put a single one into a list")
    sources: dict[str, str | Path] = {}
    for model in models:
        name, equals, source = str(model).partition("=")
        if not equals or Path(model).is_dir():
            name = Path(model).expanduser().resolve().name if is_local_folder(model) else str(model)
            source = to_string(model)
        if not name or not source:
            raise ConfigError(f"model {model!r} must be a folder, a built-in name or a hub id, or name=one of these")
        if name in sources:
            raise ConfigError(f"two models have the name {name!r}; give one of them another: other={source}")
        sources[name] = source
    return sources


def _reranking(checkpoint: Checkpoint, head: str) -> type[Task[Any, Any, Any]] | None:
    """`Reranker` for a cross-encoder with one score, as in `bertie.load`."""
    single = head in checkpoint.spec.heads and len(checkpoint.heads[head].labels) == 1
    return Reranker if single and checkpoint.cross_encoder is not None else None
