"""A command-line flag for each hyperparameter in `Recipe`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from bertie.cli.labelled_input import parse_pairs
from bertie.recipe import Recipe, parse_duration

CHOSEN = (
    "epochs",
    "lr",
    "head_lr",
    "batch_size",
    "patience",
    "dev_fraction",
    "folds",
    "refit",
    "stop_loss",
)  # from the model and the data
NONE = "none"  # resets a value of a recipe file; a flag that is not given is None

HELP = {
    "method": "classify: full, few-shot or frozen; auto compares them on held-out rows where rows are few",
    "epochs": "passes over the training data",
    "lr": "peak learning rate",
    "head_lr": "learning rate of the head",
    "batch_size": "texts per step",
    "batch_tokens": "tokens per step, instead of --batch-size",
    "micro_tokens": "tokens per micro-batch",
    "warmup": "fraction of steps in which the learning rate rises",
    "schedule": "learning-rate schedule after the warmup",
    "decay": "schedule wsd: the last fraction of steps, in which the learning rate decays",
    "weight_decay": "weight decay of weight matrices",
    "beta2": "second beta of AdamW",
    "max_grad_norm": "gradient clipping; 0: none",
    "layer_decay": "learning rate of a layer relative to the layer above it",
    "freeze": "number of lower layers to freeze, or 'encoder' to train the head only",
    "unfreeze": "frozen layers to unfreeze per epoch, from the top",
    "lora": "LoRA rank; 0: train all weights",
    "lora_alpha": "LoRA alpha; twice the rank by default",
    "class_weights": "'balanced', or weights as good=1,bad=3",
    "label_smoothing": "probability mass moved from the true label to the others",
    "dropout": "dropout probability, instead of the checkpoint's",
    "patience": "evaluations without improvement before early stopping; 0: never stop early",
    "evals_per_epoch": "evaluations on the dev data",
    "seed": "random seed",
    "mixed_precision": "auto: bf16 on GPUs that have it, else fp32; bf16 on CPUs with AVX512_BF16 is faster",
    "gradient_checkpointing": "recompute activations in the backward pass: less memory, more time",
    "max_length": "tokens per window, fewer than the model could read",
    "train_windows": "windows per long text and step",
    "dev_fraction": "fraction of the training data to hold out without --dev; 0: none",
    "folds": "folds of cross-validation without --dev, instead of holding out one part; 0: none",
    "refit": "after holding out, train again on all rows",
    "stop_loss": "training loss at which a run has nothing left to learn, and ends after one more epoch; 0: none",
    "budget": "time to train in, as 90s, 5m or 1h: fewer epochs if need be",
    "metric": "selects the best epoch and the best seed; the task's main metric by default",
    "abstain": "target precision of confident predictions; sets the abstention threshold",
    "loss": (
        "embed: infonce, triplet, softmax, cosine, cosent, contrastive, margin-mse or kl, with settings as in "
        "triplet:margin=0.2,distance=cosine; by the kind of data by default"
    ),
    "matryoshka": "embed: dimensions that embeddings may be truncated to, as 256,128,64",
    "pooling": "embed: cls, mean, max, last or weighted-mean; the checkpoint's, else mean (last if causal)",
}


def add_recipe_flags(group: argparse._ArgumentGroup) -> None:
    """Add a flag for each field of Recipe."""
    hints = get_type_hints(Recipe)
    for field in fields(Recipe):
        flag, hint = "--" + field.name.replace("_", "-"), hints[field.name]
        options: dict[str, Any] = {"dest": f"recipe.{field.name}", "help": HELP[field.name] + _default(field)}
        if bool in _members(hint):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, **options)
        elif field.name == "budget":
            group.add_argument(flag, type=_duration, metavar="TIME", **options)
        else:
            group.add_argument(flag, type=_parser(hint), metavar=_metavar(hint), **options)


def _duration(text: str) -> float | str:
    return text if text == NONE else parse_duration("--budget", text)


def recipe_values(args: argparse.Namespace) -> dict[str, Any]:
    """The hyperparameters given as flags."""
    return {
        field.name: None if value == NONE else value
        for field in fields(Recipe)
        if (value := getattr(args, f"recipe.{field.name}")) is not None
    }


def _default(field: Field[Any]) -> str:
    value = field.default
    if value is None:
        return " (default: chosen from the model and the data)" if field.name in CHOSEN else ""
    return (
        f" (default: {value:g})"
        if isinstance(value, int | float) and not isinstance(value, bool)
        else f" (default: {value})"
    )


def _metavar(hint: Any) -> str:
    names = {int: "N", float: "NUMBER", str: "NAME", NoneType: NONE, tuple[int, ...]: "N,N,…"}
    return "|".join(
        name
        for member in _members(hint)
        for name in (get_args(member) if get_origin(member) is Literal else (names.get(member, "LABEL=WEIGHT,…"),))
    )


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _parser(hint: Any) -> Callable[[str], Any]:
    """Parse a flag's value by the type of its field."""

    def parse(text: str) -> Any:
        for member in _members(hint):
            try:
                return _parse_as(member, text)
            except ValueError:
                continue
        raise ValueError(text)

    parse.__name__ = _metavar(hint)  # argparse's message: invalid N|none value
    return parse


def _parse_as(kind: Any, text: str) -> Any:
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(text)
        return text
    if kind is NoneType:
        if text != NONE:
            raise ValueError(text)
        return NONE
    if kind in (int, float, str):
        return kind(text)
    if kind == tuple[int, ...]:
        return tuple(int(number) for number in text.split(","))
    if "=" not in text:
        raise ValueError(text)
    weights = parse_pairs([text], "--class-weights", "LABEL=WEIGHT")
    return {label: float(weight) for label, weight in weights.items()}
