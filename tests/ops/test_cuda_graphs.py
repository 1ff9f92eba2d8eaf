"""CUDA-graph replay without a GPU: recorded sizes, and that a batch within a larger one gives the same results.

"Recordings" are replayed by running the model again. tests/gpu has the real ones.
"""

from __future__ import annotations

import copy
import pickle
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.config import BlockSparse, Disentangled, Full, HeadConfig, Learned, NormConfig, Rotary, Sliding
from bertie.errors import InputError
from bertie.nn import attention
from bertie.nn.model import Model
from bertie.ops import cuda_graphs, disable
from bertie.ops.attention import attend
from bertie.ops.contracts import AttentionInputs
from bertie.ops.cuda_graphs import ForwardGraphs, GraphRecorder, GraphSize, graph_size
from bertie.ops.dispatch import select
from bertie.ops.site import Site
from bertie.text.batch import Batch, spare_ends
from tests.ops.forced import forced, hardware
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
    "disentangled": replace(WIDE, positions=(Disentangled(("c2p", "p2c"), 64, buckets=8, norm=NormConfig()),)),
}


def true_lengths(inputs: AttentionInputs, backends: Any) -> Tensor:
    """Attention that reads the lengths from the device, as the backends of a GPU do."""
    assert len(inputs.cu_seqlens) == len(inputs.lengths) + 1
    real = tuple(n for n in inputs.cu_seqlens.diff().tolist() if n)
    assert sum(real) == len(inputs.q)
    assert max(real) <= max(inputs.lengths)
    return attend(replace(inputs, lengths=real), backends)


class Rerun(ForwardGraphs):
    """Replays by running again, into the same output."""

    recorded = 0

    def __init__(
        self,
        max_tokens: int = 4096,
        max_graphs: int = 64,
        record_after: int = 2,
        min_idle: int = 1000,
        max_spare: float = 0.0,
    ) -> None:
        super().__init__(max_tokens, max_graphs, record_after, min_idle, max_spare)

    def _takes(self, batch: Batch, max_length: int) -> bool:
        return len(batch.ids) <= self.max_tokens and batch.max_len <= max_length

    def _record(self, run: Any, static: Batch) -> Any:
        self.recorded += 1
        out = run(static)
        return lambda: out.copy_(run(static)), out


@pytest.fixture
def _replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if this were a GPU: forward passes are replayed, by PyTorch's layers."""
    monkeypatch.setattr(attention, "attend", true_lengths)
    with forced("cuda_graphs"), disable("native.encoder"):
        yield


def made(cfg: Any = WIDE) -> Model:
    torch.manual_seed(0)
    return Model(cfg, HEADS).eval()


