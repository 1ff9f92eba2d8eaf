"""The methods of training a classifier, and which of them is used.

    frozen      logistic regression on the pooled hidden states of the encoder as it is (`linear_probe`)
    few-shot    the same, after the upper half of the encoder has been trained so that texts of one label are similar:
                SetFit's two steps (Tunstall et al. 2022), with every pair of a batch instead of sampled pairs
    full        the head and all weights are trained together (`bertie.training.finetune.fit`)

The rule of method="auto", for single texts, by the number of rows per label:

    up to 64    frozen and few-shot (frozen only for multi-label data), and from 32 on also full
    more        full, and up to 5,000 rows also frozen, which costs little and is sometimes better

Each is trained on the same parts of the data and predicts the rest: the dev data, or the rows that were held out. The
one with the best score is trained on all rows; of equal scores, the one that trains more weights. Pairs of texts are
always trained in full, and so is everything if a hyperparameter of full fine-tuning was set (`lr`, `epochs`, …; and
`budget` from 32 rows per label on).

The reported score is not that of the winner, which is biased upwards as the best of several. With cross-validation, the
method for the rows of a fold is chosen by the other folds, and the score is that of these predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from bertie.errors import ConfigError, InputError
from bertie.recipe import Recipe
from bertie.training.finetune.data import LabelledDataset

FEW, FULL_FROM = 64, 32  # rows per label
MOST_FROZEN_ROWS = 5_000
# Setting any of these hyperparameters selects full fine-tuning.
FULL_ONLY = (
    *("epochs", "lr", "head_lr", "batch_size", "batch_tokens", "layer_decay", "freeze", "unfreeze", "lora"),
    *("class_weights", "label_smoothing", "patience", "evals_per_epoch", "metric", "budget", "stop_loss"),
)
_DEFAULTS = {item.name: item.default for item in fields(Recipe)}


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """The methods to compare, in the order of the weights they train, and why the others are not tried."""

    methods: tuple[str, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    few: bool = False  # whether the data has few examples

    @property
    def only_full(self) -> bool:
        """Whether there is nothing to compare, and full fine-tuning is used."""
        return self.methods == ("full",)


def plan_methods(recipe: Recipe, data: LabelledDataset) -> MethodPlan:
    """Choose the methods to try.

    >>> from bertie.training.finetune.data import read_dataset
    >>> data = read_dataset("classify", [f"text {i}" for i in range(48)], ["a", "b", "c"] * 16)
    >>> plan_methods(Recipe(), data)
    MethodPlan(methods=('frozen', 'few-shot'), left_out={'full': '48 rows'}, few=True)
    """
    rows, method = len(data.examples), recipe.method
    pairs = any(len(example.texts) != 1 for example in data.examples)
    if method not in ("auto", "full"):
        _check_explicit(method, data, pairs)
        return MethodPlan((method,), few=rows <= FEW * len(data.labels))
    given = {name for name in FULL_ONLY if getattr(recipe, name) != _DEFAULTS[name]}
    per_label = rows / max(1, len(data.labels))
    if per_label < FULL_FROM:
        given.discard("budget")  # the others take seconds
    if method == "full" or data.kind != "classify" or pairs or len(data.labels) < 2 or given:
        return MethodPlan(("full",))
    if per_label > FEW:
        return MethodPlan(("frozen", "full") if rows <= MOST_FROZEN_ROWS else ("full",))
    methods = ["frozen", *([] if data.multi_label else ["few-shot"])]
    if per_label >= FULL_FROM:
        return MethodPlan((*methods, "full"), few=True)
    return MethodPlan(tuple(methods), {"full": f"{rows:,} rows"}, few=True)


def _check_explicit(method: str, data: LabelledDataset, pairs: bool) -> None:
    if data.kind != "classify":
        raise ConfigError(f"method={method!r} is for classification; leave it out to train for {data.kind}")
    if pairs:
        raise InputError(f"method={method!r} is for single texts, and {data.name} has pairs; use method='full'")
    if method == "few-shot" and data.multi_label:
        raise InputError(
            f"method='few-shot' is for one label per text, and {data.name} has several; use method='frozen' or 'full'"
        )


def best_method(scores: Mapping[str, float]) -> str:
    """The method with the best score; of equal ones the last, which trains most weights.

    >>> best_method({"frozen": 0.8, "few-shot": 0.8, "full": 0.7})
    'few-shot'
    """
    return max(reversed(list(scores)), key=lambda name: -math.inf if math.isnan(scores[name]) else scores[name])
