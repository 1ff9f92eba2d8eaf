"""How many tokens a batch should have on this machine: measured when a server starts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice

import numpy as np
import torch

from bertie.nn.model import Model
from bertie.ops.cuda_graphs import GraphSize, graph_size
from bertie.text.batch import Batch

SMALLEST, LARGEST = 512, 65_536  # token budgets that are tried
SMALLEST_ON_GPU = 4096  # smaller batches take longer to launch than to run
NEAR_BEST = 0.95  # of the best throughput: larger batches add latency for little throughput
LENGTHS = (9, 14, 21, 33, 48, 75, 110, 170)  # of the texts in the measurement
SECONDS = 0.1  # for the measurement on a CPU, where small batches are nearly as fast as large ones
SAMPLE = 4  # on a CPU a quarter of a batch is timed, since the server waits for it: time is proportional to tokens
GPU_SECONDS = 1.0  # without the first passes of each size, for which kernels are compiled and CUDA graphs recorded
# Batches that are run before requests come: tokens of the smallest one, the step to the next ones, and tokens of the
# longest text. Longer ones would make attention slow for batches without such texts that are replayed as one of these.
LADDER_START, LADDER_STEP, LONGEST = 64, 1.3, 512
# A server meets the same sizes again and again: more of them are recorded as CUDA graphs than offline, and sooner. And
# launching kernels takes its engine longer than the GPU takes for spare tokens.
RECORD_AFTER, MAX_GRAPHS, MAX_SPARE = 2, 128, 0.5
WARM_PASSES = RECORD_AFTER + 1


@cache
def cores() -> int:
    """Threads that torch may use. Cached, because it changes with the calling thread."""
    return torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class BudgetMeasurement:
    """The result of `measure_budget`."""

    budget: int  # tokens per batch
    rate: float  # tokens per second with this budget
    rates: dict[int, float]  # by tokens per batch
    seconds: float  # that the measurement took


def measure_budget(model: Model, *, workers: int, devices: int = 1) -> BudgetMeasurement:
    """Time growing batches of random tokens; the budget is the smallest whose throughput is near the best.

    `workers`: concurrent batches per device. `devices`: how many run the same model.
    """
    torch.set_num_threads(max(1, cores() // workers))
    try:
        return _measure(model, workers, devices)
    finally:
        torch.set_num_threads(cores())


def _measure(model: Model, workers: int, devices: int) -> BudgetMeasurement:
    cuda = model.device.type == "cuda"
    start = time.perf_counter()
    rates: dict[int, float] = {}
    size, part, passes = (SMALLEST_ON_GPU, 1, 3) if cuda else (SMALLEST, SAMPLE, 1)
    time_pass(model, 64)  # warm-up
    until = (time.perf_counter() if cuda else start) + (GPU_SECONDS if cuda else SECONDS)
    seconds = 0.0
    # The next size takes about twice as long as this one.
    while size <= LARGEST and (not rates or time.perf_counter() + 2 * passes * seconds < until):
        try:
            if cuda:
                until += sum(time_pass(model, size) for _ in range(WARM_PASSES))
            seconds = min(time_pass(model, size // part) for _ in range(passes))
        except Exception as error:
            if rates and is_out_of_memory(error):
                break
            raise
        rates[size] = size / part / seconds
        if rates[size] < NEAR_BEST * max(rates.values()):
            break  # larger ones are slower
        size *= 2
    best = max(rates.values())
    budget = min(size for size, rate in rates.items() if rate >= NEAR_BEST * best)
    concurrent = devices * (1 if cuda else workers)
    return BudgetMeasurement(budget, rates[budget] * concurrent, rates, time.perf_counter() - start)


def warm_up(model: Model) -> Iterator[None]:
    """Run batches of many sizes as often as it takes to record them as CUDA graphs and to compile kernels."""
    for lengths in _warm_up_batches(model.graphs.max_tokens, model.config.max_length):
        for _ in range(WARM_PASSES):
            _run(model, lengths)
            yield


def _warm_up_batches(max_tokens: int, max_length: int) -> Iterator[list[int]]:
    """The lengths of texts in batches of growing size. Almost any batch has room in the recording of one of them."""
    tokens, sizes = float(LADDER_START), set[GraphSize]()
    while tokens <= max_tokens:
        longest = min(int(tokens) * 3 // 4, LONGEST, max_length)
        for lengths in (
            [32, *[8] * (int(tokens) // 8 - 4)],  # short texts, such as queries
            list(islice(cycle(LENGTHS), max(1, int(tokens) * len(LENGTHS) // sum(LENGTHS)))),
            [longest, *[32] * ((int(tokens) - longest) // 32)],  # any texts, if there are not too many
        ):
            possible = [min(length, max_length) for length in lengths]
            size = graph_size(possible, max_length)
            if size not in sizes:
                sizes.add(size)
                yield possible
        tokens *= LADDER_STEP


@torch.inference_mode()
def time_pass(model: Model, tokens: int) -> float:
    """Seconds of a forward pass over about so many tokens."""
    max_length, lengths = model.config.max_length, list[int]()
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(LENGTHS[len(lengths) % len(LENGTHS)], left, max_length))
    # On a CPU only the time of this thread counts: a starting server is busy with other things.
    clock = time.perf_counter if model.device.type == "cuda" else time.thread_time
    start = clock()
    _run(model, lengths)
    return clock() - start


@torch.inference_mode()
def _run(model: Model, lengths: Sequence[int]) -> None:
    random = np.random.default_rng(0)
    ids = [random.integers(0, model.config.vocab, size=n) for n in lengths]
    hidden = model.hidden(Batch.from_ids(ids).to(model.device))
    hidden.isfinite().all().item()  # synchronizes with the device


def is_out_of_memory(error: BaseException) -> bool:
    """By class on a GPU; on a CPU, torch only has a message for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
