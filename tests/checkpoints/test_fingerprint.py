"""Fingerprints of weights: the same at every precision, changed by training, and read from the cache if possible."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from bertie.checkpoints import fingerprint
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.fingerprint import weights_fingerprint
from tests.checkpoints.tiny_sentence import save_bert


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and an empty cache."""
    monkeypatch.setenv("BERTIE_CACHE", str(tmp_path / "cache"))
    return save_bert(tmp_path / "model")


def test_the_precision_does_not_matter(folder: Path) -> None:
    expected = fingerprint.hash_weights(Checkpoint.load(folder).model.encoder)
    for precision in ("int8", "bf16", "fp16", "fp32"):
        assert weights_fingerprint(Checkpoint.load(folder, precision=precision)) == expected


def test_every_weight_counts(folder: Path) -> None:
    checkpoint = Checkpoint.load(folder)
    before = weights_fingerprint(checkpoint)
    with torch.no_grad():
        for parameter in checkpoint.model.encoder.parameters():
            parameter.view(-1)[0] += 1
            after = weights_fingerprint(checkpoint)
            assert after != before
            before = after


def test_it_is_computed_once_per_version_of_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    compute = fingerprint.hash_weights
    monkeypatch.setattr(fingerprint, "hash_weights", lambda encoder: hashed.append(encoder) or compute(encoder))
    first = weights_fingerprint(Checkpoint.load(folder))
    assert [weights_fingerprint(Checkpoint.load(folder, precision="int8")) for _ in range(2)] == [first, first]
    assert len(hashed) == 1
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, 0))  # may be other weights
    assert weights_fingerprint(Checkpoint.load(folder)) == first
    assert len(hashed) == 2
    changed = Checkpoint.load(folder)
    with torch.no_grad():
        next(changed.model.encoder.parameters()).add_(1)
    assert weights_fingerprint(changed) != first  # in memory, while the files are the same
    changed.save(folder, overwrite=True)
    assert weights_fingerprint(Checkpoint.load(folder)) == weights_fingerprint(changed) != first


def test_a_cache_that_cannot_be_used_does_no_harm(folder: Path, tmp_path: Path) -> None:
    expected = weights_fingerprint(Checkpoint.load(folder))
    cache = tmp_path / "cache" / fingerprint.CACHE_FILE
    for content in (b"nonsense", b"[1]"):
        cache.write_bytes(content)
        assert weights_fingerprint(Checkpoint.load(folder)) == expected
    shutil.rmtree(cache.parent)
    cache.parent.write_bytes(b"")  # no folder
    assert weights_fingerprint(Checkpoint.load(folder)) == expected
