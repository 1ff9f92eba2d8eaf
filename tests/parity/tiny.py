"""Tiny random models of every family, made by transformers, with weights large enough to show a mistake."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 48,
    "hidden_dropout_prob": 0.3,
    "attention_probs_dropout_prob": 0.2,
    "layer_norm_eps": 1e-5,
}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "pooler_hidden_size": 16}
_USUAL = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_CHOICE = (*_USUAL, "ForMultipleChoice")


@dataclass(frozen=True)
class Tiny:
    """One family in one shape."""

    model_type: str
    stem: str
    config: dict[str, Any]
    heads: tuple[str, ...] = _CHOICE
    longest: int = 40


_DECODER = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LAYERS = ["sliding_attention", "full_attention"]
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA = _DECODER | {
    "num_hidden_layers": 3,
    "head_dim": 8,
    "query_pre_attn_scalar": 12,
    "sliding_window": 8,
    "layer_types": [*_LAYERS, "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_T5 = {
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "dropout_rate": 0.2,
}
_ROBERTA = _SMALL | {"pad_token_id": 1, "type_vocab_size": 2}

TINY: dict[str, Tiny] = {
    "bert": Tiny("bert", "Bert", _SMALL, (*_CHOICE, "ForPreTraining", "ForNextSentencePrediction")),
    "bert-untied": Tiny(
        "bert", "Bert", _SMALL | {"tie_word_embeddings": False, "hidden_act": "gelu_new"}, ("ForMaskedLM",)
    ),
    "roberta": Tiny("roberta", "Roberta", _ROBERTA),
    "roberta-untied": Tiny("roberta", "Roberta", _ROBERTA | {"tie_word_embeddings": False}, ("ForMaskedLM",)),
    "xlm-roberta": Tiny("xlm-roberta", "XLMRoberta", _ROBERTA | {"type_vocab_size": 1}),
    "camembert": Tiny("camembert", "Camembert", _ROBERTA),
    "distilbert": Tiny(
        "distilbert",
        "DistilBert",
        {
            "vocab_size": 64,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 24,
            "max_position_embeddings": 48,
            "dropout": 0.3,
            "attention_dropout": 0.2,
        },
    ),
    "albert": Tiny(
        "albert", "Albert", _SMALL | {"embedding_size": 12, "num_hidden_layers": 3}, (*_CHOICE, "ForPreTraining")
    ),
    "albert-groups": Tiny(
        "albert", "Albert", _SMALL | {"embedding_size": 16, "num_hidden_layers": 3, "num_hidden_groups": 2}, ("Model",)
    ),
    "electra": Tiny("electra", "Electra", _SMALL | {"embedding_size": 12}, (*_CHOICE, "ForPreTraining")),
    "electra-wide": Tiny("electra", "Electra", _SMALL | {"embedding_size": 16}, ("Model", "ForMaskedLM")),
    "mpnet": Tiny("mpnet", "MPNet", _SMALL | {"max_position_embeddings": 220}, longest=200),
    "deberta": Tiny("deberta", "Deberta", _SMALL | _DEBERTA | {"position_biased_input": False}, _USUAL),
    "deberta-near": Tiny(
        "deberta",
        "Deberta",
        _SMALL
        | _DEBERTA
        | {"max_relative_positions": 8, "type_vocab_size": 2, "embedding_size": 12, "pos_att_type": ["c2p"]},
        ("Model", "ForMaskedLM"),
    ),
    "deberta-new-head": Tiny("deberta", "Deberta", _SMALL | _DEBERTA | {"legacy": False}, ("ForMaskedLM",)),
    "deberta-plain": Tiny("deberta", "Deberta", _SMALL | {"pooler_hidden_size": 16}, ("Model",)),
    "deberta-v2": Tiny(
        "deberta-v2",
        "DebertaV2",
        _SMALL
        | _DEBERTA
        | {"conv_kernel_size": 3, "conv_act": "gelu", "position_buckets": 8, "norm_rel_ebd": "layer_norm"},
    ),
    "deberta-v3": Tiny(
        "deberta-v2",
        "DebertaV2",
        _SMALL
        | _DEBERTA
        | {
            "position_biased_input": False,
            "position_buckets": 8,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "max_relative_positions": -1,
            "max_position_embeddings": 64,
        },
        longest=150,
    ),
    "deberta-v3-new-head": Tiny(
        "deberta-v2",
        "DebertaV2",
        _SMALL
        | _DEBERTA
        | {"legacy": False, "share_att_key": True, "position_buckets": 8, "conv_kernel_size": 3, "conv_groups": 2},
        ("ForMaskedLM",),
    ),
    "modernbert": Tiny(
        "modernbert",
        "ModernBert",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "local_attention": 16,
            "pad_token_id": 0,
            "attention_dropout": 0.2,
            "mlp_dropout": 0.2,
            "embedding_dropout": 0.2,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        longest=70,
    ),
    "modernbert-mean": Tiny(
        "modernbert",
        "ModernBert",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "local_attention": 4,
            "pad_token_id": 0,
            "classifier_pooling": "mean",
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
            "classifier_bias": True,
            "decoder_bias": False,
        },
        ("ForMaskedLM", "ForSequenceClassification"),
    ),
    "ernie": Tiny(
        "ernie",
        "Ernie",
        _SMALL | {"use_task_id": True},
        (*_CHOICE, "ForPreTraining", "ForNextSentencePrediction"),
    ),
    "ernie-no-tasks": Tiny("ernie", "Ernie", _SMALL, ("Model",)),
    "longformer": Tiny(
        "longformer",
        "Longformer",
        _ROBERTA | {"attention_window": [4, 8], "max_position_embeddings": 80, "sep_token_id": 2},
        longest=60,
    ),
    "big_bird": Tiny(
        "big_bird",
        "BigBird",
        _SMALL | {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 96, "sep_token_id": 63},
        (*_CHOICE, "ForPreTraining"),
        longest=90,
    ),
    "big_bird-full": Tiny(
        "big_bird",
        "BigBird",
        _SMALL | {"attention_type": "original_full", "use_bias": False, "rescale_embeddings": True},
        ("Model",),
    ),
    "nomic_bert": Tiny(
        "nomic_bert",
        "NomicBert",
        _SMALL | {"hidden_act": "silu"},
        ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    ),
    "eurobert": Tiny(
        "eurobert",
        "EuroBert",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_dropout": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "mask_token_id": 3,
        },
        ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    ),
    "eurobert-tied": Tiny(
        "eurobert",
        "EuroBert",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "mlp_bias": True,
            "attention_bias": True,
            "classifier_pooling": "mean",
            "pad_token_id": 0,
        },
        ("ForMaskedLM", "ForSequenceClassification"),
    ),
    "llama": Tiny("llama", "Llama", _DECODER, ("Model",), longest=60),
    "llama-scaled": Tiny(
        "llama",
        "Llama",
        _DECODER | {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True, "head_dim": 8},
        ("Model",),
        longest=60,
    ),
    "llama-bidirectional": Tiny("llama", "Llama", _DECODER | {"is_causal": False}, ("Model",)),
    "mistral": Tiny("mistral", "Mistral", _DECODER | {"sliding_window": 9}, ("Model",), longest=60),
    "mistral-full": Tiny("mistral", "Mistral", _DECODER | {"sliding_window": None, "head_dim": 6}, ("Model",)),
    "mistral-bidirectional": Tiny(
        "mistral", "Mistral", _DECODER | {"sliding_window": 4, "is_causal": False}, ("Model",)
    ),
    "qwen2": Tiny("qwen2", "Qwen2", _DECODER, ("Model",)),
    "qwen3": Tiny("qwen3", "Qwen3", _DECODER | {"head_dim": 8}, ("Model",), longest=60),
    "qwen3-sliding": Tiny(
        "qwen3",
        "Qwen3",
        _DECODER
        | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None},
        ("Model",),
    ),
    "gemma3_text": Tiny("gemma3_text", "Gemma3Text", _GEMMA, ("Model",), longest=60),
    "gemma3_text-bidirectional": Tiny(
        "gemma3_text", "Gemma3Text", _GEMMA | {"use_bidirectional_attention": True}, ("Model",), longest=60
    ),
    "t5": Tiny("t5", "T5", _T5, ("EncoderModel",), longest=70),
    "t5-gated": Tiny("t5", "T5", _T5 | {"feed_forward_proj": "gated-gelu"}, ("EncoderModel",)),
}

CASES = [(name, suffix) for name, tiny in TINY.items() for suffix in tiny.heads]


def build(name: str, suffix: str, seed: int = 0, *, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    """transformers' model, in evaluation mode; `changes` are made to its config."""
    tiny = TINY[name]
    torch.manual_seed(seed)
    extra: dict[str, Any] = {}
    if suffix in ("ForSequenceClassification", "ForTokenClassification"):
        extra = {"num_labels": 3}
    config = AutoConfig.for_model(tiny.model_type, **tiny.config | extra | (changes or {}))
    stem = "Gemma3" if (tiny.stem, suffix) == ("Gemma3Text", "ForCausalLM") else tiny.stem
    model = getattr(transformers, stem + suffix)(config, **options)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in key.lower() and key.endswith("weight"):
                offset = 0 if tiny.model_type == "gemma3_text" else 1  # Gemma's factor is 1 + weight
                parameter.copy_(offset + 0.2 * noise)
            else:
                parameter.copy_(0.25 * noise)
    return model.eval()


def texts(name: str, suffix: str, count: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Ids and segments of a ragged batch, singles and pairs, from one token to past every window and block."""
    tiny = TINY[name]
    draw = random.Random(seed)
    pairs_only = tiny.model_type == "longformer" and suffix in ("ForQuestionAnswering", "ForMultipleChoice")
    segments_known = tiny.config.get("type_vocab_size", 2) > 1 and tiny.model_type != "deberta"
    ids, segments = [], []
    for i in range(count):
        n = draw.choice([1, 2, 3, tiny.longest]) if i % 2 else draw.randint(1, tiny.longest)
        n = max(n, 6) if pairs_only else n
        one = [draw.randrange(3, 60) if draw.random() < 0.97 else draw.choice((0, 1)) for _ in range(n)]
        cut = draw.randint(1, n - 4) if pairs_only else draw.randint(0, n)
        if pairs_only:  # <s> a </s> </s> b </s>
            one[cut] = one[cut + 1] = one[-1] = 2
        ids.append(one)
        segments.append([int(t >= cut and segments_known) for t in range(n)])
    return ids, segments
