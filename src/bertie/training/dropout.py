"""Override the dropout rate during training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bertie.config import EncoderConfig, HeadConfig
from bertie.nn.model import Model

Saved = list[tuple[Any, str, Any]]  # module, attribute, value


def set_dropout(model: Model, rate: float | None) -> Saved:
    """Set the dropout rate of all modules, unless it is None; returns the old values for `restore_dropout`."""
    saved: Saved = []
    if rate is None:
        return saved
    for module in model.modules():
        for name in ("cfg", "dropout"):
            value = getattr(module, name, None)
            if isinstance(value, int | float):
                new: Any = rate
            elif isinstance(value, EncoderConfig):
                new = replace(value, dropout=rate, attention_dropout=rate)
            elif isinstance(value, HeadConfig):  # not every head has dropout before its dense layer
                new = replace(value, dropout=rate, dense_dropout=rate if value.dense_dropout else 0.0)
            else:
                continue
            saved.append((module, name, value))
            setattr(module, name, new)
    return saved


def restore_dropout(saved: Saved) -> None:
    """Restore the rates that `set_dropout` replaced."""
    for module, name, value in saved:
        setattr(module, name, value)


def random_seed(*numbers: int) -> int:
    """Derive the random seed of a micro-batch from the numbers that identify it."""
    return int(np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)[0] >> np.uint64(1))
