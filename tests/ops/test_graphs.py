"""Recorded passes without a GPU: which sizes there are, and that a batch laid into a larger one says the same.

What is recorded here is played by running it anew. On a GPU: tests/gpu/test_graphs.py.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.config import Disentangled, Full, HeadConfig, Learned, Norm, Rotary
from bertie.errors import InputError
from bertie.nn import attention
from bertie.nn.model import Model
from bertie.ops import cuda_graphs as graphs
from bertie.ops.attention import attend
from bertie.ops.cuda_graphs import Graphs, Sizes, sizes_of
from bertie.text.batch import Batch, spare_ends
from tests.test_config import GOOD

HEADS = {
    "first": HeadConfig(kind="text", outputs=3, dense=8, activation="tanh"),
    "mean": HeadConfig(kind="text", outputs=3, pooling="mean"),
    "late": HeadConfig(kind="text", outputs=3, pooling="late"),
    "token": HeadConfig(kind="token", outputs=2),
}
WIDE = replace(GOOD, max_length=64, positions=(Learned(64),))
CONFIGS = {
    "learned": WIDE,
    "counted": replace(WIDE, positions=(Learned(66, skip_id=1),)),
    "rotary": replace(WIDE, positions=(Rotary((1e4, 1e4)),)),
    "disentangled": replace(WIDE, positions=(Disentangled(("c2p", "p2c"), 64, buckets=8, norm=Norm()),)),
}


def true_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: Any, cu_seqlens: Tensor, **more: Any) -> Tensor:
    """Attention that knows texts from the device alone, as the GPU's paths do."""
    assert len(cu_seqlens) == len(lengths) + 1
    real = tuple(n for n in cu_seqlens.diff().tolist() if n)
    assert sum(real) == len(q)
    assert max(real) <= max(lengths)
    return attend(q, k, v, real, cu_seqlens, **more)


class Rerun(Graphs):
    """Plays by running anew, into the same place."""

    recorded = 0

    def _takes(self, batch: Batch, max_length: int) -> bool:
        return len(batch.ids) <= self.tokens and batch.max_len <= max_length

    def _recorded(self, run: Any, static: Batch) -> Any:
        self.recorded += 1
        out = run(static)
        return lambda: out.copy_(run(static)), out


@pytest.fixture
def _on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertie.nn.model.can_record", lambda encoder: True)
    monkeypatch.setattr(attention, "attend", true_lengths)


def made(cfg: Any = WIDE) -> Model:
    torch.manual_seed(0)
    return Model(cfg, HEADS).eval()


