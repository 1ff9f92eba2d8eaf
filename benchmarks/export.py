"""Exported graphs beside Bertie: every family × {onnx, openvino} × {fp32, int8}: error, size and speed.

    python -m benchmarks.export
    python -m benchmarks.export --models bertie-small path/to/all-MiniLM-L6-v2 --families

Families are random models of a realistic shape (by default 3 layers of width 256, with the built-in model's tokenizer
and a vocabulary of 30,522); `--models` are real ones. Each is exported by `bertie.export`, which compares it with the
source and measures both in turns. Prints a Markdown table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import bertie
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.model_spec import FAMILIES, model_spec
from bertie.compress.export_report import ExportedFile
from bertie.nn.model import Model

VARIANTS = (("onnx", "fp32"), ("openvino", "fp32"), ("onnx", "int8"), ("openvino", "int8"))
SEGMENTS = ("albert", "bert", "electra", "ernie")
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
V3 = {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}
EXTRA: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 128},
    "deberta": DEBERTA | {"position_biased_input": False},
    "deberta-v2": DEBERTA | V3 | {"type_vocab_size": 0},
    "electra": {"embedding_size": 128},
    "longformer": {"attention_window": 64, "sep_token_id": 2, "pad_token_id": 1},
    "eurobert": {"num_key_value_heads": 2, "hidden_act": "silu"},
    "modernbert": {"hidden_activation": "gelu", "local_attention": 128},
    "big_bird": {"block_size": 16, "num_random_blocks": 1, "max_position_embeddings": 1024},
    "roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "camembert": {"pad_token_id": 1, "type_vocab_size": 1},
    "mpnet": {"pad_token_id": 1},
}


def random_model(model_type: str, layers: int, width: int) -> Checkpoint:
    """A random model of a family, with the built-in model's tokenizer."""
    shape: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 4 * width,
        "max_position_embeddings": 514,
    }
    if model_type == "distilbert":
        names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
        names["intermediate_size"] = "hidden_dim"
        shape = {names.get(key, key): value for key, value in shape.items()}
    segments = {"type_vocab_size": 2} if model_type in SEGMENTS else {}
    config = {"model_type": model_type, "vocab_size": 30522, **shape, **segments, **EXTRA.get(model_type, {})}
    config["pad_token_id"] = config.get("pad_token_id", 0)
    spec = model_spec(config, None)
    torch.manual_seed(0)
    model = Model(spec.encoder, spec.heads).eval()
    with torch.no_grad():  # larger than at initialization, where attention is almost uniform
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embeddings" not in name:
                weight.mul_(2.5)
    tokenizer = Checkpoint.load("bertie-small", device="cpu").tokenizer
    return Checkpoint(model=model, config=config, spec=spec, tokenizer=tokenizer, source=f"random {model_type}")


def measure(model: str | Checkpoint) -> list[ExportedFile]:
    """Export a model in all variants."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        report = bertie.export(
            model, out, to=["onnx", "openvino"], precision=["fp32", "int8"], task="embed", progress=False
        )
    by_variant = {(file.format, file.precision): file for file in report.files}
    return [by_variant[variant] for variant in VARIANTS]


def cell(file: ExportedFile) -> str:
    output = file.outputs["sentence_embedding"]
    return f"{output.max_difference:.1g} · {output.min_cosine:.4f} · {file.bytes / 1e6:.1f} · {file.speedup:.2f}×"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--models", nargs="*", default=["bertie-small"])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("-o", "--output", type=Path, default=Path("export.json"))
    args = parser.parse_args()
    print("| model | " + " | ".join(f"{kind} {precision}" for kind, precision in VARIANTS) + " |")
    print("|---|" + "--:|" * len(VARIANTS), flush=True)
    results = {}
    for name in [*args.models, *args.families]:
        model = name if name in args.models else random_model(name, args.layers, args.width)
        files = measure(model)
        label = Path(name).name
        results[label] = {f"{file.format} {file.precision}": _plain(file) for file in files}
        print(f"| {label} | " + " | ".join(map(cell, files)) + " |", flush=True)
        args.output.write_text(json.dumps({"threads": torch.get_num_threads(), "models": results}, indent=2) + "\n")


def _plain(file: ExportedFile) -> dict[str, Any]:
    output = file.outputs["sentence_embedding"]
    return {
        "max_difference": output.max_difference,
        "min_cosine": output.min_cosine,
        "mean_cosine": output.mean_cosine,
        "agreement": output.agreement,
        "bytes": file.bytes,
        "texts_per_second": file.texts_per_second,
        "bertie_texts_per_second": file.source_texts_per_second,
    }


if __name__ == "__main__":
    main()
