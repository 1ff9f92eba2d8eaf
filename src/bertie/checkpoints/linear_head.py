"""Classification heads that are linear in the mean of the hidden states: for weights that were not found by training.

The head is the mean over the tokens, LayerNorm, and the output layer. ModernBERT's own head becomes that with
`classifier_pooling: mean`, `classifier_activation: linear` and the identity as its dense layer, so that transformers
loads the folder as any other classifier. No other family has such a head (BERT's reads the first token): theirs is
stored beside the weights, as any named head is, and other libraries load the folder as an encoder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch

from bertie.checkpoints import named_heads
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.cross_encoder import CrossEncoderConfig
from bertie.checkpoints.model_spec import ModelSpec, config_with_head, model_spec
from bertie.config import HeadConfig, HeadInfo, NormConfig
from bertie.errors import ConfigError
from bertie.nn.heads import Head
from bertie.nn.model import Model

NAME: Final = "classify"
_CONFIG = {"classifier_pooling": "mean", "classifier_activation": "linear"}
_HEAD_KEYS = ("id2label", "label2id", "num_labels", "_num_labels", "problem_type")


def with_linear_head(checkpoint: Checkpoint, info: HeadInfo) -> Checkpoint:
    """The same encoder with one head, "classify", whose output layer is zero. The encoder is shared, not copied.

    >>> checkpoint = with_linear_head(Checkpoint.load("bertie-small"), HeadInfo("classify", {0: "bad", 1: "good"}))
    >>> checkpoint.config["architectures"], checkpoint.model.head("classify").cfg.pooling
    (['BertModel'], 'mean')
    """
    base = {key: value for key, value in checkpoint.config.items() if key not in CrossEncoderConfig.CONFIG_KEYS}
    labels = list(info.labels.values())
    config = config_with_head(base, NAME, labels, info.problem) | _CONFIG
    heads: dict[str, HeadInfo] = {}
    try:
        spec = model_spec(config, None, ignore=checkpoint.spec.ignored)
    except ConfigError:  # the family does not have these keys
        config, spec = _without_heads(base, checkpoint.spec)
        norm = NormConfig(eps=1e-5, bias=False)
        width = checkpoint.model.config.width
        cfg = HeadConfig(kind="text", outputs=len(labels), pooling="mean", dense=width, dense_bias=False, norm=norm)
        heads = {NAME: info}
    else:
        cfg = spec.heads[NAME]
    model = Model.from_parts(checkpoint.model.encoder, {NAME: _linear(cfg, checkpoint.model)}).eval()
    bare = replace(checkpoint, sentence=None, cross_encoder=None, splade=None, late_interaction=None)
    return replace(bare, model=model, config=config, spec=spec, heads=heads)


def _without_heads(config: dict[str, Any], spec: ModelSpec) -> tuple[dict[str, Any], ModelSpec]:
    kept = {key: value for key, value in config.items() if key not in _HEAD_KEYS}
    kept["architectures"] = [name for name, heads in spec.family.architectures.items() if not heads][:1]
    return kept, model_spec(kept, None, head="none", ignore=spec.ignored)


@torch.no_grad()
def _linear(cfg: HeadConfig, model: Model) -> Head:
    """A head without dropout that normalizes and nothing else."""
    head = named_heads.initialize(cfg, model, seed=0)
    assert head.dense is not None
    assert head.out is not None
    torch.nn.init.eye_(head.dense.weight)
    head.out.weight.zero_()
    return head
