"""A Ray Data job: what readers read, and what workers make of it."""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from bertie._version import __version__
from bertie.errors import BertieError, ConfigError

RETRIES = 3  # of a shard whose worker died, or could not write


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """What readers and workers are told."""

    version: str = __version__
    model: str
    options: dict[str, Any]  # of `Embedder.load`
    threads: int | None  # None: on a GPU


ConfigT = TypeVar("ConfigT", bound=JobConfig)


def everywhere(model: str | Path) -> str:
    """A model's name that is the same wherever a worker runs."""
    return str(Path(model).resolve()) if os.path.isdir(model) else str(model)


def run(
    ray: Any,
    sources: Sequence[Any],
    read: Callable[[Any, ConfigT], Iterator[Any]],
    worker: type[EmbedderActor[ConfigT]],
    plan: ConfigT,
    workers: int,
    *,
    ordered: bool = False,
) -> Iterator[Any]:
    """What the workers make of what the readers read, as it comes, or in order."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.target_max_block_size = 1  # each shard is a block of its own, and a block is what a worker gets
    context.raise_original_map_exception = True
    context.actor_task_retry_on_errors = [OSError]
    context.max_consecutive_actor_init_deaths = RETRIES
    context.execution_options.preserve_order = ordered
    # Ray gives what a worker had when it died to the next one, however often that happens: so we count.
    tries = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(AttemptCounter).remote()
    device = {"num_gpus": 1} if plan.threads is None else {"num_cpus": plan.threads}
    with ray.data.DataContext.current(context):
        rows = (
            ray.data.from_items([{"cell": pickle.dumps(one)} for one in sources], override_num_blocks=len(sources))
            .flat_map(
                reading,
                fn_args=(read, plan),
                num_cpus=0,  # workers may have all of them
                compute=ray.data.TaskPoolStrategy(min(len(sources), workers + 1)),
            )
            .map(
                worker,
                fn_constructor_args=(plan, tries),
                # The second waits where the first is worked on, so that no worker waits for its next.
                compute=ray.data.ActorPoolStrategy(
                    min_size=1, max_size=workers, initial_size=workers, max_tasks_in_flight_per_actor=2
                ),
                **device,
            )
        )
        try:
            for row in rows.iter_rows():
                one = pickle.loads(row["cell"])
                if isinstance(one, BertieError):
                    raise one
                yield one
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            why = next(iter(str(cause).strip().splitlines()), "")
            raise BertieError(f"the Ray job failed: {type(cause).__name__}: {why}") from error
        finally:
            ray.kill(tries)


def reading(row: dict[str, bytes], read: Callable[[Any, ConfigT], Iterator[Any]], plan: ConfigT) -> Iterator[Any]:
    """A reader: in one cell each, what it read, or the error that ended it."""
    try:
        if plan.version != __version__:
            raise ConfigError(
                f"the cluster has bertie {__version__}, and this machine {plan.version}; install the same"
            )
        for one in read(pickle.loads(row["cell"]), plan):
            yield {"cell": pickle.dumps(one)}
    except BertieError as error:
        yield {"cell": pickle.dumps(error)}


class AttemptCounter:
    """How often each shard was begun, all workers together."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}

    def begin(self, name: str) -> int:
        """Once more; how often it was, with this."""
        self._begun[name] = self._begun.get(name, 0) + 1
        return self._begun[name]


class EmbedderActor(ABC, Generic[ConfigT]):
    """What was read in, what was made of it out; or the error of either, which tells more than a worker that died."""

    def __init__(self, plan: ConfigT, tries: Any) -> None:
        import torch

        from bertie.tasks import Embedder

        self.plan, self._tries = plan, tries
        self._error: BertieError | None = None
        if plan.threads is not None:
            torch.set_num_threads(plan.threads)
        try:
            device = "cuda" if plan.threads is None else "cpu"
            self.task = Embedder.load(plan.model, device=device, **plan.options)
        except BertieError as error:
            self._error = error

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        """One cell for another."""
        one = pickle.loads(row["cell"])
        if isinstance(one, BertieError):
            return row
        try:
            if self._error is not None:
                raise self._error
            import ray

            if ray.get(self._tries.begin.remote(one.name)) > 1 + RETRIES:
                raise BertieError(
                    f"{one.what}: {1 + RETRIES} workers died or could not write; is there too little memory, or room "
                    "on the disk?"
                )
            found: object = self.work(one)
        except BertieError as error:
            found = error
        return {"cell": pickle.dumps(found)}

    @abstractmethod
    def work(self, one: Any) -> object:
        """Make something of it."""
