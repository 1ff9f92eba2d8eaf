"""Layers in eight bits: how far they are from the exact ones, and how a checkpoint is loaded so."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bertie import Classifier, Embedder
from bertie.bench import random_model
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.model_spec import model_spec
from bertie.cli import main
from bertie.errors import CheckpointError, ConfigError, InputError
from bertie.nn.linear import Fp8Linear, Fp8QKV, Int8Linear, is_fp8, is_int8, to_fp8
from bertie.nn.model import Model
from bertie.ops import disable
from bertie.ops.quantization import dequantize, quantize
from bertie.ops.triton import fp8
from bertie.text.batch import Batch
from tests.checkpoints.test_roundtrip import with_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory.mktemp("bytes") / "m")


@pytest.mark.parametrize("kind", ["mixed", "positive", "negative", "zero", "one far out"])
def test_int8_equals_the_product_of_quantized_numbers(kind: str) -> None:
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


def test_an_int8_checkpoint(folder: Path, tmp_path: Path) -> None:
    texts = ["the cat sat on the mat", "a dog", "the cat " * 12]
    exact = Embedder.load(folder, overflow="truncate").embed(texts)
    embedder = Embedder.load(folder, overflow="truncate", precision="int8")
    assert is_int8(embedder.model.encoder)
    assert all(
        one.dtype == torch.int8 for name, one in embedder.model.named_parameters() if ".ff." in name and one.ndim > 1
    )
    found = embedder.embed(texts)
    cosines = (found * exact).sum(1) / ((found**2).sum(1) * (exact**2).sum(1)) ** 0.5
    assert cosines.min() > 0.99
    with pytest.raises(
        CheckpointError, match=r"loaded with precision='int8', for inference; load it with precision='fp32' to save"
    ):
        embedder.save(tmp_path / "again")
    with pytest.raises(
        InputError, match=r"loaded with precision='int8', for inference; load it with precision='fp32' to train"
    ):
        Classifier(embedder.checkpoint).fit(texts, ["a", "b", "a"])
    with pytest.raises(ConfigError, match="device='cuda': int8 inference runs on a CPU only"):
        Checkpoint.load(folder, precision="int8", device="cuda")


def test_without_the_compiled_encoder(folder: Path) -> None:
    texts = ["the cat sat on the mat", "a dog"]
    embedder = Embedder.load(folder, precision="int8")
    fast = embedder.embed(texts)
    with disable("native.encoder"):
        slow = embedder.embed(texts)
    assert_close(torch.from_numpy(slow), torch.from_numpy(fast), atol=0.1, rtol=0.1)


def test_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["similarity", "a cat", "the cat sat", "-m", str(folder), "--precision", "int8", "--device", "cpu"]) == 0
    )
    assert "1.0000" in capsys.readouterr().out


# --- fp8, emulated on a CPU ---

SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
DEBERTA = {"relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
DEBERTA |= {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "max_position_embeddings": 64},
    "deberta-v3": {"model_type": "deberta-v2", "max_position_embeddings": 64} | DEBERTA,
    "modernbert": {"model_type": "modernbert", "local_attention": 8, "global_attn_every_n_layers": 2},
    "albert": {"model_type": "albert", "embedding_size": 16, "max_position_embeddings": 64},
    "eurobert": {"model_type": "eurobert", "max_position_embeddings": 64},
}


def made(family: str, **changes: Any) -> Model:
    """A small model whose weights show."""
    torch.manual_seed(0)
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    config = SMALL | (special if family in ("modernbert", "eurobert") else {}) | FAMILIES[family] | changes
    model = Model(model_spec(config, None, head="none").encoder, {}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


BATCH = [[2, 3, 4, 5, 9], [7] * 20, [8], list(range(2, 40))]


@pytest.mark.parametrize("kind", ["mixed", "one far out", "tiny", "huge", "zero"])
def test_fp8_rounding(kind: str) -> None:
    """Each number is within a sixteenth of itself, or of the smallest; the product is that of the rounded numbers."""
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 32), torch.randn(7, 48)
    x = {"tiny": x * 1e-9, "huge": x * 1e30, "zero": x * 0}.get(kind, x)
    if kind == "one far out":
        x[:, 3] = 5000.0
    codes, scales = fp8.quantize(x)
    back = codes.float() * scales
    assert ((back - x).abs() <= torch.maximum(x.abs() / 16, scales * 2**-10) * 1.001).all()
    inside = x.abs().amax(1, keepdim=True)
    assert_close(back.abs().amax(1, keepdim=True), inside)
    made = Fp8Linear(layer.weight, layer.bias)
    weight = made.weight.double() * made.scale.double()[:, None]
    wanted = back.double() @ weight.T + layer.bias.double()
    found = made((codes, scales))
    assert_close(found.double(), wanted, atol=1e-5 * float(inside.max() + 1), rtol=0)
    assert torch.equal(found, made(x))
    assert_close(made(x[:1]), found[:1], atol=1e-6 * float(inside.max() + 1), rtol=0)  # whoever its neighbours are
    if kind == "mixed":
        assert 0.005 < far(found, layer(x)) < 0.05


def test_quantized_values_of_a_tensor_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer = torch.randn(3, 16), Fp8Linear(torch.randn(16, 16), None)
    wanted = layer(x * 2)
    x.fp8 = fp8.quantize(x * 2)  # type: ignore[attr-defined]
    monkeypatch.setattr(fp8, "quantize_rows", None)
    assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_family_in_fp8(family: str) -> None:
    model = made(family)
    other = deepcopy(model)
    to_fp8(other.encoder)
    assert is_fp8(other.encoder)
    assert not is_fp8(model.encoder)
    blocks = len(other.encoder.blocks)
    assert sum(isinstance(one, Fp8Linear) for one in other.modules()) == 4 * blocks
    assert sum(isinstance(one, Fp8QKV) for one in other.modules()) == blocks
    batch = Batch.from_ids(BATCH)
    assert 0.002 < far(other.hidden(batch), model.hidden(batch)) < 0.08
    alone = other.hidden(Batch.from_ids(BATCH[1:2]))
    assert far(alone, other.hidden(batch)[5:25]) < 0.02  # a rounding of sums can take a number to the next code
    half = deepcopy(model).bfloat16()
    to_fp8(half.encoder)
    assert half.hidden(batch).dtype == torch.bfloat16
    assert far(half.hidden(batch).float(), model.hidden(batch)) < 0.1


@torch.inference_mode()
def test_layers_whose_sides_are_no_multiple_of_16_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed-forward width of 40: both layers stay, or one of them where it is gated."""
    batch = Batch.from_ids(BATCH)
    for family, kept in (("bert", 2), ("modernbert", 1)):
        model = made(family, intermediate_size=40)
        exact = model.hidden(batch)
        to_fp8(model.encoder)
        feed_forward = model.encoder.blocks[0].ff
        assert sum(isinstance(one, nn.Linear) for one in feed_forward.modules()) == kept
        assert 0.002 < far(model.hidden(batch), exact) < 0.08
    model = made("bert", hidden_size=24)
    to_fp8(model.encoder)
    assert not is_fp8(model.encoder)


