"""Operations per token, against torch's counter and a count of query-key pairs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bertie.config import BlockSparse, Causal, Full, Sliding
from bertie.errors import ConfigError, InputError
from bertie.nn.model import Model
from bertie.ops.reference import _count
from bertie.switches import disable
from bertie.text.batch import Batch
from bertie.training.mfu import flops_per_token, peak_flops
from tests.parity import tiny
from tests.parity.test_transformers import ours
from tests.training.tiny import masked


def counted(of: Model, lengths: list[int], rows: torch.Tensor) -> tuple[int, int]:
    """Operations there, and there and back, as torch counts them."""
    draw = np.random.default_rng(0)
    batch = Batch.from_ids([draw.integers(5, 60, n) for n in lengths])
    # torch has no count for its fused attention on a CPU; and on a GPU it counts scores that are computed twice.
    # Nor does it count what compiled kernels do.
    with disable("native.training"), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hidden = of.hidden(batch, "mlm")[rows]
        outputs = of.head("mlm")(hidden, batch, of.encoder.embeddings.words.weight)
        there = counter.get_total_flops()
        outputs.sum().backward()
    return there, counter.get_total_flops()


@pytest.mark.parametrize(
    "name",
    [
        *("bert", "albert", "electra", "mpnet", "eurobert", "modernbert", "longformer", "big_bird"),
        *("deberta", "deberta-near", "deberta-v2", "deberta-v3"),
    ],
)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    of, _ = ours(tiny.build(name, "ForMaskedLM"))
    of.train()
    cfg = of.config
    lengths = [tiny.TINY[name].longest, 17, 17, 5]
    tokens = sum(lengths)
    rows = torch.arange(0, tokens, 4)
    there, both = counted(of, lengths, rows)
    inner = cfg.heads * cfg.head_width
    # On a CPU what a pattern hides is computed, then hidden: torch counts it and we do not.
    for pattern, n in product(cfg.patterns, lengths):
        unseen = sum(not _count(pattern, i, j, n) for i in range(n) for j in range(n))
        there -= 4 * inner * unseen
        both -= 12 * inner * unseen
    if name == "deberta-v3":  # the table goes through the content's projections, that of values too, which none reads
        assert of.encoder.relative is not None
        spare = cfg.depth * 2 * len(of.encoder.relative.rows.weight) * cfg.width * inner
        there, both = there - spare, both - 3 * spare
        assert spare < 0.01 * there
    share = len(rows) / tokens
    assert tokens * flops_per_token(of, lengths, share) == pytest.approx(both, rel=1e-9)
    assert tokens * flops_per_token(of, lengths, share, backward=False) == pytest.approx(there, rel=1e-9)


def test_pairs_of_attention_patterns() -> None:
    from bertie.training.mfu import _pairs

    sizes = np.array([1, 2, 5, 9, 30, 31, 33, 61])
    for pattern in (
        Full(),
        Sliding(1),
        Sliding(4),
        Sliding(40),
        Causal(),
        Causal(0),
        Causal(6),
        BlockSparse(4, 0),
        BlockSparse(4, 1),
        BlockSparse(3, 2),
    ):
        seen = [sum(_count(pattern, i, j, n) > 0 for i in range(n) for j in range(n)) for n in sizes.tolist()]
        assert _pairs(pattern, sizes).tolist() == seen


def test_invalid_arguments_are_refused() -> None:
    of = masked(40, 24, dropout=0.5, std=0.3)
    for lengths in ([], [3, 0], 512):
        with pytest.raises(InputError, match="lengths="):
            flops_per_token(of, lengths, 0.15)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rows_share="):
        flops_per_token(of, [3], 1.5)


def test_the_peak_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = peak_flops("cpu", torch.float32, seconds=0.02)
    assert 1e8 < found < 1e15
    monkeypatch.setattr(torch, "mm", None)
    assert peak_flops("cpu", torch.float32, seconds=0.02) == found
    with pytest.raises(ConfigError, match="seconds=0"):
        peak_flops("cpu", torch.float32, seconds=0)
