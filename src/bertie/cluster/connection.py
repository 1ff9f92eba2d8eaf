"""The Ray cluster that a job runs on."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bertie.errors import BertieError, InputError, MissingPackageError, NotFoundError

SECONDS_TO_CONNECT, SECONDS_TO_JOIN = 10.0, 60.0
OBJECT_STORE = 1 << 30  # bytes, of a local cluster: room for some tens of shards on their way
THREADS = 4  # of a worker without a GPU: a small model gains little from more


def check(device: str | None, **numbers: int | None) -> None:
    """That a job can be, as far as this machine knows."""
    packages()
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InputError(f"{name}={value} must be at least 1")
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"device={device!r} must be cpu or cuda: which of several GPUs a worker gets is Ray's choice")


def packages() -> Any:
    """Ray, with all that it needs here."""
    try:
        import pyarrow.parquet  # noqa: F401
        import ray
        import ray.data
    except ImportError as error:
        raise MissingPackageError(f"Ray jobs need the package {error.name}: pip install 'bertie[ray]'") from None
    return ray


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The cluster that there is, or is asked for; what was started or connected to here is left here."""
    ray = packages()
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    # What Ray's core says of its own doings: of every pool of workers, that they could perhaps not begin anew.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        if address in (None, "local"):
            ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE, **quiet)
        else:
            assert address is not None
            reachable(address)
            ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, BertieError):
            raise
        raise _nobody(address or "local", next(iter(str(error).splitlines()), type(error).__name__)) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def reachable(address: str) -> None:
    """Ray itself would try without end, and could not be stopped: so another process tries first."""
    if address.startswith("ray://"):
        raise InputError(
            f"address={address!r}: Ray Data does not run through Ray's client; run this on a machine of the cluster "
            "with auto or host:port, or hand it over with ray job submit"
        )
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise InputError(f"address={address!r} must be local, auto or host:port")
        try:
            socket.create_connection((host, int(port)), SECONDS_TO_CONNECT).close()
        except (OSError, OverflowError) as error:
            raise _nobody(address, str(error)) from None
    command = [sys.executable, "-c", "import sys, ray; ray.init(sys.argv[1], log_to_driver=False)", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_JOIN)
    except subprocess.TimeoutExpired:
        raise _nobody(address, f"no answer in {SECONDS_TO_JOIN:.0f} s") from None
    if done.returncode:
        why = next(iter(done.stderr.strip().splitlines()[-1:]), "it was refused")
        raise _nobody(address, f"{why}; if it asks for a token, set RAY_AUTH_MODE=token")


def _nobody(address: str, why: str) -> NotFoundError:
    return NotFoundError(
        f"no Ray cluster answers at {address!r} ({why}); start one with ray start --head, or use local"
    )


def devices(ray: Any, device: str | None, workers: int | None, threads: int | None) -> tuple[int, int | None]:
    """How many workers there can be, and with how many threads each; None: each with a GPU."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if device == "cuda" and not gpus:
        raise InputError("device='cuda': no machine of the cluster has a GPU; use cpu")
    if device != "cpu" and gpus:
        return min(workers or gpus, gpus), None
    cores = [int(node.get("CPU", 0)) for node in nodes]
    threads = threads or max(1, min(THREADS, *cores, max(cores)))
    most = sum(count // threads for count in cores)
    if not most:
        raise InputError(f"threads={threads}: the largest machine of the cluster has {max(cores)} cores")
    return min(workers or most, most), threads
