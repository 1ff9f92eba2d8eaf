"""The compiled encoder beside the plain one: the same numbers, whatever the chip, the batch and the threads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bertie.config import (
    BlockSparse,
    Bucketed,
    Causal,
    Disentangled,
    EmbeddingConfig,
    EncoderConfig,
    Full,
    Learned,
    NormConfig,
    Rotary,
    RotaryScaling,
    Sliding,
)
from bertie.nn import packed
from bertie.nn.encoder import Encoder
from bertie.nn.linear import to_int8
from bertie.nn.model import Model
from bertie.ops import dispatch
from bertie.ops.native import encoder as native
from bertie.text.batch import Batch
from bertie.training import lora

built = native.library()
LEVELS = range(built.bertie_encoder_isa_level() + 1) if built is not None else range(0)
needs_it = pytest.mark.skipif(built is None, reason="no compiler was here when the package was built")
HALVES = native.bf16_is_faster()
LENGTHS = (
    *((n,) for n in (1, 2, 15, 16, 17, 127, 128, 129, 512, 513, 1500)),
    (900, *(3, 1, 7, 12, 13) * 4),
    (64,) * 9,
    (5, 33, 2),
)


def config(**changes: Any) -> EncoderConfig:
    usual: dict[str, Any] = {
        "vocab": 100,
        "width": 64,
        "layer_map": (0, 1),
        "heads": 2,
        "head_width": 32,
        "kv_heads": 2,
        "ff_width": 96,
        "activation": "gelu",
        "embeddings": EmbeddingConfig(width=64, segments=2),
        "max_length": 2048,
        "positions": (Learned(2048),),
        "patterns": (Full(), Full()),
    }
    return EncoderConfig(**usual | changes)


MODERN = {"pre_norm": True, "gated": True, "positions": (Rotary((1e4, 500.0)),), "norm": NormConfig(bias=False)}
ODD = {
    "width": 50,
    "heads": 5,
    "head_width": 10,
    "kv_heads": 5,
    "ff_width": 33,
    "embeddings": EmbeddingConfig(width=50),
}
DECODER = {
    "pre_norm": True,
    "gated": True,
    "norm": NormConfig("rms", 1e-6, False),
    "activation": "silu",
    "qkv_bias": "",
    "out_bias": False,
    "ff_bias": False,
}
CONFIGS = {
    "bert": config(),
    "roberta": config(positions=(Learned(2050, skip_id=1),), activation="gelu_tanh"),
    "shared": config(layer_map=(0, 0), qkv_bias="qv"),
    "modern": config(**MODERN, patterns=(Sliding(20), Full()), first_norm=False, qkv_bias="", ff_bias=False),
    "few keys": config(**MODERN, heads=4, kv_heads=2, head_width=16, patterns=(Sliding(64), Sliding(1))),
    "odd": config(**ODD, activation="relu"),
    "rms": config(**MODERN | {"norm": NormConfig("rms", 1e-6, False)}, activation="silu", out_bias=False),
    "narrow": config(embeddings=EmbeddingConfig(width=16, project="after_norm"), patterns=(BlockSparse(400, 0),) * 2),
    "bucketed": config(positions=(Learned(2050, skip_id=1), Bucketed(32, 128))),
    "bucketed windows": config(
        positions=(Bucketed(8, 20),), patterns=(Sliding(20), Full()), heads=4, kv_heads=2, head_width=16
    ),
    "disentangled": config(positions=(Disentangled(("c2p", "p2c"), 512, 256, shared=True, norm=NormConfig()),)),
    "c2p alone": config(positions=(Learned(2050), Disentangled(("c2p",), 40, key_bias=False))),
    "p2c alone": config(positions=(Disentangled(("p2c",), 60, 8),), patterns=(Sliding(20), Full())),
    "scaled": config(embeddings=EmbeddingConfig(width=64, scale=8.0, tasks=3, norm=False)),
    "causal": config(
        **DECODER | {"heads": 4, "kv_heads": 2, "head_width": 16, "qk_norm": True},
        positions=(Rotary((1e4, 500.0)),),
        patterns=(Causal(), Causal(30)),
    ),
    "output norms": config(
        **DECODER | {"norm": NormConfig("rms", 1e-6, False, unit_offset=True), "activation": "gelu_tanh"},
        patterns=(Causal(0), Sliding(17)),
        qk_norm=True,
        output_norms=True,
        attention_scale=0.3,
        positions=(Rotary((1e4, 500.0), (None, RotaryScaling(4.0))),),
        embeddings=EmbeddingConfig(width=64, norm=False, scale=8.0),
    ),
    "unscaled": config(
        **DECODER | {"gated": False, "activation": "relu"},
        positions=(Bucketed(8, 20),),
        attention_scale=1.0,
        heads=3,
        kv_heads=3,
        head_width=10,
    ),
}


def fresh(name: str) -> Encoder:
    torch.manual_seed(0)
    encoder = Encoder(CONFIGS[name]).eval().requires_grad_(False)
    for parameter in encoder.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.15)
    return encoder


def batch_of(lengths: tuple[int, ...], encoder: Encoder) -> Batch:
    draw = torch.Generator().manual_seed(sum(lengths))
    ids = [torch.randint(2, 100, (n,), generator=draw).tolist() for n in lengths]
    kinds = [[i % max(1, encoder.cfg.embeddings.segments) for i in range(n)] for n in lengths]
    return Batch.from_ids(ids, kinds)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    dispatch.clear_cache()
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def use_level(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restrict the instructions; level 0, plain C++, is never chosen otherwise."""
    monkeypatch.setattr(native, "instruction_level", lambda: level)
    dispatch.clear_cache()


