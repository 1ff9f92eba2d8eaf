"""The run: results, the time limit, errors that do not end it, and profiles."""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.models import DEVICE, DTYPE
from bertie.bench import mixed_lengths, synchronize
from bertie.training.mfu import peak_flops


class Run:
    """The results so far, and the time left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.until = time.perf_counter() + options.seconds
        self.ceiling = peak_flops(DEVICE, DTYPE, 0.1 if options.tiny else 0.5)
        self.results: dict[str, Any] = {
            "chip": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "dtype": str(DTYPE).removeprefix("torch."),
            "ceiling_tflops": self.ceiling / 1e12,
            "skipped": [],
        }

    @property
    def seconds_left(self) -> float:
        return float(self.until - time.perf_counter())

    def lengths(self) -> Any:
        """Lengths of the mixed texts."""
        return mixed_lengths(self.options.count, 48 if self.options.tiny else 512)

    def print(self, line: str) -> None:
        print(line, flush=True)

    def skip(self, what: str, why: str) -> None:
        self.results["skipped"].append(f"{what}: {why}")
        self.print(f"  skipped: {what}: {why}")

    def has_time(self, seconds: float, what: str) -> bool:
        """Whether so many seconds are left; if not, `what` is skipped."""
        if self.seconds_left < seconds:
            self.skip(what, f"{self.seconds_left:.0f} s left")
            return False
        return True

    def save(self) -> None:
        if self.options.json:
            self.options.json.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Report an error and continue with the rest."""
        try:
            yield
        except Exception as error:
            if self.options.verbose:
                traceback.print_exc()
            self.skip(what, f"{type(error).__name__}: {error}".splitlines()[0][:200])
        free_memory()

    def rates(self, times: list[float], tokens: int, texts: int, weights: int) -> dict[str, Any]:
        seconds = median(times)
        flops = 2 * weights * tokens / seconds
        return {
            "seq_per_s": texts / seconds,
            "tokens_per_s": tokens / seconds,
            "tflops": flops / 1e12,
            "share_of_ceiling": flops / self.ceiling,
            "seconds": times,
        }


def free_memory() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def absolute_difference(a: Tensor, b: Tensor) -> dict[str, float]:
    difference = (a - b).abs()
    return {"max": float(difference.max()), "mean": float(difference.mean()), "magnitude": float(b.abs().mean())}


def profile(call: Callable[[], object], seconds: float) -> dict[str, Any]:
    """The kernels of one call by share of device time, and how much of the time the device is busy."""
    on_gpu = DEVICE.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as recorded:
        call()
        synchronize(DEVICE)
    events = [
        (event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6, event.count)
        for event in recorded.key_averages()
    ]
    events = sorted((event for event in events if event[1] > 0), key=lambda event: -event[1])
    total = sum(spent for _, spent, _ in events)
    top = [
        {"kernel": key[:120], "share": spent / total, "ms": 1e3 * spent, "calls": count}
        for key, spent, count in events[:12]
    ]
    launches = sum(count for *_, count in events)
    busy = min(1.0, total / seconds)
    return {"device_seconds": total, "seconds": seconds, "busy": busy, "launches": launches, "top": top}
