"""The program for rotary positions, in a process of its own and compiled; who goes there, and what is there without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from bertie.config import Rotary
from bertie.ops import disable
from bertie.ops.dispatch import Site, select
from bertie.ops.torch.eager import rotary_tables, rotate, rotate_pair
from bertie.ops.triton import rotary
from tests.ops.compiled import compiled
from tests.ops.forced import hardware


def test_the_program() -> None:
    """On a GPU as it is, elsewhere interpreted. Without Triton there is none, and that is said."""
    pytest.importorskip("triton", reason="the program is Triton's")
    environment = dict(os.environ) if torch.cuda.is_available() else os.environ | {"TRITON_INTERPRET": "1"}
    cases = Path(__file__).with_name("rotary_programs.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(12, 12, 64), (16, 2, 128), (6, 2, 24), (1, 1, 16)])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_compiled(
    kind: str, heads: int, key_heads: int, width: int, back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an H100. Each thread writes where it has read, and nowhere else: so outputs may lie where the inputs do."""
    pytest.importorskip("triton", reason="the program is Triton's")
    from bertie.ops.triton import rotary_kernels as programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"HEADS": heads, "KEY_HEADS": key_heads, "WIDTH": width, "ROWS": rotary.ROWS, "BACK": back}
    room = {"HEADS_ROOM": heads, "KEY_HEADS_ROOM": key_heads, "HALF_ROOM": width // 2}
    types = dict.fromkeys(("q_at", "k_at", "q_out_at", "k_out_at"), f"*{kind}") | {"cos_at": "*fp32", "sin_at": "*fp32"}
    constants = sizes | {name: rotary._power_of_2(size) for name, size in room.items()}
    made = compiled(programs.turn, types, constants, rotary.WARPS)
    read, written = (
        Counter(re.findall(rf"tt\.{what} .* : (tensor<.*>) loc", made.asm["ttgir"])) for what in ("load", "store")
    )
    assert written.total() == 4
    assert written <= read  # the same shapes in the same layouts


def test_supported_sites() -> None:
    def backends(dtype: torch.dtype = torch.bfloat16, width: int = 64, device: str = "cuda:0") -> list[str]:
        site = Site(torch.device(device), dtype, heads=4, kv_heads=2, head_width=width, rotary=True)
        return [row.backend for row in select("rotary", site) if "short" not in row.backend]

    with hardware():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert backends(dtype) == ["triton.rotary"]
        assert backends(torch.float64) == ["torch.eager"]
        assert backends(width=8) == backends(width=256) == ["torch.eager"]
        assert backends(device="cpu") == ["torch.eager"]
        with disable("triton.rotary"):
            assert backends() == ["torch.eager"]
    with hardware(triton=False):
        assert backends() == ["torch.eager"]


def test_eager_pair_is_eager_rotate() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    cos, sin = rotary_tables(Rotary((100.0,)), torch.arange(5), 16)[100.0]
    found = rotate_pair(q, k, cos, sin)
    assert torch.equal(found[0], rotate(q, cos, sin))
    assert torch.equal(found[1], rotate(k, cos, sin))
