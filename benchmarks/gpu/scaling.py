"""Parts `lengths` (how time and memory grow) and `invariance` (a text alone and in a batch)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.harness import Run, free_memory, peak_bytes
from benchmarks.gpu.models import DEVICE, DTYPE, bertie_model, config_of, transformers_model
from bertie.bench import flat_batches, forward_all, mixed_lengths, random_ids, time_call, time_interleaved
from bertie.nn.model import Model
from bertie.ops.cuda_graphs import ForwardGraphs
from bertie.text.batch import Batch

MAX_LENGTHS = {"bert-base": 512, "modernbert-base": 8192, "deberta-v3-base": 4096, "deberta-v3-large": 4096}


def lengths(run: Run) -> None:
    """Time by total tokens and by text length; peak memory of one long text."""
    options = run.options
    results = run.results.setdefault("lengths", {})
    budget = 1 << (9 if options.tiny else 16)
    for name, longest in MAX_LENGTHS.items():
        if name not in options.models or not run.has_time(8, f"lengths {name}"):
            continue
        config = config_of(name, options.tiny)
        model = bertie_model(transformers_model(config, DTYPE), DTYPE)
        result: dict[str, Any] = {"total": {}, "length": {}, "one text": {}}
        results[name] = result
        vocab = config["vocab_size"]

        def seconds(ids: list[Any], model: Model = model) -> float:
            return _median_seconds(forward_all(model, flat_batches(ids, budget, DEVICE)), options)

        for power in range(6, 11) if options.tiny else range(12, 21):
            with run.guard(f"lengths {name}, 2^{power} tokens"):
                result["total"][str(1 << power)] = seconds(random_ids(_mixed_total(1 << power), vocab))
        for power in range(4, min(longest, 128 if options.tiny else longest).bit_length()):
            n = 1 << power
            with run.guard(f"lengths {name}, texts of {n} tokens"):
                result["length"][str(n)] = seconds(random_ids([n] * (budget // n), vocab))
            with run.guard(f"lengths {name}, one text of {n} tokens"):
                result["one text"][str(n)] = _one_text(model, Batch.from_ids(random_ids([n], vocab)).to(DEVICE))
        run.print(f"lengths {name}: {json.dumps(result)}")
        run.save()
        free_memory()


def _one_text(model: Model, batch: Batch) -> dict[str, float]:
    model.hidden(batch)
    free_memory()
    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    seconds = time_call(forward_all(model, [batch]), DEVICE)
    return {"seconds": seconds, "peak_bytes": peak_bytes() - before}


def _mixed_total(total: int) -> list[int]:
    """Mixed lengths with a given sum."""
    sizes = mixed_lengths(max(8, total // 40)).tolist()
    sizes = sizes[: int(np.searchsorted(np.cumsum(sizes), total)) + 1]
    sizes[-1] -= sum(sizes) - total
    return [n for n in sizes if n > 0]


def _median_seconds(call: Callable[[], None], options: argparse.Namespace) -> float:
    call()
    return median(time_interleaved({"": call}, DEVICE, options.repeats)[""])


def invariance(run: Run) -> None:
    """Each text alone, and in a batch with others."""
    results = run.results.setdefault("invariance", {})
    for name in run.options.models:
        if not run.has_time(5, f"invariance {name}"):
            continue
        config, sizes = config_of(name, run.options.tiny), run.lengths()[:128]
        ids = random_ids(sizes, config["vocab_size"])
        results[name] = {}
        peer = transformers_model(config, torch.float32)
        for dtype in (torch.float32, torch.bfloat16, torch.float16) if DEVICE.type == "cuda" else (torch.float32,):
            with run.guard(f"invariance {name}, {dtype}"):
                model = bertie_model(peer, dtype)
                results[name][str(dtype).removeprefix("torch.")] = _differences(model, ids, sizes.tolist())
                if dtype == DTYPE:
                    results[name]["texts_per_s"] = _cost(model, ids)
        run.print(f"invariance {name}: {json.dumps(results[name])}")
        run.save()
        free_memory()


def _differences(model: Model, ids: list[Any], sizes: list[int]) -> dict[str, Any]:
    """Of every eighth text."""
    together = model.hidden(Batch.from_ids(ids).to(DEVICE)).float().split(sizes)
    differences, equal = [], 0
    for index in range(0, len(ids), 8):
        alone = model.hidden(Batch.from_ids([ids[index]]).to(DEVICE)).float()
        differences.append(float((alone - together[index]).abs().max()))
        equal += int(torch.equal(alone, together[index]))
    magnitude = float(together[0].abs().mean())
    return {
        "max": max(differences),
        "median": median(differences),
        "equal": equal,
        "of": len(differences),
        "magnitude": magnitude,
    }


def _cost(model: Model, ids: list[Any]) -> dict[str, float]:
    """Texts per second in batches, and one per forward pass, without and with CUDA-graph replay."""
    calls = {"batched": forward_all(model, flat_batches(ids, 65536, DEVICE))}
    calls["alone"] = calls["alone, graphs"] = forward_all(model, flat_batches(ids, 1, DEVICE))
    rates = {}
    for name, call in calls.items():
        model.graphs, model.replay = ForwardGraphs(max_graphs=256, record_after=2), "graphs" in name
        time_interleaved({name: call}, DEVICE, 3)
        rates[name] = len(ids) / median(time_interleaved({name: call}, DEVICE, 3)[name])
    model.replay = True
    return rates
