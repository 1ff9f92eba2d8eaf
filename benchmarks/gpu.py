"""How fast Bertie reads on a GPU, beside transformers and sentence-transformers in the same run.

    python -m benchmarks.gpu [--models minilm,bert-base,…] [--parts mix,compiled,short,text,…] [--json FILE]

Models have the real shapes and vocabularies, and random weights: the same on both sides. All is in bfloat16 (float32 on
a CPU), without gradients.

mix         4,096 texts of mixed length (mean 117, median 87, 95th percentile 324, at most 512), from ids to the last
            hidden state. Bertie: flat batches of so many tokens, several sizes tried. transformers: texts sorted by
            length, batches of so many padded to their longest, several sizes tried; sdpa where it has it; no mask
            where nothing is padded. Batches lie on the device before the clock starts, for both. The best of each
            is measured again in turns, and the median counts.
compiled    after `mix`, with what is left of the time: the peer also under torch.compile(dynamic=True), each model in
            a process of its own, beside Bertie and the peer as it is. `--compile` says which models, and in what order.
short       a classifier of the largest model named, on requests of 16 tokens, by batch size; Bertie also with
            CUDA-graph replay, and with products in eight bits (`to_fp8`).
fp8         bf16 and fp8 on the texts of `mix`, in turns, and how far the hidden states are apart.
fixed       DeBERTa's of the models named on texts of one length, 16 to 2,048 tokens, 65,536 in all, beside FlashDeBERTa
            (PyPI flashdeberta, which must be there).
text        from text to normalized vectors: `--folder` is a sentence-transformers model, `--texts` a file of lines.
lengths     time against total tokens, and against length at a fixed total; peak memory of one long text.
neighbours  the largest difference between a text alone and in a batch, by precision; and what it costs to read each
            alone, as `deterministic` does.

"TF" is 2 × weights of the blocks × real tokens / s, so padding is no work. The share is of a large product's pace,
measured at the start. `--seconds` is kept: what does not fit is left out, and said. Results are written after each
model.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertie.bench import (
    flat_batches,
    forward_all,
    mixed_lengths,
    padded_tokens,
    random_ids,
    synchronize,
    time_call,
    time_interleaved,
)
from bertie.checkpoints.checkpoint import build
from bertie.checkpoints.model_spec import model_spec
from bertie.nn.linear import to_fp8
from bertie.nn.model import Model
from bertie.ops.cuda_graphs import ForwardGraphs
from bertie.text.batch import Batch
from bertie.training.mfu import encoder_weights, peak_flops

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if HERE.type == "cuda" else torch.float32

_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_MINI = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_BERT = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512, "pad_token_id": 0}
_DEBERTA = {
    "model_type": "deberta-v2",
    "vocab_size": 128100,
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "layer_norm_eps": 1e-7,
    "pad_token_id": 0,
}
# As in the config.json of each.
SHAPES: dict[str, dict[str, Any]] = {
    "minilm": _BERT | _MINI,
    "bert-base": _BERT | _BASE,
    "roberta-base": _BASE
    | {"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    | {"layer_norm_eps": 1e-5, "pad_token_id": 1},
    "bert-large": _BERT | _LARGE,
    "modernbert-base": _BASE
    | {"model_type": "modernbert", "vocab_size": 50368, "num_hidden_layers": 22, "intermediate_size": 1152}
    | {"max_position_embeddings": 8192, "local_attention": 128, "global_attn_every_n_layers": 3}
    | {"pad_token_id": 50283, "cls_token_id": 50281, "sep_token_id": 50282},
    "mpnet-base": _BASE
    | {"model_type": "mpnet", "vocab_size": 30527, "max_position_embeddings": 514, "layer_norm_eps": 1e-5}
    | {"relative_attention_num_buckets": 32, "pad_token_id": 1},
    "deberta-v3-base": _DEBERTA | _BASE,
    "deberta-v3-large": _DEBERTA | _LARGE,
}
_TINY = {"vocab_size": 1000, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TINY |= {"intermediate_size": 48}
POOLERS = ("bert", "roberta", "mpnet")  # whose plain models have one, which would be work for nothing

BUDGETS = (65536, 32768, 131072, 16384)  # tokens of a flat batch; the likely best first, as time may run out
SIZES = (256, 128, 512, 64)  # texts of a padded batch


def shape_of(name: str, tiny: bool) -> dict[str, Any]:
    """The config, or a small one of its kind."""
    config = SHAPES[name]
    small = _TINY | {"pad_token_id": min(config["pad_token_id"], 3)}
    if config["model_type"] == "modernbert":
        small |= {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 3}
    return config | small if tiny else dict(config)


def drawn(options: argparse.Namespace) -> Any:
    """Lengths of the texts."""
    return mixed_lengths(options.count, 48 if options.tiny else 512)


# --- both sides ---


class Tensors:
    """A checkpoint that lies in memory, under the names that files have."""

    def __init__(self, peer: Any) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self.tensors: dict[str, Tensor] = revert_weight_conversion(peer, peer.state_dict())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(one.shape) for name, one in self.tensors.items()}

    def get(self, name: str) -> Tensor:
        return self.tensors[name]


@torch.inference_mode(False)  # weights are weights, as when they are loaded
def peer_of(config: dict[str, Any], dtype: torch.dtype, *, classes: int = 0) -> Any:
    """transformers' model with random weights."""
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    torch.manual_seed(0)
    extra: dict[str, Any] = {"num_labels": classes} if classes else {}
    made = AutoConfig.for_model(**(config | extra))
    kind: Any = AutoModelForSequenceClassification if classes else AutoModel
    options = {} if classes or config["model_type"] not in POOLERS else {"add_pooling_layer": False}
    with torch.device(HERE):
        return kind.from_config(made, dtype=dtype, **options).eval().to(HERE)


