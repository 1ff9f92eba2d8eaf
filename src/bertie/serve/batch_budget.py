"""How many tokens a batch should have on this machine: measured when a server starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from bertie.nn.model import Model
from bertie.text.batch import Batch

SMALLEST, LARGEST = 512, 65_536  # token budgets that are tried
NEAR_BEST = 0.95  # of the best throughput: larger batches add latency for little throughput
LENGTHS = (9, 14, 21, 33, 48, 75, 110, 170)  # of the texts in the measurement
SECONDS = 0.6  # for the measurement; four times as long on a GPU, whose first passes are slow


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
    until = start + SECONDS * (4 if cuda else 1)
    rates: dict[int, float] = {}
    size, seconds = SMALLEST, 0.0
    time_pass(model, 64)  # warm-up
    # The next size takes about twice as long as this one.
    while size <= LARGEST and (not rates or time.perf_counter() + 2 * seconds < until):
        try:
            seconds = min(time_pass(model, size) for _ in range(3 if cuda else 1))
        except Exception as error:
            if rates and is_out_of_memory(error):
                break
            raise
        rates[size] = size / seconds
        if rates[size] < NEAR_BEST * max(rates.values()):
            break  # larger ones are slower
        size *= 2
    best = max(rates.values())
    budget = min(size for size, rate in rates.items() if rate >= NEAR_BEST * best)
    concurrent = devices * (1 if cuda else workers)
    return BudgetMeasurement(budget, rates[budget] * concurrent, rates, time.perf_counter() - start)


@torch.inference_mode()
def time_pass(model: Model, tokens: int) -> float:
    """Seconds of a forward pass over about so many tokens."""
    max_length, lengths = model.config.max_length, list[int]()
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(LENGTHS[len(lengths) % len(LENGTHS)], left, max_length))
    random = np.random.default_rng(0)
    ids = [random.integers(0, model.config.vocab, size=n) for n in lengths]
    # On a CPU only the time of this thread counts: a starting server is busy with other things.
    clock = time.perf_counter if model.device.type == "cuda" else time.thread_time
    start = clock()
    hidden = model.hidden(Batch.from_ids(ids).to(model.device))
    hidden.isfinite().all().item()  # synchronizes with the device
    return clock() - start


def is_out_of_memory(error: BaseException) -> bool:
    """By class on a GPU; on a CPU, torch only has a message for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
