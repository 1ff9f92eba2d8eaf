"""Pretrain an encoder on a corpus, or continue pretraining a model.

Build the corpus with `bertie corpus` and the tokenizer with `bertie tokenizer train`. A recipe
(TOML) defines the model, the objectives and the hyperparameters; flags override it. Without a
recipe, masked-language modelling of a model (-m) is continued on the corpus, which adapts it to a
domain. With an extended --tokenizer (`bertie tokenizer extend`) it gets embeddings for the new tokens.

During training, the state of the run is in OUTPUT.training; --resume continues an interrupted run from
its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie import recipes
from bertie.cli.common import UsageError, add_device, select_device, verb

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie pretrain tiny --corpus corpus --tokenizer tokenizer -o model       # two minutes on two CPU cores
  bertie pretrain modernbert-small --corpus corpus --tokenizer tokenizer -o model
  bertie pretrain -m ./bert-base-uncased --corpus clinic --tokens 200000000 --lr 5e-5 -o clinic-bert
  torchrun --no-python --nproc-per-node 8 bertie pretrain bert-base -o my-bert --resume
"""
# Fields of [training] in a recipe.
NUMBERS: dict[str, tuple[type, str]] = {
    "tokens": (int, "tokens to train on, in total"),
    "steps": (int, "optimizer steps, instead of --tokens"),
    "batch_tokens": (int, "tokens per step (default: 131072)"),
    "micro_tokens": (int, "tokens per micro-batch (gradient accumulation)"),
    "max_length": (int, "maximum tokens per sequence"),
    "lr": (float, "peak learning rate (default: 5e-4, or 5e-5 with -m)"),
    "warmup": (float, "fraction of the run for learning-rate warmup"),
    "seed": (int, "random seed"),
    "evals": (int, "evaluations on held-out text (default: 10)"),
    "save_steps": (int, "steps between checkpoints (default: every five minutes)"),
}


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "pretrain", "pretrain an encoder on raw text", __doc__, EXAMPLE)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a TOML file, or a name listed by `bertie recipes`")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder to save the model in")
    parser.add_argument("-m", "--model", metavar="MODEL", help="the model to continue from: a folder or a hub id")
    parser.add_argument("--corpus", metavar="DIR", help="a corpus built by bertie corpus")
    parser.add_argument("--tokenizer", metavar="DIR", help="a tokenizer trained by bertie tokenizer")
    parser.add_argument(
        "--data", metavar="DIR", default=".", help="folder that paths in the recipe are relative to (default: .)"
    )
    for name, (kind, description) in NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=description)
    parser.add_argument(
        "--budget",
        metavar="TIME",
        help="maximum training time, such as 90s, 5m or 1h; steps and schedule are shortened to fit",
    )
    parser.add_argument("--schedule", choices=("linear", "cosine", "wsd", "constant"), help="learning-rate schedule")
    parser.add_argument(
        "--mixed-precision", choices=("auto", "fp32", "bf16", "fp16"), help="compute dtype (auto: bf16 on a GPU)"
    )
    add_device(parser)
    parser.add_argument(
        "--strategy", choices=("ddp", "fsdp"), default="ddp", help="parallelism under torchrun (default: ddp)"
    )
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard event files")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run, if there is one")
    parser.add_argument("--overwrite", action="store_true", help="replace the model in the output folder")
    parser.add_argument("--json", action="store_true", help="print a summary of the run as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Pretrain a model."""
    import torch

    from bertie.training.distributed import local_device
    from bertie.training.pretrain.pretrain_recipe import PretrainRecipe
    from bertie.training.pretrain.run import pretrain

    if args.recipe is None and args.model is None:
        raise UsageError("pass a RECIPE, or a model to continue from (-m)")
    names = (*NUMBERS, "budget", "schedule", "mixed_precision", "model", "corpus", "tokenizer")
    overrides: dict[str, Any] = {name: getattr(args, name) for name in names}
    if args.recipe is None:
        overrides = {"lr": 5e-5, "tokens": None if args.steps else 100_000_000} | {
            name: value for name, value in overrides.items() if value is not None
        }
    file = None if args.recipe is None else recipes.find(args.recipe, recipes.PRETRAINING)
    summary = pretrain(
        PretrainRecipe.read(file, **overrides),
        args.output,
        data=args.data,
        resume=args.resume,
        overwrite=args.overwrite,
        device=local_device(torch.device(select_device(args.device))),
        strategy=args.strategy,
        tensorboard=args.tensorboard,
    )
    if os.environ.get("RANK", "0") != "0":  # the main process prints
        return
    if args.json:
        print(json.dumps(summary))
        return
    tokens, seconds = summary["tokens"], summary["seconds"]
    print(f"{args.output}: {summary['parameters']:,} parameters, {tokens:,} tokens in {seconds:,.0f} s")
    for name, score in summary["held_out"].items():
        interval = "" if score["low"] is None else f" [{score['low']:.4g}, {score['high']:.4g}]"
        value = "undefined" if score["value"] is None else f"{score['value']:.4g}"
        print(f"  held-out {name} {value}{interval}")
    print(f"  curves: {Path(args.output) / 'training' / 'curve.html'}")