def run(encoder: Encoder, batch: Batch) -> Tensor | None:
    """The compiled encoder's hidden states; None if it is not chosen."""
    return packed.run(encoder, batch) if encoder.dispatch().native else None


def compiled(encoder: Encoder, batch: Batch) -> Tensor:
    found = run(encoder, batch)
    assert found is not None
    return found


def plain(encoder: Encoder, batch: Batch) -> Tensor:
    *_, last = encoder.hidden_states(batch)
    return last


def test_it_is_built_where_there_is_a_compiler() -> None:
    assert built is not None or not (shutil.which("g++") or shutil.which("c++"))


@needs_it
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("level", LEVELS)
def test_equals_the_torch_layers(name: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(level, monkeypatch)
    encoder = fresh(name)
    for lengths in LENGTHS:
        batch = batch_of(lengths, encoder)
        wanted = plain(encoder, batch)
        assert_close(compiled(encoder, batch), wanted, atol=1e-5 * max(1.0, float(wanted.abs().max())), rtol=0)


@needs_it
@pytest.mark.parametrize("kind", [torch.float32, torch.int8, torch.bfloat16], ids=["fp32", "int8", "bf16"])
@pytest.mark.parametrize("name", ["bert", "modern", "odd", "bucketed", "disentangled", "causal", "output norms"])
@pytest.mark.parametrize("level", LEVELS)
def test_results_are_bit_identical_for_any_batch_and_thread_count(
    name: str, level: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == torch.int8 and level < native.INT8_LEVEL:
        pytest.skip("no int8 at this instruction level")
    if kind == torch.bfloat16 and not (level == 3 and HALVES):
        pytest.skip("no bf16 at this instruction level")
    use_level(level, monkeypatch)
    encoder = fresh(name)
    if kind == torch.int8:
        to_int8(encoder)
    if kind == torch.bfloat16:
        encoder.bfloat16()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))  # nothing is left unwritten
    for lengths in ((5, 33, 2), (300, 1, 12, 13, 64, 90), (700,)):
        batch = batch_of(lengths, encoder)
        parts = zip(torch.split(batch.ids, lengths), torch.split(batch.segments, lengths), strict=True)  # type: ignore[arg-type]
        alone = [compiled(encoder, Batch.from_ids([i.numpy()], [s.numpy()])) for i, s in parts]
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(compiled(encoder, batch), torch.cat(alone))


