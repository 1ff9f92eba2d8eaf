"""infinity-emb as a peer of `bertie serve`: its environment, its ONNX model, and its best settings.

    python -m benchmarks.serve_infinity setup      # .venv-infinity, with its old pins
    python -m benchmarks.serve_infinity export     # .models/all-MiniLM-L6-v2-onnx and -onnx-int8
    python -m benchmarks.serve_infinity tune --data FOLDER [--seconds 6] [--repeats 2] [--json OUT.json]

setup installs infinity-emb and what it needs into an environment of its own. `--torch` is the
requirement of torch: where the default index has builds for CUDA only, name another with PIP_INDEX_URL.

tune starts a server for each setting, one after the other, and measures the texts of
`benchmarks.serve saturate` with the same closed loop: first engines and options with batches of 8,
then batch sizes for the best of them, then one process per core. The order is reversed in every
second repeat; medians count. Settings in fp32 compete for the best; int8 and bf16 are listed as well.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import serve_servers
from benchmarks.serve_servers import INFINITY_PYTHON, MODEL, ROOT, request_bodies, server

# Two folders: infinity-emb keeps the optimized model beside the other, and would load that of the wrong precision.
ONNX_MODELS = {name: ROOT / ".models" / f"all-MiniLM-L6-v2-{name}" for name in ("onnx", "onnx-int8")}
# The last optimum with BetterTransformer, the last transformers that it converts, and packages for numpy 1.
REQUIREMENTS = (
    "infinity-emb[server,torch,optimum]==0.0.78",
    "optimum==1.27.0",
    "transformers==4.48.3",
    "numpy<2",
    "pandas<3",
    "pyarrow<22",
    "ctranslate2==4.6.0",
)


@dataclass(frozen=True)
class Setting:
    """Settings of infinity's engine, and the number of processes."""

    name: str
    engine: dict[str, Any]
    processes: int = 1
    exact: bool = True  # in fp32, with the results of the other servers

    def arguments(self) -> list[str]:
        return ["--settings", json.dumps(self.engine), "--processes", str(self.processes)]

    def model(self, model: str) -> str:
        """The folder to serve: ONNX Runtime needs an exported model."""
        return str(ONNX_MODELS["onnx" if self.exact else "onnx-int8"]) if self.engine["engine"] == "optimum" else model


_BATCH = {"batch_size": 8}
TORCH = {"engine": "torch", "bettertransformer": False} | _BATCH
ONNX = {"engine": "optimum", "pooling_method": "mean", "onnx_do_not_prefer_quantized": True} | _BATCH
SETTINGS = (
    Setting("defaults (torch, BetterTransformer, batches of 32)", {"engine": "torch"}),
    Setting("BetterTransformer", {"engine": "torch"} | _BATCH),
    Setting("BetterTransformer, lengths by tokens", {"engine": "torch", "lengths_via_tokenize": True} | _BATCH),
    Setting("torch", TORCH),
    Setting("torch, compiled", TORCH | {"compile": True}),
    Setting("ONNX Runtime", ONNX),
    Setting("ONNX Runtime, not optimized", ONNX | {"onnx_disable_optimize": True}),
    Setting("CTranslate2", TORCH | {"engine": "ctranslate2"}),
    Setting("torch, bf16", TORCH | {"dtype": "bfloat16"}, exact=False),
    Setting("torch, int8", TORCH | {"dtype": "int8"}, exact=False),
    Setting("ONNX Runtime, int8", ONNX, exact=False),
)
BATCHES = (2, 4, 16, 32)
# The best of `tune` on two cores.
BEST = Setting("BetterTransformer", {"engine": "torch"} | _BATCH)


def with_batch(setting: Setting, batch: int) -> Setting:
    return Setting(
        f"{setting.name}, batches of {batch}",
        setting.engine | {"batch_size": batch},
        setting.processes,
        setting.exact,
    )


def with_processes(setting: Setting, processes: int) -> Setting:
    return Setting(f"{setting.name}, {processes} processes", setting.engine, processes, setting.exact)


def setup(args: argparse.Namespace) -> None:
    """Create the environment."""
    folder = INFINITY_PYTHON.parents[1]
    venv.create(folder, with_pip=True)
    subprocess.run([INFINITY_PYTHON, "-m", "pip", "install", args.torch, *REQUIREMENTS], check=True)


