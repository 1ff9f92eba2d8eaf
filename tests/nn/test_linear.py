"""Layers in bytes: how far they are from the exact ones, and how a checkpoint is loaded so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bertie import Classifier, Embedder
from bertie.cli import main
from bertie.errors import CheckpointError, ConfigError, InputError
from bertie.hub import Checkpoint
from bertie.kernels import native
from bertie.nn.linear import Int8Linear, is_int8
from bertie.store import dequantize, quantize
from tests.test_roundtrip import with_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory.mktemp("bytes") / "m")


@pytest.mark.parametrize("kind", ["mixed", "positive", "negative", "zero", "one far out"])
def test_a_product_equals_that_of_the_rounded_numbers(kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(40, 24)
    x = torch.randn(7, 40)
    x = {"mixed": x, "positive": x.abs(), "negative": -x.abs(), "zero": x * 0, "one far out": x}[kind]
    if kind == "one far out":
        x[:, 3] = 50.0
    codes, scale = quantize(layer.weight)
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    step = (high - low).clamp(min=1e-30) / 255
    rounded = ((x / step).round() * step).double()
    wanted = rounded @ dequantize(codes, scale).double().T + layer.bias.double()
    assert_close(
        Int8Linear(layer.weight, layer.bias)(x).double(), wanted, atol=2e-2 if kind == "one far out" else 1e-3, rtol=0
    )


def test_a_checkpoint_in_bytes(folder: Path, tmp_path: Path) -> None:
    texts = ["the cat sat on the mat", "a dog", "the cat " * 12]
    exact = Embedder.load(folder, long="truncate").embed(texts)
    embedder = Embedder.load(folder, long="truncate", dtype=torch.int8)
    assert is_int8(embedder.model.encoder)
    assert all(
        one.dtype == torch.int8 for name, one in embedder.model.named_parameters() if ".ff." in name and one.ndim > 1
    )
    found = embedder.embed(texts)
    cosines = (found * exact).sum(1) / ((found**2).sum(1) * (exact**2).sum(1)) ** 0.5
    assert cosines.min() > 0.99
    with pytest.raises(CheckpointError, match=r"loaded with dtype=torch\.int8, for inference; load it without to save"):
        embedder.save(tmp_path / "again")
    with pytest.raises(InputError, match=r"loaded with dtype=torch\.int8, for inference; load it without to train"):
        Classifier(embedder.checkpoint).fit(texts, ["a", "b", "a"])
    with pytest.raises(ConfigError, match="device='cuda': bytes are multiplied on a CPU only"):
        Checkpoint.load(folder, dtype=torch.int8, device="cuda")


def test_without_the_compiled_part_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["the cat sat on the mat", "a dog"]
    embedder = Embedder.load(folder, dtype=torch.int8)
    fast = embedder.embed(texts)
    monkeypatch.setattr(native, "enabled", False)
    assert_close(torch.from_numpy(embedder.embed(texts)), torch.from_numpy(fast), atol=0.1, rtol=0.1)


def test_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["similar", "a cat", "the cat sat", "-m", str(folder), "--precision", "int8", "--device", "cpu"]) == 0
    assert "1.0000" in capsys.readouterr().out
