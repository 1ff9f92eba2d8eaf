import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from bertie.errors import ConfigError, InputError
from bertie.nn.pooling import MODES, Pooling
from bertie.text.batch import Batch

WIDTH = 5
SETS = [*((mode,) for mode in MODES), MODES, ("mean", "cls")]


def ragged(texts: int, seed: int = 0) -> tuple[torch.Tensor, Batch]:
    draw = random.Random(seed + texts)
    batch = Batch.from_ids([[1] * draw.randint(4, 12) for _ in range(texts)])
    return torch.randn(len(batch.ids), WIDTH, generator=torch.Generator().manual_seed(seed)), batch


def one_by_one(hidden: torch.Tensor, batch: Batch, modes: tuple[str, ...], skips: list[int]) -> torch.Tensor:
    """The definition of each mode, text by text."""
    rows = []
    for (start, end), skip in zip(pairwise(batch.cu_seqlens.tolist()), skips, strict=True):
        x = hidden[start + skip : end]
        n = torch.arange(skip + 1, end - start + 1, dtype=x.dtype)[:, None]
        each = {
            "cls": x[0],
            "max": x.max(dim=0).values,
            "mean": x.mean(dim=0),
            "mean_sqrt_len_tokens": x.sum(dim=0) / len(x) ** 0.5,
            "weightedmean": (x * n).sum(dim=0) / n.sum(),
            "lasttoken": x[-1],
        }
        rows.append(torch.cat([each[mode] for mode in modes]))
    return torch.stack(rows)


