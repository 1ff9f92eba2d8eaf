"""Add a whitening transform to an embedder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from bertie.errors import InputError
from bertie.nn.sentence_layers import Dense, Normalize
from bertie.tasks.embed import Embedder

if TYPE_CHECKING:
    from bertie.evaluation.isotropy import Whitening


def whiten(embedder: Embedder, whitening: Whitening) -> Embedder:
    """Return an embedder that whitens its embeddings, with a final dense layer that is saved like any other.

    The whitening must have been fitted to the output of `embedder.embed`. If that is normalized, so are the
    whitened embeddings.

    >>> white = whiten(embedder, Whitening.fit(embedder.embed(texts)))     # doctest: +SKIP
    >>> white.save("whitened")                                             # doctest: +SKIP
    """
    modules = embedder.modules
    width, out = whitening.projection.shape
    if width != embedder.dimension or modules.truncate_dim is not None or embedder.truncate_dim is not None:
        raise InputError(f"the whitening is for untruncated embeddings of dimension {width}, not {embedder.dimension}")
    dense = Dense(width, out, activation="Identity")
    with torch.no_grad():
        dense.linear.weight.copy_(torch.from_numpy(whitening.projection.T))
        dense.linear.bias.copy_(torch.from_numpy(-whitening.mean @ whitening.projection))
    dense = dense.to(embedder.model.device)
    normalized = bool(len(modules.layers)) and isinstance(modules.layers[-1], Normalize)
    before = [Normalize()] if embedder.normalize and not normalized else []
    after = [Normalize()] if embedder.normalize or normalized else []
    checkpoint = replace(embedder.checkpoint, sentence=modules.with_layers(*before, dense, *after).eval())
    return Embedder(checkpoint, overflow=embedder.overflow)
