"""Pretrain an encoder on a corpus, or go on with one, by a recipe.

The corpus is made by `bertie corpus`, the tokenizer by `bertie tokenizer train`. A recipe (TOML) says what the model
is, what it is trained for and for how long; flags come before it. Without a recipe a model that is there (-m) goes on
with its own masked language modelling: a domain's text makes it that domain's model. With a longer --tokenizer
(`bertie tokenizer extend`) it gets rows for the new words.

While it runs, all there is lies in OUT.training, and --resume goes on with it after whatever stopped it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, device_of, verb

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie pretrain recipes/pretrain/modernbert-small.toml --corpus corpus --tokenizer tokenizer --out model
  bertie pretrain -m ./bert-base-uncased --corpus clinic --tokens 200000000 --lr 5e-5 --out clinic-bert
  torchrun --nproc-per-node 8 -m bertie pretrain recipes/pretrain/bert-base.toml --out my-bert --resume
"""
# Fields of [training] in a recipe.
NUMBERS: dict[str, tuple[type, str]] = {
    "tokens": (int, "to read in all"),
    "steps": (int, "to do in all, instead of --tokens"),
    "batch_tokens": (int, "tokens a step (131072)"),
    "micro_tokens": (int, "tokens held on the device at a time"),
    "max_length": (int, "tokens a text, at most"),
    "lr": (float, "the learning rate at its peak (5e-4; 5e-5 with -m)"),
    "warmup": (float, "the share of the tokens in which the rate rises"),
    "seed": (int, "of all that is random"),
    "evals": (int, "how often to look at held-out text (10)"),
    "save_steps": (int, "save every so many steps; every five minutes unless given"),
}


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "pretrain", "train an encoder on raw text", __doc__, EXAMPLE)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a TOML file")
    parser.add_argument("-o", "--out", required=True, metavar="OUT", help="the folder to make")
    parser.add_argument("-m", "--model", metavar="MODEL", help="a model to go on with: a folder or a hub id")
    parser.add_argument("--corpus", metavar="DIR", help="made by bertie corpus")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="made by bertie tokenizer")
    parser.add_argument("--data", metavar="DIR", default=".", help="where the recipe's files and folders lie (.)")
    for name, (kind, told) in NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=told)
    parser.add_argument("--schedule", choices=("linear", "cosine", "wsd", "constant"), help="of the learning rate")
    parser.add_argument("--mixed-precision", choices=("auto", "fp32", "bf16", "fp16"), help="of the computation")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, …; a GPU if there is one")
    parser.add_argument(
        "--strategy", choices=("ddp", "fsdp"), default="ddp", help="how torchrun distributes the model (ddp)"
    )
    parser.add_argument("--tensorboard", action="store_true", help="write event files for TensorBoard, too")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped, if there is one")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument("--json", action="store_true", help="print what the run says of itself as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    import torch

    from bertie.training.distributed import local_device
    from bertie.training.pretrain.pretrain_recipe import PretrainRecipe
    from bertie.training.pretrain.run import pretrain

    if args.recipe is None and args.model is None:
        raise UsageError("give a RECIPE, or a model to go on with (-m)")
    over: dict[str, Any] = {name: getattr(args, name) for name in (*NUMBERS, "schedule", "mixed_precision")}
    over |= {name: getattr(args, name) for name in ("model", "corpus", "tokenizer")}
    if args.recipe is None:
        over = {"lr": 5e-5, "tokens": None if args.steps else 100_000_000} | {
            name: value for name, value in over.items() if value is not None
        }
    asked = PretrainRecipe.read(args.recipe, **over)
    device = local_device(torch.device(device_of(args.device)))
    made = pretrain(
        asked,
        args.out,
        data=args.data,
        resume=args.resume,
        overwrite=args.overwrite,
        device=device,
        strategy=args.strategy,
        tensorboard=args.tensorboard,
    )
    if os.environ.get("RANK", "0") != "0":  # the first process speaks for all
        return
    if args.json:
        print(json.dumps(made))
        return
    print(f"{args.out}: {made['parameters']:,} parameters, {made['tokens']:,} tokens in {made['seconds']:,.0f} s")
    if made["evaluation"]:
        skip = ("step", "epoch")
        found = {name: value for name, value in made["evaluation"].items() if name not in skip}
        print("  " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    print(f"  curves: {Path(args.out) / 'training' / 'curve.html'}")
