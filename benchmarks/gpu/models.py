"""Models: configs of real checkpoints, transformers' models with random weights, and Bertie's with the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertie.checkpoints.meta_model import build
from bertie.checkpoints.model_spec import model_spec
from bertie.nn.linear import to_fp8
from bertie.nn.model import Model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32

_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_MINI = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_BERT = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512, "pad_token_id": 0}
_DEBERTA = {
    "model_type": "deberta-v2",
    "vocab_size": 128100,
    "max_position_embeddings": 512,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "layer_norm_eps": 1e-7,
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {  # as in each config.json
    "minilm": _BERT | _MINI,
    "bert-base": _BERT | _BASE,
    "roberta-base": _BASE
    | {"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    | {"layer_norm_eps": 1e-5, "pad_token_id": 1},
    "bert-large": _BERT | _LARGE,
    "modernbert-base": _BASE
    | {"model_type": "modernbert", "vocab_size": 50368, "num_hidden_layers": 22, "intermediate_size": 1152}
    | {"max_position_embeddings": 8192, "local_attention": 128, "global_attn_every_n_layers": 3}
    | {"pad_token_id": 50283, "cls_token_id": 50281, "sep_token_id": 50282},
    "mpnet-base": _BASE
    | {"model_type": "mpnet", "vocab_size": 30527, "max_position_embeddings": 514, "layer_norm_eps": 1e-5}
    | {"relative_attention_num_buckets": 32, "pad_token_id": 1},
    "deberta-v3-base": _DEBERTA | _BASE,
    "deberta-v3-large": _DEBERTA | _LARGE,
}
_TINY = {"vocab_size": 1000, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TINY |= {"intermediate_size": 48}
_WITH_POOLER = ("bert", "roberta", "mpnet")  # the pooler of AutoModel would be wasted work


def config_of(name: str, tiny: bool) -> dict[str, Any]:
    """The config, or a tiny one of its kind."""
    config = CONFIGS[name]
    if not tiny:
        return dict(config)
    small = _TINY | {"pad_token_id": min(config["pad_token_id"], 3)}
    if config["model_type"] == "modernbert":
        small |= {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 3}
    return config | small


class InMemoryWeights:
    """A model's weights under the names that its weight files use."""

    def __init__(self, peer: Any) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self.tensors: dict[str, Tensor] = revert_weight_conversion(peer, peer.state_dict())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def get(self, name: str) -> Tensor:
        return self.tensors[name]


@torch.inference_mode(False)  # normal tensors, as in a loaded model
def transformers_model(config: dict[str, Any], dtype: torch.dtype, *, labels: int = 0) -> Any:
    """transformers' model with random weights."""
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    torch.manual_seed(0)
    extra: dict[str, Any] = {"num_labels": labels} if labels else {}
    peer_config = AutoConfig.for_model(**(config | extra))
    auto_class: Any = AutoModelForSequenceClassification if labels else AutoModel
    options = {} if labels or config["model_type"] not in _WITH_POOLER else {"add_pooling_layer": False}
    with torch.device(DEVICE):
        return auto_class.from_config(peer_config, dtype=dtype, **options).eval().to(DEVICE)


@torch.inference_mode(False)
def bertie_model(peer: Any, dtype: torch.dtype) -> Model:
    """Bertie's model with the weights of transformers' model."""
    weights = InMemoryWeights(peer)
    config = json.loads(peer.config.to_json_string()) | {"architectures": [type(peer).__name__]}
    spec = model_spec(config, weights.shapes())
    model = build(spec)
    spec.weight_map.check(model, weights.shapes(), spec.family.dropped)
    model = model.to(dtype).to_empty(device=DEVICE)
    spec.weight_map.load(model, weights)
    return model.eval()


@torch.inference_mode(False)
def fp8_copy(model: Model) -> Model:
    other = copy.deepcopy(model)
    to_fp8(other.encoder)
    return other


# --- padded batches of the peer ---

Inputs = dict[str, Tensor]


def padded_batches(ids: list[Any], size: int, pad_id: int) -> list[Inputs]:
    """Texts sorted by length, `size` per batch, on the device."""
    ranked = sorted(ids, key=len, reverse=True)
    return [padded_batch(ranked[start : start + size], pad_id) for start in range(0, len(ranked), size)]


def padded_batch(ids: list[Any], pad_id: int) -> Inputs:
    shape = (len(ids), max(map(len, ids)))
    rows, mask = np.full(shape, pad_id), np.zeros(shape, np.int64)
    for row, text in enumerate(ids):
        rows[row, : len(text)], mask[row, : len(text)] = text, 1
    inputs = {"input_ids": torch.from_numpy(rows).to(DEVICE)}
    # Without a mask, sdpa may use its fastest kernel.
    return inputs if mask.all() else inputs | {"attention_mask": torch.from_numpy(mask).to(DEVICE)}


def peer_forward_all(peer: Any, batches: list[Inputs]) -> Callable[[], None]:
    """A call that runs transformers' model on all batches."""

    def call() -> None:
        for inputs in batches:
            peer(**inputs)

    return call
