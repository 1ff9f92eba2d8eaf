"""The programs for relative terms, in a process of their own; and who goes there."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bertie.config import Full, Sliding
from bertie.ops import Relative, disable
from bertie.ops.contracts import AttentionInputs
from bertie.ops.dispatch import AttentionBackends, Site, select
from bertie.ops.triton import disentangled_attention as disentangled
from bertie.text.batch import Batch
from bertie.training.graphed_step import micro_batch_size
from tests.ops.compiled import compiled
from tests.ops.forced import attend, forced, hardware


def test_the_programs() -> None:
    """Interpreted. Without Triton there are none, and that is said."""
    pytest.importorskip("triton", reason="the programs are Triton's")
    cases = Path(__file__).with_name("disentangled_programs.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


CUDA = torch.device("cuda", 0)
HALF = Site(CUDA, torch.bfloat16, heads=4, kv_heads=4, head_width=64)


def attention_rows(site: Site) -> list[str]:
    """The last part of each resolved backend's name."""
    return [row.backend.rsplit(".", 1)[1] for row in select("attention", site)]


def test_supported_sites() -> None:
    with hardware():
        for site in (HALF, replace(HALF, head_width=24, dtype=torch.float16), replace(HALF, training=True)):
            for relative in ("", "bucketed", "disentangled"):
                assert "disentangled" in attention_rows(replace(site, relative=relative))
        for change in (
            {"dtype": torch.float32}, {"head_width": 8}, {"head_width": 20}, {"head_width": 136},
            {"kv_heads": 2}, {"patterns": (Sliding(3),)}, {"device": torch.device("cpu")},
        ):  # fmt: skip
            assert "disentangled" not in attention_rows(replace(HALF, **change))
        with disable("triton.attention.disentangled"):
            assert "disentangled" not in attention_rows(HALF)
    with hardware(capability=(7, 5)):
        assert "disentangled" not in attention_rows(HALF)
    with hardware(triton=False):
        assert "disentangled" not in attention_rows(HALF)


def test_order_of_preference() -> None:
    with hardware():
        assert attention_rows(HALF) == ["short", "disentangled", "varlen", "grouped"]
        assert attention_rows(replace(HALF, training=True)) == ["disentangled", "varlen", "grouped"]
        assert attention_rows(replace(HALF, relative="disentangled")) == ["disentangled", "grouped"]
        bucketed = replace(HALF, relative="bucketed")
        assert attention_rows(bucketed) == ["disentangled", "bucketed", "grouped"]
        assert attention_rows(replace(bucketed, training=True)) == ["disentangled", "grouped"]
        assert attention_rows(replace(bucketed, dtype=torch.float32)) == ["bucketed", "grouped"]
        assert attention_rows(replace(HALF, device=torch.device("cpu"))) == ["grouped"]


def chosen(site: Site, lengths: tuple[int, ...], **options: Any) -> str:
    """The backend for a batch of these lengths."""
    q = torch.empty(sum(lengths), 4, 64, device="meta")
    more: dict[str, Any] = {"relative": None, "rotation": None, "global_tokens": None, "dropout": 0.0, "cache": None}
    call = AttentionInputs(q, q, q, lengths, q, 0.5, site.patterns[0], **(more | options))
    return AttentionBackends.resolve(site).choose(call).backend.rsplit(".", 1)[1]


RELATIVE = Relative(torch.zeros(5, dtype=torch.long), scores=torch.zeros(1, 2))


def test_chosen_for_relative_positions_of_any_length() -> None:
    with hardware():
        for lengths in ((3,), (2 * disentangled.LONGEST,)):
            site = replace(HALF, relative="disentangled")
            assert chosen(site, lengths, relative=RELATIVE, dropout=0.1) == "disentangled"
            assert chosen(site, lengths, relative=RELATIVE, global_tokens=torch.zeros(3)) == "grouped"


def test_chosen_for_short_texts_without_relative_positions() -> None:
    most = disentangled.LONGEST
    training = replace(HALF, training=True)
    with hardware():
        assert chosen(HALF, (3, most)) == "short"
        assert chosen(HALF, (3, most), dropout=0.1) == "disentangled"
        assert chosen(training, (3, most)) == "disentangled"
        assert chosen(training, (3, most + 1)) == "varlen"
        with disable("triton.attention"):
            assert chosen(HALF, (3, most)) == "varlen"
        with disable("torch.attention.varlen"):
            assert chosen(training, (3, most + 1)) == "grouped"


def test_arguments_of_the_chosen_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the layers of a pass share is handed on."""
    calls: list[Any] = []
    monkeypatch.setattr(disentangled, "attend", lambda *call, **more: calls.append((call, more)) or call[0])
    q, cu, cache = torch.zeros(3, 2, 16), torch.tensor([0, 3]).int(), {}
    with forced("triton.attention.disentangled"):
        attend(q, q, q, (3,), cu, scale=0.5, pattern=Full(), relative=RELATIVE, dropout=0.1, cache=cache)
    ((call, more),) = calls
    assert call == (q, q, q, (3,), cu)
    assert more == {"scale": 0.5, "relative": RELATIVE, "dropout": 0.1, "cache": cache}
    assert more["cache"] is cache


def test_bucketed_scores_without_our_kernel() -> None:
    site = replace(HALF, relative="bucketed")
    with hardware():
        assert chosen(site, (3,), relative=RELATIVE) == "disentangled"
        with disable("triton"):
            assert chosen(site, (3,), relative=RELATIVE) == "bucketed"
            assert chosen(site, (513,), relative=RELATIVE) == "grouped"
            assert chosen(site, (3,), relative=RELATIVE, dropout=0.1) == "grouped"
            assert chosen(replace(site, training=True), (3,), relative=RELATIVE) == "grouped"


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
    size = micro_batch_size(mini, max_length)
    assert batch.max_len <= size.longest
    assert size.texts * size.longest > size.tokens
