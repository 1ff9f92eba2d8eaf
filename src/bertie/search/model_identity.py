"""Which model an index was built with."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertie.tasks.embed import Embedder
    from bertie.tasks.late_interaction import LateInteraction
    from bertie.tasks.sparse import SparseEmbedder


def model_fingerprint(embedder: Embedder) -> str:
    """Return a hash of everything that determines embeddings, except for the precision."""
    from bertie.checkpoints.fingerprint import hash_weights, weights_fingerprint

    modules, pooling = embedder.modules, embedder.modules.pooling
    digest = hashlib.sha256(weights_fingerprint(embedder.checkpoint).encode())
    digest.update(embedder.tokenizer.files()["tokenizer.json"])
    layers = [type(module).__name__ for module in modules.modules()]  # activations are modules, too
    residual = [getattr(layer, "add_input", False) for layer in modules.layers]
    digest.update(repr((pooling.modes, pooling.include_prompt, layers, residual, hash_weights(modules))).encode())
    settings = (modules.lower_case, sorted(modules.prompts.items()), modules.default_prompt)
    digest.update(repr((*settings, embedder.dimension, embedder.overflow, embedder.checkpoint.max_length)).encode())
    return digest.hexdigest()[:32]


def task_fingerprint(task: SparseEmbedder | LateInteraction) -> str:
    """Return a hash of everything that determines sparse or token embeddings, except for the precision."""
    from bertie.checkpoints.fingerprint import hash_weights, weights_fingerprint

    checkpoint = task.checkpoint
    digest = hashlib.sha256(weights_fingerprint(checkpoint).encode())
    digest.update(task.tokenizer.files()["tokenizer.json"])
    own = checkpoint.late_interaction if task.head is None else checkpoint.model.head(task.head)
    settings = checkpoint.splade if task.head is not None else task.settings
    digest.update(repr((own and hash_weights(own), settings, task.overflow, checkpoint.max_length)).encode())
    return digest.hexdigest()[:32]