def test_which_norms_write_quantized_outputs() -> None:
    def announced(family: str, **changes: Any) -> set[str]:
        encoder = made(family, **changes).encoder
        to_fp8(encoder)
        return {n for n, one in encoder.named_modules() if getattr(one, "fp8", False) and isinstance(one, nn.LayerNorm)}

    posts = {f"blocks.{i}.{name}" for i in range(3) for name in ("post_attention", "post_ff")}
    assert announced("bert") == {"embeddings.norm"} | posts - {"blocks.2.post_ff"}
    pres = {f"blocks.{i}.{name}" for i in range(3) for name in ("pre_attention", "pre_ff")}
    assert announced("modernbert") == {"embeddings.norm"} | pres - {"blocks.0.pre_attention"}
    assert announced("albert") == {"blocks.0.post_attention", "blocks.0.post_ff"}
    assert announced("bert", hidden_size=24) == set()


def test_an_fp8_checkpoint(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for refused in (
        lambda: Checkpoint.load(folder, precision="fp8"),
        lambda: random_model("1x16", precision="fp8"),
    ):
        with pytest.raises(
            ConfigError, match=r"precision='fp8' with device='cpu' needs a GPU of compute capability 8\.9"
        ):
            refused()
    assert main(["similarity", "a", "b", "-m", str(folder), "--precision", "fp8", "--device", "cpu"]) == 1
    assert "compute capability 8.9" in capsys.readouterr().err
    embedder = Embedder.load(folder)
    to_fp8(embedder.model.encoder)
    with pytest.raises(CheckpointError, match=r"loaded with precision='fp8', for inference; load it"):
        embedder.save(tmp_path / "again")
    with pytest.raises(InputError, match=r"loaded with precision='fp8', for inference; load it"):
        Classifier(embedder.checkpoint).fit(["a", "b"], ["a", "b"])
