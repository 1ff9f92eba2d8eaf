"""The program for attention without relative terms, in a process of its own and compiled; and who goes there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bertie.config import BlockSparse, Full, Rotary, Sliding
from bertie.nn.positions import rotations
from bertie.ops import Relative
from bertie.ops.attention import attend
from bertie.ops.torch import grouped_attention as grouped
from bertie.ops.torch import varlen_attention as gpu
from bertie.ops.triton import disentangled_attention as disentangled
from bertie.ops.triton import rotary
from bertie.ops.triton import short_attention as ragged
from tests.ops.compiled import compiled
from tests.ops.test_disentangled import OnGpu


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


def test_who_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "enabled", True)
    monkeypatch.setattr(ragged, "_has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    most = ragged.LONGEST

    def can(
        q: Any, k: Any = None, lengths: tuple[int, ...] = (7, 2), pattern: Any = Full(),  # noqa: B008
        globals_: Any = None, dropout: float = 0.0,
    ) -> bool:  # fmt: skip
        return ragged.can(q, q if k is None else k, q if k is None else k, lengths, pattern, globals_, dropout)

    assert can(OnGpu(9, 4, 64))
    assert can(OnGpu(9, 4, 24, dtype=torch.float16))
    assert can(OnGpu(9, 4, 64), OnGpu(9, 2, 64))  # shared key heads
    assert can(OnGpu(9, 4, 64), pattern=Sliding(3))
    assert can(OnGpu(most, 4, 64), lengths=(most,))
    assert can(OnGpu(2 * most, 4, 64), lengths=(2 * most,), pattern=Sliding(3))
    assert not can(OnGpu(most + 3, 4, 64), lengths=(most + 1, 2))
    assert not can(OnGpu(9, 4, 64), pattern=BlockSparse(4, 1))
    assert not can(OnGpu(9, 4, 64), lengths=(7, 7, 7))  # bounds, no lengths
    assert not can(OnGpu(9, 4, 64), dropout=0.1)
    assert not can(OnGpu(9, 4, 64), globals_=torch.zeros(9, dtype=torch.bool))
    assert not can(OnGpu(9, 4, 64, dtype=torch.float32))
    for width in (8, 20, 136):
        assert not can(OnGpu(9, 4, width))
    assert not can(torch.zeros(9, 4, 64, dtype=torch.bfloat16))
    for learning in ((True, False), (False, True)):
        q, k = (OnGpu(9, 4, 64, learns=one) for one in learning)
        assert not can(q, k)
        with torch.no_grad():
            assert can(q, k)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not can(OnGpu(9, 4, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ragged, "_has_triton", lambda: False)
    assert not can(OnGpu(9, 4, 64))
    monkeypatch.setattr(ragged, "_has_triton", lambda: True)
    monkeypatch.setattr(ragged, "enabled", False)
    assert not can(OnGpu(9, 4, 64))


def test_attend_goes_there_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not with relative terms."""
    asked: list[Any] = []
    paths = {"ours": ragged, "relative": disentangled, "framework": gpu, "plain": grouped}
    for name, path in paths.items():
        monkeypatch.setattr(path, "attend", lambda *call, name=name, **more: (name, call, more))
    monkeypatch.setattr(ragged, "can", lambda *call: asked.append(call) or True)
    monkeypatch.setattr(disentangled, "can", lambda *call: True)
    monkeypatch.setattr(gpu, "can", lambda *call: True)
    q: Any = OnGpu(3, 2, 16)
    cu = torch.tensor([0, 3]).int()
    call: dict[str, Any] = {"scale": 0.5, "pattern": Sliding(2), "dropout": 0.1}
    found: Any = attend(q, q, q, (3,), cu, **call)
    assert found == ("ours", (q, q, q, (3,)), {"scale": 0.5, "pattern": Sliding(2), "rotation": None})
    assert asked == [(q, q, q, (3,), Sliding(2), None, 0.1)]
    relative = Relative(torch.zeros(5, dtype=torch.long), scores=torch.zeros(1, 2))
    found = attend(q, q, q, (3,), cu, **call, relative=relative)
    assert found[0] == "relative"
    assert len(asked) == 1


def test_who_turns_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program, where heads have halves that it can multiply; else what goes before every other path."""
    turned: Any = OnGpu(3, 2, 64), OnGpu(3, 1, 64)
    monkeypatch.setattr(rotary, "rotated", lambda *given: asked.append(given) or turned)
    asked: list[Any] = []
    for name, path in {"ours": ragged, "framework": gpu, "plain": grouped}.items():
        monkeypatch.setattr(path, "attend", lambda q, k, *_, name=name, **more: (name, q, k, more.get("rotation")))
    monkeypatch.setattr(ragged, "turns", True)
    monkeypatch.setattr(disentangled, "can", lambda *call: False)
    monkeypatch.setattr(gpu, "can", lambda *call: True)

    def way(fits: bool = True, width: int = 64, length: int = 3, pattern: Any = Full()) -> Any:  # noqa: B008
        monkeypatch.setattr(ragged, "can", lambda *call: fits)
        q: Any = OnGpu(length, 2, width)
        k: Any = OnGpu(length, 1, width)
        cu = torch.tensor([0, length]).int()
        name, *given, rotation = attend(q, k, k, (length,), cu, scale=0.5, pattern=pattern, rotation=("cos", "sin"))  # type: ignore[arg-type]
        if rotation is None:
            assert (tuple(given), asked.pop()) == (turned, (q, k, "cos", "sin"))
            return name
        assert (given, rotation, asked) == ([q, k], ("cos", "sin"), [])
        return f"{name}, turning"

    for width in (32, 64, 128):
        assert way(width=width) == "ours, turning"
    for width in (16, 24, 48, 96):
        assert way(width=width) == "ours"
    assert way(fits=False) == "framework"
    monkeypatch.setattr(ragged, "TURNED_SIZES", {128: ragged.SIZES[128]})
    assert way(length=128) == way(length=129, pattern=Sliding(64)) == "ours, turning"
    assert way(length=129) == "ours"
    monkeypatch.setattr(ragged, "turns", False)
    assert way() == "ours"


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("pattern", [Full(), Sliding(2)], ids=str)
def test_elsewhere_a_rotation_goes_before(pattern: Any, learns: bool) -> None:
    """To the bit."""
    torch.manual_seed(0)
    lengths, cu = (5, 1, 9), torch.tensor([0, 5, 6, 15]).int()
    q, k, v = (torch.randn(15, heads, 32, requires_grad=learns) for heads in (4, 2, 2))
    positions = torch.cat([torch.arange(n) for n in lengths])
    rotation = rotations(Rotary((100.0,)), positions, 32)[100.0]
    found = attend(q, k, v, lengths, cu, scale=0.3, pattern=pattern, rotation=rotation)
    turned = rotary.rotated(q, k, *rotation)
    assert torch.equal(found, attend(*turned, v, lengths, cu, scale=0.3, pattern=pattern))
    assert found.requires_grad == learns
