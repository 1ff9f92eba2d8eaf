from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.sentence.tiny import save_bert


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Models this small take twice as long on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
