"""Functions that tasks share to decode the outputs of windows."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.nn.model import Model
from bertie.pipeline.outputs import FloatArray
from bertie.text.windows import Window

WindowPooling = Literal["mean", "confidence", "max"]
WINDOW_POOLING = ("mean", "confidence", "max")


def read_counts(windows: Sequence[Window]) -> dict[str, int]:
    """How much of a text was read, for its result."""
    whole = windows[0].whole
    total = whole.text_tokens
    read = total if len(windows[0]) == len(whole) else sum(window.tokens_read for window in windows)
    return {"tokens_total": total, "tokens_read": read, "windows": len(windows)}


def average_windows(windows: Sequence[Window], outputs: Sequence[FloatArray]) -> FloatArray:
    """The mean of the windows' outputs, weighted by the tokens that each window owns."""
    if len(outputs) == 1:
        return outputs[0]
    weights = np.array([window.weight for window in windows])
    mean = np.average(np.stack(outputs).astype(np.float64), axis=0, weights=weights)
    return mean.astype(np.float32)


def pool_windows(windows: Sequence[Window], logits: Sequence[FloatArray], pooling: WindowPooling) -> FloatArray:
    """(labels,) logits of a text of several windows, for softmax; `logits` are those of each window.

    "mean": the mean of the log-probabilities, weighted by the tokens that each window owns. "confidence": the same,
    weighted also by each window's confidence: (1 − entropy / entropy of the uniform distribution) squared.
    "max": for each label, the highest probability in any window.
    """
    rows = np.stack([log_softmax(row) for row in logits]).astype(np.float64)  # (W, labels)
    if pooling == "max":
        highest: FloatArray = rows.max(axis=0).astype(np.float32)
        return highest
    weights = np.array([window.weight for window in windows])
    if pooling == "confidence":
        entropy = -(np.exp(rows) * rows).sum(axis=1) / np.log(rows.shape[1])
        weights = weights * np.maximum(1 - entropy, 1e-6) ** 2
    pooled: FloatArray = np.average(rows, axis=0, weights=weights).astype(np.float32)
    return pooled


def owned_rows(windows: Sequence[Window], outputs: Sequence[FloatArray]) -> tuple[NDArray[np.int64], FloatArray]:
    """Indices of all tokens that were read, without special tokens, and for each the row of the window that owns it."""
    masks = [window.owned & (window.encoding.sequence_ids >= 0) for window in windows]
    indices = np.concatenate([window.indices[mask] for window, mask in zip(windows, masks, strict=True)])
    rows = np.concatenate([output[mask] for output, mask in zip(outputs, masks, strict=True)])
    order = np.argsort(indices, kind="stable")
    return indices[order], rows[order]


def trim_span(text: str, start: int, end: int) -> tuple[int, int]:
    """Remove whitespace from the ends of a span, and include the accents of its last letter.

    Some tokenizers attach a space to the adjacent word, and some strip accents before they compute offsets.
    """
    while text[end : end + 1] and unicodedata.category(text[end])[0] == "M":
        end += 1
    span = text[start:end]
    if not span.strip():
        return start, end
    return start + len(span) - len(span.lstrip()), end - len(span) + len(span.rstrip())


def softmax(x: FloatArray) -> FloatArray:
    """Softmax over the last axis."""
    y = np.exp(x - x.max(axis=-1, keepdims=True))
    out: FloatArray = y / y.sum(axis=-1, keepdims=True)
    return out


def log_softmax(x: FloatArray) -> FloatArray:
    """Log-softmax over the last axis."""
    y = x - x.max(axis=-1, keepdims=True)
    out: FloatArray = y - np.log(np.exp(y).sum(axis=-1, keepdims=True))
    return out


def sigmoid(x: FloatArray) -> FloatArray:
    """1 / (1 + exp(−x)), without overflow."""
    out: FloatArray = np.exp(-np.logaddexp(0, -x))
    return out


def decoding_device(model: Model) -> torch.device:
    """The device for decoding outputs: the model's, or the CPU if another process runs the model."""
    return torch.device("cpu") if model.device.type == "meta" else model.device
