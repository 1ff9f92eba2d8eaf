"""Defaults for the threads of OpenMP, BLAS and the tokenizers, set before torch is loaded.

A thread of libgomp that waits for work spins for milliseconds. On a busy machine, or in a container with
a CPU quota, that takes the time of the thread it waits for. And OpenMP's thread count ignores the quota.
`set_defaults`, which `import bertie` calls, sets environment variables, so that child processes inherit
them. Variables that the user has set are left unchanged.

A leaf module: it imports neither torch nor numpy.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import MutableMapping
from functools import cache
from pathlib import Path

# How waiting threads wait. If the user has set one of these, none is changed.
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPIN_COUNT = 1000  # of libgomp, by default 300,000: a few tens of microseconds, about the cost of sleeping and waking
COUNT_VARIABLES = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")
MARKER = "BERTIE_DEFAULT_THREADS"  # the counts that were set here, not by the user: a child process may change them
CGROUP, SELF, CPUS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/sys/devices/system/cpu")


def set_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let waiting threads sleep soon, and limit thread counts to the CPU quota, unless the user has set them.

    If torch is already imported, its runtime has read the environment; then only its thread count is reduced.
    """
    if not any(name in environment for name in WAIT_VARIABLES):
        environment.update(zip(WAIT_VARIABLES, ("PASSIVE", str(SPIN_COUNT), "0"), strict=True))
    for name in environment.pop(MARKER, "").split():  # set by a parent process, which may have had other limits
        environment.pop(name, None)
    quota = cpu_quota()
    if quota is None or quota >= len(allowed_cpus()):
        return  # the libraries count the CPUs of the affinity mask themselves, and know which are hyper-threads
    count = available()
    free = [name for name in COUNT_VARIABLES if name not in environment]
    if free:
        environment.update(dict.fromkeys(free, str(count)), **{MARKER: " ".join(free)})
    torch = sys.modules.get("torch")
    if "OMP_NUM_THREADS" in free and torch is not None and torch.get_num_threads() > count:
        torch.set_num_threads(count)


@cache
def use_one_thread_in_forks() -> None:
    """From now on, let torch use one thread in forked processes: libgomp's other threads do not survive a fork, and
    the next parallel region would wait for them forever.
    """

    def after_fork() -> None:
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=after_fork)


def available() -> int:
    """Number of threads that can run in parallel: physical cores in the affinity mask, and at most the CPU quota."""
    cores = _physical_cores(allowed_cpus())
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def count_is_given(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether the user has set the number of OpenMP threads."""
    return "OMP_NUM_THREADS" in environment and "OMP_NUM_THREADS" not in environment.get(MARKER, "").split()


def allowed_cpus() -> set[int]:
    """The CPUs of the affinity mask; without one, all."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def cpu_quota(root: Path = CGROUP, self_file: Path = SELF) -> float | None:
    """CPUs that the control groups of this process allow on average; None: no limit.

    Reads `cpu.max` (version 2) or `cpu.cfs_quota_us` (version 1) of the process's group and of every group
    above it. In a container, its group is often the root of the mounted tree, whatever /proc says.
    """
    folders = {root, root / "cpu", root / "cpu,cpuacct"}
    for line in _read(self_file).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (root / controllers, root / "cpu", root / "unified") if controllers else (root, root / "unified"):
            folder = mount / path.strip("/")
            while folder != mount and mount in folder.parents:
                folders.add(folder)
                folder = folder.parent
            folders.add(mount)
    return min((quota for folder in folders if (quota := _folder_quota(folder)) is not None), default=None)


def _folder_quota(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0 or int(quota) == 0:
        return None  # "max", -1 or no file
    return int(quota) / int(period)


def _physical_cores(cpus: set[int], root: Path = CPUS) -> int:
    """Number of cores that these CPUs belong to; hyper-threads share one."""
    siblings = (_read(root / f"cpu{cpu}" / "topology" / "thread_siblings_list").strip() for cpu in cpus)
    return max(1, len({names or f"cpu {cpu}" for cpu, names in zip(cpus, siblings, strict=True)}))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
