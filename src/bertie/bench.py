"""Throughput of a model, compared with the device's peak matrix-multiplication throughput: `bertie bench`.

The side-by-side benchmarks (benchmarks/) use the random texts and timers of this module.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.checkpoints import storage
from bertie.checkpoints.model_spec import model_spec
from bertie.config import Precision
from bertie.errors import ConfigError, InputError
from bertie.nn.linear import check_fp8, precision_of, to_fp8, to_int8
from bertie.nn.model import Model
from bertie.ops.gemm_benchmark import GemmBenchmark
from bertie.text.batch import Batch, pack
from bertie.training.mfu import encoder_weights

if TYPE_CHECKING:
    from bertie.tasks import Embedder

IntArray = NDArray[np.int64]
BUDGETS = {"cpu": (2048, 8192), "cuda": (16384, 65536, 131072)}  # token budgets of a batch to try
PADDED_BATCH = 32  # texts of a padded batch, the default of most libraries
BUSY_SPREAD = 0.15  # by how much matrix multiplication may slow down before the machine counts as busy
GEMM_DTYPES: dict[Precision, torch.dtype] = {  # of the operands of matrix multiplications
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Throughput:
    """Texts and tokens per second, and the share of the ceiling that the matrix multiplications reach."""

    texts_per_s: float
    tokens_per_s: float
    share_of_ceiling: float  # at most 1


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """The result of `measure`."""

    device: str
    precision: str
    ceiling: float  # operations per second of large matrix multiplications: the best round
    machine_busy: bool  # rounds differed by more than BUSY_SPREAD, or the model was faster than the ceiling
    texts: int
    tokens: int
    budget: int  # tokens per batch: the fastest of those tried
    from_ids: Throughput  # to the last hidden state
    from_text: Throughput | None  # to embeddings; None without a tokenizer
    padding: float  # padding tokens per token, if batches of 32 texts were padded to their longest
    padding_sorted: float  # the same with the texts sorted by length first
    peak_bytes: int | None  # device memory, weights included; on a CPU, of the whole process
    per_million_tokens: float | None  # cost of a million tokens, in the currency of the hourly price
    dispatch: list[dict[str, str]]  # the backends in use (ops/dispatch.py)


def measure(
    model: Model,
    *,
    texts: Sequence[str] | None = None,
    embedder: Embedder | None = None,
    seconds: float = 10.0,
    price: float | None = None,
) -> BenchmarkResult:
    """Measure the throughput of a model on its device.

    Args:
        model: The model.
        texts: Texts to read; by default random tokens of mixed lengths (see `mixed_lengths`).
        embedder: The same model with its tokenizer, to measure from text as well.
        seconds: Approximate duration of the measurement.
        price: Price of the machine per hour.

    >>> result = measure(random_model("1x16"), seconds=0.1)
    >>> result.from_ids.tokens_per_s > 0 and result.padding > result.padding_sorted >= 0
    True
    """
    if not seconds > 0:
        raise InputError(f"seconds={seconds} must be greater than 0")
    if texts is not None and not texts:
        raise InputError("there are no texts to measure with")
    gemm = GemmBenchmark(model.device, GEMM_DTYPES[precision_of(model.encoder)])
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
    max_length = model.config.max_length if embedder is None else embedder.checkpoint.max_length
    with torch.inference_mode():
        ids = _choose_ids(model, embedder, texts, max_length, seconds)
        calls: dict[int | str, Callable[[], object]] = {
            budget: forward_all(model, flat_batches(ids, budget, model.device))
            for budget in BUDGETS.get(model.device.type, BUDGETS["cuda"])
        }
        tokens = text_tokens = sum(map(len, ids))
        if embedder is not None:
            read = list(texts) if texts is not None else [embedder.tokenizer.decode(text) for text in ids]
            text_tokens = int(embedder.tokenizer.encode_flat(read).lengths.sum())
            calls["text"] = lambda: embedder.embed(read)
        times, ceilings = _time_with_ceiling(calls, gemm, model.device, seconds)
    spent = {name: statistics.median(values) for name, values in times.items()}
    best = min((key for key in spent if isinstance(key, int)), key=lambda budget: spent[budget])
    counts: dict[int | str, int] = {best: tokens} | ({} if embedder is None else {"text": text_tokens})
    return _summarize(
        model, ids, best, {key: (spent[key], count) for key, count in counts.items()}, ceilings, gemm, price
    )


def _summarize(
    model: Model,
    ids: Sequence[IntArray],
    budget: int,
    measured: Mapping[int | str, tuple[float, int]],  # seconds and tokens
    ceilings: Sequence[float],
    gemm: GemmBenchmark,
    price: float | None,
) -> BenchmarkResult:
    device, lengths = model.device, np.array([len(text) for text in ids])
    tokens, top = int(lengths.sum()), max(ceilings)
    flops = 2.0 * encoder_weights(model.config)
    shares = {key: flops * count / seconds / top for key, (seconds, count) in measured.items()}
    throughputs = {
        key: Throughput(len(ids) / seconds, count / seconds, min(1.0, shares[key]))
        for key, (seconds, count) in measured.items()
    }
    from_ids, from_text = throughputs[budget], throughputs.get("text")
    with torch.inference_mode():
        dispatch = model.dispatch_report()
    return BenchmarkResult(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        precision=precision_of(model.encoder),
        ceiling=top,
        machine_busy=max(shares.values()) > 1 or statistics.median(ceilings) < (1 - BUSY_SPREAD) * top,
        texts=len(ids),
        tokens=tokens,
        budget=budget,
        from_ids=from_ids,
        from_text=from_text,
        padding=padded_tokens(lengths, PADDED_BATCH) / tokens - 1,
        padding_sorted=padded_tokens(np.sort(lengths), PADDED_BATCH) / tokens - 1,
        peak_bytes=_peak_bytes(device, gemm),
        per_million_tokens=None if price is None else price / ((from_text or from_ids).tokens_per_s * 3600 / 1e6),
        dispatch=dispatch,
    )


def _choose_ids(
    model: Model, embedder: Embedder | None, texts: Sequence[str] | None, max_length: int, seconds: float
) -> list[IntArray]:
    """Token ids of the texts, truncated to the maximum length; or random ids for about a tenth of the time."""
    if embedder is not None and texts is not None:
        flat = embedder.tokenizer.encode_flat(texts)
        return [text[:max_length] for text in np.split(flat.ids, np.cumsum(flat.lengths)[:-1])]
    few = random_ids(mixed_lengths(32, max_length), model.config.vocab)
    call = forward_all(model, [Batch.from_ids(few).to(model.device)])
    call()
    per_text = min(time_call(call, model.device) for _ in range(2)) / len(few)
    count = int(np.clip(seconds / 10 / per_text, 32, 4096))
    return random_ids(mixed_lengths(count, max_length), model.config.vocab)


def _time_with_ceiling(
    calls: Mapping[int | str, Callable[[], object]], gemm: GemmBenchmark, device: torch.device, seconds: float
) -> tuple[dict[int | str, list[float]], list[float]]:
    """Seconds of each call, and the throughput of matrix multiplication before each: in rounds, at least two.

    A temporary slowdown of the machine then affects both, and the best rounds of both are comparable.
    """
    until = time.perf_counter() + seconds
    times: dict[int | str, list[float]] = {name: [] for name in calls}
    ceilings: list[float] = []
    for call in calls.values():
        call()  # not counted: memory is allocated, kernels are compiled
    longest = 0.0
    while len(ceilings) < 2 * len(calls) or time.perf_counter() + longest < until:
        began = time.perf_counter()
        for name, call in calls.items():
            ceilings.append(gemm.flops_per_s())
            times[name].append(time_call(call, device))
        longest = max(longest, time.perf_counter() - began)
    return times, ceilings


def _peak_bytes(device: torch.device, gemm: GemmBenchmark) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - gemm.nbytes
    if find_spec("resource") is None:  # Windows
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def random_model(shape: str, device: torch.device | str = "cpu", precision: Precision = "fp32") -> Model:
    """A model with random weights: from a config.json of any family, or a BERT of layers x width, as in "12x768"."""
    match = re.fullmatch(r"(\d+)x(\d+)", shape)
    if match:
        depth, width = map(int, match.groups())
        heads = max(1, width // 64)
        config = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512}
        config |= {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
        config |= {"intermediate_size": 4 * width}
    elif Path(shape).is_file():
        config = storage.read_json(Path(shape))
    else:
        raise ConfigError(f"shape={shape!r} must be layers x width, as in 12x768, or the path of a config.json")
    model = Model(model_spec(config, None, head="none").encoder, {}).eval()
    if precision == "fp8":
        check_fp8(device)
        to_fp8(model.to(device, torch.bfloat16).encoder)
        return model
    if precision == "int8":
        to_int8(model.encoder)
        return model.to(device)
    return model.to(device, GEMM_DTYPES[precision])


# --- random texts and timers ---


def mixed_lengths(count: int, longest: int = 512, seed: int = 4) -> IntArray:
    """Text lengths in tokens as they occur in practice: log-normal, mean 117, median 87, 95th percentile 324.

    (4,096 texts with the default seed have exactly these values.)

    >>> lengths = mixed_lengths(4096)
    >>> int(np.median(lengths)), round(float(lengths.mean())), int(lengths.max())
    (87, 117, 512)
    """
    lengths = np.exp(np.random.default_rng(seed).normal(np.log(87), 0.8, count))
    return np.clip(lengths, 3, longest).astype(np.int64)


def random_ids(lengths: Sequence[int] | IntArray, vocab: int, seed: int = 0) -> list[IntArray]:
    """Random token ids for texts of these lengths, without the lowest ids, which are mostly special tokens."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(min(5, vocab - 1), vocab, int(np.sum(lengths)))
    return np.split(ids, np.cumsum(lengths)[:-1])


