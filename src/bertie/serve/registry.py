"""The served models by name: each is loaded once, with an engine of its own and a task for each of its heads."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any, TypeVar

import torch

from bertie.checkpoints.checkpoint import Checkpoint, default_device
from bertie.checkpoints.hub import default_model, is_local_folder, resolve, to_string
from bertie.config import PAIR_LABELS, Precision
from bertie.errors import BertieError, ConfigError, InputError, NotFoundError
from bertie.serve.embedding_cache import EmbeddingCache, ModelCache
from bertie.serve.engine import Engine
from bertie.serve.engine_client import EngineClient, RemoteEngine
from bertie.serve.engine_load import EngineLoad
from bertie.serve.engine_stats import BatchStats
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

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        engine: Engine | RemoteEngine,
        cache: EmbeddingCache | None = None,
        version: str = "",
    ) -> None:
        self._cache = None if cache is None else ModelCache(cache, engine)
        self.name, self.checkpoint, self.engine = name, checkpoint, engine
        self.version = version  # of its files
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
                if self._cache is not None and kind is Embedder:  # whose outputs are one row per window
                    task.pipeline.executor = self._cache.executor(key)
                if len(self._variants) >= VARIANTS:
                    self._variants.clear()
                self._variants[key] = task
            return task

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function with the checkpoint, where its weights are."""
        if isinstance(self.engine, RemoteEngine):
            return self.engine.call(function, *args, **options)
        return function(self.checkpoint, *args, **options)

    @torch.inference_mode()
    def describe(self) -> dict[str, Any]:
        """How the model runs: its precision, its resolved dispatch table, and whether CUDA graphs are replayed."""
        if isinstance(self.engine, RemoteEngine):
            return self.engine.describe()
        model = self.checkpoint.model
        dispatch = model.dispatch_report()
        return {
            "dtype": str(model.dtype).removeprefix("torch."),
            "precision": self.checkpoint.precision,
            "budget": self.engine.budget,
            "dispatch": dispatch,
            "cuda_graphs": model.replay and any(row["backend"] == "cuda_graphs" for row in dispatch),
        }

    def acquire(self) -> None:
        """Keep the engine open during a request, even if the model is replaced meanwhile, until `release`."""
        with self._idle:
            self._users += 1

    def release(self) -> None:
        """End the use of `acquire`."""
        with self._idle:
            self._users -= 1
            if not self._users:
                self._idle.notify_all()

    def retire(self) -> None:
        """Close the engine once no request uses it."""
        with self._idle:
            self._idle.wait_for(lambda: not self._users)
        self.engine.close()
        gc.unfreeze()  # a server freezes what it has loaded at its start: the collector would never free this model


class Registry:
    """Served models by name.

    `models`: a mapping from names to folders, built-in names or hub ids, or a list of these, each plain or as
    name=source; nothing else is ever served. The first one is the default. `devices`: one replica per device.
    `on_batch` is called with the model's name and the statistics of each batch; `settings` are options of `Engine`.
    `engines`: other processes that run the models, whose weights are then not loaded here. `cache`: of embeddings.

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
        engines: EngineClient | None = None,
        cache: EmbeddingCache | None = None,
        **settings: Any,
    ) -> None:
        self._sources = dict(models) if isinstance(models, Mapping) else name_models(models or [default_model()])
        if not self._sources:
            raise ConfigError("models={} must name at least one model")
        default = [] if engines is not None else [default_device()]  # a front end needs none
        self._devices = [torch.device(device) for device in devices or default]
        self._precision, self._on_batch, self._settings = precision, on_batch, settings
        self.engines, self.cache = engines, cache
        if engines is not None:
            engines.on_reload = self.reload
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
        version = _files_version(source)  # before they are read: if they change meanwhile, they are read again
        if self.engines is not None:
            checkpoint = Checkpoint.inspect(source)
            remote = RemoteEngine(self.engines, name, checkpoint, version)
            return ServedModel(name, checkpoint, remote, self.cache, version)
        checkpoints = [Checkpoint.load(source, device=device, precision=self._precision) for device in self._devices]
        on_batch = self._on_batch
        engine = Engine(
            checkpoints[0].model,
            replicas=[checkpoint.model for checkpoint in checkpoints[1:]],
            on_batch=None if on_batch is None else lambda batch: on_batch(name, batch),
            **self._settings,
        )
        try:
            return ServedModel(name, checkpoints[0], engine, self.cache, version)
        except BaseException:
            engine.close(drain=False)
            raise

    def __getitem__(self, name: str) -> ServedModel:
        """The current model of that name. Requests go through `use`, which keeps it open."""
        if name not in self._served:
            raise NotFoundError(f"model={name!r:.100} is not served here; served are: {', '.join(self._sources)}")
        return self._served[name]

    def acquire(self, name: str) -> ServedModel:
        """A model for one request, until its `release`: if it is reloaded meanwhile, the request keeps the old one."""
        with self._lock:  # it must not be retired before this request is counted
            served = self[name]
            served.acquire()
            return served

    @contextmanager
    def use(self, name: str | None = None) -> Iterator[ServedModel]:
        """A model for the length of a context."""
        served = self.acquire(self.default if name is None else name)
        try:
            yield served
        finally:
            served.release()

    def reload(self, name: str) -> ServedModel:
        """Load a model again from its source and replace it; requests in progress keep the old one.

        If loading fails, the error is raised and the old model stays.
        """
        with self._reloading:  # one at a time: both must fit into memory
            gc.collect()  # models that were replaced earlier; the collector is in no hurry to look for them
            old = self[name]
            new = self._load(name)
            if isinstance(new.engine, Engine):
                new.engine.finish_warm_up()
            with self._lock:
                self._served[name] = new
            thread = Thread(target=old.retire, name=f"retire-{name}", daemon=True)
            thread.start()
            self._retiring = [other for other in self._retiring if other.is_alive()] + [thread]
            return new

    def check(self, owner: str = "") -> None:
        """Refuse a request early, if every model would."""
        for served in self._served.values():
            if not served.engine.is_full(owner):
                return
        self[self.default].engine.load().check(owner)

    def loads(self) -> dict[str, EngineLoad]:
        """How busy each model's engine is."""
        return {name: served.engine.load() for name, served in list(self._served.items())}

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


def _files_version(source: str | Path) -> str:
    """What changes when the files of a model do: their names, sizes and times."""
    folder = resolve(source)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stats = [(path, path.stat()) for path in files]
    facts = [(str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _reranking(checkpoint: Checkpoint, head: str) -> type[Task[Any, Any, Any]] | None:
    """`Reranker` for a cross-encoder with one score, as in `bertie.load`."""
    single = head in checkpoint.spec.heads and len(checkpoint.heads[head].labels) == 1
    return Reranker if single and checkpoint.cross_encoder is not None else None
