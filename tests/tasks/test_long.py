"""A long document through every task: without error, read to its end, in memory that grows with it and not faster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.long import read
from tests.tasks.tiny import LABELS, save

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    nli = ["contradiction", "neutral", "entailment"]
    save(folder / "ForMaskedLM", "wordpiece", "ForMaskedLM")
    save(folder / "ForSequenceClassification", "wordpiece", "ForSequenceClassification", labels=nli)
    save(folder / "relevance", "wordpiece", "ForSequenceClassification", labels=["relevant"])
    save(folder / "ForTokenClassification", "wordpiece", "ForTokenClassification", labels=LABELS)
    save(folder / "ForQuestionAnswering", "wordpiece", "ForQuestionAnswering")
    save(folder / "encoder", "wordpiece", "")
    return folder


def test_20_000_tokens(folder: Path) -> None:
    for name, (total, done) in read(folder, 20_000).items():
        assert total == done >= 20_000, name


def measured(folder: Path, tokens: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.tasks.long", str(folder), str(tokens)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux tells how much memory was held at most")
def test_200_000_tokens_in_linear_memory(folder: Path) -> None:
    lengths = (100, 50_000, 100_000, 200_000)
    found = [measured(folder, length) for length in lengths]
    for length, one in zip(lengths, found, strict=True):
        assert all(total == done >= length for total, done in one["tokens"].values())
    base, *peaks = (one["peak"] / 1e6 for one in found)
    print(
        f"peak above {base:.0f} MB:", [f"{n}: {peak - base:.0f} MB" for n, peak in zip(lengths[1:], peaks, strict=True)]
    )
    # Four times the text: four times the memory would be in line, sixteen times its square.
    assert peaks[2] - base < 5 * (peaks[0] - base)
