from pathlib import Path

import pytest

from tests.checkpoints.tiny_sentence import save_bert


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))
