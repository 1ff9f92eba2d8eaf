from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.tiny import save


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a tiny checkpoint; the same one for the same wishes."""
    folders: dict[str, Path] = {}

    def make(kind: str, head: str, **config: Any) -> Path:
        key = repr((kind, head, sorted(config.items())))
        if key not in folders:
            folders[key] = save(tmp_path_factory.mktemp(f"{kind}-{head}"), kind, head, **config)
        return folders[key]

    return make
