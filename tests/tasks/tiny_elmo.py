"""A tiny ELMo with random weights, and sentences with tags that it can learn."""

from __future__ import annotations

from typing import Any

import bertie

CONFIG = bertie.ElmoConfig(
    filters=((1, 8), (2, 16), (3, 32)), character_width=4, highways=1, width=48, cell_width=32, layers=2
)
WORDS = [
    ["Ada", "lives", "in", "London"],
    ["Grace", "is", "in", "Paris", "now"],
    ["no", "names"],
    ["in", "New", "York", "with", "Ada"],
] * 6
TAGS = [
    ["B-PER", "O", "O", "B-LOC"],
    ["B-PER", "O", "O", "B-LOC", "O"],
    ["O", "O"],
    ["O", "B-LOC", "I-LOC", "O", "B-PER"],
] * 6


def tiny_elmo(**changes: Any) -> bertie.Elmo:
    values = {name: getattr(CONFIG, name) for name in CONFIG.__slots__} | changes
    return bertie.Elmo.random(bertie.ElmoConfig(**values), seed=1)


def tiny_tagger(**options: Any) -> bertie.ElmoTagger:
    settings: dict[str, Any] = {"lstm_width": 0, "epochs": 25, "lr": 0.1, "dropout": 0.0, "batch_size": 8} | options
    return bertie.ElmoTagger(tiny_elmo(), **settings)
