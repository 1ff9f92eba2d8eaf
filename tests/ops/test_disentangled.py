"""The programs for relative terms, in a process of their own; and who goes there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bertie.config import Full, Sliding
from bertie.ops import Relative
from bertie.ops.attention import attend
from bertie.ops.torch import grouped_attention as grouped
from bertie.ops.torch import varlen_attention as gpu
from bertie.ops.triton import disentangled_attention as disentangled
from bertie.ops.triton import short_attention as ragged
from bertie.text.batch import Batch
from bertie.training import step as stepper
from tests.ops.compiled import compiled


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

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, learns: bool = False) -> None:
        self.dtype, self.shape, self.requires_grad = dtype, torch.Size(shape), learns

    def __len__(self) -> int:
        return self.shape[0]


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


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Which path `attend` takes, where those that it is told of can; and with which options."""
    paths = {"ragged": ragged, "ours": disentangled, "framework": gpu, "plain": grouped}
    for name, path in paths.items():
        monkeypatch.setattr(path, "attend", lambda *call, name=name, **more: (name, more))
    monkeypatch.setattr(gpu, "attend_biased", lambda *call, **more: ("rectangles", more))

    def ask(lengths: tuple[int, ...], *able: str, on_gpu: bool = True, **options: Any) -> Any:
        for name in ("ragged", "ours", "framework"):
            monkeypatch.setattr(paths[name], "can", lambda *call, yes=name in able: yes)
        q: Any = OnGpu(sum(lengths), 2, 16) if on_gpu else torch.zeros(sum(lengths), 2, 16)
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        return attend(q, q, q, lengths, cu, scale=0.5, pattern=Full(), **options)

    return ask


RELATIVE = Relative(torch.zeros(5, dtype=torch.long), scores=torch.zeros(1, 2))


def test_attend_goes_there_with_relative_terms(taken: Callable[..., Any]) -> None:
    """Always, of texts of any length; and what the layers of a pass share is handed on."""
    kept: dict[Any, torch.Tensor] = {}
    for lengths in ((3,), (2 * disentangled.LONGEST,)):
        name, more = taken(lengths, "ragged", "ours", "framework", relative=RELATIVE, dropout=0.1, kept=kept)
        assert (name, more) == ("ours", {"scale": 0.5, "relative": RELATIVE, "dropout": 0.1, "kept": kept})
        assert more["kept"] is kept


def test_attend_goes_there_without_them_where_texts_are_short(taken: Callable[..., Any]) -> None:
    """And where the program that is for reading alone does not take them."""
    most = disentangled.LONGEST
    assert taken((3, most), "ragged", "ours", "framework")[0] == "ragged"
    assert taken((3, most), "ours", "framework", dropout=0.1) == (
        "ours",
        {"scale": 0.5, "relative": None, "dropout": 0.1, "kept": None},
    )
    assert taken((3, most + 1), "ours", "framework")[0] == "framework"
    assert taken((3, most + 1), "ours")[0] == "plain"
    assert taken((3, most), "framework")[0] == "framework"
    assert taken((3, most), "framework", on_gpu=False)[0] == "plain"
    assert taken((3,))[0] == "plain"


def test_rectangles_are_for_what_our_programs_cannot(taken: Callable[..., Any]) -> None:
    with torch.no_grad():
        assert taken((3,), "ours", relative=RELATIVE)[0] == "ours"
        assert taken((3,), relative=RELATIVE)[0] == "rectangles"
        assert taken((3,), relative=RELATIVE, on_gpu=False)[0] == "plain"
    assert taken((3,), "ours", relative=RELATIVE)[0] == "ours"
    assert taken((3,), relative=RELATIVE)[0] == "plain"  # there is something to learn


@pytest.mark.parametrize("rows", disentangled.SIZES)
@pytest.mark.parametrize(
    ("kind", "terms"), [("bf16", "scores"), ("fp16", "scores"), ("bf16", "none"), ("bf16", "drop")]
)
def test_compiled(kind: str, terms: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With scores alone, and with no relative terms at all."""
    pytest.importorskip("triton", reason="the programs are Triton's")
    from bertie.ops.triton import disentangled_attention_kernels as programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    single = ("level_at", "delta_at", "scores_at", "dscores_at", "dkeys_at", "dqueries_at")
    floats = dict.fromkeys(("scale", "factor", "kept_scale"), "fp32")
    constants: dict[str, Any] = {"KEYS": False, "QUERIES": False, "SCORES": terms == "scores", "DROP": terms == "drop"}
    constants |= {"PACK": True, "HEADS": 12, "WIDTH": 64, "D": 64, "B": rows}
    constants |= {} if terms == "drop" else {"seed_at": None}
    sizes = (disentangled.SIZES if terms == "scores" else disentangled.PLAIN_SIZES)[rows]
    for number, program in enumerate((programs.forward, programs.backward_queries, programs.backward_keys)):
        pointers = {name: f"*{kind}" for name in program.arg_names if name.endswith("_at")}
        types = pointers | dict.fromkeys(single, "*fp32") | floats | {"tiles_at": "*i32", "seed_at": "*i64"}
        warps, stages, _ = sizes[number]
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


@pytest.mark.parametrize("max_length", [64, 128, 512])
@pytest.mark.parametrize(
    "lengths",
    [[1], [64] * 8, [128] * 4, [64] * 100, [3, 60, 1], [17] * 333],
    ids=lambda one: f"{len(one)} up to {max(one)}",
)
def test_bounds_of_a_recorded_step_are_never_taken_for_lengths(lengths: list[int], max_length: int) -> None:
    """Which they would be if they filled the batch."""
    batch = Batch.from_ids([[1] * min(n, max_length) for n in lengths])
    mini: Any = SimpleNamespace(batch=batch, targets=SimpleNamespace(rows=None))
    room, texts, longest, _ = stepper._sizes(mini, max_length)
    assert batch.max_len <= longest
    assert texts * longest > room
