"""Retries and versions of a Ray job."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from bertie import cluster
from bertie.cluster import ray_job
from bertie.cluster.text_shards import read_shards
from bertie.errors import BertieError
from tests.cluster.jobs import Attempts, sentences

pq = pytest.importorskip("pyarrow.parquet")
ray = pytest.importorskip("ray")


def test_retries_are_limited(without_ray: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up after some, and says which it is."""
    monkeypatch.setattr(Attempts, "before", ray_job.MAX_RETRIES)
    cluster.embed(sentences(20), tmp_path / "out", model, threads=1)
    monkeypatch.setattr(Attempts, "before", ray_job.MAX_RETRIES + 1)
    with pytest.raises(BertieError, match=r"texts\.jsonl, rows 1 to 20: 4 actors died"):
        cluster.embed(sentences(20), tmp_path / "out", model, threads=1, overwrite=True)


def test_version_mismatch() -> None:
    plan = ray_job.JobConfig(version="0.0.0", model="", options={}, threads=1)
    (row,) = ray_job.read_task({"cell": b""}, read_shards, plan)  # type: ignore[arg-type]
    assert "install the same" in str(pickle.loads(row["cell"]))
