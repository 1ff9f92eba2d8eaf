"""Connecting to a cluster, and allocating actors to its nodes."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from bertie import cluster
from bertie.cluster import connection
from bertie.cluster.connection import RayResources
from bertie.errors import InputError, MissingPackageError, NotFoundError
from tests.cluster.jobs import Nodes

pq = pytest.importorskip("pyarrow.parquet")
ray = pytest.importorskip("ray")


def test_no_ray(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"bertie\[ray\]"):
        cluster.embed(["a"], tmp_path / "out", model)


def test_unreachable_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody at the port; or someone who is not Ray, and says nothing."""
    monkeypatch.setattr(connection, "JOIN_TIMEOUT", 3.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with pytest.raises(NotFoundError, match=r"no Ray cluster answers at '127.*refused"):
            connection.check_reachable(f"127.0.0.1:{port}")
        other.listen()
        with pytest.raises(NotFoundError, match="no answer in 3 s"):
            connection.check_reachable(f"127.0.0.1:{port}")
    for address in ("nonsense", "host:port", ":1", "host:"):
        with pytest.raises(InputError, match="must be local, auto or host:port"):
            connection.check_reachable(address)
    with pytest.raises(InputError, match="does not run through the Ray client"):
        connection.check_reachable("ray://127.0.0.1:10001")


def test_one_actor_per_device() -> None:
    small, large, gpus = {"CPU": 2.0}, {"CPU": 9.0}, {"CPU": 16.0, "GPU": 8.0}
    for nodes, asked, wanted in (
        ((small,), (None, None, None), (1, 2)),
        ((large,), (None, None, None), (2, 4)),
        ((large,), (None, None, 3), (3, 3)),
        ((small, large), (None, 2, 1), (2, 1)),
        ((gpus, gpus, small), (None, None, None), (16, None)),
        ((gpus,), ("cuda", 3, None), (3, None)),
        ((gpus,), ("cpu", None, 4), (4, 4)),
        ((gpus,), (None, 100, None), (8, None)),
    ):
        assert RayResources(device=asked[0], workers=asked[1], threads=asked[2]).allocate(Nodes(*nodes)) == wanted  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no node of the cluster has a GPU"):
        RayResources(device="cuda").allocate(Nodes(large))
    with pytest.raises(InputError, match="threads=10"):
        RayResources(threads=10).allocate(Nodes(large))
