"""Parts `mix`, `compiled` and `fp8`: texts of mixed length, from token ids to the last hidden state."""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.harness import Run, absolute_difference, profile, relative_error
from benchmarks.gpu.models import (
    DEVICE,
    DTYPE,
    bertie_model,
    config_of,
    fp8_copy,
    padded_batch,
    padded_batches,
    peer_forward_all,
    transformers_model,
)
from bertie.bench import flat_batches, forward_all, padded_tokens, random_ids, time_call, time_interleaved
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.training.mfu import encoder_weights

SIDES = ("bertie", "bertie, from host memory", "transformers")


def mix(run: Run) -> None:
    """Each model, in its share of the time."""
    names = run.options.models
    results = run.results.setdefault("mix", {})
    for number, name in enumerate(names):
        share = run.seconds_left / (len(names) - number)
        if share < 2:
            run.skip(f"mix {name}", f"{run.seconds_left:.0f} s left")
            continue
        with run.guard(f"mix {name}"):
            results[name] = _mix(run, name, time.perf_counter() + share)
            run.print(_summary(name, results[name]))
        run.save()


def _mix(run: Run, name: str, until: float) -> dict[str, Any]:
    options, config, lengths = run.options, config_of(name, run.options.tiny), run.lengths()
    ids, tokens = random_ids(lengths, config["vocab_size"]), int(lengths.sum())
    peer = transformers_model(config, DTYPE)
    model = bertie_model(peer, DTYPE)
    weights, pad_id = encoder_weights(model.config), config["pad_token_id"]
    result: dict[str, Any] = {"weights": weights, "texts": len(ids), "tokens": tokens}
    result["attention"] = getattr(peer.config, "_attn_implementation", None)
    with run.guard(f"mix {name}, difference"):
        result["difference"] = difference(model, peer, ids[:: max(1, len(ids) // 64)], pad_id)

    # A third of the time for Bertie's batch size, a third for the peer's, and the last for both, interleaved.
    start = time.perf_counter()
    budgets = _try_sizes(
        *(run, f"{name} bertie", options.budgets, start + (until - start) / 3, tokens),
        lambda budget: forward_all(model, flat_batches(ids, budget, DEVICE)),
    )
    result["budgets"] = {str(budget): tokens / seconds for budget, seconds in budgets.items()}
    sizes = _try_sizes(
        *(run, f"{name} transformers", options.sizes, start + 2 * (until - start) / 3, tokens),
        lambda size: peer_forward_all(peer, padded_batches(ids, size, pad_id)),
    )
    result["sizes"] = {str(size): tokens / seconds for size, seconds in sizes.items()}

    calls: dict[str, Callable[[], None]] = {}
    if budgets:
        budget = result["budget"] = min(budgets, key=budgets.__getitem__)
        calls["bertie"] = forward_all(model, flat_batches(ids, budget, DEVICE))
        # Including batching and the copy to the device.
        calls["bertie, from host memory"] = lambda: forward_all(model, flat_batches(ids, budget, DEVICE))()
    if sizes:
        result["size"] = min(sizes, key=sizes.__getitem__)
        calls["transformers"] = peer_forward_all(peer, padded_batches(ids, result["size"], pad_id))
        result["padding"] = padded_tokens(np.sort(lengths)[::-1], result["size"]) / tokens - 1
    for side, times in time_interleaved(calls, DEVICE, options.repeats, until).items():
        result[side] = run.rates(times, tokens, len(ids), weights)
    if budgets and sizes:
        result["ratio"] = median(result["transformers"]["seconds"]) / median(result["bertie"]["seconds"])
    if budgets and time.perf_counter() < until + 2:
        with run.guard(f"mix {name}, profile"):
            result["profile"] = profile(calls["bertie"], median(result["bertie"]["seconds"]))
    return result


def _try_sizes(
    run: Run, label: str, sizes: Sequence[int], until: float, tokens: int, make: Callable[[int], Callable[[], None]]
) -> dict[int, float]:
    """Seconds per pass for each batch size that there is time for; the first is always tried."""
    times: dict[int, float] = {}
    for size in sizes:
        if times and time.perf_counter() + 1.5 * max(times.values()) > until:
            run.skip(f"{label}, {size}", "no time left")
            continue
        with run.guard(f"{label}, {size}"):
            call = make(size)
            first = time_call(call, DEVICE)  # includes one-time setup, which is little beside a slow pass
            times[size] = first if first > 2.0 else time_call(call, DEVICE)
            run.print(f"  {label}, {size}: {tokens / times[size] / 1e6:.3f} Mtokens/s")
    return times


def _summary(name: str, result: dict[str, Any]) -> str:
    parts = [f"{name}:"]
    for side in SIDES:
        if side in result:
            row = result[side]
            parts.append(
                f"{side} {row['seq_per_s']:,.0f} seq/s, {row['tokens_per_s'] / 1e6:.2f} Mtok/s, "
                f"{row['tflops']:.0f} TF ({row['share_of_ceiling']:.0%});"
            )
    if "ratio" in result:
        parts.append(f"{result['ratio']:.2f}×, budget {result['budget']}, size {result['size']};")
    if "profile" in result:
        parts.append(f"device busy {result['profile']['busy']:.0%}")
    return " ".join(parts)


def difference(model: Model, peer: Any, ids: list[Any], pad_id: int) -> dict[str, Any]:
    """Differences of the last hidden state: between the two, and of each from transformers in float32."""
    bertie = model.hidden(Batch.from_ids(ids).to(DEVICE)).float()
    inputs = padded_batch(ids, pad_id)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    transformers = peer(**inputs).last_hidden_state[mask].float()
    result = {"bertie from transformers": absolute_difference(bertie, transformers)}
    if torch.float32 != DTYPE:
        exact = copy.deepcopy(peer).float()(**inputs).last_hidden_state[mask]
        result["bertie from float32"] = absolute_difference(bertie, exact)
        result["transformers from float32"] = absolute_difference(transformers, exact)
    return result


# --- compiled ---


def compiled(run: Run) -> None:
    """transformers under torch.compile, with the batch sizes that `mix` found."""
    results = run.results.get("mix", {})
    for name in run.options.compile:
        if results.get(name, {}).get("transformers"):
            with run.guard(f"{name}, compiled"):
                results[name]["compiled"] = _run_child(run, name, results[name])
                run.print(f"{name}, torch.compile: {json.dumps(results[name]['compiled'])}")
            run.save()


def _run_child(run: Run, name: str, result: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: a compilation cannot be stopped otherwise."""
    limit = min(run.seconds_left, run.options.compile_seconds)
    if limit < 20:
        raise TimeoutError(f"{run.seconds_left:.0f} s left")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "child.json")
        command = [sys.executable, "-m", "benchmarks.gpu", "--child", f"{name},{result['budget']},{result['size']}"]
        command += ["--json", str(output), "--count", str(run.options.count)]
        command += ["--tiny"] if run.options.tiny else []
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with its compiler processes
                raise TimeoutError(f"torch.compile took over {limit:.0f} s") from None
        if process.returncode:
            raise RuntimeError(f"exit status {process.returncode}")
        return dict(json.loads(output.read_text()))


def child(options: argparse.Namespace, lengths: Any) -> None:
    """Compiled transformers, transformers and Bertie, interleaved."""
    name, budget, size = options.child.split(",")
    config = config_of(name, options.tiny)
    ids = random_ids(lengths, config["vocab_size"])
    peer = transformers_model(config, DTYPE)
    model = bertie_model(peer, DTYPE)
    batches = padded_batches(ids, int(size), config["pad_token_id"])
    calls = {
        "bertie": forward_all(model, flat_batches(ids, int(budget), DEVICE)),
        "transformers": peer_forward_all(peer, batches),
        "transformers, compiled": peer_forward_all(torch.compile(peer, dynamic=True), batches),
    }
    time_interleaved(calls, DEVICE, 1)  # compiles
    times = time_interleaved(calls, DEVICE, options.repeats)
    rates = {side: len(ids) / median(seconds) for side, seconds in times.items()}
    options.json.write_text(json.dumps({"seq_per_s": rates, "seconds": times}))


# --- fp8 ---


def fp8(run: Run) -> None:
    """The mixed texts in bf16 and in fp8."""
    results = run.results.setdefault("fp8", {})
    for name in run.options.models:
        if not run.has_time(6, f"fp8 {name}"):
            continue
        with run.guard(f"fp8 {name}"):
            config, lengths = config_of(name, run.options.tiny), run.lengths()
            ids, tokens = random_ids(lengths, config["vocab_size"]), int(lengths.sum())
            models = {"bf16": bertie_model(transformers_model(config, DTYPE), DTYPE)}
            models["fp8"] = fp8_copy(models["bf16"])
            weights = encoder_weights(models["bf16"].config)
            batches = flat_batches(ids, run.options.budgets[0], DEVICE)
            calls = {precision: forward_all(model, batches) for precision, model in models.items()}
            time_interleaved(calls, DEVICE, 1)
            times = time_interleaved(calls, DEVICE, run.options.repeats)
            result: dict[str, Any] = {key: run.rates(t, tokens, len(ids), weights) for key, t in times.items()}
            result["ratio"] = median(times["bf16"]) / median(times["fp8"])
            result["error"] = relative_error(*(models[key].hidden(batches[0]) for key in ("fp8", "bf16")))
            result["profile"] = profile(calls["fp8"], median(times["fp8"]))
            results[name] = result
            rates = ", ".join(f"{precision} {result[precision]['seq_per_s']:,.0f} texts/s" for precision in calls)
            run.print(f"fp8 {name}: {rates}, {result['ratio']:.2f}×; error of hidden states {result['error']:.2%}")
        run.save()
