"""The README's Python runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.real_models import fetch

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_python_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("all-MiniLM-L6-v2")  # what the hub id in the README stands for
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(block.replace("sentence-transformers/all-MiniLM-L6-v2", str(folder)), scope)
        said = re.findall(r"^print\(.*\)\s+# (.*)$", block, flags=re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == said
    assert tuple(scope["hidden"].shape) == (12, 384)  # type: ignore[attr-defined]
    assert tuple(scope["pooled"].shape) == (2, 384)  # type: ignore[attr-defined]
