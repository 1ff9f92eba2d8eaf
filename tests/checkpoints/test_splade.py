"""SPLADE folders as sentence-transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SparseEncoder

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.splade import Splade
from bertie.errors import ConfigError
from tests.tasks.tiny import save


def splade_folder(folder: Path) -> tuple[Path, Any]:
    """A tiny one, and what sentence-transformers makes of it."""
    made = SparseEncoder(str(save(folder, "wordpiece", "ForMaskedLM")), device="cpu")
    made.save(str(folder / "splade"))
    return folder / "splade", made


def test_it_is_read_and_written(tmp_path: Path) -> None:
    folder, theirs = splade_folder(tmp_path)
    checkpoint = Checkpoint.load(folder)
    assert checkpoint.splade is not None
    assert checkpoint.sentence is None
    assert list(checkpoint.heads) == ["mlm"]
    assert checkpoint.max_length == theirs.max_seq_length
    checkpoint.with_max_length(20).save(tmp_path / "again")
    again = SparseEncoder(str(tmp_path / "again"), device="cpu")
    assert again.max_seq_length == Checkpoint.load(tmp_path / "again").max_length == 20
    np.testing.assert_allclose(again.encode(["the river"]).to_dense(), theirs.encode(["the river"]).to_dense())
    assert checkpoint.with_head("classify", ["bad", "good"]).splade is None


def test_other_poolings_are_refused(tmp_path: Path) -> None:
    folder, _ = splade_folder(tmp_path)
    config = folder / "1_SpladePooling" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pooling_strategy": "sum"}))
    with pytest.raises(ConfigError, match="pooling_strategy='sum'"):
        Splade.from_folder(folder)


def test_other_modules_are_refused(tmp_path: Path) -> None:
    folder, _ = splade_folder(tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:1]))
    with pytest.raises(ConfigError, match="a sparse encoder of Transformer is not supported"):
        Checkpoint.load(folder)