def batch_of(lengths: list[int], seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return Batch.from_ids([torch.randint(0, 50, (n,), generator=draw).tolist() for n in lengths])


def test_sizes() -> None:
    assert graph_size([16] * 1024, 512) == GraphSize(16384, 2048, 16)
    assert graph_size([1], 512) == GraphSize(64, 8, 16)
    assert graph_size([300], 512) == GraphSize(320, 8, 512)
    assert graph_size([300], 400).longest == 400
    for lengths in ([1], [16] * 7, [5, 60, 3], [512] * 3, [1] * 1000, [17] * 333, list(range(1, 129))):
        tokens = sum(lengths)
        sizes = graph_size(lengths, 512)
        assert 0 <= sizes.tokens - tokens <= max(63, tokens / 8)
        assert max(lengths) <= sizes.longest <= max(16, 2 * max(lengths))
        assert sizes.texts * sizes.longest > sizes.tokens  # so that bounds are never taken for lengths
        ends = spare_ends(tokens, sizes.tokens, sizes.texts - len(lengths), sizes.longest)
        sizes_left = torch.from_numpy(ends).diff(prepend=torch.tensor([tokens]))
        assert ends[-1] == sizes.tokens
        assert sizes_left.min() >= 0
        assert sizes_left.max() <= sizes.longest
    every = {graph_size([16] * n, 512) for n in range(1, 1025)}
    assert len(every) < 100


@pytest.mark.usefixtures("_replayed")
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


@pytest.mark.usefixtures("_replayed")
@torch.no_grad()
def test_which_sizes_are_recorded() -> None:
    model = made()
    model.graphs = once = Rerun(max_graphs=2, max_tokens=128, min_idle=0)
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


@pytest.mark.usefixtures("_replayed")
@torch.no_grad()
def test_what_cannot_be_recorded_runs_eagerly() -> None:
    class Failing(Rerun):
        def _record(self, run: Any, static: Batch) -> Any:
            self.recorded += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    model = made()
    wanted = model.hidden(batch_of([5]))
    model.graphs = failing = Failing()
    for _ in range(4):
        assert torch.equal(model.hidden(batch_of([5])), wanted)
    assert (failing.recorded, len(failing)) == (1, 0)


class FakeCuda:
    """The parts of torch.cuda that a recorder uses. Captures fail as told, and as PyTorch's do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.pools, self.events = "default", 0, list[str]()
        self.recording: set[int] = set()  # pools that the allocator takes for such that are being recorded
        self.capturing, self.most = 0, 0
        self.can_end = True
        for name in (
            "device",
            "graph_pool_handle",
            "Stream",
            "Event",
            "current_stream",
            "stream",
            "CUDAGraph",
            "graph",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def device(self, device: object) -> Any:
        return nullcontext()

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def Stream(self, device: object) -> Any:
        return SimpleNamespace(name="capture", wait_stream=lambda other: None)

    def Event(self) -> Any:
        return SimpleNamespace(
            synchronize=lambda: None,
            record=lambda stream: self.events.append("recorded"),
        )

    def current_stream(self, device: object = None) -> Any:
        return SimpleNamespace(name=self.current, wait_stream=lambda other: None, wait_event=lambda event: None)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self) -> Any:
        def pool() -> int:
            if not graph.ended:
                raise RuntimeError("without a preceding successful capture")
            return 1

        graph = SimpleNamespace(ended=False, pool=pool, replay=lambda: None)
        return graph

    @contextmanager
    def graph(self, graph: Any, pool: int, stream: Any, capture_error_mode: str) -> Iterator[None]:
        if pool in self.recording:
            raise RuntimeError("already recording to mempool_id")
        self.recording.add(pool)
        before, self.current = self.current, stream.name
        self.capturing += 1
        self.most = max(self.most, self.capturing)
        try:
            yield
        finally:
            self.capturing -= 1
            if not self.can_end:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.recording.remove(pool)
            graph.ended, self.current = True, before


def test_a_capture_that_fails_affects_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    recorder = GraphRecorder(torch.device("cuda"))

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(fail, warmup=0)
    assert (cuda.current, cuda.pools) == ("default", 1), "the capture was ended, and its pool can be used again"
    cuda.can_end = False
    with pytest.raises(RuntimeError, match="previous error"):
        recorder.record(lambda: 1, warmup=0)
    assert cuda.current == "default"
    cuda.can_end = True
    _, outputs = recorder.record(lambda: 2, warmup=0)
    assert outputs == 2
    assert cuda.current == "default"

    cuda.can_end = False
    for _ in range(5):
        with pytest.raises(RuntimeError):
            recorder.record(lambda: 3, warmup=0)
    assert len(cuda.recording) == 3, "nothing can be captured"
    with pytest.raises(torch.OutOfMemoryError), recorder.exclusive():
        fail()
    assert cuda.events == ["recorded"], "what was launched before the error is waited for"


def test_one_capture_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model that is being reloaded, while the one before it runs in another thread."""
    cuda = FakeCuda(monkeypatch)
    recorders = [GraphRecorder(torch.device("cuda")) for _ in range(2)]
    run = partial(time.sleep, 0.05)
    threads = [Thread(target=recorder.record, args=(run,), kwargs={"warmup": 0}) for recorder in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cuda.most == 1


@pytest.mark.usefixtures("_replayed")
@torch.no_grad()
def test_a_larger_recording_is_used_if_the_own_size_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "LATER", 1)
    plain, model = made(), made()
    model.graphs = rerun = Rerun(max_spare=0.5)
    for _ in range(2):
        model.hidden(batch_of([60] * 4))

    def fail(run: Any, static: Batch) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rerun, "_record", fail)
    replays: list[int] = []
    use = rerun._use
    monkeypatch.setattr(rerun, "_use", lambda key: replays.append(1) or use(key))
    batch = batch_of([40] * 4)
    for _ in range(4):
        assert_close(model.hidden(batch), plain.hidden(batch), atol=1e-5, rtol=1e-5)
    assert len(replays) == 4
    # It may have been dropped to make room for the one that could not be recorded.
    rerun.max_graphs, rerun.min_idle = 1, -1
    rerun._seen.clear()
    for _ in range(3):
        assert_close(model.hidden(batch), plain.hidden(batch), atol=1e-5, rtol=1e-5)
    assert len(rerun) == 0