@torch.inference_mode(False)
def ours_of(peer: Any, dtype: torch.dtype) -> Model:
    """Bertie's model with the weights of the peer's."""
    source = Tensors(peer)
    config = json.loads(peer.config.to_json_string()) | {"architectures": [type(peer).__name__]}
    plan = model_spec(config, source.shapes())
    model = build(plan)
    plan.weight_map.check(model, source.shapes(), plan.family.dropped)
    model = model.to(dtype).to_empty(device=HERE)
    plan.weight_map.load(model, source)
    return model.eval()


Inputs = dict[str, Tensor]


def padded(ids: list[Any], size: int, pad: int) -> list[Inputs]:
    """Sorted by length, `size` at a time, on the device."""
    ranked = sorted(ids, key=len, reverse=True)
    return [rectangle(ranked[at : at + size], pad) for at in range(0, len(ranked), size)]


def rectangle(ids: list[Any], pad: int) -> Inputs:
    longest = max(map(len, ids))
    rows, seen = np.full((len(ids), longest), pad), np.zeros((len(ids), longest), np.int64)
    for b, one in enumerate(ids):
        rows[b, : len(one)], seen[b, : len(one)] = one, 1
    inputs = {"input_ids": torch.from_numpy(rows).to(HERE)}
    # Without a mask sdpa may take its fastest way.
    return inputs if seen.all() else inputs | {"attention_mask": torch.from_numpy(seen).to(HERE)}


def theirs_over(peer: Any, batches: list[Inputs]) -> Callable[[], None]:
    def call() -> None:
        for inputs in batches:
            peer(**inputs)

    return call


# --- the run ---


