"""The default hyperparameters of fine-tuning, chosen from the model and the data.

The rule was fitted on a grid of learning rates, head learning rates, epochs and batch sizes over twelve datasets with
200, 1,000 and 5,000 rows each, from two models of width 384 (benchmarks/RESULTS.md has the figures):

- `lr` 1.5e-4 for a width of 384, scaled by the inverse square of the width: 3.7e-5 for base models and 1.5e-5 for large
  ones, in the range that their authors recommend. One rate serves all data sizes; only the number of steps must be
  large enough.
- `head_lr` grows with the number of labels: a fresh head of 77 classes learns too slowly at the encoder's rate, and
  one of two classes is best at it.
- `epochs`: 5, or 3 from 20,000 rows on, or as many as 400 steps take if rows are few.
- `stop_loss` 0.01 for single-label classification where the epochs are chosen, too: a run whose training loss has
  been below it for an epoch ends after one more, in which the learning rate decays. Few rows are often memorized
  long before 400 steps, and the rest changes nothing.
- `batch_size` 16, and 32 from 20,000 rows on.
- Embeddings (`embed`) have no fresh head, and the encoder has often been trained for them: half of the learning rate,
  batches of 32 rows, or of 64 from 1,000 pairs on, as the other rows are their negatives, and 3 to 10 epochs, or 1
  to 10 from 20,000 rows on. Nothing is held out by default. These follow the usual recipes, and were not fitted.
- `bertie.MultiTask` takes the rule for the head with the most rows. A part of each head's data is held out, and the
  epoch with the best mean score is kept.
- With dev data the best epoch is kept, and training stops when it has not improved for half of the epochs.
- Without dev data, `folds`: from 20 to 399 rows, 5 folds of cross-validation (3 where methods for
  few examples are compared, see `methods`). Otherwise `dev_fraction`: a tenth is held
  out (at least 30 rows, at most 1,000). The models of the folds, or the one of the rest, run to the end of their
  schedule, and what they predict for the rows they have not seen gives the score, the temperature and the thresholds.
- `refit`: the final model is then trained on all rows, for as many epochs: training on all rows gained 2.3, 0.7 and
  0.7 points with 200, 1,000 and 5,000 rows. Fewer epochs are taken only where the score had fallen from its best by
  more than two standard errors at the end. Above 20,000 rows the gain is too small for twice the time: the model of
  the best epoch is kept instead.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bertie.config import EncoderConfig
from bertie.recipe import Recipe
from bertie.training.finetune.data import LabelledDataset
from bertie.training.finetune.methods import plan_methods

BASE_LR, BASE_WIDTH = 1.5e-4, 384
LR_RANGE = (1e-5, 3e-4)
LORA_LR, HEAD_ONLY_LR = 5e-4, 1e-3
LARGE = 20_000  # rows
STEPS = 400  # that training takes at least
MAX_EPOCHS, MAX_EMBED_EPOCHS = 50, 10
STOP_LOSS = 0.01
EMBED_LR, EMBED_PAIRS = 0.5, 1000  # relative to other tasks; from so many pairs on, batches are large
LABELS_PER_FACTOR, MAX_FACTOR = 5, 10  # of the head's learning rate
HELD_OUT, FEWEST, MOST, LARGEST_SHARE = 0.1, 30, 1000, 0.2
REFIT_ROWS = LARGE  # up to which the model is trained again on all rows
FOLDS, FEWEST_FOLD_ROWS, MOST_FOLD_ROWS = 5, 20, 399
METHOD_FOLDS = 3  # where methods for few examples are compared
TOO_HIGH = 5  # times the default learning rate: usually too much


@dataclass(frozen=True, slots=True)
class ChosenRecipe:
    """A recipe with all hyperparameters, and why those that were not given have their values."""

    recipe: Recipe
    reasons: tuple[str, ...]  # as "lr 1.5e-4: hidden size 384, 6 layers"
    warnings: tuple[str, ...] = ()


def default_lr(config: EncoderConfig) -> float:
    """The learning rate for fine-tuning all weights of a model, with two significant digits.

    >>> from types import SimpleNamespace as Config
    >>> [default_lr(Config(width=width, depth=depth)) for width, depth in ((384, 6), (768, 12), (1024, 24))]
    [0.00015, 3.7e-05, 1.5e-05]
    """
    rate = BASE_LR * (BASE_WIDTH / config.width) ** 2 * min(1.0, 12 / config.depth) ** 0.5
    return float(f"{min(max(rate, LR_RANGE[0]), LR_RANGE[1]):.1e}")


def default_dev_fraction(rows: int) -> float:
    """The fraction of the training data to hold out; none of fewer than 60 rows.

    >>> [round(rows * default_dev_fraction(rows)) for rows in (50, 100, 1000, 50_000)]
    [0, 20, 100, 1000]
    """
    if rows < 2 * FEWEST:
        return 0.0
    return min(LARGEST_SHARE, max(min(HELD_OUT, MOST / rows), FEWEST / rows))


def dev_fraction(recipe: Recipe, data: LabelledDataset) -> float:
    """The fraction of the training data to hold out: the recipe's, or the default one."""
    if recipe.dev_fraction is not None:
        return recipe.dev_fraction
    return default_dev_fraction(len(data.examples)) if data.kind != "embed" else 0.0


