"""The program for attention without relative terms, in a process of its own and compiled; and who goes there."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bertie.config import BlockSparse, Full, Rotary, Sliding
from bertie.ops import disable
from bertie.ops.contracts import AttentionInputs
from bertie.ops.dispatch import AttentionBackends, attention_backends, select
from bertie.ops.torch.eager import rotary_tables, rotate_pair
from bertie.ops.triton import short_attention as ragged
from tests.ops.compiled import compiled
from tests.ops.forced import attend, forced, hardware
from tests.ops.test_disentangled import HALF, attention_rows, chosen


def test_the_program() -> None:
    """Interpreted. Without Triton there is none, and that is said."""
    pytest.importorskip("triton", reason="the program is Triton's")
    cases = Path(__file__).with_name("ragged_programs.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("longest", ragged.SIZES | ragged.TURNED_SIZES)
@pytest.mark.parametrize(("kind", "width"), [("bf16", 64), ("fp16", 24), ("bf16", 128)])
def test_compiled(
    kind: str, width: int, longest: int, window: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the program is Triton's")
    from bertie.ops.triton import short_attention_kernels as programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(("q_at", "k_at", "v_at", "out_at"), f"*{kind}") | {"tiles_at": "*i32", "factor": "fp32"}
    for turn, table in ((False, ragged.SIZES), (True, ragged.TURNED_SIZES)):
        if longest not in table or (turn and width != ragged._power_of_2(width)):
            continue
        rows, columns, warps, stages, *_ = table[longest]
        constants: dict[str, Any] = {"WINDOW": window, "TURN": turn, "HEADS": 12, "SHARE": 3, "M": rows, "N": columns}
        constants |= {"WIDTH": width, "D": ragged._power_of_2(width)}
        tables = dict.fromkeys(("cos_at", "sin_at"), "*fp32") if turn else {}
        absent = {} if turn else dict.fromkeys(("cos_at", "sin_at"))
        compiled(programs.forward, types | tables, constants | absent, warps, 1 if width > 64 else stages)


def test_supported_sites() -> None:
    with hardware():
        for change in (
            {}, {"head_width": 24, "dtype": torch.float16}, {"kv_heads": 2}, {"patterns": (Sliding(3),)},
        ):  # fmt: skip
            assert "short" in attention_rows(replace(HALF, **change))
        for change in (
            {"patterns": (BlockSparse(4, 1),)}, {"dtype": torch.float32}, {"head_width": 8}, {"head_width": 20},
            {"head_width": 136}, {"device": torch.device("cpu")}, {"training": True}, {"relative": "bucketed"},
        ):  # fmt: skip
            assert "short" not in attention_rows(replace(HALF, **change))
        with disable("triton.attention.short"):
            assert "short" not in attention_rows(HALF)
    with hardware(capability=(7, 5)):
        assert "short" not in attention_rows(HALF)
    with hardware(triton=False):
        assert "short" not in attention_rows(HALF)


def test_accepted_batches() -> None:
    most = ragged.LONGEST
    sliding = replace(HALF, patterns=(Sliding(3),))
    with hardware():
        assert chosen(HALF, (7, 2)) == chosen(HALF, (most,)) == "short"
        assert chosen(sliding, (2 * most,)) == "short"
        assert chosen(HALF, (most + 1, 2)) == "varlen"
        assert chosen(HALF, (7, 2), dropout=0.1) == "disentangled"
        assert chosen(HALF, (7, 2), global_tokens=torch.zeros(9)) == "grouped"
        row = select("attention", HALF)[0]
        q = torch.empty(9, 4, 64, device="meta")
        bounds = AttentionInputs(q, q, q, (7, 7, 7), q, 0.5, Full(), None, None, None, 0.0, None)
        assert row.accepts is not None
        assert not row.accepts(bounds)  # upper bounds, no lengths


def test_gradients_of_tensors_rule_it_out() -> None:
    q, k = (torch.zeros(3, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    with hardware():
        for learning in (q, k):
            learning.requires_grad_()
            site = attention_backends(AttentionInputs(q, k, k, (3,), q, 0.5, Full()))
            assert "triton.attention.short" not in [row.backend for row in site.rows]
            learning.requires_grad_(False)


def test_rotary_inside_the_kernel() -> None:
    """Where half a head's width is a power of two of at least 16, and a query sees few keys."""

    def fuses(width: int = 64, length: int = 3, pattern: Any = Full()) -> bool:  # noqa: B008
        backends = AttentionBackends.resolve(replace(HALF, head_width=width, patterns=(pattern,), rotary=True))
        q = torch.empty(length, 4, width, device="meta")
        call = AttentionInputs(q, q, q, (length,), q, 0.5, pattern, None, (q, q), None, 0.0, None)
        return backends.rotates(backends.choose(call), call)

    most = max(ragged.TURNED_SIZES)
    with hardware():
        assert all(fuses(width) for width in (32, 64, 128))
        assert not any(fuses(width) for width in (16, 24, 48, 96))
        assert fuses(length=most)
        assert not fuses(length=most + 1)
        assert fuses(length=most + 1, pattern=Sliding(64))
        with disable("triton.attention.short_rotary"):
            assert not fuses()
        with disable("triton.attention.short"):
            assert not fuses()


@pytest.mark.parametrize("fused", [True, False])
def test_rotation_is_applied_once(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(ragged, "attend", lambda *call, **more: calls.append((call, more)) or call[0])
    q, k = torch.randn(3, 2, 64), torch.randn(3, 1, 64)
    rotation = rotary_tables(Rotary((100.0,)), torch.arange(3), 64)[100.0]
    with forced("triton.attention.short", *(["triton.attention.short_rotary"] if fused else [])):
        attend(q, k, k, (3,), torch.tensor([0, 3]).int(), scale=0.5, pattern=Sliding(2), rotation=rotation)
    (((q_, k_, _, lengths), more),) = calls
    assert lengths == (3,)
    assert more == {"scale": 0.5, "pattern": Sliding(2), "rotation": rotation if fused else None}
    wanted = (q, k) if fused else rotate_pair(q, k, *rotation)
    assert torch.equal(q_, wanted[0])
    assert torch.equal(k_, wanted[1])


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("pattern", [Full(), Sliding(2)], ids=str)
def test_elsewhere_a_rotation_goes_before(pattern: Any, learns: bool) -> None:
    """To the bit."""
    torch.manual_seed(0)
    lengths, cu = (5, 1, 9), torch.tensor([0, 5, 6, 15]).int()
    q, k, v = (torch.randn(15, heads, 32, requires_grad=learns) for heads in (4, 2, 2))
    positions = torch.cat([torch.arange(n) for n in lengths])
    rotation = rotary_tables(Rotary((100.0,)), positions, 32)[100.0]
    found = attend(q, k, v, lengths, cu, scale=0.3, pattern=pattern, rotation=rotation)
    turned = rotate_pair(q, k, *rotation)
    assert torch.equal(found, attend(*turned, v, lengths, cu, scale=0.3, pattern=pattern))
    assert found.requires_grad == learns