def flat_batches(ids: Sequence[IntArray], budget: int, device: torch.device) -> list[Batch]:
    """Batches of texts of similar length, at most `budget` tokens each."""
    groups = pack([len(text) for text in ids], budget)
    return [Batch.from_ids([ids[i] for i in group]).to(device) for group in groups]


def forward_all(model: Model, batches: Sequence[Batch]) -> Callable[[], None]:
    """A function that runs the encoder on all batches."""

    def call() -> None:
        for batch in batches:
            model.hidden(batch)

    return call


def padded_tokens(lengths: Sequence[int] | IntArray, batch_size: int) -> int:
    """Tokens, padding included, of batches of consecutive texts padded to their longest."""
    sizes = np.asarray(lengths)
    rows = [sizes[start : start + batch_size] for start in range(0, len(sizes), batch_size)]
    return int(sum(row.max() * len(row) for row in rows))


def synchronize(device: torch.device) -> float:
    """Wait for the device, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Time a call, in seconds."""
    began = synchronize(device)
    call()
    return synchronize(device) - began


def time_interleaved(
    calls: Mapping[str, Callable[[], object]], device: torch.device, repeats: int, until: float = float("inf")
) -> dict[str, list[float]]:
    """Time calls in rounds, in seconds: thermal throttling then affects all of them equally.

    No round starts after `until` (by `time.perf_counter`), except the first.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats):
        if repeat and time.perf_counter() > until:
            break
        for name, call in calls.items():
            times[name].append(time_call(call, device))
    return times