def default_folds(recipe: Recipe, data: LabelledDataset) -> int:
    """The number of folds of cross-validation; 0 for none: the recipe's, or the default one."""
    if recipe.folds is not None:
        return recipe.folds
    if data.kind == "embed" or recipe.dev_fraction is not None or recipe.refit is False:
        return 0
    if len(data.examples) <= MOST_FOLD_ROWS and plan_methods(recipe, data).few:
        return METHOD_FOLDS if len(data.examples) >= 2 * METHOD_FOLDS else 0
    return FOLDS if FEWEST_FOLD_ROWS <= len(data.examples) <= MOST_FOLD_ROWS else 0


def default_refit(recipe: Recipe, data: LabelledDataset) -> bool:
    """Whether to train on all rows after holding out a part: the recipe's setting, or the default."""
    if recipe.refit is not None:
        return recipe.refit
    return data.kind != "embed" and len(data.examples) <= REFIT_ROWS


def print_reasons(reasons: Sequence[str]) -> None:
    """Print to standard error which hyperparameters were chosen, and why."""
    if reasons:
        print("chosen: " + "; ".join(reasons), file=sys.stderr)


def choose(recipe: Recipe, config: EncoderConfig, data: LabelledDataset, *, has_dev: bool) -> ChosenRecipe:
    """Choose the hyperparameters that are None. `data` is the training data, without what is held out of it."""
    rows, labels = len(data.examples), len(data.labels)
    model = f"hidden size {config.width}, {config.depth} layers"
    embed = data.kind == "embed"
    best_lr = default_lr(config) * (EMBED_LR if embed else 1.0)
    if recipe.freeze == "encoder" and not recipe.unfreeze:
        lr, why = HEAD_ONLY_LR, "only the head is trained"
    elif recipe.lora:
        lr, why = LORA_LR, f"LoRA of rank {recipe.lora}"
    else:
        lr, why = best_lr, model
    chosen: dict[str, tuple[Any, str]] = {}
    if recipe.lr is None:
        chosen["lr"] = (lr, why)
    lr = recipe.lr or lr
    factor = _head_factor(data)
    if recipe.head_lr is None and factor > 1 and lr < HEAD_ONLY_LR:
        chosen["head_lr"] = (float(f"{lr * factor:.1e}"), f"{labels} labels")
    size, why = default_batch_size(data)
    if recipe.batch_size is None and recipe.batch_tokens is None:
        chosen["batch_size"] = (size, why)
    size = recipe.batch_size or size
    if recipe.epochs is None:
        least = (5 if rows < LARGE else 3) if not embed else (3 if rows < LARGE else 1)
        most = MAX_EPOCHS if not embed else MAX_EMBED_EPOCHS
        chosen["epochs"] = (float(min(most, max(least, math.ceil(STEPS * size / rows)))), f"{rows:,} rows")
        if recipe.stop_loss is None and data.kind == "classify" and not data.multi_label and not recipe.label_smoothing:
            chosen["stop_loss"] = (STOP_LOSS, "ends once the loss is low")
    evaluations = (recipe.epochs or chosen["epochs"][0]) * recipe.evals_per_epoch
    if recipe.patience is None and has_dev and (patience := max(3, math.ceil(evaluations / 2))) < evaluations - 1:
        chosen["patience"] = (patience, "half of the evaluations")
    warnings: tuple[str, ...] = ()
    full = not recipe.lora and (not recipe.freeze or recipe.unfreeze)
    if full and recipe.lr is not None and recipe.lr > TOO_HIGH * best_lr:
        warnings = (
            f"lr={recipe.lr:g} is more than {TOO_HIGH} times the usual {best_lr:g} for this model ({model}): at such a "
            "rate fine-tuning tends to destroy what pretraining learned; lower it, or set head_lr if it is meant for "
            "the head",
        )
    reasons = tuple(f"{name} {_plain(value)}: {why}" for name, (value, why) in chosen.items())
    return ChosenRecipe(recipe.replace(**{name: value for name, (value, _) in chosen.items()}), reasons, warnings)


def default_batch_size(data: LabelledDataset) -> tuple[int, str]:
    """The number of rows per step, and why."""
    rows = len(data.examples)
    if data.kind == "embed" and data.inputs == "pairs":
        return (64 if rows >= EMBED_PAIRS else 32), f"{rows:,} pairs, with the others as negatives"
    return (16 if rows < LARGE and data.kind != "embed" else 32), f"{rows:,} rows"


def _head_factor(data: LabelledDataset) -> float:
    """How much faster the head learns than the encoder."""
    if data.kind != "classify":
        return 1.0
    if data.multi_label:
        return float(MAX_FACTOR)
    return min(float(MAX_FACTOR), len(data.labels) / LABELS_PER_FACTOR)


def _plain(value: float) -> str:
    """Format a number compactly.

    >>> _plain(0.0002), _plain(5.0)
    ('2e-4', '5')
    """
    return f"{value:g}" if value >= 1 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
