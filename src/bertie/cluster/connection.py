"""Connecting to a Ray cluster, and the resources of its nodes."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bertie.errors import BertieError, InputError, MissingPackageError, NotFoundError

CONNECT_TIMEOUT, JOIN_TIMEOUT = 10.0, 60.0  # seconds
OBJECT_STORE = 1 << 30  # bytes, of a local cluster: room for a few dozen shards in flight
THREADS = 4  # of an actor without a GPU: a small model gains little from more


@dataclass(frozen=True, slots=True, kw_only=True)
class RayResources:
    """The cluster of a job, and the resources of its actors.

    `address`: "local" or None starts a cluster on this machine; `host:port` or `auto` joins one
    that this machine belongs to. A process that is connected to a cluster uses that one. `workers`:
    one actor per GPU; without GPUs, or with `device="cpu"`, as many as there are cores for, with
    `threads` each.
    """

    address: str | None = None
    device: str | None = None
    workers: int | None = None
    threads: int | None = None

    def check(self, **numbers: int | None) -> None:
        """Reject invalid options before a cluster is started."""
        import_ray()
        for name, value in {"workers": self.workers, "threads": self.threads, **numbers}.items():
            if value is not None and value < 1:
                raise InputError(f"{name}={value} must be at least 1")
        if self.device not in (None, "cpu", "cuda"):
            raise InputError(f"device={self.device!r} must be cpu or cuda: Ray assigns GPUs to actors")

    def allocate(self, ray: Any) -> tuple[int, int | None]:
        """Return the number of actors, and the threads of each; None: each has a GPU."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = int(sum(node.get("GPU", 0) for node in nodes))
        if self.device == "cuda" and not gpus:
            raise InputError("device='cuda': no node of the cluster has a GPU; use cpu")
        if self.device != "cpu" and gpus:
            return min(self.workers or gpus, gpus), None
        cores = [int(node.get("CPU", 0)) for node in nodes]
        threads = self.threads or max(1, min(THREADS, *cores, max(cores)))
        limit = sum(count // threads for count in cores)
        if not limit:
            raise InputError(f"threads={threads}: the largest node of the cluster has {max(cores)} cores")
        return min(self.workers or limit, limit), threads


def import_ray() -> Any:
    """Import Ray and the packages that its jobs need."""
    try:
        import pyarrow.parquet  # noqa: F401
        import ray
        import ray.data
    except ImportError as error:
        raise MissingPackageError(f"Ray jobs need the package {error.name}: pip install 'bertie[ray]'") from None
    return ray


@contextmanager
def connect(address: str | None) -> Iterator[Any]:
    """Use the current connection, or connect to (or start) a cluster and disconnect at the end."""
    ray = import_ray()
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray
        return
    options = {"log_to_driver": False, "logging_level": logging.ERROR, "job_config": _job_config()}
    # Ray's core warns for every actor pool that it may not be restartable.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        if address in (None, "local"):
            ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE, **options)
        else:
            assert address is not None
            check_reachable(address)
            ray.init(address, **options)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, BertieError):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise _unreachable(address or "local", reason) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _job_config() -> Any:
    """A job whose workers do not import modules of the current folder.

    Ray puts the driver's folder first on the path of its workers, so that an `orjson.py` there would
    run in each of them, unless the job has a working directory of its own.
    """
    from ray.job_config import JobConfig

    class SafePathJobConfig(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return SafePathJobConfig()


def check_reachable(address: str) -> None:
    """Connect from a subprocess first, since Ray itself would retry forever."""
    if address.startswith("ray://"):
        raise InputError(
            f"address={address!r}: Ray Data does not run through the Ray client; run this on a node of the cluster "
            "with auto or host:port, or submit it with ray job submit"
        )
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise InputError(f"address={address!r} must be local, auto or host:port")
        try:
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
        except (OSError, OverflowError) as error:
            raise _unreachable(address, str(error)) from None
    command = [sys.executable, "-P", "-c", "import sys, ray; ray.init(sys.argv[1], log_to_driver=False)", address]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=JOIN_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise _unreachable(address, f"no answer in {JOIN_TIMEOUT:.0f} s") from None
    if completed.returncode:
        reason = next(iter(completed.stderr.strip().splitlines()[-1:]), "connection refused")
        raise _unreachable(address, f"{reason}; if it needs a token, set RAY_AUTH_MODE=token")


def _unreachable(address: str, reason: str) -> NotFoundError:
    return NotFoundError(
        f"no Ray cluster answers at {address!r} ({reason}); start one with ray start --head, or use local"
    )