class Bench:
    """What was found, and how much time is left for more."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.until = time.perf_counter() + options.seconds
        self.top = peak_flops(HERE, HALF, 0.1 if options.tiny else 0.5)
        chip = torch.cuda.get_device_name() if HERE.type == "cuda" else "CPU"
        self.found: dict[str, Any] = {
            "chip": chip,
            "torch": torch.__version__,
            "dtype": str(HALF).removeprefix("torch."),
            "ceiling_tflops": self.top / 1e12,
            "left_out": [],
        }

    @property
    def left(self) -> float:
        return float(self.until - time.perf_counter())

    def say(self, text: str) -> None:
        print(text, flush=True)

    def leave_out(self, what: str, why: str) -> None:
        self.found["left_out"].append(f"{what}: {why}")
        self.say(f"  left out: {what}: {why}")

    def save(self) -> None:
        if self.options.json:
            self.options.json.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """What goes wrong is said, and the rest goes on."""
        try:
            yield
        except Exception as error:
            if self.options.verbose:
                traceback.print_exc()
            self.leave_out(what, f"{type(error).__name__}: {error}".splitlines()[0][:200])
        cleared()

    def rates(self, times: list[float], tokens: int, texts: int, weights: int) -> dict[str, Any]:
        """The usual numbers."""
        spent = median(times)
        work = 2 * weights * tokens / spent
        return {
            "seq_per_s": texts / spent,
            "tokens_per_s": tokens / spent,
            "tflops": work / 1e12,
            "share_of_ceiling": work / self.top,
            "seconds": times,
        }


def cleared() -> None:
    gc.collect()
    if HERE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> int:
    return torch.cuda.max_memory_allocated() if HERE.type == "cuda" else 0


# --- mix ---


def mix(bench: Bench) -> None:
    """Each model, in its share of the time."""
    names = bench.options.models
    results = bench.found.setdefault("mix", {})
    for number, name in enumerate(names):
        share = bench.left / (len(names) - number)
        if share < 2:
            bench.leave_out(f"mix {name}", f"{bench.left:.0f} s were left")
            continue
        with bench.guarded(f"mix {name}"):
            results[name] = _mix(bench, name, time.perf_counter() + share)
            bench.say(_mix_line(name, results[name]))
        bench.save()


def compiled(bench: Bench) -> None:
    """The peer under torch.compile, at the sizes that `mix` found."""
    results = bench.found.get("mix", {})
    for name in bench.options.compile:
        if results.get(name, {}).get("transformers"):
            with bench.guarded(f"{name}, compiled"):
                results[name]["compiled"] = _in_child(bench, name, results[name])
                bench.say(f"{name}, torch.compile: {json.dumps(results[name]['compiled'])}")
            bench.save()


def _mix(bench: Bench, name: str, until: float) -> dict[str, Any]:
    options = bench.options
    config = shape_of(name, options.tiny)
    lengths = drawn(options)
    ids, tokens = random_ids(lengths, config["vocab_size"]), int(lengths.sum())
    peer = peer_of(config, HALF)
    model = ours_of(peer, HALF)
    weights = encoder_weights(model.config)
    pad = config["pad_token_id"]
    out: dict[str, Any] = {"weights": weights, "texts": len(ids), "tokens": tokens}
    out["attention"] = getattr(peer.config, "_attn_implementation", None)
    with bench.guarded(f"mix {name}, difference"):
        out["difference"] = difference(model, peer, ids[:: max(1, len(ids) // 64)], pad)

    # Bertie may have a third of the time to find its size, the peer a third, and the last is for both in turns.
    began = time.perf_counter()
    ours = _tried(bench, f"{name} bertie", options.budgets, began + (until - began) / 3, tokens)(
        lambda size: forward_all(model, flat_batches(ids, size, HERE))
    )
    out["budgets"] = {str(size): tokens / spent for size, spent in ours.items()}
    theirs = _tried(bench, f"{name} transformers", options.sizes, began + 2 * (until - began) / 3, tokens)(
        lambda size: theirs_over(peer, padded(ids, size, pad))
    )
    out["sizes"] = {str(size): tokens / spent for size, spent in theirs.items()}

    calls: dict[str, Callable[[], None]] = {}
    if ours:
        out["budget"] = min(ours, key=lambda size: ours[size])
        batches = flat_batches(ids, out["budget"], HERE)
        calls["bertie"] = forward_all(model, batches)
        # The same with the host's part, from ids that lie there.
        calls["bertie, from the host"] = lambda: forward_all(model, flat_batches(ids, out["budget"], HERE))()
    if theirs:
        out["size"] = min(theirs, key=lambda size: theirs[size])
        calls["transformers"] = theirs_over(peer, padded(ids, out["size"], pad))
        out["padding"] = padded_tokens(np.sort(lengths)[::-1], out["size"]) / tokens - 1
    for who, times in time_interleaved(calls, HERE, options.repeats, until).items():
        out[who] = bench.rates(times, tokens, len(ids), weights)
    if ours and theirs:
        out["ratio"] = median(out["transformers"]["seconds"]) / median(out["bertie"]["seconds"])
    if ours and time.perf_counter() < until + 2:
        with bench.guarded(f"mix {name}, profile"):
            out["profile"] = profiled(calls["bertie"], median(out["bertie"]["seconds"]))
    return out


def _tried(
    bench: Bench, what: str, sizes: list[int], until: float, tokens: int
) -> Callable[[Callable[[int], Callable[[], None]]], dict[int, float]]:
    """Seconds of one pass for each size that there is time for; the first one is always tried."""

    def run(make: Callable[[int], Callable[[], None]]) -> dict[int, float]:
        found: dict[int, float] = {}
        for size in sizes:
            if found and time.perf_counter() + 1.5 * max(found.values()) > until:
                bench.leave_out(f"{what}, {size}", "no time left")
                continue
            with bench.guarded(f"{what}, {size}"):
                call = make(size)
                first = time_call(call, HERE)  # sets up what a size needs
                # Of a slow one the first pass will do: what is set up is little beside it.
                found[size] = first if first > 2.0 else time_call(call, HERE)
                bench.say(f"  {what}, {size}: {tokens / found[size] / 1e6:.3f} Mtokens/s")
        return found

    return run


def _mix_line(name: str, out: dict[str, Any]) -> str:
    parts = [f"{name}:"]
    for who in ("bertie", "bertie, from the host", "transformers"):
        if who in out:
            row = out[who]
            parts.append(
                f"{who} {row['seq_per_s']:,.0f} seq/s, {row['tokens_per_s'] / 1e6:.2f} Mtok/s, "
                f"{row['tflops']:.0f} TF ({row['share_of_ceiling']:.0%});"
            )
    if "ratio" in out:
        parts.append(f"{out['ratio']:.2f}×, budget {out['budget']}, size {out['size']};")
    if "profile" in out:
        parts.append(f"device busy {out['profile']['busy']:.0%}")
    return " ".join(parts)


def difference(model: Model, peer: Any, ids: list[Any], pad: int) -> dict[str, Any]:
    """The last hidden state: ours from theirs, and each from theirs in float32."""
    flat = model.hidden(Batch.from_ids(ids).to(HERE)).float()
    inputs = rectangle(ids, pad)
    seen = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    theirs = peer(**inputs).last_hidden_state[seen].float()
    out = {"bertie from transformers": _far(flat, theirs)}
    if torch.float32 != HALF:
        truth = copy.deepcopy(peer).float()(**inputs).last_hidden_state[seen]
        out |= {"bertie from float32": _far(flat, truth), "transformers from float32": _far(theirs, truth)}
    return out


def _far(a: Tensor, b: Tensor) -> dict[str, float]:
    gap = (a - b).abs()
    return {"max": float(gap.max()), "mean": float(gap.mean()), "of": float(b.abs().mean())}


def profiled(call: Callable[[], object], wall: float) -> dict[str, Any]:
    """The kernels of one pass by share of the device's time, and how much of the time the device has work at all."""
    cuda = HERE.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        call()
        synchronize(HERE)
    events = [
        (event.key, (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6, event.count)
        for event in profile.key_averages()
    ]
    events = sorted((one for one in events if one[1] > 0), key=lambda one: -one[1])
    total = sum(spent for _, spent, _ in events)
    top = [
        {"kernel": key[:120], "share": spent / total, "ms": 1e3 * spent, "calls": count}
        for key, spent, count in events[:12]
    ]
    launches = sum(count for *_, count in events)
    return {"device_seconds": total, "seconds": wall, "busy": min(1.0, total / wall), "launches": launches, "top": top}


def _in_child(bench: Bench, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """The peer compiled, the peer as it is and Bertie in turns. A compiler can be stopped in no other way."""
    limit = min(bench.left, bench.options.compile_seconds)
    if limit < 20:
        raise TimeoutError(f"{bench.left:.0f} s were left")
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "child.json")
        command = [sys.executable, "-m", "benchmarks.gpu", "--child", f"{name},{found['budget']},{found['size']}"]
        command += ["--json", str(said), "--count", str(bench.options.count)]
        command += ["--tiny"] if bench.options.tiny else []
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
                raise TimeoutError(f"torch.compile was not done after {limit:.0f} s") from None
        if process.returncode:
            raise RuntimeError(f"ended with {process.returncode}")
        out: dict[str, Any] = json.loads(said.read_text())
    return out


def child(options: argparse.Namespace) -> None:
    """In a process of its own."""
    name, budget, size = options.child.split(",")
    config = shape_of(name, options.tiny)
    lengths = drawn(options)
    ids = random_ids(lengths, config["vocab_size"])
    peer = peer_of(config, HALF)
    model = ours_of(peer, HALF)
    rows = padded(ids, int(size), config["pad_token_id"])
    quick = torch.compile(peer, dynamic=True)
    calls = {
        "bertie": forward_all(model, flat_batches(ids, int(budget), HERE)),
        "transformers": theirs_over(peer, rows),
        "transformers, compiled": theirs_over(quick, rows),
    }
    time_interleaved(calls, HERE, 1)  # compiles
    times = time_interleaved(calls, HERE, options.repeats)
    out: dict[str, Any] = {who: len(ids) / median(some) for who, some in times.items()}
    options.json.write_text(json.dumps({"seq_per_s": out, "seconds": times}))


# --- short ---


def short(bench: Bench) -> None:
    """Requests of 16 tokens to a classifier."""
    options = bench.options
    name = next(one for one in ("deberta-v3-large", *options.models[::-1]) if one in options.models)
    config = shape_of(name, options.tiny)
    peer = peer_of(config, HALF, classes=3)
    model = ours_of(peer, HALF)
    out: dict[str, Any] = {"model": name, "tokens": 16, "batches": {}}
    bench.found["short"] = out
    weights, eight = encoder_weights(model.config), in_eight_bits(model)
    for one in (model, eight):
        one.graphs, one.replay = ForwardGraphs(max_tokens=1 << 20, record_after=2), False
    for size in options.requests:
        if bench.left < 5:
            bench.leave_out(f"short {size}", f"{bench.left:.0f} s were left")
            continue
        ids = random_ids([16] * size, config["vocab_size"])
        batch, inputs = Batch.from_ids(ids).to(HERE), rectangle(ids, config["pad_token_id"])
        calls: dict[str, Callable[[], object]] = {
            "bertie": lambda batch=batch: model(batch, "classify"),  # type: ignore[misc]
            "transformers": lambda inputs=inputs: peer(**inputs),  # type: ignore[misc]
            "bertie, fp8": lambda batch=batch: eight(batch, "classify"),  # type: ignore[misc]
        }
        if HERE.type == "cuda":
            calls["bertie, graphs"] = lambda batch=batch: _with_graphs(model, batch)  # type: ignore[misc]
            calls["bertie, fp8, graphs"] = lambda batch=batch: _with_graphs(eight, batch)  # type: ignore[misc]
        row: dict[str, Any] = {}
        with bench.guarded(f"short {size}"):
            time_interleaved(calls, HERE, 2)
            spent = max(median(some) for some in time_interleaved(calls, HERE, 1).values())
            many = max(1, int(0.15 / spent))  # calls on the clock at a time: one alone would be the launch's
            for who, times in time_interleaved(
                {k: _times(v, many) for k, v in calls.items()}, HERE, options.repeats
            ).items():
                pace = size * many / median(times)
                row[who] = {"requests_per_s": pace, "tflops": 2 * weights * 16 * pace / 1e12}
            truth = copy.deepcopy(peer).float()(**inputs).logits
            outs = {"bertie": model(batch, "classify"), "fp8": eight(batch, "classify"), "peer": peer(**inputs).logits}
            row["difference"] = _far(outs["bertie"].float(), outs["peer"].float())
            row["error"] = {who: _error(one, truth) for who, one in outs.items()}  # from the peer in float32
        out["batches"][str(size)] = row
        rates = ", ".join(
            f"{who} {one['requests_per_s']:,.0f}/s" for who, one in row.items() if "requests_per_s" in one
        )
        bench.say(f"short {name}, {size} requests of 16 tokens: {rates}; errors {row.get('error')}")
        bench.save()
    if out["batches"] and "bertie" in row:
        with bench.guarded("short, profile"):
            out["profile"] = profiled(calls["bertie"], time_call(calls["bertie"], HERE))


def _with_graphs(model: Model, batch: Batch) -> Tensor:
    model.replay = True
    try:
        return model(batch, "classify")
    finally:
        model.replay = False


def _times(call: Callable[[], object], count: int) -> Callable[[], None]:
    def many() -> None:
        for _ in range(count):
            call()

    return many


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """The same by one launch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def play() -> object:
        graph.replay()
        return kept

    return play


# --- fp8 ---


@torch.inference_mode(False)
def in_eight_bits(model: Model) -> Model:
    """A copy of it."""
    other = copy.deepcopy(model)
    to_fp8(other.encoder)
    return other


def _error(a: Tensor, b: Tensor) -> float:
    """The length of the difference in that of b."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def fp8(bench: Bench) -> None:
    """The mix in bf16 and in fp8."""
    options = bench.options
    results = bench.found.setdefault("fp8", {})
    for name in options.models:
        if bench.left < 6:
            bench.leave_out(f"fp8 {name}", f"{bench.left:.0f} s were left")
            continue
        with bench.guarded(f"fp8 {name}"):
            config = shape_of(name, options.tiny)
            lengths = drawn(options)
            ids, tokens = random_ids(lengths, config["vocab_size"]), int(lengths.sum())
            models = {"bf16": ours_of(peer_of(config, HALF), HALF)}
            models["fp8"] = in_eight_bits(models["bf16"])
            weights, batches = encoder_weights(models["bf16"].config), flat_batches(ids, options.budgets[0], HERE)
            calls = {who: forward_all(model, batches) for who, model in models.items()}
            time_interleaved(calls, HERE, 1)
            times = time_interleaved(calls, HERE, options.repeats)
            out: dict[str, Any] = {who: bench.rates(some, tokens, len(ids), weights) for who, some in times.items()}
            out["ratio"] = median(times["bf16"]) / median(times["fp8"])
            out["error"] = _error(*(models[who].hidden(batches[0]) for who in ("fp8", "bf16")))
            out["profile"] = profiled(calls["fp8"], median(times["fp8"]))
            results[name] = out
            rates = ", ".join(f"{who} {out[who]['seq_per_s']:,.0f} texts/s" for who in calls)
            bench.say(f"fp8 {name}: {rates}, {out['ratio']:.2f}×; error of hidden states {out['error']:.2%}")
        bench.save()


# --- fixed ---


def fixed(bench: Bench) -> None:
    """Texts of one length: nothing is padded, for either."""
    from flashdeberta import FlashDebertaV2Model
    from transformers import AutoConfig

    options = bench.options
    for name in (one for one in options.models if one.startswith("deberta")):
        config = shape_of(name, options.tiny)
        peer = peer_of(config, HALF)
        model = ours_of(peer, HALF)
        with torch.inference_mode(False), torch.device(HERE):
            flash = FlashDebertaV2Model(AutoConfig.for_model(**config)).to(HALF).eval()
            flash.load_state_dict(peer.state_dict())
        del peer
        out: dict[str, Any] = bench.found.setdefault("fixed", {}).setdefault(name, {})
        for power in range(4, 12):
            n = 1 << power
            if bench.left < 4:
                bench.leave_out(f"fixed {name}, {n}", f"{bench.left:.0f} s were left")
                continue
            with bench.guarded(f"fixed {name}, {n}"):
                ids = random_ids([n] * ((1 << 16) // n), config["vocab_size"])
                batch, inputs = Batch.from_ids(ids).to(HERE), rectangle(ids, config["pad_token_id"])
                calls: dict[str, Callable[[], object]] = {
                    "bertie": lambda model=model, batch=batch: model.hidden(batch),  # type: ignore[misc]
                    "flashdeberta": lambda flash=flash, inputs=inputs: flash(**inputs),  # type: ignore[misc]
                }
                time_interleaved(calls, HERE, 1)
                row = {
                    who: len(ids) / median(times)
                    for who, times in time_interleaved(calls, HERE, options.repeats).items()
                }
                row["difference"] = float((model.hidden(batch) - flash(**inputs)[0].flatten(0, 1)).abs().float().mean())
                out[str(n)] = row
                bench.say(f"fixed {name}, {n} tokens: {json.dumps(row)}")
            bench.save()


# --- text ---


def text(bench: Bench) -> None:
    """From text to normalized vectors."""
    from sentence_transformers import SentenceTransformer

    from bertie.tasks import Embedder, base, embed

    options = bench.options
    if options.folder is None or options.texts is None:
        bench.leave_out("text", "it needs --folder and --texts")
        return
    texts = [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line][: options.most_texts]
    embedder = Embedder.load(options.folder, device=HERE, precision="bf16", normalize=True)
    peer = SentenceTransformer(str(options.folder), device=str(HERE), model_kwargs={"dtype": HALF})
    max_length = embedder.checkpoint.max_length
    encoded = embedder.tokenizer.encode_batch(texts)
    lengths = [min(len(one), max_length) for one in encoded]
    cut = [one.ids[:max_length] for one in encoded]
    out: dict[str, Any] = {"texts": len(texts), "tokens": sum(lengths), "sizes": {}}
    bench.found["text"] = out
    model, backend = embedder.model, embedder.tokenizer._backend
    calls: dict[str, Callable[[], Any]] = {
        "bertie": lambda: embedder.embed(texts),
        "bertie, from ids": lambda: forward_all(model, flat_batches(cut, 65536, HERE))(),
        "tokenizer": lambda: embedder.tokenizer.encode_batch(texts),
        "tokenizers, the library alone": lambda: backend.encode_batch(texts),
        "the same, without offsets": lambda: backend.encode_batch_fast(texts),
    }

    def encode(size: int) -> Callable[[], Any]:
        return lambda: peer.encode(texts, batch_size=size, normalize_embeddings=True, show_progress_bar=False)

    calls["bertie"]()
    peer.encode(texts[:512], batch_size=256, show_progress_bar=False)
    for size in options.encode_sizes:
        if bench.left < 12:
            bench.leave_out(f"text, sentence-transformers at {size}", f"{bench.left:.0f} s were left")
            continue
        out["sizes"][str(size)] = len(texts) / time_call(encode(size), HERE)
        bench.say(f"  sentence-transformers, batches of {size}: {out['sizes'][str(size)]:,.0f} texts/s")
    if out["sizes"]:
        best = int(max(out["sizes"], key=out["sizes"].__getitem__))
        calls["sentence-transformers"] = encode(best)
        with bench.guarded("text, difference"):
            a, b = embedder.embed(texts[:2000]), np.asarray(encode(256)()[:2000], dtype=np.float32)
            alike = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
            whole = np.array([len(one) <= max_length for one in encoded[:2000]])
            out["cosine"] = {"mean": float(alike[whole].mean()), "min": float(alike[whole].min())}
    for who, times in time_interleaved(calls, HERE, options.repeats, bench.until - 8).items():
        out[who] = {"texts_per_s": len(texts) / median(times), "seconds": times}
        bench.say(f"  text, {who}: {out[who]['texts_per_s']:,.0f} texts/s")
    if "sentence-transformers" in out:
        out["ratio"] = out["bertie"]["texts_per_s"] / out["sentence-transformers"]["texts_per_s"]
        bench.say(f"text: {out['ratio']:.2f}×, cosine {out.get('cosine')}")
    kept = embed.THREADS, base.ITEMS_AT_ONCE
    out["tried"] = {}
    for threads, items in product((1, 2, 3, 4), (512, 1024, 4096)):  # what users get is measured above
        if bench.left > 3:
            embed.THREADS, base.ITEMS_AT_ONCE = threads, items
            out["tried"][f"{threads} threads, {items} texts"] = len(texts) / time_call(calls["bertie"], HERE)
    embed.THREADS, base.ITEMS_AT_ONCE = kept
    bench.say(f"  text, bertie, other settings: {json.dumps({k: round(v) for k, v in out['tried'].items()})}")
    with bench.guarded("text, profile"):
        out["profile"] = profiled(calls["bertie"], median(out["bertie"]["seconds"]))


# --- lengths ---

LONGEST = {"bert-base": 512, "modernbert-base": 8192, "deberta-v3-base": 4096, "deberta-v3-large": 4096}


def lengths(bench: Bench) -> None:
    """How the cost grows."""
    options = bench.options
    results = bench.found.setdefault("lengths", {})
    budget = 1 << (9 if options.tiny else 16)
    for name, longest in LONGEST.items():
        if name not in options.models:
            continue
        if bench.left < 8:
            bench.leave_out(f"lengths {name}", f"{bench.left:.0f} s were left")
            continue
        config = shape_of(name, options.tiny)
        model = ours_of(peer_of(config, HALF), HALF)
        out: dict[str, Any] = {"total": {}, "length": {}, "one text": {}}
        results[name] = out
        vocab = config["vocab_size"]
        for power in range(6, 11) if options.tiny else range(12, 21):
            with bench.guarded(f"lengths {name}, 2^{power} tokens"):
                ids = random_ids(_mix_of(1 << power), vocab)
                out["total"][str(1 << power)] = _repeated(forward_all(model, flat_batches(ids, budget, HERE)), options)
        for power in range(4, longest.bit_length()):
            n = 1 << power
            if options.tiny and n > 128:
                break
            with bench.guarded(f"lengths {name}, {n} tokens a text"):
                ids = random_ids([n] * (budget // n), vocab)
                out["length"][str(n)] = _repeated(forward_all(model, flat_batches(ids, budget, HERE)), options)
            with bench.guarded(f"lengths {name}, one text of {n}"):
                batch = Batch.from_ids(random_ids([n], vocab)).to(HERE)
                model.hidden(batch)
                cleared()
                before = torch.cuda.memory_allocated() if HERE.type == "cuda" else 0
                spent = time_call(forward_all(model, [batch]), HERE)
                out["one text"][str(n)] = {"seconds": spent, "peak_bytes": peak() - before}
        bench.say(f"lengths {name}: {json.dumps(out)}")
        bench.save()
        cleared()


def _mix_of(total: int) -> list[int]:
    """Texts of mixed length with so many tokens together."""
    found = mixed_lengths(max(8, total // 40)).tolist()
    ends = np.cumsum(found)
    kept = found[: int(np.searchsorted(ends, total)) + 1]
    kept[-1] -= sum(kept) - total
    return [n for n in kept if n > 0]


def _repeated(call: Callable[[], None], options: argparse.Namespace) -> float:
    call()
    return median(time_interleaved({"": call}, HERE, options.repeats)[""])


# --- neighbours ---


def neighbours(bench: Bench) -> None:
    """Each text alone, and in a batch with others."""
    options = bench.options
    results = bench.found.setdefault("neighbours", {})
    for name in options.models:
        if bench.left < 5:
            bench.leave_out(f"neighbours {name}", f"{bench.left:.0f} s were left")
            continue
        config = shape_of(name, options.tiny)
        sizes = drawn(options)[:128]
        ids = random_ids(sizes, config["vocab_size"])
        results[name] = {}
        peer = peer_of(config, torch.float32)
        for dtype in (torch.float32, torch.bfloat16, torch.float16) if HERE.type == "cuda" else (torch.float32,):
            with bench.guarded(f"neighbours {name}, {dtype}"):
                model = ours_of(peer, dtype)
                many = model.hidden(Batch.from_ids(ids).to(HERE)).float().split(sizes.tolist())
                gaps, same = [], 0
                for b in range(0, len(ids), 8):
                    one = model.hidden(Batch.from_ids([ids[b]]).to(HERE)).float()
                    gaps.append(float((one - many[b]).abs().max()))
                    same += int(torch.equal(one, many[b]))
                results[name][str(dtype).removeprefix("torch.")] = {
                    "max": max(gaps),
                    "median": median(gaps),
                    "equal": same,
                    "of": len(gaps),
                    "size": float(many[0].abs().mean()),
                }
                if dtype == HALF:
                    results[name]["cost"] = alone(model, ids)
        bench.say(f"neighbours {name}: {json.dumps(results[name])}")
        bench.save()
        cleared()


def alone(model: Model, ids: list[Any]) -> dict[str, float]:
    """Texts a second in batches; and a text a pass, as `deterministic` has it, without and with CUDA-graph replay."""
    calls = {"together": forward_all(model, flat_batches(ids, 65536, HERE))}
    calls["alone"] = calls["alone, graphs"] = forward_all(model, flat_batches(ids, 1, HERE))
    found = {}
    for who, call in calls.items():
        model.graphs, model.replay = ForwardGraphs(max_graphs=256, record_after=2), "graphs" in who
        time_interleaved({who: call}, HERE, 3)
        found[who] = len(ids) / median(time_interleaved({who: call}, HERE, 3)[who])
    model.replay = True
    return found


PARTS: dict[str, Callable[[Bench], None]] = {
    "mix": mix,
    "compiled": compiled,
    "short": short,
    "fp8": fp8,
    "fixed": fixed,
    "text": text,
    "lengths": lengths,
    "neighbours": neighbours,
}


def table(found: dict[str, Any]) -> str:
    """The mix, as Markdown."""
    lines = [
        "| model | Bertie, seq/s | TF | share of the ceiling | transformers, seq/s | TF | ratio | compiled, seq/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.get("mix", {}).items():
        cells = [name]
        for who in ("bertie", "transformers"):
            one = row.get(who)
            cells += [f"{one['seq_per_s']:,.0f}", f"{one['tflops']:.0f}"] if one else ["", ""]
            cells += [f"{one['share_of_ceiling']:.0%}" if one else ""] if who == "bertie" else []
        quick = row.get("compiled", {}).get("seq_per_s", {})
        cells.append(f"{row['ratio']:.2f}×" if "ratio" in row else "")
        cells.append(f"{quick['transformers, compiled']:,.0f} (Bertie there {quick['bertie']:,.0f})" if quick else "")
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"\nCeiling: {found['ceiling_tflops']:.0f} TFLOP/s, {found['dtype']}, on {found['chip']}.")
    return "\n".join(lines + [f"Left out: {one}" for one in found["left_out"]])


def plots(found: dict[str, Any], folder: Path) -> None:
    """What `lengths` found, as two pictures: over a power of two, a line of slope 1 is linear growth."""
    from benchmarks.serve import _STYLE
    from bertie.evaluation.plots import Line, lines

    for part, x in (("total", "tokens in all"), ("length", "tokens a text, 65,536 in all")):
        series = [
            Line(name, [(math.log2(int(n)), math.log2(1e3 * spent)) for n, spent in out[part].items()], style, True)
            for (name, out), style in zip(found["lengths"].items(), ("a", "b", "faint"), strict=False)
        ]
        svg = lines(f"Time by {x}", series, f"{x}, as a power of two", "milliseconds, as a power of two")
        svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        svg = svg.replace("</title>", "</title>" + _STYLE, 1) + "\n"
        (folder / f"speed-{part}.svg").write_text(svg, encoding="utf-8")


def names(value: str) -> list[str]:
    return [one for one in value.split(",") if one]


def numbers(value: str) -> list[int]:
    return [int(one) for one in names(value)]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "benchmarks.gpu", description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=names, default=list(SHAPES), help="which, by commas")
    parser.add_argument("--parts", type=names, default=["mix"], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=150.0, help="for everything; what is left then is left out")
    parser.add_argument("--repeats", type=int, default=5, help="of the best of each, in turns")
    parser.add_argument("--count", type=int, default=4096, help="texts of the mix")
    parser.add_argument("--budgets", type=numbers, default=list(BUDGETS), help="tokens of a flat batch, to be tried")
    parser.add_argument("--sizes", type=numbers, default=list(SIZES), help="texts of a padded batch, to be tried")
    parser.add_argument("--requests", type=numbers, default=[64, 256, 1024, 4096, 8192], help="of `short`, at a time")
    parser.add_argument("--compile", type=names, default=list(SHAPES), help="models of the part `compiled`")
    parser.add_argument("--compile-seconds", type=float, default=90.0, help="for each of them")
    parser.add_argument("--folder", type=Path, help="of `text`: a sentence-transformers model")
    parser.add_argument("--texts", type=Path, help="of `text`: a file, a text a line")
    parser.add_argument("--most-texts", type=int, default=30000)
    parser.add_argument("--encode-sizes", type=numbers, default=[1024, 256, 32], help="of sentence-transformers")
    parser.add_argument("--tiny", action="store_true", help="models and texts for trying this file out")
    parser.add_argument("--verbose", action="store_true", help="say in full what went wrong")
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--plots", type=Path, help="draw `lengths` of an earlier --json into this folder; no more")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for what, given, known in (("--models", options.models, SHAPES), ("--parts", options.parts, PARTS)):
        if unknown := [one for one in given if one not in known]:
            parser.error(f"{what}: {', '.join(unknown)} is not one of {', '.join(known)}")
    if options.plots:
        plots(json.loads(options.json.read_text(encoding="utf-8")), options.plots)
        return {}
    if options.tiny:
        options.count, options.repeats = min(options.count, 64), 2
        options.budgets, options.sizes, options.requests = [2048, 1024], [16, 8], [8, 32]
    with torch.inference_mode():
        if options.child:
            child(options)
            return {}
        bench = Bench(options)
        for part in options.parts:
            with bench.guarded(part):
                PARTS[part](bench)
            bench.save()
    print(table(bench.found))
    return bench.found


if __name__ == "__main__":
    main()
