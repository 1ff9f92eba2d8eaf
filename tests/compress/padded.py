"""Padded inputs of exported graphs, and transformers' outputs to compare theirs with."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.compress.padded_model import PaddedModel
from tests.parity.test_transformers import ours, their_outputs
from tests.parity.tiny import build, texts

HEADS = {"hidden": None, "answer": "answer", "pooler": "pooler"}


def padded_inputs(
    model: PaddedModel,
    ids: list[list[int]],
    segments: list[list[int]],
    side: Literal["left", "right"] = "right",
    pad: int | None = None,
) -> dict[str, NDArray[np.int64]]:
    """(B, S) arrays by name."""
    longest = max(map(len, ids))
    pad = (model.encoder.cfg.pad_id or 0) if pad is None else pad

    def fill(rows: list[list[int]], value: int) -> NDArray[np.int64]:
        filled = [[value] * (longest - len(row)) for row in rows]
        joined = [a + b if side == "left" else b + a for a, b in zip(filled, rows, strict=True)]
        return np.array(joined, np.int64)

    values = {
        "input_ids": fill(ids, pad),
        "attention_mask": fill([[1] * len(row) for row in ids], 0),
        "token_type_ids": fill(segments, 0),
    }
    return {name: values[name] for name in model.input_names}


def tiny_model(name: str, suffix: str) -> tuple[Any, PaddedModel, str]:
    """transformers' model, ours, and the name of the output in `their_outputs`."""
    theirs = build(name, suffix)
    model, spec = ours(theirs)
    heads = [head for head in spec.heads if head != "pooler"]
    head = heads[0] if heads else None
    return theirs, PaddedModel(model, head, spans=head == "answer"), head or "hidden"


def expected(theirs: Any, key: str, ids: list[list[int]], segments: list[list[int]]) -> list[Any]:
    """transformers' output for each text alone: (n, …) or (1, n)."""
    with torch.no_grad():
        return [their_outputs(theirs, i, s)[key].numpy() for i, s in zip(ids, segments, strict=True)]


def unpadded(model: PaddedModel, outputs: list[NDArray[Any]], mask: NDArray[np.int64]) -> list[NDArray[Any]]:
    """A graph's outputs text by text, without padding, in the shape of `expected`."""
    stacked = np.stack(outputs, axis=-1) if model.spans else outputs[0]
    per_token = model.head is None or model.head.cfg.kind != "text"
    return [row[real > 0] if per_token else row[None] for row, real in zip(stacked, mask, strict=True)]


def ragged(name: str, suffix: str, count: int = 6, seed: int = 2) -> tuple[list[list[int]], list[list[int]]]:
    return texts(name, suffix, count, seed)
