"""Forward passes replayed from CUDA graphs against eager ones: varying lengths and sizes, threads and streams."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.config import Disentangled, EmbeddingConfig, EncoderConfig, HeadConfig, NormConfig
from bertie.nn.model import Model
from bertie.ops import disable
from bertie.ops.cuda_graphs import ForwardGraphs, GraphRecorder
from bertie.text.batch import Batch
from tests.gpu.test_attention import ENCODERS
from tests.test_config import GOOD

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HEADS = {
    "first": HeadConfig(kind="text", outputs=3, dense=32, activation="tanh"),
    "mean": HeadConfig(kind="text", outputs=3, pooling="mean"),
    "token": HeadConfig(kind="token", outputs=2),
}
KINDS: dict[str, dict[str, Any]] = {
    **ENCODERS,  # type: ignore[dict-item]
    "disentangled": {"positions": (Disentangled(("c2p", "p2c"), 64, buckets=16, norm=NormConfig()),)},
}
ROUNDS = [[30, 10, 20], [1, 1, 40, 2, 6, 10], [16] * 4, [64], [20, 20, 20], [16] * 3, [5] * 40, [64, 64, 3]] * 3
TOLERANCE = 6e-2  # bfloat16, after two layers of GEMMs with other numbers of rows


def small(name: str) -> EncoderConfig:
    sizes: dict[str, Any] = {"width": 32, "head_width": 16, "ff_width": 64}
    return replace(GOOD, max_length=64, embeddings=EmbeddingConfig(width=32, segments=2), **sizes, **KINDS[name])


def build_model(name: str, dtype: torch.dtype = torch.bfloat16) -> Model:
    torch.manual_seed(0)
    model = Model(small(name), HEADS).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.graphs = ForwardGraphs(record_after=2)
    return model.to("cuda", dtype)


def batch_of(lengths: list[int], seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(2, 50, (n,), generator=draw).tolist() for n in lengths]
    return Batch.from_ids(ids).to("cuda")


def near(one: Tensor, other: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    assert one.shape == other.shape
    assert one.isfinite().all()
    atol = TOLERANCE if dtype == torch.bfloat16 else 1e-4
    assert_close(one.float(), other.float(), atol=atol * max(1.0, float(other.float().abs().max())), rtol=0)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", KINDS)
def test_replay(name: str, mode: Any) -> None:
    if name == "disentangled":
        pytest.importorskip("triton", reason="needs Triton")
    plain, model = build_model(name), build_model(name)
    plain.replay = False
    with mode():
        assert model.encoder.dispatch().replays
        for seed, lengths in enumerate(ROUNDS):
            batch = batch_of(lengths, seed)
            near(model.hidden(batch), plain.hidden(batch))
            for head in HEADS:
                near(model(batch, head), plain(batch, head))
        assert len(model.graphs) > 4
        # A replay equals the eager forward pass of its batch.
        for recording in model.graphs._recordings.values():
            recording.replay()
            if len(recording.out) == len(recording.batch.ids) and recording.out.shape[1] == 32:
                near(recording.out, plain.encoder(recording.batch))


def test_float32() -> None:
    plain, model = build_model("learned", torch.float32), build_model("learned", torch.float32)
    plain.replay = False
    with torch.inference_mode():
        for seed, lengths in enumerate(ROUNDS):
            batch = batch_of(lengths, seed)
            near(model.hidden(batch), plain.hidden(batch), torch.float32)
    assert len(model.graphs) > 0


def test_max_graphs() -> None:
    plain, model = build_model("learned"), build_model("learned")
    plain.replay = False
    model.graphs = ForwardGraphs(max_graphs=2, record_after=2, min_idle=0)
    with torch.inference_mode():
        for seed, lengths in enumerate(ROUNDS):
            batch = batch_of(lengths, seed)
            for _ in range(3):
                near(model.hidden(batch), plain.hidden(batch))
            assert len(model.graphs) <= 2


@pytest.mark.parametrize("name", KINDS)
def test_a_larger_recording(name: str) -> None:
    if name == "disentangled":
        pytest.importorskip("triton", reason="needs Triton")
    plain, model = build_model(name), build_model(name)
    plain.replay = False
    model.graphs = ForwardGraphs(record_after=2, max_spare=0.5)
    with torch.inference_mode():
        for lengths in ([60] * 4, [16] * 40, [64] * 8) * 2:
            model.hidden(batch_of(lengths, 0))
        assert len(model.graphs) == 3
        for seed, lengths in enumerate(([50] * 4, [30, 60, 60], [16] * 36, [7, 64, 20] * 4, [64] * 7)):
            batch = batch_of(lengths, seed)
            near(model.hidden(batch), plain.hidden(batch))
        assert len(model.graphs) == 3


def test_a_capture_that_fails_affects_no_other() -> None:
    recorder, x = GraphRecorder(torch.device("cuda")), torch.ones(4, device="cuda")
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        recorder.record(lambda: x.sum().item(), warmup=0)
    assert torch.cuda.current_stream() == stream
    torch.cuda.synchronize()
    replay, out = recorder.record(lambda: x * 2, warmup=1)
    x.fill_(3)
    with recorder.exclusive():
        replay()
    assert out.tolist() == [6] * 4


def test_weights_changed_in_place_or_moved() -> None:
    plain, model = build_model("learned"), build_model("learned")
    plain.replay = False
    batch = batch_of([9, 30], 1)
    with torch.inference_mode():
        for _ in range(2):
            model.hidden(batch)
        assert len(model.graphs) == 1
    with torch.no_grad():
        for one in (plain, model):
            one.encoder.blocks[0].ff.up.weight.mul_(-1.5)
    with torch.inference_mode():
        near(model.hidden(batch), plain.hidden(batch))
    model.half()
    plain.half()
    assert len(model.graphs) == 0
    with torch.inference_mode():
        for _ in range(3):
            near(model.hidden(batch), plain.hidden(batch))


def test_no_replay_with_gradients() -> None:
    model = build_model("learned")
    for _ in range(3):
        model.hidden(batch_of([9, 30], 1)).float().sum().backward()
    assert len(model.graphs) == 0


@pytest.mark.parametrize("own_streams", [False, True])
def test_threads_share_graphs(own_streams: bool) -> None:
    plain, model = build_model("learned"), build_model("learned")
    plain.replay = False
    model.graphs = ForwardGraphs(max_graphs=3, record_after=2, min_idle=0)
    errors: list[str] = []

    def ask(number: int) -> None:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.default_stream()
        try:
            with torch.inference_mode(), torch.cuda.stream(stream):
                for seed, lengths in enumerate(ROUNDS):
                    batch = batch_of(lengths, 100 * number + seed)
                    near(model.hidden(batch), plain.hidden(batch))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    with torch.inference_mode():
        plain.hidden(batch_of([3], 0))
    torch.cuda.synchronize()
    threads = [Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_on_by_default_and_turned_off_by_name() -> None:
    model, batch = build_model("learned"), batch_of([9, 30], 1)
    with torch.inference_mode():
        with disable("cuda_graphs"):
            for _ in range(3):
                model.hidden(batch)
            assert len(model.graphs) == 0
        for _ in range(3):
            model.hidden(batch)
    assert len(model.graphs) == 1
    with torch.inference_mode():
        assert model.dispatch_report()[0]["backend"] == "cuda_graphs"
