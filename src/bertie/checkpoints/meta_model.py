"""Build a model without weights, to compare its parameters with a checkpoint's tensors."""

from __future__ import annotations

import torch

from bertie.checkpoints.model_spec import ModelSpec
from bertie.errors import ConfigError
from bertie.nn.model import Model, SkipInit


def build(spec: ModelSpec) -> Model:
    """Build the model of a spec on the meta device, without allocating weights."""
    try:
        with torch.device("meta"), SkipInit():
            return Model(spec.encoder, spec.heads)
    except RuntimeError as error:
        raise ConfigError(f"config.json describes a model that is too large to build: {error}") from None
