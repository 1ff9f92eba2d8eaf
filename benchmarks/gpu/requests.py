"""Parts `requests` (many short requests to a classifier) and `fixed` (texts of one length)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.harness import Run, absolute_difference, profile, relative_error
from benchmarks.gpu.models import (
    DEVICE,
    DTYPE,
    Inputs,
    bertie_model,
    config_of,
    fp8_copy,
    padded_batch,
    transformers_model,
)
from bertie.bench import random_ids, time_call, time_interleaved
from bertie.nn.model import Model
from bertie.ops.cuda_graphs import ForwardGraphs
from bertie.text.batch import Batch
from bertie.training.mfu import encoder_weights

TOKENS = 16  # per request


def requests(run: Run) -> None:
    """Classify requests of 16 tokens."""
    options = run.options
    name = next(name for name in ("deberta-v3-large", *options.models[::-1]) if name in options.models)
    config = config_of(name, options.tiny)
    peer = transformers_model(config, DTYPE, labels=3)
    models = {"bertie": bertie_model(peer, DTYPE)}
    models["bertie, fp8"] = fp8_copy(models["bertie"])
    for model in models.values():
        model.graphs, model.replay = ForwardGraphs(max_tokens=1 << 20, record_after=2), False
    result: dict[str, Any] = {"model": name, "tokens": TOKENS, "batches": {}}
    run.results["requests"] = result
    calls: dict[str, Callable[[], object]] = {}
    for size in options.requests:
        if not run.has_time(5, f"requests {size}"):
            continue
        ids = random_ids([TOKENS] * size, config["vocab_size"])
        batch, inputs = Batch.from_ids(ids).to(DEVICE), padded_batch(ids, config["pad_token_id"])
        calls = _calls(models, peer, batch, inputs)
        row: dict[str, Any] = {}
        with run.guard(f"requests {size}"):
            weights = encoder_weights(models["bertie"].config)
            for side, rate in _rates(calls, size, options.repeats).items():
                row[side] = {"requests_per_s": rate, "tflops": 2 * weights * TOKENS * rate / 1e12}
            row |= _accuracy(models, peer, batch, inputs)
        result["batches"][str(size)] = row
        rates = ", ".join(f"{side} {row[side]['requests_per_s']:,.0f}/s" for side in calls if side in row)
        run.print(f"{name}, {size} requests of {TOKENS} tokens: {rates}; errors {row.get('error')}")
        run.save()
    if calls:
        with run.guard("requests, profile"):
            result["profile"] = profile(calls["bertie"], time_call(calls["bertie"], DEVICE))


def _calls(models: dict[str, Model], peer: Any, batch: Batch, inputs: Inputs) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {"transformers": lambda: peer(**inputs)}
    for side, model in models.items():
        calls[side] = lambda model=model: model(batch, "classify")
        if DEVICE.type == "cuda":
            calls[f"{side}, graphs"] = lambda model=model: _replay(model, batch)
    return calls


def _replay(model: Model, batch: Batch) -> Tensor:
    model.replay = True
    try:
        return model(batch, "classify")
    finally:
        model.replay = False


def _rates(calls: dict[str, Callable[[], Any]], size: int, repeats: int) -> dict[str, float]:
    """Requests per second."""
    time_interleaved(calls, DEVICE, 2)
    slowest = max(median(times) for times in time_interleaved(calls, DEVICE, 1).values())
    count = max(1, int(0.15 / slowest))  # calls per measurement: a single one would measure the launch
    repeated = {side: _repeat(call, count) for side, call in calls.items()}
    times = time_interleaved(repeated, DEVICE, repeats)
    return {side: size * count / median(seconds) for side, seconds in times.items()}


def _repeat(call: Callable[[], object], count: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(count):
            call()

    return repeated


def _accuracy(models: dict[str, Model], peer: Any, batch: Batch, inputs: Inputs) -> dict[str, Any]:
    exact = copy.deepcopy(peer).float()(**inputs).logits
    logits = {side: model(batch, "classify") for side, model in models.items()} | {
        "transformers": peer(**inputs).logits
    }
    return {
        "difference": absolute_difference(logits["bertie"].float(), logits["transformers"].float()),
        "error": {side: relative_error(values, exact) for side, values in logits.items()},
    }


def fixed(run: Run) -> None:
    """DeBERTa against FlashDeBERTa on texts of one length: no padding on either side."""
    from flashdeberta import FlashDebertaV2Model
    from transformers import AutoConfig

    for name in (name for name in run.options.models if name.startswith("deberta")):
        config = config_of(name, run.options.tiny)
        peer = transformers_model(config, DTYPE)
        model = bertie_model(peer, DTYPE)
        with torch.inference_mode(False), torch.device(DEVICE):
            flash = FlashDebertaV2Model(AutoConfig.for_model(**config)).to(DTYPE).eval()
            flash.load_state_dict(peer.state_dict())
        del peer
        result: dict[str, Any] = run.results.setdefault("fixed", {}).setdefault(name, {})
        for power in range(4, 12):
            n = 1 << power
            if not run.has_time(4, f"fixed {name}, {n}"):
                continue
            with run.guard(f"fixed {name}, {n}"):
                ids = random_ids([n] * ((1 << 16) // n), config["vocab_size"])
                batch, inputs = Batch.from_ids(ids).to(DEVICE), padded_batch(ids, config["pad_token_id"])
                result[str(n)] = _compare_flash(model, flash, batch, inputs, run.options.repeats)
                run.print(f"fixed {name}, {n} tokens: {json.dumps(result[str(n)])}")
            run.save()


def _compare_flash(model: Model, flash: Any, batch: Batch, inputs: Inputs, repeats: int) -> dict[str, float]:
    calls: dict[str, Callable[[], object]] = {
        "bertie": lambda: model.hidden(batch),
        "flashdeberta": lambda: flash(**inputs),
    }
    time_interleaved(calls, DEVICE, 1)
    times = time_interleaved(calls, DEVICE, repeats)
    row = {side: len(batch) / median(seconds) for side, seconds in times.items()}
    row["difference"] = float((model.hidden(batch) - flash(**inputs)[0].flatten(0, 1)).abs().float().mean())
    return row