def batch_of(lengths: list[int], seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return Batch.from_ids([torch.randint(0, 50, (n,), generator=draw).tolist() for n in lengths])


def test_sizes() -> None:
    assert sizes_of([16] * 1024, 512) == Sizes(16384, 1536, 16)
    assert sizes_of([1], 512) == Sizes(64, 8, 16)
    assert sizes_of([300], 512) == Sizes(320, 8, 512)
    assert sizes_of([300], 400).longest == 400
    for lengths in ([1], [16] * 7, [5, 60, 3], [512] * 3, [1] * 1000, [17] * 333, list(range(1, 129))):
        tokens = sum(lengths)
        sizes = sizes_of(lengths, 512)
        assert 0 <= sizes.tokens - tokens <= max(63, tokens / 16)
        assert max(lengths) <= sizes.longest <= max(16, 2 * max(lengths))
        assert sizes.texts * sizes.longest > sizes.tokens  # so that bounds are never taken for lengths
        ends = spare_ends(tokens, sizes.tokens, sizes.texts - len(lengths), sizes.longest)
        sizes_left = torch.from_numpy(ends).diff(prepend=torch.tensor([tokens]))
        assert ends[-1] == sizes.tokens
        assert sizes_left.min() >= 0
        assert sizes_left.max() <= sizes.longest
    every = {sizes_of([16] * n, 512) for n in range(1, 1025)}
    assert len(every) < 200


@pytest.mark.usefixtures("_on_the_way")
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_batch_in_a_larger_one(name: str) -> None:
    plain, model = made(CONFIGS[name]), made(CONFIGS[name])
    model.graphs = Rerun()
    # Several sizes, in turn, so that what lies behind a batch is of an earlier one.
    rounds = [[3, 30, 1], [64], [9, 9, 9], [33, 7, 20, 1], [16] * 4, [2] * 30, [40, 20, 4], [16] * 3] * 3
    for seed, lengths in enumerate(rounds):
        batch = batch_of(lengths, seed)
        assert_close(model.hidden(batch), plain.hidden(batch), atol=1e-5, rtol=1e-5)
        for head in HEADS:
            out = model(batch, head)
            assert len(out) == (sum(lengths) if head == "token" else len(lengths))
            assert_close(out, plain(batch, head), atol=1e-5, rtol=1e-5)
    assert 0 < len(model.graphs) < 64


@pytest.mark.usefixtures("_on_the_way")
@torch.no_grad()
def test_when_it_records() -> None:
    model = made()
    model.graphs = once = Rerun(most=2, tokens=128)
    small, large = batch_of([5]), batch_of([40, 40])
    model.hidden(small)
    assert once.recorded == 0  # a size that comes once is not worth it
    first = model.hidden(small)
    assert (once.recorded, len(once)) == (1, 1)
    kept = first.clone()
    model.hidden(batch_of([4, 2], seed=3))
    assert torch.equal(first, kept)  # rows are the caller's
    assert once.recorded == 1
    for _ in range(2):
        model.hidden(large)
        model(small, "first")
    assert (once.recorded, len(once)) == (3, 2)
    model.hidden(small)  # its recording made room for others, and is made again
    assert (once.recorded, len(once)) == (4, 2)
    for _ in range(3):
        model.hidden(batch_of([60, 60, 60]))  # too many tokens
    assert once.recorded == 4
    with pytest.raises(InputError, match="ids holds 99"):
        model.hidden(Batch.from_ids([[99]]))


@pytest.mark.usefixtures("_on_the_way")
@torch.no_grad()
def test_what_cannot_be_recorded_runs_as_it_is() -> None:
    class Failing(Rerun):
        def _recorded(self, run: Any, static: Batch) -> Any:
            self.recorded += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    model = made()
    wanted = model.hidden(batch_of([5]))
    model.graphs = failing = Failing()
    for _ in range(4):
        assert torch.equal(model.hidden(batch_of([5])), wanted)
    assert (failing.recorded, len(failing)) == (1, 0)


@pytest.mark.usefixtures("_on_the_way")
def test_threads_share_them() -> None:
    plain, model = made(), made()
    model.graphs = Rerun()
    wrong: list[int] = []

    @torch.no_grad()
    def ask(number: int) -> None:
        for seed in range(20):
            batch = batch_of([1 + (number + seed) % 9, 3], seed=100 * number + seed)
            if not torch.allclose(model.hidden(batch), plain.hidden(batch), atol=1e-5):
                wrong.append(number)

    threads = [Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(model.graphs) == 1


@torch.no_grad()
def test_on_a_cpu_nothing_changes() -> None:
    plain, model = made(), made()
    model.graphs = Graphs()
    batch = batch_of([5, 9])
    for _ in range(3):
        assert torch.equal(model.hidden(batch), plain.hidden(batch))
        assert torch.equal(model(batch, "first"), plain(batch, "first"))
        # And by itself, whoever says that it could.
        assert torch.equal(
            model.graphs("hidden", plain.encoder, batch, max_length=64, rows="token"), plain.hidden(batch)
        )
    assert len(model.graphs) == 0
    assert not graphs.can(model.encoder)


@pytest.mark.usefixtures("_on_the_way")
@torch.no_grad()
def test_copies_and_moved_weights_begin_anew() -> None:
    model = made()
    model.graphs = Rerun(most=5)
    for _ in range(2):
        model.hidden(batch_of([5]))
    assert len(model.graphs) == 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.graphs is not model.graphs
        assert (len(other.graphs), other.graphs.most) == (0, 5)
    model.double()
    assert len(model.graphs) == 0


def test_which_models_can(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weight:
        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cpu")

    class Fake:
        training = False
        cfg: Any = replace(WIDE, head_width=8, heads=1, kv_heads=1)
        relative: Any = None

        class embeddings:
            class words:
                weight = Weight()

    monkeypatch.setattr(graphs.gpu, "_has_flash", lambda device: True)
    monkeypatch.setattr(graphs.disentangled, "can", lambda q, k, pattern, globals_: isinstance(pattern, Full))
    one: Any = Fake()
    assert not graphs.can(one)  # there may be gradients
    with torch.no_grad():
        assert graphs.can(one)
        one.relative = made(CONFIGS["disentangled"]).encoder.relative
        assert graphs.can(one)
        one.relative.scheme = None
        assert not graphs.can(one)
        one.relative, one.training = None, True
        assert not graphs.can(one)
        one.training, one.cfg = False, replace(one.cfg, head_width=4, heads=2, kv_heads=2)
        assert not graphs.can(one)
