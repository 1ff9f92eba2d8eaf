"""The dispatch table: what is resolved, when, and what is reported."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from bertie.config import BlockSparse, Bucketed, Disentangled, Full, Rotary, Sliding
from bertie.nn.encoder import Encoder
from bertie.nn.linear import to_int8
from bertie.nn.model import Model
from bertie.ops import disable, dispatch
from bertie.ops.dispatch import ROWS, report, select, summarize
from bertie.ops.native import encoder as native
from bertie.ops.site import Site
from bertie.ops.torch import grouped_attention
from bertie.text.batch import Batch
from tests.ops.forced import hardware
from tests.test_config import GOOD

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HAS_NATIVE = native.instruction_level() is not None


def backends(rows: list[dict[str, str]], operation: str) -> list[str]:
    return [row["backend"] for row in rows if row["operation"] == operation]


@pytest.mark.parametrize("operation", dict.fromkeys(row.operation for row in ROWS))
def test_the_last_row_of_an_operation_takes_everything(operation: str) -> None:
    last = [row for row in ROWS if row.operation == operation][-1]
    assert (last.condition, last.accepts) == ("", None)
    for device in (CPU, CUDA, torch.device("meta")):
        assert last.supports(Site(device, torch.float64, training=True))
    for row in ROWS:
        assert (row.accepts is None) or row.condition  # a guard is described


def test_an_encoder_resolves_once_per_device_precision_and_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(GOOD)
    training = encoder.dispatch()
    assert training.site.training
    with torch.no_grad():
        inference = encoder.eval().dispatch()
        assert not inference.site.training
        half = encoder.bfloat16().dispatch()
        assert (half.site.dtype, half.site.weights) == (torch.bfloat16, {torch.bfloat16})
        encoder.float()
        monkeypatch.setattr(dispatch.DispatchTable, "resolve", None)  # nothing is resolved again
        assert encoder.dispatch() is inference
    with torch.enable_grad():
        assert encoder.train().dispatch() is training
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError):
        encoder.dispatch()  # autocast is another precision


def test_a_frozen_encoder_is_at_inference() -> None:
    encoder = Encoder(GOOD).train()
    assert encoder.dispatch().site.training
    with torch.no_grad():
        assert encoder.dispatch().site.training  # it is compared with passes that record gradients
    encoder.requires_grad_(False)
    assert not encoder.dispatch().site.training
    assert Encoder(replace(GOOD, dropout=0.1)).train().requires_grad_(False).dispatch().site.training


def test_disabling_and_replacing_layers_resolve_anew() -> None:
    encoder = Encoder(GOOD).eval()
    with torch.no_grad():
        assert encoder.dispatch().native is HAS_NATIVE
        with disable("native.encoder"):
            assert not encoder.dispatch().native
        assert encoder.dispatch().native is HAS_NATIVE
        to_int8(encoder)
        assert encoder.dispatch().site.weights == {torch.float32, torch.int8}
        for other in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
            assert other._tables == {}


def test_report_of_a_model() -> None:
    model = Model(GOOD, {}).eval()
    assert model.encoder.dispatch().site.training  # gradients are recorded here
    rows = model.dispatch_report()
    with torch.no_grad():
        assert rows == report(GOOD, "cpu", "fp32")
        assert backends(rows, "replay") == ["none"]
        assert backends(rows, "encoder") == [*(["native.encoder"] if HAS_NATIVE else []), "torch.layers"]
        assert backends(rows, "attention") == ["torch.attention.grouped"]
        assert not backends(rows, "rotary")
        assert not backends(rows, "cross_entropy")  # only in training
        with disable("native"):
            assert summarize(model.dispatch_report())["encoder"] == "torch.layers"


def test_the_reported_backend_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: the compiled encoder where it is reported, PyTorch's layers where it is disabled."""
    model, batch = Model(GOOD, {}).eval(), Batch.from_ids([[1, 2, 3], [4]])
    calls: list[str] = []
    run = grouped_attention.attend
    monkeypatch.setattr(grouped_attention, "attend", lambda *a, **k: calls.append("grouped") or run(*a, **k))
    with torch.no_grad():
        fast = model.hidden(batch)
        assert len(calls) == (0 if HAS_NATIVE else GOOD.depth)
        calls.clear()
        with disable("native.encoder"):
            slow = model.hidden(batch)
        assert calls == ["grouped"] * GOOD.depth
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)


SMALL: dict[str, Any] = {"heads": 2, "kv_heads": 2, "head_width": 32, "width": 64, "ff_width": 128}


def test_report_for_a_gpu() -> None:
    bert = replace(GOOD, **SMALL, embeddings=replace(GOOD.embeddings, width=64))
    modern = replace(bert, positions=(Rotary((1e4, 1e4)),), patterns=(Full(), Sliding(8)))
    with hardware():
        rows = report(bert, CUDA, "bf16")
        assert {row["operation"]: row["backend"] for row in reversed(rows)} == {
            "replay": "cuda_graphs",
            "encoder": "torch.layers",
            "attention": "triton.attention.short",
            "norm": "triton.fused.norm",
            "activation": "triton.fused.activation",
            "embedding": "triton.fused.embedding",
            "pooling": "triton.fused.pooling",
        }
        assert backends(report(bert, CUDA, "fp8"), "fp8_quantization") == ["triton.fused.fp8"]
        rotary = backends(report(modern, CUDA, "bf16"), "rotary")
        assert rotary == ["triton.attention.short_rotary", "triton.rotary"]
        short, disentangled = "triton.attention.short", "triton.attention.disentangled"
        varlen, grouped = "torch.attention.varlen", "torch.attention.grouped"
        assert backends(report(modern, CUDA, "bf16"), "attention") == [short, disentangled, varlen, grouped]
        assert backends(report(bert, CUDA, "fp32"), "attention") == [varlen, grouped]
        deberta = replace(bert, positions=(Disentangled(("c2p", "p2c"), 16),))
        assert backends(report(deberta, CUDA, "bf16"), "attention") == [disentangled, grouped]
        mpnet = replace(bert, positions=(Bucketed(32),))
        assert backends(report(mpnet, CUDA, "fp32"), "attention") == ["torch.attention.bucketed", grouped]
        assert backends(report(mpnet, CUDA, "fp32"), "replay") == ["none"]
        big_bird = replace(bert, patterns=(BlockSparse(4, 1),) * 2)
        assert backends(report(big_bird, CUDA, "bf16"), "attention") == [grouped]


def test_rows_up_to_the_first_without_a_condition() -> None:
    with hardware():
        rows = select("attention", Site(CUDA, torch.float64, heads=1, kv_heads=1, head_width=64))
    assert [row.backend for row in rows] == ["torch.attention.grouped"]
