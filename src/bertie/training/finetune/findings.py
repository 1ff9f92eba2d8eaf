"""Findings at the top of a report: a cheap baseline was not beaten, or training ended too early; and what to try."""

from __future__ import annotations

import math

from bertie.evaluation.convergence import loss_trend
from bertie.evaluation.model_report import BaselineResult, BaselineTable, difference_text
from bertie.evaluation.plots import plain_number
from bertie.recipe import Recipe
from bertie.training.callbacks import TrainingHistory

FEW_TEST_ROWS = 200
MOST_SUGGESTIONS = 3
CLASSIFICATION = ("accuracy", "macro_f1")  # whose main metrics are these


def findings(
    table: BaselineTable | None,
    *,
    recipe: Recipe | None = None,
    history: TrainingHistory | None = None,
    metric: str = "",
    usual_lr: float | None = None,
) -> list[str]:
    """Sentences for the top of a report; none if the model beats every baseline and was trained to the end.

    `recipe` and `history` are those of the training, `metric` selected its best epoch, and `usual_lr` is the default
    learning rate of the model.
    """
    trend = _trend(recipe, history, metric)
    lines = []
    best = None if table is None else table.best
    # The method "frozen" is that baseline, with other pooling.
    same = recipe is not None and recipe.method == "frozen" and best is not None and "frozen" in best.name
    if table is not None and best is not None and not best.beaten and not same:
        tries = _suggestions(table, best, recipe, usual_lr, longer=trend[1])
        lines.append(f"{_not_beaten(table, best, trained=recipe is not None)} Try {_join(tries)}.")
    if trend[0]:
        lines.append(trend[0] if lines else f"{trend[0]} Set {trend[1]}.")
    return lines


def _not_beaten(table: BaselineTable, best: BaselineResult, *, trained: bool) -> str:
    subject = "Training" if trained else "The model"
    how = "does" if not trained else "did"
    significantly = "significantly " if best.difference.value > 0 else ""
    value = "undefined" if math.isnan(table.model.value) else f"{table.model.value:.4f}"
    return (
        f"{subject} {how} not {significantly}beat a cheap baseline: on {table.split} ({table.rows:,} rows) {best.name} "
        f"has {table.metric} {best.score.value:.4f}, this model {value} "
        f"(difference {difference_text(best.difference)})."
    )


def _trend(recipe: Recipe | None, history: TrainingHistory | None, metric: str) -> tuple[str, str]:
    """A sentence if training ended too early, and the setting for a longer one."""
    settled = history is not None and history.shortened == "converged"
    if recipe is None or history is None or not history.steps or settled or recipe.method in ("frozen", "few-shot"):
        return "", ""
    dev = [row[metric] for row in history.evaluations if metric in row]
    verdict = loss_trend(history.curve, dev, stopped_early=history.stopped_early)
    epochs = recipe.resolve().epochs
    longer = f"--epochs {2 * epochs:g} (it was {epochs:g})"
    if recipe.budget is not None:
        longer = f"a longer --budget (it was {recipe.budget:g}s)"
    if verdict == "settled":
        return "", ""
    if verdict == "too few steps":
        steps = f"{history.steps} step{'' if history.steps == 1 else 's'}"
        return f"Training took only {steps}, too few for the loss to settle.", longer
    return "The training loss was still falling at the end: longer training may help.", longer


def _suggestions(
    table: BaselineTable,
    best: BaselineResult,
    recipe: Recipe | None,
    usual_lr: float | None,
    *,
    longer: str,
) -> list[str]:
    tries = []
    if recipe is not None:
        lr, full = recipe.resolve().lr, not recipe.lora and not recipe.freeze and recipe.method in ("auto", "full")
        if full and usual_lr is not None and lr < usual_lr / 2:
            tries.append(f"--lr {plain_number(usual_lr)}, the usual rate for this model (it was {plain_number(lr)})")
        if longer:
            tries.append(longer)
        if "frozen" in best.name and full and best.difference.value <= 0:
            flag = "--method frozen" if table.metric in CLASSIFICATION else "--freeze encoder"
            tries.append(f"{flag}, which trains the head only")
        if recipe.freeze == "encoder" and not recipe.unfreeze:
            tries.append("training without --freeze")
    elif "before training" not in best.name:
        tries.append("bertie train on the same rows with its defaults")
    tries.append("more labelled rows")
    if table.rows < FEW_TEST_ROWS and best.difference.value > 0:
        tries.insert(0, f"more test rows: {table.rows} cannot show a small difference")
    return tries[:MOST_SUGGESTIONS]


def _join(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{'; '.join(items[:-1])}; or {items[-1]}"
