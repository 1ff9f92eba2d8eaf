"""Fixtures of the fine-tuning tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.finetune import toys


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny encoder."""
    return toys.save_encoder(tmp_path_factory.mktemp("encoder"))
