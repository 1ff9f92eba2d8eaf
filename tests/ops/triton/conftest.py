"""Tests of Triton kernels on machines without a GPU: Triton's interpreter runs the kernels on the CPU.

TRITON_INTERPRET must be set before Triton is imported. So tests marked `interpreted` run in one child process, and
their reports are passed on one by one. With `native_on_gpu=True` they run in this process where there is a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.forced import forced

REPORTS = "BERTIE_TEST_REPORTS"  # names the file that the child writes its reports to
IN_CHILD = os.environ.get("TRITON_INTERPRET") == "1"


def runs_in_child(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("interpreted")
    native = marker is not None and marker.kwargs.get("native_on_gpu") and torch.cuda.is_available()
    return marker is not None and not IN_CHILD and not native


class Child:
    """A pytest process with TRITON_INTERPRET=1, which runs some tests in their order."""

    def __init__(self, items: list[pytest.Item], config: pytest.Config, folder: Path) -> None:
        self.config, self.path, self.output = config, folder / "reports.jsonl", folder / "output.txt"
        self.path.touch()
        self.reports: dict[str, list[Any]] = {}
        self._position = 0
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(item.nodeid for item in items)]
        environment = os.environ | {"TRITON_INTERPRET": "1", REPORTS: str(self.path)}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=config.rootpath, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def wait_for(self, item: pytest.Item) -> list[Any]:
        """The reports of a test's setup, call and teardown."""
        while True:
            ended = self.process.poll() is not None
            self._read()
            reports = self.reports.get(item.nodeid, [])
            if reports and reports[-1].when == "teardown":
                return reports
            if ended:
                message = f"The child process ended before this test:\n{self.output.read_text()[-4000:]}"
                return [pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")]
            time.sleep(0.05)

    def _read(self) -> None:
        with self.path.open() as lines:
            lines.seek(self._position)
            while (line := lines.readline()).endswith("\n"):
                self._position += len(line)
                report = self.config.hook.pytest_report_from_serializable(config=self.config, data=json.loads(line))
                if isinstance(report.longrepr, list):  # of a skipped test: JSON has no tuples
                    report.longrepr = tuple(report.longrepr)
                self.reports.setdefault(report.nodeid, []).append(report)


CHILD = pytest.StashKey[Child]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted(native_on_gpu): runs in Triton's interpreter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("triton") is None:
        for item in items:
            if item.get_closest_marker("interpreted"):
                item.add_marker(pytest.mark.skip(reason="needs Triton"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not runs_in_child(item) or find_spec("triton") is None:
        return None
    stash = item.config.stash
    if CHILD not in stash:
        factory = item.config._tmp_path_factory  # type: ignore[attr-defined]
        items = [other for other in item.session.items if runs_in_child(other)]
        stash[CHILD] = Child(items, item.config, factory.mktemp("interpreted"))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in stash[CHILD].wait_for(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # of the test before this one
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if REPORTS in os.environ and IN_CHILD:
        data = _config.hook.pytest_report_to_serializable(config=_config, report=report)
        with Path(os.environ[REPORTS]).open("a") as file:
            file.write(json.dumps(data) + "\n")


_config: pytest.Config


def pytest_sessionstart(session: pytest.Session) -> None:
    global _config
    _config = session.config


def pytest_sessionfinish(session: pytest.Session) -> None:
    if CHILD in session.config.stash:
        session.config.stash[CHILD].process.kill()


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixes two defects of Triton 3.6's interpreter, and seeds torch."""
    torch.manual_seed(0)
    if not IN_CHILD:
        return
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_index(tensor: Any, scope: Any) -> None:  # scalars are no indices with numpy 2.4
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert_fp8(x: Any, source: Any, target: Any, rounding: Any) -> Any:  # loses a carry: 127 becomes 64
        if str(target) != "fp8e4nv":
            return convert(x, source, target, rounding)
        return torch.tensor(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_index)
    monkeypatch.setattr(interpreter, "_convert_float", convert_fp8)


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills uninitialized tensors with NaN."""
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *args, allocate=allocate, **options: allocate(*args, **options).fill_(torch.nan)
        )


@pytest.fixture
def fused_backends() -> Iterator[None]:
    """Selects the fused Triton kernels on every device."""
    with forced("triton.fused"):
        yield


@pytest.fixture
def rotary_backend() -> Iterator[None]:
    """Selects the Triton kernel of rotary embeddings on every device."""
    with forced("triton.rotary"):
        yield
