"""A Ray Data job: read tasks produce work items, and actors with a model process them."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from bertie._version import __version__
from bertie.errors import BertieError, ConfigError

MAX_RETRIES = 3  # of a work item whose actor died or could not write


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """The configuration that the driver sends to read tasks and actors."""

    version: str = __version__
    model: str
    options: dict[str, Any]  # of `Embedder.load`
    threads: int | None  # None: on a GPU


class WorkItem(Protocol):
    """A unit of work, which read tasks send to actors."""

    @property
    def name(self) -> str:
        """A unique name."""

    @property
    def description(self) -> str:
        """A description for error messages."""


ConfigT = TypeVar("ConfigT", bound=JobConfig)


def resolve_model(model: str | Path) -> str:
    """Return a model name that is valid on every node: absolute if it is a folder."""
    from bertie.checkpoints.hub import absolute_name

    return absolute_name(model)


def run_job(
    ray: Any,
    inputs: Sequence[Any],
    read: Callable[[Any, ConfigT], Iterator[Any]],
    actor: type[EmbedderActor[ConfigT]],
    config: ConfigT,
    actors: int,
    *,
    ordered: bool = False,
) -> Iterator[Any]:
    """Read inputs in tasks, process work items in actors, and yield the results."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.target_max_block_size = 1  # one work item per block, the unit that an actor gets
    context.raise_original_map_exception = True
    context.actor_task_retry_on_errors = [OSError]
    context.max_consecutive_actor_init_deaths = MAX_RETRIES
    context.execution_options.preserve_order = ordered
    # Ray retries the work of a dead actor without limit: so attempts are counted.
    attempts = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(AttemptCounter).remote()
    resources = {"num_gpus": 1} if config.threads is None else {"num_cpus": config.threads}
    with ray.data.DataContext.current(context):
        rows = (
            ray.data.from_items([{"cell": pickle.dumps(item)} for item in inputs], override_num_blocks=len(inputs))
            .flat_map(
                read_task,
                fn_args=(read, config),
                num_cpus=0,  # leaves all CPUs to the actors
                compute=ray.data.TaskPoolStrategy(min(len(inputs), actors + 1)),
            )
            .map(
                actor,
                fn_constructor_args=(config, attempts),
                # While an actor works on one item the next one is already there.
                compute=ray.data.ActorPoolStrategy(
                    min_size=1, max_size=actors, initial_size=actors, max_tasks_in_flight_per_actor=2
                ),
                **resources,
            )
        )
        try:
            for row in rows.iter_rows():
                result = pickle.loads(row["cell"])
                if isinstance(result, BertieError):
                    raise result
                yield result
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            reason = next(iter(str(cause).strip().splitlines()), "")
            raise BertieError(f"the Ray job failed: {type(cause).__name__}: {reason}") from error
        finally:
            ray.kill(attempts)


def read_task(row: dict[str, bytes], read: Callable[[Any, ConfigT], Iterator[Any]], config: ConfigT) -> Iterator[Any]:
    """Yield one cell per work item; an error becomes the last cell."""
    try:
        if config.version != __version__:
            raise ConfigError(
                f"the cluster has bertie {__version__}, and the driver {config.version}; install the same version"
            )
        for item in read(pickle.loads(row["cell"]), config):
            yield {"cell": pickle.dumps(item)}
    except BertieError as error:
        yield {"cell": pickle.dumps(error)}


class AttemptCounter:
    """An actor that counts the attempts at each work item over all actors."""

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}

    def begin(self, name: str) -> int:
        """Count one more attempt and return their number."""
        self._attempts[name] = self._attempts.get(name, 0) + 1
        return self._attempts[name]


class EmbedderActor(ABC, Generic[ConfigT]):
    """A Ray actor with a model; errors are returned as results."""

    def __init__(self, config: ConfigT, attempts: Any) -> None:
        import torch

        from bertie.tasks import Embedder

        self.config, self._attempts = config, attempts
        self._error: BertieError | None = None
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        try:
            device = "cuda" if config.threads is None else "cpu"
            self.embedder = Embedder.load(config.model, device=device, **config.options)
        except BertieError as error:
            self._error = error

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        """Process one cell."""
        item = pickle.loads(row["cell"])
        if isinstance(item, BertieError):
            return row
        try:
            if self._error is not None:
                raise self._error
            import ray

            if ray.get(self._attempts.begin.remote(item.name)) > 1 + MAX_RETRIES:
                raise BertieError(
                    f"{item.description}: {1 + MAX_RETRIES} actors died or could not write; is there enough memory and "
                    "disk space?"
                )
            result: object = self.process(item)
        except BertieError as error:
            result = error
        return {"cell": pickle.dumps(result)}

    @abstractmethod
    def process(self, item: Any) -> object:
        """Process a work item."""
