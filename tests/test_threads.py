"""Defaults of thread counts and waiting threads: set before torch is loaded, unless the user has set them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bertie import threads

NAMES = (*threads.WAIT_VARIABLES, *threads.COUNT_VARIABLES, threads.MARKER)


def run(code: str, **variables: str) -> str:
    """The output of a Python process without any of the variables, other than these."""
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=clean | variables, capture_output=True, text=True, check=True).stdout.strip()


def show(*names: str) -> str:
    return f"import bertie, os; print(*[os.environ.get(name) for name in {names!r}])"


def test_import_sets_the_wait_policy_before_torch() -> None:
    code = "import sys; assert 'torch' not in sys.modules; " + show(*threads.WAIT_VARIABLES)
    assert run(code) == f"PASSIVE {threads.SPIN_COUNT} 0"


def test_a_module_sets_it_too() -> None:
    """Python runs the package's `__init__` before any of its modules, such as the command line's."""
    assert run("import bertie.cli, os; print(os.environ.get('OMP_WAIT_POLICY'))") == "PASSIVE"


def test_child_processes_inherit_it() -> None:
    child = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"
    code = f"import bertie, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run(code) == str(threads.SPIN_COUNT)


@pytest.mark.parametrize("name", threads.WAIT_VARIABLES)
def test_users_wait_policy_stays(name: str) -> None:
    values = ["7" if other == name else "None" for other in threads.WAIT_VARIABLES]
    assert run(show(*threads.WAIT_VARIABLES), **{name: "7"}) == " ".join(values)


def test_libgomp_reads_what_was_set() -> None:
    """The runtime inside torch prints its settings when it is loaded."""
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    code = "import bertie.text.batch, torch"
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch uses another OpenMP runtime")
    assert f"GOMP_SPINCOUNT = '{threads.SPIN_COUNT}'" in done.stderr


def cgroup(tmp_path: Path, line: str, **files: str) -> tuple[Path, Path]:
    """A fake control group tree; a file's folders are separated by two underscores."""
    for name, text in files.items():
        file = tmp_path / "tree" / name.replace("__", "/").replace("_max", ".max").replace("_cfs", ".cfs")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "self").write_text(line)
    return tmp_path / "tree", tmp_path / "self"


@pytest.mark.parametrize(
    ("line", "files", "quota"),
    [
        ("0::/", {"cpu_max": "150000 100000\n"}, 1.5),
        ("0::/", {"cpu_max": "max 100000\n"}, None),
        ("0::/", {}, None),
        ("0::/", {"cpu_max": "garbage"}, None),
        ("0::/", {"cpu_max": "0 0"}, None),
        ("0::/kube/pod", {"kube__pod__cpu_max": "max 100000", "kube__cpu_max": "400000 100000"}, 4.0),
        ("0::/kube/pod", {"kube__pod__cpu_max": "50000 100000", "kube__cpu_max": "400000 100000"}, 0.5),
        ("0::/not/mounted/here", {"cpu_max": "200000 100000"}, 2.0),
        ("1:cpu,cpuacct:/x", {"cpu__x__cpu_cfs_quota_us": "300000", "cpu__x__cpu_cfs_period_us": "100000"}, 3.0),
        ("1:cpu:/", {"cpu__cpu_cfs_quota_us": "-1", "cpu__cpu_cfs_period_us": "100000"}, None),
        ("4:memory:/y\n1:cpu:/y", {"cpu__y__cpu_cfs_quota_us": "20000", "cpu__y__cpu_cfs_period_us": "10000"}, 2.0),
        ("0::/../..", {"cpu_max": "100000 100000"}, 1.0),
        ("nonsense", {"cpu_max": "100000 100000"}, 1.0),
    ],
)  # fmt: skip
def test_quota(tmp_path: Path, line: str, files: dict[str, str], quota: float | None) -> None:
    assert threads.cpu_quota(*cgroup(tmp_path, line, **files)) == quota


def limited(monkeypatch: pytest.MonkeyPatch, quota: float | None, cpus: int) -> None:
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    monkeypatch.setattr(threads, "allowed_cpus", lambda: set(range(cpus)))
    monkeypatch.setattr(threads, "_physical_cores", len)


def test_quota_limits_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1.5, 16)
    environment: dict[str, str] = {}
    threads.set_defaults(environment)
    assert threads.available() == 2  # rounded up: one thread would leave a third of the quota unused
    assert [environment[name] for name in threads.COUNT_VARIABLES] == ["2", "2"]
    assert not threads.count_is_given(environment)
    limited(monkeypatch, 4.0, 16)
    threads.set_defaults(environment)  # as in a child process with another quota
    assert environment["OMP_NUM_THREADS"] == "4"
    limited(monkeypatch, None, 16)
    threads.set_defaults(environment)
    assert "OMP_NUM_THREADS" not in environment


def test_users_counts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 2.0, 16)
    environment = {"OMP_NUM_THREADS": "7"}
    threads.set_defaults(environment)
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["RAYON_NUM_THREADS"] == "2"
    assert threads.count_is_given(environment)
    threads.set_defaults(environment)
    assert environment["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize("quota", [None, 16.0, 99.0])
def test_without_a_smaller_quota_the_runtime_counts(monkeypatch: pytest.MonkeyPatch, quota: float | None) -> None:
    """libgomp respects the affinity mask by itself, and MKL knows the physical cores."""
    limited(monkeypatch, quota, 16)
    environment: dict[str, str] = {}
    threads.set_defaults(environment)
    assert not set(threads.COUNT_VARIABLES) & set(environment)
    assert threads.available() == 16


def test_hyper_threads_share_a_core(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert threads._physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert threads._physical_cores({0, 2}, tmp_path) == 1
    assert threads._physical_cores({0, 1, 5, 6}, tmp_path) == 4  # unknown CPUs count as cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs an affinity mask")
def test_affinity_limits_the_threads() -> None:
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}}); from bertie import threads; import torch; "
    assert run(code + "print(threads.available(), torch.get_num_threads())") == "1 1"


def test_a_loaded_torch_gets_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        threads = 16

        def get_num_threads(self) -> int:
            return self.threads

        def set_num_threads(self, count: int) -> None:
            self.threads = count

    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    limited(monkeypatch, 3.0, 16)
    threads.set_defaults({})
    assert torch.threads == 3
    torch.threads = 1  # set by the user
    threads.set_defaults({})
    assert torch.threads == 1
