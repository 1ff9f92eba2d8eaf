from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Models as tiny as these lose more by threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