@pytest.mark.usefixtures("_replayed")
def test_threads_share_recordings() -> None:
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
    model.graphs = ForwardGraphs()
    batch = batch_of([5, 9])
    for _ in range(3):
        assert torch.equal(model.hidden(batch), plain.hidden(batch))
        assert torch.equal(model(batch, "first"), plain(batch, "first"))
        # And by itself, whoever says that it could.
        assert torch.equal(
            model.graphs("hidden", plain.encoder, batch, max_length=64, rows="token"), plain.hidden(batch)
        )
    assert len(model.graphs) == 0
    assert not model.encoder.dispatch().replays


@pytest.mark.usefixtures("_replayed")
@torch.no_grad()
def test_copies_and_moved_models_record_anew() -> None:
    model = made()
    model.graphs = Rerun(max_graphs=5)
    for _ in range(2):
        model.hidden(batch_of([5]))
    assert len(model.graphs) == 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.graphs is not model.graphs
        assert (len(other.graphs), other.graphs.max_graphs) == (0, 5)
    model.double()
    assert len(model.graphs) == 0


def test_supported_sites() -> None:
    """On GPUs, of models whose attention reads the lengths from the device; in training those of plain attention."""
    half = Site.of(replace(WIDE, head_width=8, heads=1, kv_heads=1), torch.device("cuda", 0), torch.bfloat16)
    disentangled = replace(half, relative="disentangled", head_width=16)

    def replays(site: Site) -> bool:
        return select("replay", site)[0].backend == "cuda_graphs"

    with hardware():
        assert replays(half)
        assert replays(replace(half, dtype=torch.float32))
        assert replays(replace(half, patterns=(Full(), Sliding(3))))
        assert replays(disentangled)
        assert replays(replace(half, training=True, autocast=True))
        for site in (
            replace(half, autocast=True),
            replace(half, head_width=4),
            replace(half, relative="bucketed"),
            replace(half, global_tokens=True),
            replace(half, convolution=True),
            replace(half, patterns=(BlockSparse(4, 1),)),
            replace(half, dtype=torch.float32, patterns=(Sliding(3),)),
            replace(disentangled, dtype=torch.float32),
            replace(disentangled, training=True),
            replace(half, training=True, dtype=torch.float16),
            replace(half, training=True, checkpointing=True),
            replace(half, device=torch.device("cpu")),
        ):
            assert not replays(site), site
        with disable("cuda_graphs"):
            assert not replays(half)


@pytest.mark.usefixtures("_replayed")
def test_replay_is_for_inference_without_hooks() -> None:
    model, batch = made(), batch_of([5])
    model.graphs = rerun = Rerun()
    for _ in range(3):
        model(batch, "first")  # gradients are recorded
    with torch.no_grad():
        model.replay = False
        for _ in range(3):
            model.hidden(batch)
        model.replay = True
        calls: list[int] = []
        hook = model.encoder.blocks[0].register_forward_hook(lambda *_: calls.append(1))
        for _ in range(3):
            model.hidden(batch)
        assert (rerun.recorded, len(calls)) == (0, 3)
        hook.remove()
        with disable("cuda_graphs"):
            for _ in range(3):
                model.hidden(batch)
        assert rerun.recorded == 0
        for _ in range(3):
            model.hidden(batch)
    assert rerun.recorded == 1


@pytest.mark.usefixtures("_replayed")
@torch.no_grad()
def test_replaced_weights_are_recorded_anew() -> None:
    """Changes in place are seen by a recording; a replaced parameter or module is not."""
    model, batch = made(), batch_of([5])
    model.graphs = rerun = Rerun()
    for _ in range(2):
        model.hidden(batch)
    model.encoder.embeddings.words.weight.mul_(2.0)
    model.hidden(batch)
    assert rerun.recorded == 1
    block = model.encoder.blocks[0]
    for change in (
        lambda: setattr(block.ff.up, "weight", torch.nn.Parameter(torch.ones_like(block.ff.up.weight))),  # type: ignore[arg-type]
        lambda: setattr(block.ff.down.weight, "data", torch.ones_like(block.ff.down.weight)),  # type: ignore[arg-type]
        lambda: setattr(block.ff, "up", copy.deepcopy(block.ff.up)),
    ):
        change()
        assert len(rerun) == 1
        model.hidden(batch)
        assert len(rerun) == 0
        model.hidden(batch)
        assert len(rerun) == 1


