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
    "method": "classify: full fine-tuning, few-shot (SetFit) or frozen (linear probe); auto compares them on held-out "
    "rows if there are few rows",
    "epochs": "passes over the training data",
    "lr": "peak learning rate",
    "head_lr": "learning rate of the head",
    "batch_size": "texts per step",
    "batch_tokens": "tokens per step, instead of --batch-size",
    "micro_tokens": "tokens per micro-batch",
    "warmup": "fraction of steps for learning-rate warmup",
    "schedule": "learning-rate schedule after the warmup",
    "decay": "schedule wsd: fraction of steps at the end in which the learning rate decays",
    "weight_decay": "weight decay of weight matrices",
    "beta2": "second beta of AdamW",
    "max_grad_norm": "maximum gradient norm; 0: no gradient clipping",
    "layer_decay": "layer-wise learning-rate decay: learning rate of a layer relative to the layer above it",
    "freeze": "number of lower layers to freeze, or 'encoder' to train the head only",
    "unfreeze": "frozen layers to unfreeze per epoch, from the top",
    "lora": "LoRA rank; 0: train all weights",
    "lora_alpha": "LoRA alpha (default: twice the rank)",
    "class_weights": "'balanced', or weights such as good=1,bad=3",
    "label_smoothing": "probability mass moved from the true label to the others",
    "dropout": "dropout probability (default: that of the checkpoint)",
    "patience": "evaluations without improvement before early stopping; 0: never stop early",
    "evals_per_epoch": "evaluations on the dev data",
    "seed": "random seed",
    "mixed_precision": "auto: bf16 on GPUs that support it, otherwise fp32; on CPUs with AVX512_BF16, bf16 is faster",
    "gradient_checkpointing": "recompute activations in the backward pass: less memory, more time",
    "max_length": "maximum tokens per window (default: the model's maximum length)",
    "train_windows": "maximum windows of a long text per step; of more, a sample is drawn in each epoch",
    "dev_fraction": "fraction of the training data to hold out if there is no --dev; 0: none",
    "folds": "cross-validation folds if there is no --dev, instead of a held-out part; 0: none",
    "refit": "after evaluation on held-out rows, train again on all rows",
    "stop_loss": "training loss below which training stops after one more epoch; 0: never",
    "budget": "maximum training time, such as 90s, 5m or 1h; the number of epochs is reduced to fit",
    "metric": "metric that selects the best epoch and the best seed (default: the task's main metric)",
    "abstain": "target precision of confident predictions; sets the abstention threshold",
    "loss": (
        "embed: infonce, triplet, softmax, cosine, cosent, contrastive, margin-mse or kl, with settings such as "
        "triplet:margin=0.2,distance=cosine (default: chosen from the data format)"
    ),
    "matryoshka": "embed: dimensions that embeddings can be truncated to, such as 256,128,64",
    "pooling": "embed: cls, mean, max, last or weighted-mean (default: the checkpoint's, else mean; causal: last)",
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
