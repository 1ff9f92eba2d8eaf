"""Settings of all tests: one thread, since tiny models gain nothing from more; worker processes; a notice if page
tests are skipped.

`make test` runs the tests in as many processes as there are CPUs (`-n auto`). A file's tests stay in one process, one
after another, since they share fixtures; so do those of `GROUPS`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

# Tests write no fingerprints into the user's cache.
os.environ.setdefault("BERTIE_CACHE", tempfile.mkdtemp(prefix="bertie-cache-"))
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # tests reach no network
# Settings of the user must not change what is tested.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="bertie-config-")
for _name in ("BERTIE_MODEL", "BERTIE_DEVICE", "BERTIE_PRECISION", "BERTIE_CONFIG"):
    os.environ.pop(_name, None)

MAX_PROCESSES = 8
# Folders and files whose tests run in one process, where they share a child process or a cluster, or measure times.
GROUPS = {
    "tests/ops/triton/": "triton",
    "tests/cluster/": "ray",
}
# Those that take longest are started first, so that no process waits for another at the end.
SLOWEST = (
    "tests/ops/triton/",
    "tests/cli/test_serve.py",
    "tests/pipeline/test_bit_identity.py",
    "tests/search/test_vector_store.py",
)

INSTALL_COMMANDS = {
    "Chromium": "python -m playwright install --with-deps chromium",
    "playwright": "pip install playwright",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process per CPU: tests use one thread each."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In worker processes, put the slowest files first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(SLOWEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Distribute files, and groups of files, in their order."""
    config.option.loadscopereorder = False  # by the number of tests
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((group for prefix, group in GROUPS.items() if file.startswith(prefix)), file)

    return FileScheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own summary: the notice comes after it
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """Say at the end which command enables the page tests, if they were skipped."""
    yield
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for name, command in INSTALL_COMMANDS.items():
        count = sum(f"the page tests need {name}" in reason for reason in reasons)
        if count:
            terminalreporter.write_line(
                f"The page tests were skipped ({count}): they need {name}. To run them: .venv/bin/{command}",
                yellow=True,
            )