_EXPORT = """
import sys
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import AutoModel

class LastHiddenState(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, token_type_ids):
        return self.model(input_ids, attention_mask, token_type_ids).last_hidden_state

folder, output, int8_output = sys.argv[1:]
model = AutoModel.from_pretrained(folder, attn_implementation="eager", add_pooling_layer=False).eval()
names = ["input_ids", "attention_mask", "token_type_ids"]
ids = torch.ones(2, 8, dtype=torch.long)
axes = {name: {0: "batch_size", 1: "sequence_length"} for name in [*names, "last_hidden_state"]}
torch.onnx.export(
    LastHiddenState(model), (ids, ids, ids * 0), f"{output}/model.onnx", input_names=names,
    output_names=["last_hidden_state"], dynamic_axes=axes, opset_version=17, dynamo=False,
)
quantize_dynamic(f"{output}/model.onnx", f"{int8_output}/model.onnx", weight_type=QuantType.QInt8)
"""


def export(args: argparse.Namespace) -> None:
    """Export the model to ONNX, in fp32 and quantized to int8, beside a copy of its other files."""
    for folder in ONNX_MODELS.values():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(args.model, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    command = [INFINITY_PYTHON, "-c", _EXPORT, args.model, *ONNX_MODELS.values()]
    subprocess.run(command, check=True, env=serve_servers.environment(packages=False))
    for (
        folder
    ) in ONNX_MODELS.values():  # with one file, optimum compares its name with infinity's whole path, and fails
        os.link(folder / "model.onnx", folder / "copy.onnx")
    print(*ONNX_MODELS.values())


def measure(setting: Setting, model: str, bodies: Sequence[bytes], args: argparse.Namespace) -> dict[str, Any] | None:
    """The rate of one setting, in a server of its own; None if it does not start or answer."""
    from benchmarks.serve import measure_saturation

    try:
        with server("infinity", setting.model(model), setting.arguments()) as up:
            result = measure_saturation(up, "/embeddings", bodies, args, args.seconds)
    except SystemExit as error:
        print(f"  {setting.name}: {error}", flush=True)
        return None
    print(f"  {setting.name}: {json.dumps(result)}", flush=True)
    return result if result["answered"] else None


def tune(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all settings, and find the best in fp32."""
    from benchmarks.serve import real_texts

    bodies = request_bodies(real_texts(args.data, args.model, args.texts), path="/embeddings")
    runs: dict[str, list[dict[str, Any]]] = {}
    by_name: dict[str, Setting] = {}

    def run(settings: Sequence[Setting]) -> None:
        by_name.update({setting.name: setting for setting in settings})
        for number in range(args.repeats):
            for setting in settings if number % 2 == 0 else reversed(settings):
                if number == 0 or runs[setting.name]:  # what does not run is not tried again
                    result = measure(setting, args.model, bodies, args)
                    runs.setdefault(setting.name, []).extend([] if result is None else [result])

    def best() -> Setting:
        rates = {
            name: statistics.median(result["rate"] for result in results) for name, results in runs.items() if results
        }
        return by_name[max((name for name in rates if by_name[name].exact), key=rates.__getitem__)]

    run([setting for setting in SETTINGS if args.only in setting.name])
    run([with_batch(best(), batch) for batch in args.batches])
    run([with_processes(best(), os.cpu_count() or 1)])
    print("\n| infinity-emb | texts/s | CPU ms per text | p50 ms | p99 ms |\n|" + "---|" * 5)
    rows = []
    for name, results in runs.items():
        setting = by_name[name]
        if not results:
            print(f"| {name} | does not run | | | |")
            continue
        row = {
            key: statistics.median(result[key] for result in results) for key in ("rate", "cpu_ms", "p50_ms", "p99_ms")
        }
        rows.append({"name": name, "engine": setting.engine, "processes": setting.processes, **row})
        times = f"{row['cpu_ms']:.2f} | {row['p50_ms']:.0f} | {row['p99_ms']:.0f}"
        print(f"| {name} | {row['rate']:.1f} | {times} |")
    fastest = best()
    print(f"\nbest: {fastest.name}: {' '.join(fastest.arguments())}")
    return {"best": {"name": fastest.name, "arguments": fastest.arguments()}, "settings": rows}


def main() -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("setup", "export", "tune"))
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement of torch, for setup")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--data", type=Path, help="a folder of data sets, see benchmarks.serve")
    parser.add_argument("--texts", type=Path, help="a list of texts in JSON, instead of --data")
    parser.add_argument("--only", default="", help="a part of the names of settings: try only these")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="batch sizes to try")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--generator", choices=("wrk", "python"), default="wrk")
    parser.add_argument("--processes", type=int, default=1, help="processes of the Python generator")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.batches = [int(value) for value in args.batches.split(",") if value]
    if args.what != "tune":
        {"setup": setup, "export": export}[args.what](args)
        return 0
    result = tune(args)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
