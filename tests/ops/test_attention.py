"""Attention against its reference on random ragged batches, forward and backward."""

from __future__ import annotations

import random

import pytest
import torch
from torch.testing import assert_close

from bertie.config import BlockSparse, Bucketed, Causal, Disentangled, Full, Pattern, Sliding
from bertie.nn.positions import relative_rows
from bertie.ops import Relative, reference
from bertie.ops.torch import grouped_attention as grouped
from tests.ops.forced import attend

PATTERNS: list[Pattern] = [
    *(Full(), Sliding(1), Sliding(5), Sliding(64), BlockSparse(4, 1), BlockSparse(8, 0)),
    *(Causal(), Causal(0), Causal(4), Causal(64)),
]
H, D = 4, 8


def batch(lengths: list[int], key_heads: int = H) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = sum(lengths)
    q, k, v = (torch.randn(total, h, D) for h in (H, key_heads, key_heads))
    return tuple(x.requires_grad_() for x in (q, k, v))  # type: ignore[return-value]


def compare(lengths: list[int], key_heads: int = H, relative: Relative | None = None, **options: object) -> None:
    q, k, v = batch(lengths, key_heads)
    leaves = [q, k, v]
    if relative is not None:
        leaves += [t for t in (relative.keys, relative.queries, relative.scores) if t is not None]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    fast = attend(q, k, v, tuple(lengths), cu, scale=0.3, relative=relative, **options)
    slow = reference.attend(q, k, v, tuple(lengths), scale=0.3, relative=relative, **options)  # type: ignore[arg-type]
    assert_close(fast, slow, atol=1e-5, rtol=0)
    upstream = torch.randn_like(slow)
    for one, other in zip(
        torch.autograd.grad(fast, leaves, upstream), torch.autograd.grad(slow, leaves, upstream), strict=True
    ):
        assert_close(one, other, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_patterns(pattern: Pattern, seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    compare([draw.choice([1, 2, 3, 17, 40, 40, 61]) for _ in range(draw.randint(1, 6))], pattern=pattern)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_shared_key_heads(key_heads: int) -> None:
    torch.manual_seed(0)
    compare([3, 1, 9], key_heads=key_heads, pattern=Full())


@pytest.mark.parametrize(
    "scheme",
    [Bucketed(32), Disentangled(("c2p", "p2c"), 16), Disentangled(("c2p",), 64, buckets=8), Disentangled(("p2c",), 4)],
    ids=str,
)
def test_relative_terms(scheme: Bucketed | Disentangled) -> None:
    torch.manual_seed(0)
    lengths = [1, 30, 7, 30]
    rows = relative_rows(scheme, max(lengths), torch.device("cpu"))
    if isinstance(scheme, Bucketed):
        relative = Relative(rows, scores=torch.randn(scheme.buckets, H, requires_grad=True))
    else:
        keys, queries = (torch.randn(2 * scheme.span, H, D, requires_grad=True) for _ in range(2))
        relative = Relative(
            rows,
            keys=keys if "c2p" in scheme.terms else None,
            queries=queries if "p2c" in scheme.terms else None,
        )
    compare(lengths, relative=relative, pattern=Full())


def test_global_keys() -> None:
    torch.manual_seed(0)
    lengths = [20, 3, 20]
    chosen = torch.zeros(43, dtype=torch.bool)
    chosen[[0, 7, 20, 24, 42]] = True
    compare(lengths, pattern=Sliding(2), global_tokens=chosen)


@pytest.mark.parametrize("pattern", [Full(), Sliding(6), Causal(), Causal(9), BlockSparse(4, 1)], ids=str)
def test_long_texts_in_chunks(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "CHUNK", 7)
    monkeypatch.setattr(grouped, "MAX_SCORES", 500)
    torch.manual_seed(0)
    rows = relative_rows(Bucketed(8), 45, torch.device("cpu"))
    compare([45, 2, 45, 45, 8], pattern=pattern, relative=Relative(rows, scores=torch.randn(8, H, requires_grad=True)))
    compare([45, 2, 45, 45, 8], pattern=pattern)


def test_dropout_is_applied_and_unbiased() -> None:
    torch.manual_seed(0)
    q, k, v = batch([50])
    cu = torch.tensor([0, 50]).int()
    plain = attend(q, k, v, (50,), cu, scale=0.3, pattern=Full())
    dropped = torch.stack([attend(q, k, v, (50,), cu, scale=0.3, pattern=Full(), dropout=0.5) for _ in range(400)])
    assert dropped.std(0).min() > 1e-3
    assert_close(dropped.mean(0), plain, atol=0.1, rtol=0)
