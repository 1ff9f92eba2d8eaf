"""The programs for relative terms, in a process of their own; and who goes there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bertie.config import Full, Sliding
from bertie.kernels import Relative, attend, disentangled, gpu
from tests.kernels.compiled import compiled


def test_the_programs() -> None:
    """Interpreted. Without Triton there are none, and that is said."""
    pytest.importorskip("triton", reason="the programs are Triton's")
    cases = Path(__file__).with_name("disentangled_programs.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


class OnGpu:
    """As much of a tensor on a GPU as is asked about."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.is_cuda, self.device, self.dtype, self.shape = True, torch.device("cuda", 0), dtype, torch.Size(shape)


def test_who_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disentangled, "enabled", True)
    monkeypatch.setattr(disentangled, "_has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def can(q: Any, k: Any = None, pattern: Any = Full(), globals_: Any = None) -> bool:  # noqa: B008
        return disentangled.can(q, q if k is None else k, pattern, globals_)

    assert can(OnGpu(9, 4, 64))
    assert can(OnGpu(9, 4, 24, dtype=torch.float16))
    assert not can(OnGpu(9, 4, 64, dtype=torch.float32))
    assert not can(OnGpu(9, 4, 8))
    assert not can(OnGpu(9, 4, 20))
    assert not can(OnGpu(9, 4, 136))
    assert not can(OnGpu(9, 4, 64), OnGpu(9, 2, 64))  # shared key heads
    assert not can(OnGpu(9, 4, 64), pattern=Sliding(3))
    assert not can(OnGpu(9, 4, 64), globals_=torch.zeros(9, dtype=torch.bool))
    assert not can(torch.zeros(9, 4, 64, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not can(OnGpu(9, 4, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(disentangled, "enabled", False)
    assert not can(OnGpu(9, 4, 64))


def test_attend_goes_there_with_relative_terms_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(disentangled, "can", lambda *call: True)
    monkeypatch.setattr(disentangled, "attend", lambda q, *call, **more: seen.append(more) or q)
    q = torch.zeros(3, 2, 16)
    cu = torch.tensor([0, 3]).int()
    relative = Relative(torch.zeros(5, dtype=torch.long), scores=torch.zeros(1, 2))
    attend(q, q, q, (3,), cu, scale=1.0, pattern=Full())
    assert not seen
    attend(q, q, q, (3,), cu, scale=0.5, pattern=Full(), relative=relative, dropout=0.1)
    assert seen == [{"scale": 0.5, "relative": relative, "dropout": 0.1}]


def test_who_reads_by_scores_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is learnt: rectangles, unless our own programs are asked for."""
    monkeypatch.setattr(gpu, "can", lambda *call: False)
    monkeypatch.setattr(gpu, "attend_biased", lambda *call, **more: "rectangles")
    monkeypatch.setattr(disentangled, "attend", lambda *call, **more: "ours")
    q: Any = OnGpu(3, 2, 16)
    relative = Relative(torch.zeros(5, dtype=torch.long), scores=torch.zeros(1, 2))

    def taken(ours: bool, asked: bool) -> Any:
        monkeypatch.setattr(disentangled, "can", lambda *call: ours)
        monkeypatch.setattr(disentangled, "scores_alone", asked)
        return attend(q, q, q, (3,), torch.tensor([0, 3]).int(), scale=1.0, pattern=Full(), relative=relative)

    with torch.no_grad():
        assert taken(ours=True, asked=True) == "ours"
        assert taken(ours=True, asked=False) == "rectangles"
        assert taken(ours=False, asked=True) == "rectangles"
    for asked in (True, False):
        assert taken(ours=True, asked=asked) == "ours"


@pytest.mark.parametrize("rows", disentangled.SIZES)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_scores_alone_compiled(kind: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the programs are Triton's")
    from bertie.kernels import disentangled_kernels as programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    single = ("level_at", "delta_at", "scores_at", "dscores_at", "dkeys_at", "dqueries_at")
    floats = dict.fromkeys(("scale", "factor", "kept_scale"), "fp32")
    constants: dict[str, Any] = {"KEYS": False, "QUERIES": False, "SCORES": True, "DROP": False, "PACK": True}
    constants |= {"HEADS": 12, "WIDTH": 64, "D": 64, "B": rows, "seed_at": None}
    for number, program in enumerate((programs.forward, programs.backward_queries, programs.backward_keys)):
        pointers = {name: f"*{kind}" for name in program.arg_names if name.endswith("_at")}
        types = pointers | dict.fromkeys(single, "*fp32") | floats | {"tiles_at": "*i32"}
        warps, stages, _ = disentangled.SIZES[rows][number]
        compiled(program, types, constants, warps, stages)


@pytest.mark.parametrize("lengths", [[1], [16, 17, 1, 64], [0, 5, 0, 0, 200, 64, 0]], ids=str)
@pytest.mark.parametrize("rows", [16, 64])
def test_tiles_cover_each_token_once(lengths: list[int], rows: int) -> None:
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    wanted = {(int(start), n, first) for start, n in zip(cu, lengths, strict=False) for first in range(0, n, rows)}
    exact = disentangled._tiles(tuple(lengths), rows, torch.device("cpu")).tolist()
    assert {tuple(one) for one in exact} == wanted
    assert len(exact) == len(wanted)
    assert [n for _, n, _ in exact] == sorted((n for _, n, _ in exact), reverse=True)
    found = disentangled._tiles_of(cu, sum(lengths), rows, max(lengths)).tolist()
    assert {tuple(one) for one in found if one[1]} == wanted
    assert len([one for one in found if one[1]]) == len(wanted)
