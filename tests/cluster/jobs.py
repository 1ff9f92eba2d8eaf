"""Helpers of the tests of Ray jobs."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.cluster import ray_job
from bertie.cluster.shard_folder import MANIFEST
from bertie.errors import BertieError
from tests.checkpoints.tiny_sentence import WORDS

pq = pytest.importorskip("pyarrow.parquet")
ray = pytest.importorskip("ray")
KNOWN = [word for word in WORDS if word[0] != "["]


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(KNOWN, k=draw.randrange(1, 12))) for _ in range(count)]


class Nodes:
    """A fake of `ray` with the resources of its nodes."""

    def __init__(self, *resources: dict[str, float]) -> None:
        self._resources = resources

    def nodes(self) -> list[dict[str, Any]]:
        dead = {"Alive": False, "Resources": {"CPU": 99.0, "GPU": 99.0}}
        return [dead, *({"Alive": True, "Resources": one} for one in self._resources)]


class Attempts:
    """The attempt counter and its remote handle in one."""

    before = 0

    def __init__(self) -> None:
        self.begin = self
        self._attempts = ray_job.AttemptCounter()

    def remote(self, name: str) -> int:
        return self._attempts.begin(name) + self.before


def run_here(
    _: Any, sources: Any, read: Any, actor: Any, config: Any, actors: int, ordered: bool = False
) -> Iterator[Any]:
    """Run a job in this process, instead of `ray_job.run_job`."""
    made = actor(config, Attempts())
    for source in sources:
        for row in ray_job.read_task({"cell": pickle.dumps(source)}, read, config):
            one = pickle.loads(made(row)["cell"])
            if isinstance(one, BertieError):
                raise one
            yield one


def read_output(folder: Path) -> Any:
    """Read all shards in the order of their names."""
    import pyarrow as pa

    assert not list(folder.glob("*.part"))
    return pa.concat_tables([pq.read_table(file) for file in sorted(folder.glob("*.parquet"))])


def embeddings_of(table: Any) -> np.ndarray:
    flat: np.ndarray = table["vector"].combine_chunks().flatten().to_numpy()
    return flat.reshape(len(table), -1)


def mark_interrupted(folder: Path) -> None:
    """Make the manifest that of an interrupted job."""
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"rows": None, "shards": None}))
