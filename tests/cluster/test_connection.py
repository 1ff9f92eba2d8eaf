"""Connecting to a cluster, and allocating actors to its nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

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


def test_children_have_a_safe_path(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    jobs: list[Any] = []
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, job_config, **options: jobs.append(job_config))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with connection.connect("auto"):
        pass
    assert commands[0][1] == "-P"
    assert jobs[0]._runtime_env_has_working_dir()  # then Ray leaves the current folder alone; see the next test


@pytest.mark.slow
def test_no_module_of_the_current_folder_is_imported(tmp_path: Path) -> None:
    """Neither by the driver, nor by the workers of a local cluster, nor by the check of an address."""
    for name in ("orjson", "pandas", "numpy", "json", "typing_extensions"):
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path}/imported-{name}', 'w')")
    code = f"""
        import sys
        from bertie.cluster.connection import check_reachable, connect

        def path():
            import numpy, orjson, pandas
            return sys.path

        with connect(None) as ray:
            assert {str(tmp_path)!r} not in ray.get(ray.remote(path).remote())
            check_reachable("auto")
        """
    environment = os.environ | {"PYTHONPATH": str(Path(cluster.__file__).parents[2])}
    command = [sys.executable, "-P", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("imported-*"))


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
        assert RayResources(device=asked[0], workers=asked[1], threads=asked[2]).allocate(Nodes(*nodes)) == wanted
    with pytest.raises(InputError, match="no node of the cluster has a GPU"):
        RayResources(device="cuda").allocate(Nodes(large))
    with pytest.raises(InputError, match="threads=10"):
        RayResources(threads=10).allocate(Nodes(large))
