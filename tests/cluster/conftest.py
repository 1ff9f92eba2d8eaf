"""A model and a Ray cluster, or a fake of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from bertie.cluster import connection, ray_job
from tests.checkpoints.tiny_sentence import save_bert
from tests.cluster.jobs import Nodes, run_here

pq = pytest.importorskip("pyarrow.parquet")
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_bert(folder)
    return folder


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Start a local cluster, which takes seconds, once per module."""
    ray.init("local", num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run read tasks and actors in this process, for tests that do not depend on Ray."""

    monkeypatch.setattr(connection, "connect", lambda address: nullcontext(Nodes({"CPU": 1.0})))
    monkeypatch.setattr(ray_job, "run_job", run_here)
    monkeypatch.setattr(ray, "get", lambda one: one)