@pytest.mark.usefixtures("_replayed")
@torch.no_grad()
def test_a_full_cache_keeps_what_is_in_use() -> None:
    model = made()
    model.graphs = rerun = Rerun(max_graphs=1, min_idle=3)
    small, large = batch_of([5]), batch_of([40, 40])
    for _ in range(2):
        model.hidden(small)
    for _ in range(3):
        model.hidden(large)
        model.hidden(small)
    assert rerun.recorded == 1
    for _ in range(4):
        model.hidden(large)
    assert (rerun.recorded, len(rerun)) == (2, 1)


@pytest.mark.usefixtures("_replayed")
@torch.no_grad()
def test_a_size_is_recorded_when_it_has_occurred_often() -> None:
    model, batch = made(), batch_of([5])
    model.graphs = rerun = Rerun(record_after=4)
    for count in range(1, 7):
        model.hidden(batch)
        assert rerun.recorded == int(count >= 4)
    assert made().graphs.record_after == 8


@pytest.mark.usefixtures("_replayed")
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_batch_is_replayed_in_a_larger_recording(name: str) -> None:
    plain, model = made(CONFIGS[name]), made(CONFIGS[name])
    model.graphs = rerun = Rerun(max_spare=0.5)
    recorded = [*(batch_of([60] * n, n) for n in (2, 4, 8)), batch_of([16] * 30)]
    for batch in recorded * 2:
        model.hidden(batch)
    assert (rerun.recorded, len(rerun)) == (4, 4)
    draw = random.Random(0)
    replayed = 0
    for seed in range(60):
        lengths = [draw.choice([3, 20, 33, 60]) for _ in range(draw.randint(1, 9))]
        batch = batch_of(lengths, seed)
        key = rerun._larger("hidden", batch)
        if key is not None:
            size = key[1]
            assert sum(lengths) <= size.tokens <= 1.5 * sum(lengths) + 64
            replayed += 1
        assert_close(model.hidden(batch), plain.hidden(batch), atol=1e-5, rtol=1e-5)
    assert replayed > 30
    assert 4 <= rerun.recorded < 15, "sizes that have a larger one are recorded later"


@pytest.mark.usefixtures("_replayed")
@torch.no_grad()
def test_a_larger_recording_is_not_used_if_attention_would_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of many texts, of which one is long, for texts that are all short: its grid is for as many long ones."""
    model = made()
    model.graphs = rerun = Rerun(max_spare=0.5)
    for _ in range(2):
        model.hidden(batch_of([60, *[4] * 60]))
    short = batch_of([8] * 36)
    assert rerun._larger("hidden", short) is not None, "the grid is small"
    monkeypatch.setattr(cuda_graphs, "MIN_GRID", 0)
    assert rerun._larger("hidden", short) is None
    assert rerun._larger("hidden", batch_of([8] * 30 + [50])) is not None


@pytest.mark.usefixtures("_replayed")
@torch.no_grad()
def test_what_a_larger_recording_has_no_room_for() -> None:
    model = made()
    model.graphs = rerun = Rerun(max_spare=0.5)
    for _ in range(2):
        model.hidden(batch_of([20] * 12))
    (size,) = (size for _, size in rerun._recordings)
    assert size == GraphSize(240 + 16, 16, 32)
    assert rerun._larger("hidden", batch_of([20] * 11)) is not None
    assert rerun._larger("head text", batch_of([20] * 11)) is None, "of another function"
    assert rerun._larger("hidden", batch_of([40] * 6)) is None, "too long a text"
    assert rerun._larger("hidden", batch_of([11] * 20)) is None, "too many texts"
    assert rerun._larger("hidden", batch_of([20] * 5)) is None, "too few tokens"
    assert rerun._larger("hidden", batch_of([20] * 13)) is None, "too many tokens"
    model.graphs.max_spare = 0.0
    for _ in range(15):
        model.hidden(batch_of([20] * 9))
    assert rerun.recorded == 2
