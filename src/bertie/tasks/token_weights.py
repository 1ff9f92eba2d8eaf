"""Token weights by inverse frequency (SIF), for weighted mean pooling."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bertie.errors import InputError
from bertie.pipeline.inputs import text_inputs
from bertie.pipeline.pipeline import split_chunks

if TYPE_CHECKING:
    from bertie.tasks.embed import Embedder


def token_weights(embedder: Embedder, texts: Iterable[str], smoothing: float) -> Tensor:
    """(V,) smoothing / (smoothing + p) for a token that occurs in the fraction p of the texts."""
    if not isinstance(smoothing, Real) or isinstance(smoothing, bool) or not 0 < smoothing < inf:
        raise InputError(f"smoothing={smoothing!r} must be a number above 0")
    modes = embedder.modules.pooling.modes
    if not all(mode in ("mean", "mean_sqrt_len_tokens", "weightedmean") for mode in modes):
        raise InputError(f"token weights need mean pooling; this model's is {' + '.join(modes)}")
    size, count = embedder.model.config.vocab, 0
    frequencies = np.zeros(size, np.int64)  # number of texts with each token
    for inputs in split_chunks(text_inputs(texts, "weight_tokens", None)):
        encodings = embedder.tokenizer.encode_flat([embedder.prepare_text(i.texts[0]) for i in inputs])
        text = np.repeat(np.arange(len(inputs)), encodings.lengths)
        frequencies += np.bincount(np.unique(text * size + encodings.ids) % size, minlength=size)
        count += len(inputs)
    if not count:
        raise InputError("weight_tokens needs at least one text")
    return torch.from_numpy((smoothing / (smoothing + frequencies / count)).round(4)).float()
