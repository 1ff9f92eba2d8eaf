"""Settings of all tests: one thread, since tiny models gain nothing from more; a notice if page tests are skipped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

# Tests write no fingerprints into the user's cache.
os.environ.setdefault("BERTIE_CACHE", tempfile.mkdtemp(prefix="bertie-cache-"))
# Settings of the user must not change what is tested.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="bertie-config-")
for _name in ("BERTIE_MODEL", "BERTIE_DEVICE", "BERTIE_PRECISION", "BERTIE_CONFIG"):
    os.environ.pop(_name, None)

INSTALL_COMMANDS = {
    "Chromium": "python -m playwright install --with-deps chromium",
    "playwright": "pip install playwright",
}


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