@needs_it
@pytest.mark.parametrize("level", [level for level in LEVELS if level >= native.INT8_LEVEL])
@pytest.mark.parametrize(
    "name",
    [
        *("bert", "modern", "few keys", "odd", "shared", "rms", "bucketed", "disentangled"),
        *("causal", "output norms", "unscaled"),
    ],
)
def test_int8_is_as_accurate_as_the_torch_layers(name: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are rounded differently, so the errors against float32 are compared."""
    use_level(level, monkeypatch)
    encoder = fresh(name)
    exact = deepcopy(encoder)
    to_int8(encoder)
    for lengths in ((1,), (12, 40, 3), (300, 5)):
        batch = batch_of(lengths, encoder)
        wanted, slow, fast = plain(exact, batch), plain(encoder, batch), compiled(encoder, batch)
        error, usual = ((one - wanted).norm() / wanted.norm() for one in (fast, slow))
        assert error < 1.35 * usual + 0.01
        assert usual < 0.1


@pytest.mark.skipif(not HALVES, reason="the chip has no products of bf16")
@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_is_more_accurate_than_the_torch_layers(name: str) -> None:
    """Sums, norms and attention stay in float32."""
    encoder = fresh(name).bfloat16()
    exact = deepcopy(encoder).double()
    for lengths in ((1,), (12, 40, 3), (300, 5)):
        batch = batch_of(lengths, encoder)
        wanted, slow, fast = plain(exact, batch), plain(encoder, batch), compiled(encoder, batch)
        assert fast.dtype == torch.bfloat16
        error, usual = (float((one.double() - wanted).norm() / wanted.norm()) for one in (fast, slow))
        assert error <= usual
        assert error < 0.02


@pytest.mark.skipif(not HALVES, reason="the chip has no products of bf16")
def test_changed_bf16_weights_are_packed_again() -> None:
    encoder = fresh("bert").bfloat16()
    batch = batch_of((9, 4), encoder)
    for change in (
        lambda: encoder.blocks[0].ff.down.weight.mul_(-1),
        lambda: encoder.embeddings.words.weight.mul_(-1),
        lambda: encoder.blocks[1].post_ff.weight.mul_(3),
    ):
        before = compiled(encoder, batch)
        change()
        assert not torch.equal(compiled(encoder, batch), before)
        assert_close(compiled(encoder, batch), plain(encoder, batch), atol=0.2, rtol=0.1)


@needs_it
@pytest.mark.parametrize(
    "command", ["import os; os.kill(os.getpid(), 4)", "print(0.0)", "print(1.05)", "print('?')", "print(1.5)"]
)
def test_bf16_is_tried_in_another_process(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If that process is killed, gets wrong results or little speedup, PyTorch runs the model."""

    class Chip:
        _name = "none"

        @staticmethod
        def bertie_encoder_has_bf16() -> int:
            return 1

    native.bf16_is_faster.cache_clear()
    with monkeypatch.context() as other:
        other.setattr(native, "_TRIAL", command)
        other.setattr(native, "library", Chip)
        assert native.bf16_is_faster() is (command == "print(1.5)")
    if command != "print(1.5)":
        encoder = fresh("bert").bfloat16()
        batch = batch_of((9, 4), encoder)
        assert run(encoder, batch) is None
        assert torch.equal(encoder(batch), plain(encoder, batch))
    native.bf16_is_faster.cache_clear()


@needs_it
@pytest.mark.parametrize("kind", [torch.float32, torch.int8, torch.bfloat16], ids=["fp32", "int8", "bf16"])
@pytest.mark.parametrize("activation", native.ACTIVATIONS)
def test_activations_of_large_inputs(activation: str, kind: torch.dtype) -> None:
    """Some models have them, far below zero: approximations for int8 and bf16 must hold there as well."""
    if kind == torch.bfloat16 and not HALVES:
        pytest.skip("the chip has no products of bf16")
    torch.manual_seed(0)
    encoder = Encoder(config(activation=activation)).eval().requires_grad_(False)
    for block in encoder.blocks:
        block.ff.up.bias.copy_(torch.linspace(-300, 300, 96))
        block.ff.down.weight[:, 48:] = 0  # what is far above zero would hide the rest
    exact = deepcopy(encoder).double()
    if kind == torch.int8:
        to_int8(encoder)
    batch = batch_of((12, 40, 3), encoder)
    encoder.to(torch.bfloat16 if kind == torch.bfloat16 else torch.float32)
    wanted, found = plain(exact, batch), compiled(encoder, batch)
    assert float((found.double() - wanted).norm() / wanted.norm()) < {torch.float32: 1e-5}.get(kind, 0.03)


@needs_it
def test_int8_below_its_instruction_level_uses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    use_level(0, monkeypatch)
    encoder = fresh("bert")
    to_int8(encoder)
    batch = batch_of((3,), encoder)
    assert run(encoder, batch) is None
    assert_close(encoder(batch), plain(encoder, batch))


@needs_it
def test_nans_stay_within_their_text() -> None:
    for in_bytes in (False, True):
        encoder = fresh("bert")
        encoder.embeddings.words.weight[7] = torch.nan
        if in_bytes:
            to_int8(encoder)
        ids = [[8, 9, 10], [8, 7, 9], [11, 12]]
        rows = compiled(encoder, Batch.from_ids(ids))
        assert rows[[0, 1, 2, 6, 7]].isfinite().all()
        assert rows[4].isnan().all()


@needs_it
def test_changed_weights_are_packed_again() -> None:
    encoder = fresh("bert")
    batch = batch_of((9, 4), encoder)
    other = {name: value + 0.1 for name, value in encoder.state_dict().items()}

    def replaced() -> None:
        encoder.blocks[1].ff.up = nn.Linear(64, 96).requires_grad_(False)

    def moved() -> None:
        encoder.blocks[0].post_ff.weight.data = encoder.blocks[0].post_ff.weight.data * 2

    for change in (
        lambda: encoder.blocks[0].attention.qkv.weight.mul_(1.5),
        lambda: encoder.embeddings.words.weight.mul_(-1),
        lambda: encoder.load_state_dict(other),
        replaced,
        moved,
    ):
        before = compiled(encoder, batch)
        change()
        after = compiled(encoder, batch)
        assert not torch.allclose(before, after, atol=1e-3)
        assert_close(after, plain(encoder, batch), atol=1e-4, rtol=0)


@needs_it
def test_gradients_hooks_and_parametrizations_use_torch() -> None:
    encoder = fresh("bert")
    batch = batch_of((9, 4), encoder)
    assert run(encoder, batch) is not None
    heard = []
    hook = encoder.blocks[1].attention.qkv.register_forward_hook(lambda *a: heard.append(1))
    encoder(batch)
    assert heard
    hook.remove()
    model = Model.from_parts(encoder, {})
    lora.add(model, rank=2)
    assert run(encoder, batch) is None
    lora.merge(model)
    assert run(encoder, batch) is not None
    with torch.enable_grad():
        assert run(encoder, batch) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(encoder, batch) is None
    encoder.train()
    encoder.cfg = replace(encoder.cfg, dropout=0.1)
    assert run(encoder, batch) is None
    assert run(fresh("bert").double(), batch) is None
    longer = batch_of((2001,), fresh("narrow"))
    assert run(fresh("narrow"), longer) is None  # BigBird sees long texts in part


@needs_it
def test_a_frozen_encoder() -> None:
    """Under a head in training: it needs neither gradients nor dropout."""
    encoder = fresh("modern")
    batch = batch_of((9, 4), encoder)
    wanted = plain(encoder, batch)
    encoder.train()
    encoder.cfg = replace(encoder.cfg, dropout=0.0, attention_dropout=0.0)
    with torch.enable_grad():
        encoder.requires_grad_(True)
        assert run(encoder, batch) is None
        with torch.no_grad():
            assert run(encoder, batch) is None
        encoder.requires_grad_(False)
        found = run(encoder, batch)
        assert found is not None
        assert_close(found, wanted, atol=1e-4, rtol=0)
        nn.Linear(found.shape[1], 2)(found).sum().backward()
        encoder.embeddings.words.weight.requires_grad_()
        assert run(encoder, batch) is None


@needs_it
def test_concurrent_calls() -> None:
    encoder = fresh("modern")
    batches = [batch_of(lengths, encoder) for lengths in LENGTHS[-6:] * 4]
    wanted = [plain(encoder, batch) for batch in batches]

    def call(batch: Batch) -> Tensor:
        with torch.no_grad():
            return compiled(encoder, batch)

    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as pool:
        for found, one in zip(pool.map(call, batches), wanted, strict=True):
            assert_close(found, one, atol=1e-4, rtol=0)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = fresh("bert")
    batch = batch_of((9, 4), encoder)
    monkeypatch.setattr(native, "instruction_level", lambda: None)  # the library was not built
    dispatch.clear_cache()
    encoder.reset_dispatch()
    assert torch.equal(encoder(batch), plain(encoder, batch))


@needs_it
def test_updates_by_fused_optimizers_are_noticed() -> None:
    encoder = fresh("bert").requires_grad_(True)
    batch = batch_of((9, 4), encoder)
    before = compiled(encoder, batch)
    with torch.enable_grad():
        encoder(batch).pow(2).mean().backward()
        torch.optim.AdamW(encoder.parameters(), lr=1e-3, fused=True).step()
    assert not torch.equal(compiled(encoder, batch), before)
    assert_close(compiled(encoder, batch), plain(encoder, batch), atol=1e-5, rtol=0)


def test_bf16_instructions_have_a_file_of_their_own() -> None:
    """Kernels compiled for AVX512_BF16 raised SIGILL on CPUs that have VNNI only: GCC ran an instruction too early."""
    sources = Path(native.__file__).parent / "cpp"
    with_intrinsics = {path.name for path in sources.iterdir() if re.search(r"_mm\w*(pbh|dpbf16)", path.read_text())}
    assert with_intrinsics == {"bf16.h"}
    levels = (sources / "levels.h").read_text()
    targets = list(re.finditer(r'target\("[^"]*avx512bf16[^"]*"\)', levels))
    included = [re.findall(r"#include (\S+)", levels[target.end() :])[0] for target in targets]
    assert included == ['"bf16.h"'] * len(targets) != []