@pytest.mark.parametrize("modes", SETS, ids="+".join)
@pytest.mark.parametrize("texts", range(1, 8))
def test_modes_equal_their_definition(modes: tuple[str, ...], texts: int) -> None:
    hidden, batch = ragged(texts)
    assert_close(Pooling(modes)(hidden, batch), one_by_one(hidden, batch, modes, [0] * texts), atol=1e-6, rtol=1e-6)
    skips = [b % 4 for b in range(texts)]
    pooled = Pooling(modes, include_prompt=False)(hidden, batch, skips)
    assert_close(pooled, one_by_one(hidden, batch, modes, skips), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("modes", SETS, ids="+".join)
@pytest.mark.parametrize("texts", range(1, 8))
@pytest.mark.parametrize("prompt", [None, 0, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_sentence_transformers(modes: tuple[str, ...], texts: int, prompt: int | None, weighted: bool) -> None:
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    hidden, batch = ragged(texts)
    weights = None
    if weighted:
        weights = torch.tensor([0.3, 1.0, 2.5, 0.0])
        batch = replace(batch, ids=torch.randint(4, (len(hidden),), generator=torch.Generator().manual_seed(texts)))
    padded = torch.full((texts, batch.max_len + 2, WIDTH), 9.0)
    mask, ids = (torch.zeros(padded.shape[:2], dtype=torch.int64) for _ in range(2))
    for b, (one, own) in enumerate(zip(hidden.split(batch.lengths), batch.ids.split(batch.lengths), strict=True)):
        padded[b, : len(one)], mask[b, : len(one)], ids[b, : len(one)] = one, 1, own
    features = {"token_embeddings": padded, "attention_mask": mask, "input_ids": ids}
    if prompt is not None:
        features["prompt_length"] = prompt
    if weights is not None:
        features = modules.WordWeights(list("abcd"), dict(zip("abcd", weights.tolist(), strict=True)))(features)
    theirs = modules.Pooling(WIDTH, modes, include_prompt=prompt is None)(features)["sentence_embedding"]
    skips = None if prompt is None else [prompt] * texts
    pooling = Pooling(modes, include_prompt=prompt is None, token_weights=weights)
    assert_close(pooling(hidden, batch, skips), theirs, atol=1e-6, rtol=1e-6)
    with torch.no_grad():  # the short way for means
        assert_close(pooling(hidden, batch, skips), theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_token_weights_learn_batch_invariantly(mode: str) -> None:
    hidden, batch = ragged(5)
    batch = replace(batch, ids=torch.arange(len(hidden)) % 7)
    pooling = Pooling(mode, token_weights=torch.rand(7, generator=torch.Generator().manual_seed(0)))
    assert pooling.token_weights is not None
    pooling(hidden, batch).square().sum().backward()
    grad = pooling.token_weights.grad
    assert grad is not None
    step = 1e-3
    for word in range(7):
        around = []
        for way in (step, -step):
            moved = pooling.token_weights.detach().double()
            moved[word] += way
            around.append(Pooling(mode, token_weights=moved)(hidden.double(), batch).square().sum().item())
        assert grad[word].item() == pytest.approx((around[0] - around[1]) / (2 * step), rel=1e-2, abs=1e-3)
    for pool in (pooling, torch.no_grad()(pooling)):
        together = pool(hidden, batch)
        for b, (one, ids) in enumerate(zip(hidden.split(batch.lengths), batch.ids.split(batch.lengths), strict=True)):
            assert torch.equal(pool(one, Batch.from_ids([ids.tolist()]))[0], together[b])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert pooling(hidden.to(dtype), batch).dtype == dtype


@pytest.mark.parametrize("mode", MODES)
def test_batch_invariance(mode: str) -> None:
    hidden, batch = ragged(7)
    together = Pooling(mode)(hidden, batch)
    for b, one in enumerate(hidden.split(batch.lengths)):
        alone = Pooling(mode)(one, Batch.from_ids([[1] * len(one)]))
        assert torch.equal(alone[0], together[b])
    hidden[: batch.lengths[0]] = 1e8  # a huge neighbour must not eat the digits of the others
    assert torch.equal(Pooling(mode)(hidden, batch)[1:], together[1:])


@pytest.mark.parametrize("modes", SETS, ids="+".join)
def test_gradients(modes: tuple[str, ...]) -> None:
    hidden, batch = ragged(4)
    skips = [0, 1, 2, 3]
    weights = torch.randn(4, WIDTH * len(modes), generator=torch.Generator().manual_seed(1))
    fast = hidden.clone().requires_grad_()
    slow = hidden.clone().requires_grad_()
    (Pooling(modes, include_prompt=False)(fast, batch, skips) * weights).sum().backward()
    (one_by_one(slow, batch, modes, skips) * weights).sum().backward()
    assert fast.grad is not None
    assert_close(fast.grad, slow.grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_empty_texts_change_nothing(mode: str) -> None:
    hidden, batch = ragged(3)
    cu = torch.nn.functional.pad(batch.cu_seqlens, (0, 2), value=len(hidden))
    hidden.requires_grad_()
    pooled = Pooling(mode)(hidden, replace(batch, cu_seqlens=cu, lengths=(batch.max_len,) * 5))
    assert torch.equal(pooled[:3], Pooling(mode)(hidden, batch))
    assert torch.isfinite(pooled).all()
    (grad,) = torch.autograd.grad(pooled[:3].square().sum(), hidden)
    assert torch.isfinite(grad).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("modes", SETS, ids="+".join)
def test_the_gpu_agrees_and_is_deterministic(modes: tuple[str, ...]) -> None:
    hidden, batch = ragged(7)
    skips = [b % 4 for b in range(7)]
    pool = Pooling(modes, include_prompt=False)
    slow, fast = hidden.clone().requires_grad_(), hidden.cuda().requires_grad_()
    expected, pooled = pool(slow, batch, skips), pool(fast, batch.to("cuda"), skips)
    assert_close(pooled.cpu(), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(pooled, pool(fast, batch.to("cuda"), skips))
    expected.square().sum().backward()
    pooled.square().sum().backward()
    assert slow.grad is not None
    assert fast.grad is not None
    assert_close(fast.grad.cpu(), slow.grad, atol=1e-5, rtol=1e-5)
    for b, one in enumerate(hidden.cuda().split(batch.lengths)):
        alone = pool(one, Batch.from_ids([[1] * len(one)]).to("cuda"), skips[b : b + 1])
        assert torch.equal(alone[0], pooled[b])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_keeps_the_dtype_and_accumulates_in_float32(dtype: torch.dtype) -> None:
    batch = Batch.from_ids([[1] * 3000])
    hidden = torch.ones(3000, 1, dtype=dtype)
    for mode in MODES:
        pooled = Pooling(mode)(hidden, batch)
        assert pooled.dtype == dtype
        expected = 3000**0.5 if mode == "mean_sqrt_len_tokens" else 1.0
        assert pooled.item() == pytest.approx(expected, rel=4e-3)


def test_prompt_lengths_count_only_when_prompts_are_left_out() -> None:
    hidden, batch = ragged(3)
    assert torch.equal(Pooling("mean")(hidden, batch, [1, 2, 3]), Pooling("mean")(hidden, batch))


@pytest.mark.parametrize("modes", ["", "average", ("mean", "cls_token"), ()])
def test_unknown_modes_are_refused(modes: str | tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="one or more of cls, max, mean"):
        Pooling(modes)


@pytest.mark.parametrize(
    ("prompts", "match"),
    [([1], "1 prompt_lengths for 2 texts"), ([3, 2], r"prompt_lengths\[1\]=2 must be"), ([-1, 0], r"\[0\]=-1")],
)
def test_wrong_prompt_lengths_are_refused(prompts: list[int], match: str) -> None:
    batch = Batch.from_ids([[1] * 4, [1] * 2])
    with pytest.raises(InputError, match=match):
        Pooling("mean", include_prompt=False)(torch.zeros(6, WIDTH), batch, prompts)


def test_hidden_states_of_another_batch_are_refused() -> None:
    with pytest.raises(InputError, match=r"the batch needs \(3, D\)"):
        Pooling("mean")(torch.zeros(4, WIDTH), Batch.from_ids([[1, 2, 3]]))
