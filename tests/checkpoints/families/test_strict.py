"""Nothing loads wrongly in silence: each weight and each config key of every family, spoilt in turn, is an error.

Checkpoints are transformers' own, as it saves them, held in memory; `attempt` is what `Checkpoint.load` does with one.
"""

from __future__ import annotations

import copy
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from bertie.checkpoints import storage as store
from bertie.checkpoints.config_keys import IGNORED, NULLABLE, ConfigKeys
from bertie.checkpoints.meta_model import build
from bertie.checkpoints.model_spec import FAMILIES, ModelSpec, model_spec
from bertie.config import EncoderConfig, HeadConfig, HeadName
from bertie.errors import BertieError, CheckpointError, ConfigError
from bertie.nn.model import Model
from tests.parity import tiny
from tests.parity.test_transformers import Memory
from tests.parity.tiny import CASES, TINY

Config = dict[str, Any]
Tensors = dict[str, Tensor]


@cache
def saved(name: str, suffix: str) -> tuple[Config, Tensors]:
    """config.json and the weights as transformers writes them."""
    with tempfile.TemporaryDirectory() as folder:
        tiny.build(name, suffix).save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        return config, load_file(Path(folder) / "model.safetensors")


@cache
def _built(encoder: EncoderConfig, heads: tuple[tuple[HeadName, HeadConfig], ...]) -> Model:
    return build(type("Plan", (), {"encoder": encoder, "heads": dict(heads)}))  # type: ignore[arg-type]


@cache
def _room(encoder: EncoderConfig, heads: tuple[tuple[HeadName, HeadConfig], ...]) -> Model:
    return copy.deepcopy(_built(encoder, heads)).to_empty(device="cpu")


def attempt(
    config: Config, tensors: Mapping[str, Tensor], head: HeadName | None = None, ignore: Iterable[str] = ()
) -> tuple[ModelSpec, Model]:
    source = Memory(dict(tensors))
    plan = model_spec(config, source.shapes(), head=head, ignore=ignore)
    empty = _built(plan.encoder, tuple(plan.heads.items()))
    plan.weight_map.check(empty, source.shapes(), plan.family.dropped)
    model = _room(plan.encoder, tuple(plan.heads.items()))
    plan.weight_map.load(model, source)
    return plan, model


def dead(name: str, key: str) -> bool:
    """Untied, the original keeps a second bias that it never adds."""
    return name.endswith("-untied") and key in ("cls.predictions.bias", "lm_head.bias")


def without(mapping: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in names}


def refused(config: Config, tensors: Mapping[str, Tensor], **options: Any) -> str:
    with pytest.raises(BertieError) as caught:
        attempt(config, tensors, **options)
    return str(caught.value)


# --- weights ---


def spoilt_shapes(x: Tensor) -> Iterator[Tensor]:
    yield torch.cat((x, x[:1]))
    if x.ndim == 2 and x.shape[0] != x.shape[1]:
        yield x.T.contiguous()
    if x.ndim > 1:
        yield x.flatten()
    yield x[None]


@pytest.mark.parametrize(("name", "suffix"), CASES)
def test_every_weight(name: str, suffix: str) -> None:
    config, tensors = saved(name, suffix)
    attempt(config, tensors)
    assert tensors
    for key, value in tensors.items():
        if dead(name, key):
            continue
        rest = without(tensors, key)
        with pytest.raises(CheckpointError) as caught:
            attempt(config, rest)
        assert f"missing: {key}" in str(caught.value)
        for typo in (f"x{key}", f"{key}x", key.replace(".", "..", 1)):
            if typo != key:
                with pytest.raises(CheckpointError) as caught:
                    attempt(config, {**rest, typo: value})
                assert f"missing: {key}" in str(caught.value)
                assert f"unexpected: {typo}" in str(caught.value)
        for spoilt in spoilt_shapes(value):
            with pytest.raises(CheckpointError) as caught:
                attempt(config, {**tensors, key: spoilt})
            assert f"{key} has shape {tuple(spoilt.shape)}" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"unexpected: one\.too\.many"):
        attempt(config, {**tensors, "one.too.many": torch.zeros(1)})


@pytest.mark.parametrize("name", TINY)
def test_every_number(name: str) -> None:
    config, tensors = saved(name, TINY[name].heads[-1])
    kinds = itertools.cycle((torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint8))
    numbers = itertools.cycle((float("nan"), float("inf"), -float("inf")))
    for key, value in tensors.items():
        if dead(name, key):
            continue
        kind = next(kinds)
        assert f"{key} has dtype {kind}" in refused(config, {**tensors, key: value.to(kind)})
        spoilt = value.clone()
        spoilt.view(-1)[-1] = next(numbers)
        message = refused(config, {**tensors, key: spoilt})
        assert "not finite" in message
        assert key in message


# --- config keys ---

# What real checkpoints carry besides the keys of transformers' present classes: none of these may be an error.
REAL: dict[str, Config] = {
    "bert": {
        "directionality": "bidi",
        "pooler_fc_size": 768,
        "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128,
        "pooler_type": "first_token_transform",
        "position_embedding_type": "absolute",
        "gradient_checkpointing": False,
        "finetuning_task": None,
        "torch_dtype": "float32",
        "num_labels": 2,
        "pruned_heads": {},
        "torchscript": False,
        "use_bfloat16": False,
        "output_past": True,
    },
    "distilbert": {"tie_weights_": True, "output_past": True, "finetuning_task": "sst-2"},
    "roberta": {"gradient_checkpointing": False, "position_embedding_type": "absolute"},
    "xlm-roberta": {"output_past": True, "position_embedding_type": "absolute"},
    "albert": {
        "net_structure_type": 0,
        "gap_size": 0,
        "num_memory_blocks": 0,
        "down_scale_factor": 1,
        "layers_to_keep": [],
    },
    "electra": {"summary_first_dropout": 0.1, "summary_proj_to_labels": True},
    "deberta": {"padding_idx": 0, "attention_head_size": 8, "position_embedding_type": "absolute"},
    "deberta-v2": {"attention_head_size": 8, "position_embedding_type": "absolute"},
    "modernbert": {
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "layer_norm_eps": 1e-05,
        "position_embedding_type": "sans_pos",
        "reference_compile": None,
        "repad_logits_with_grad": False,
        "gradient_checkpointing": False,
    },
    "longformer": {"attention_mode": "longformer", "ignore_attention_mask": False},
    "big_bird": {"position_embedding_type": "absolute"},
    "llama": {"rope_theta": 500000.0, "rope_scaling": None, "pretraining_tp": 1},
    "mistral": {"rope_theta": 10000.0, "is_causal": True},
    "qwen2": {"rope_theta": 1000000.0, "rope_scaling": None, "use_mrope": False},
    "qwen3": {"rope_theta": 1000000.0, "rope_scaling": None},
    "gemma3_text": {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
    "t5": {"n_positions": 512, "output_past": True, "task_specific_params": {}, "tie_word_embeddings": False},
    "eurobert": {
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "hidden_dropout": 0.0,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "is_decoder": False,
    },
}

BAD: list[Any] = [
    *(None, True, False, -7, 0, 3.7, "no such word", "", [], [1], [[["x"]]], {}, {"x": 1}),
    *(10**9, 2**60, 10**18, 10**400, 1e308, float("nan"), float("inf"), -float("inf")),
]


def _zero(value: Any) -> bool:
    return type(value) is int and value == 0


# Of BAD, what is a model of its own, or the same one: by key, and why.
FINE: dict[str, Callable[[Any], bool]] = {
    "architectures": lambda v: v is None,  # the tensors tell
    "pad_token_id": lambda v: v is None or _zero(v),  # none, or another id of the vocabulary
    "sep_token_id": lambda v: type(v) is int and 0 <= v < 2**31,  # an id that no text holds is never met
    "problem_type": lambda v: v is None,  # not said
    "label2id": lambda v: isinstance(v, dict),  # id2label decides
    "num_random_blocks": _zero,  # none
    "global_attn_every_n_layers": lambda v: v == 10**9,  # layer_types decides
    "initializer_range": lambda v: v in (0, 3.7) and type(v) is not bool,  # of fresh weights only
    "task_type_vocab_size": lambda v: v == 10**9,  # where use_task_id is false there is no such table
    "conv_groups": lambda v: v == 10**9,  # where there is no convolution
    "max_relative_positions": _zero,  # all that are not positive mean max_position_embeddings
    "position_buckets": _zero,  # none
    "pos_att_type": lambda v: v in ("", []),  # none, as null
    "rope_parameters": lambda v: v == {},  # the default base
    "rope_theta": lambda v: v in (3.7, 10**9),  # a base
    "global_rope_theta": lambda v: v in (3.7, 10**9),
    "local_rope_theta": lambda v: v in (3.7, 10**9),
    "rope_local_base_freq": lambda v: v in (3.7, 10**9),
    "rope_scaling": lambda v: v == {},  # none
    "sliding_window_pattern": lambda v: v == 10**9,  # layer_types decides
    "sliding_window": lambda v: v is None,  # none
    "max_window_layers": _zero,  # windows in all layers
    "query_pre_attn_scalar": lambda v: v == 3.7,  # a scale of the scores
    "initializer_factor": lambda v: v in (0, 3.7) and type(v) is not bool,  # of fresh weights only
}


def fine(key: str, value: Any, original: Any) -> bool:
    if type(value) is type(original) and value == original:
        return True
    if "dropout" in key and _zero(value):
        return True
    if value is None and (key in NULLABLE or original is None):
        return True
    if isinstance(original, bool) and isinstance(value, bool):
        return True  # the other choice is a model of its own; where it changes the tensors, they tell
    return key in FINE and FINE[key](value)


# Their error may come from the weights, whose shapes they set.
SHAPING = {
    *("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "type_vocab_size", "embedding_size"),
    *("max_position_embeddings", "dim", "hidden_dim", "n_layers", "head_dim", "task_type_vocab_size", "num_labels"),
    *("id2label", "max_relative_positions", "position_buckets", "conv_kernel_size", "num_attention_heads"),
    *("num_key_value_heads", "num_hidden_groups", "d_model", "d_ff", "d_kv", "num_heads", "num_layers"),
    "relative_attention_num_buckets",
}


@pytest.mark.parametrize("name", TINY)
def test_every_key(name: str) -> None:
    model_type = TINY[name].model_type
    suffix = "ForMaskedLM" if "ForMaskedLM" in TINY[name].heads else TINY[name].heads[0]
    config, tensors = saved(name, suffix)
    full = json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    config = {**{k: v for k, v in full.items() if k not in config}, **config}
    config = {**config, **{k: v for k, v in REAL.get(model_type, {}).items() if k not in config}}
    plan, _ = attempt(config, tensors)
    wrong = []
    for key, original in config.items():
        if key in IGNORED or key in plan.ignored:
            continue
        for value in BAD:
            start = time.process_time()
            try:
                attempt({**config, key: value}, tensors)
            except BertieError as error:
                told_by_weights = isinstance(error, CheckpointError) and isinstance(value, bool)
                if key not in str(error) and key not in SHAPING and not told_by_weights:
                    wrong.append(f"{key}={value!r:.40}: the error does not name it: {error}")
            except BaseException as error:
                wrong.append(f"{key}={value!r:.40}: {type(error).__name__}: {error}")
            else:
                if not fine(key, value, original):
                    wrong.append(f"{key}={value!r:.40} loads in silence")
            assert time.process_time() - start < 5, f"{key}={value!r:.40} takes too long"
    assert not wrong, "\n".join(wrong)


# The original fills these from others of the same file, and so does Bertie; a bare default class does not.
DERIVED = {"head_dim", "num_key_value_heads", "pooler_hidden_size", "layer_types", "id2label", "label2id"}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_missing_key_is_an_error_or_the_original_default(model_type: str) -> None:
    full = json.loads(AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    expected = model_spec(full, None)
    for key in without(full, "model_type", *DERIVED):
        if key in ("vocab_size", "num_attention_heads"):  # no default fits two checkpoints
            with pytest.raises(ConfigError, match=f"{key} is missing"):
                model_spec(without(full, key), None)
            continue
        found = model_spec(without(full, key), None)
        assert (found.encoder, found.heads, found.labels) == (expected.encoder, expected.heads, expected.labels), key
        heads = {name: table.config(_keys(full, key), found.encoder) for name, table in found.family.heads.items()}
        assert heads == {n: t.config(_keys(full), found.encoder) for n, t in found.family.heads.items()}, key


def _keys(config: Config, *left_out: str) -> ConfigKeys:
    return ConfigKeys({**FAMILIES[config["model_type"]].defaults, **without(config, *left_out)})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_unknown_key(model_type: str) -> None:
    name = next(n for n, one in TINY.items() if one.model_type == model_type)
    config, tensors = saved(name, TINY[name].heads[0])
    for key, value in (("quantization_config", {"bits": 4}), ("attention_sink", True), ("hidden_sise", 16)):
        message = refused({**config, key: value}, tensors)
        assert key in message
        assert "ignore=" in message
        plan, _ = attempt({**config, key: value}, tensors, ignore=[key])
        assert key in plan.ignored
        assert key in refused({**config, key: value}, tensors, ignore=["another"])
    message = refused({**config, "auto_map": {"AutoModel": "x.Y"}}, tensors)
    assert "auto_map" in message
    assert "ignore=" in message
    attempt({**config, "auto_map": {"AutoModel": "x.Y"}}, tensors, ignore=["auto_map"])


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("bert", {"num_attention_heads": 3}, ("num_attention_heads=3", "hidden_size=16")),
        ("distilbert", {"n_heads": 3}, ("n_heads=3", "dim=16")),
        ("eurobert", {"num_key_value_heads": 3}, ("num_key_value_heads=3", "num_attention_heads=4")),
        ("eurobert", {"head_dim": 3}, ("head_dim",)),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ("rope_parameters", "yarn", "llama3")),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, ("rope_parameters", "factor")),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, ("dynamic",)),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope_scaling", "rope_parameters")),
        ("llama", {"num_key_value_heads": 3}, ("num_key_value_heads=3", "num_attention_heads=4")),
        ("llama", {"pretraining_tp": 2}, ("pretraining_tp",)),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, ("layer_types",)),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, ("layer_types", "use_sliding_window")),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, ("attn_logit_softcapping",)),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 3}, ("layer_types", "sliding_attention")),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, ("rope_parameters", "full_attention")),
        ("t5", {"feed_forward_proj": "gated-nothing"}, ("feed_forward_proj", "gelu_new")),
        ("t5", {"dense_act_fn": "silu"}, ("dense_act_fn",)),
        ("t5", {"is_decoder": True}, ("is_decoder",)),
        ("eurobert", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("rope_scaling",)),
        ("eurobert", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ("rope_parameters", "linear")),
        ("eurobert", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}, ("rope_parameters",)),
        ("nomic_bert", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ("rope_parameters", "partial_rotary")),
        ("modernbert", {"rope_parameters": {"full_attention": 0}}, ("rope_parameters",)),
        ("modernbert", {"rope_parameters": {"rope_theta": 1e4}}, ("rope_parameters",)),
        ("modernbert", {"rope_parameters": {"full_attention": {"factor": 2.0}}}, ("rope_parameters", "factor")),
        ("bert", {"num_labels": 3, "id2label": {"0": "a", "1": "b"}}, ("num_labels=3", "id2label")),
        ("bert", {"id2label": {"0": "a", "2": "b"}}, ("id2label",)),
        ("bert", {"id2label": {"0": "a", "1": 2}}, ("id2label",)),
        ("bert", {"_num_labels": 5, "num_labels": 2}, ("_num_labels=5",)),
        ("bert", {"num_labels": 10**9, "id2label": None}, ("num_labels",)),
        ("bert", {"position_embedding_type": "relative_key"}, ("position_embedding_type", "relative_key")),
        ("bert", {"is_decoder": True}, ("is_decoder",)),
        ("bert", {"pruned_heads": {"0": [1]}}, ("pruned_heads",)),
        ("bert", {"pad_token_id": 64}, ("pad_token_id", "64")),
        ("roberta", {"pad_token_id": 47}, ("pad_token_id", "47")),
        ("mpnet", {"pad_token_id": 0}, ("pad_token_id",)),
        ("mpnet", {"relative_attention_num_buckets": 64}, ("relative_attention_num_buckets",)),
        ("deberta", {"relative_attention": False}, ("relative_attention", "pos_att_type")),
        ("deberta", {"pos_att_type": None}, ("relative_attention", "pos_att_type")),
        ("deberta", {"pos_att_type": "c2p|p2p"}, ("pos_att_type", "p2p")),
        ("deberta", {"pos_att_type": [["c2p"]]}, ("pos_att_type",)),
        ("deberta", {"talking_head": True}, ("talking_head",)),
        ("deberta", {"pooler_hidden_size": 8}, ("pooler_hidden_size",)),
        ("deberta-v2", {"position_buckets": 2**20}, ("position_buckets",)),
        ("deberta-v2", {"conv_kernel_size": 4}, ("conv_kernel_size",)),
        ("deberta-v2", {"conv_groups": 3}, ("conv_groups",)),
        ("modernbert", {"layer_types": ["full_attention"]}, ("layer_types",)),
        ("modernbert", {"layer_types": ["full_attention"] * 2 + ["linear_attention"]}, ("layer_types",)),
        ("modernbert", {"local_attention": 17}, ("local_attention=17",)),
        ("modernbert", {"position_embedding_type": "relative_key"}, ("position_embedding_type",)),
        ("longformer", {"attention_window": [4]}, ("attention_window",)),
        ("longformer", {"attention_window": [4, 7]}, ("attention_window",)),
        ("longformer", {"attention_window": [4, "8"]}, ("attention_window",)),
        ("albert", {"num_hidden_groups": 4}, ("num_hidden_groups=4", "num_hidden_layers=3")),
        ("albert", {"inner_group_num": 2}, ("inner_group_num",)),
        ("electra", {"summary_type": "mean"}, ("summary_type",)),
        ("electra", {"summary_activation": None}, ("summary_activation",)),
        ("big_bird", {"attention_type": "sliding"}, ("attention_type", "sliding")),
        ("bert", {"model_type": "bart"}, ("model_type", "bart")),
        ("bert", {"model_type": ["bert"]}, ("model_type",)),
        ("bert", {"tie_word_embeddings": False}, ("cls.predictions.decoder.weight",)),
    ],
)
def test_contradictions(name: str, change: Config, named: tuple[str, ...]) -> None:
    suffix = "ForMaskedLM" if "ForMaskedLM" in TINY[name].heads else "Model"
    config, tensors = saved(name, suffix)
    message = refused({**config, **change}, tensors)
    for one in named:
        assert one in message


# --- which heads there are ---


def test_architectures() -> None:
    config, tensors = saved("bert", "ForSequenceClassification")
    for wrong in (
        *(["GPT2Model"], ["BertForSequenceClassification", "BertModel"], "BertForSequenceClassification", [], 3, {}),
        *([None], [["BertModel"]], [{}], ["bertmodel"], [""], True),
    ):
        message = refused({**config, "architectures": wrong}, tensors)
        assert "architectures" in message
        assert "head=" in message
    message = refused({**config, "architectures": ["GPT2Model"]}, tensors, head="mlm")
    assert "missing: cls.predictions.bias" in message
    assert "head='translate'" in refused(config, tensors, head="translate")
    plan, _ = attempt({**config, "architectures": ["Custom"]}, tensors, head="classify")
    assert list(plan.heads) == ["classify", "pooler"] or list(plan.heads) == ["classify"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_architecture(model_type: str) -> None:
    """The tensors tell, or the error says what to pass."""
    for name, suffix in CASES:
        if TINY[name].model_type != model_type:
            continue
        config, tensors = saved(name, suffix)
        named, _ = attempt(config, tensors)
        nameless = without(config, "architectures")
        if suffix in ("Model", "EncoderModel", "ForMaskedLM", "ForPreTraining", "ForNextSentencePrediction"):
            found, _ = attempt(nameless, tensors)
            assert found.heads == named.heads
        else:
            message = refused(nameless, tensors)
            assert "head=" in message
            head = FAMILIES[model_type].architectures[config["architectures"][0]][0]
            assert head in message.split("head=")[1]
            found, _ = attempt(nameless, tensors, head=head)
            assert found.heads == named.heads


# --- names for the same tensor ---

WORDS, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"


def loaded(config: Config, tensors: Tensors, **options: Any) -> Tensors:
    plan, model = attempt(config, tensors, **options)
    return {name: value.clone() for name, value in plan.weight_map.store(model).items()}


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("name", "words", "decoder"),
    [
        ("bert", WORDS, DECODER),
        ("roberta", "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
        ("distilbert", "distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight"),
        ("electra", "electra.embeddings.word_embeddings.weight", "generator_lm_head.weight"),
        ("modernbert", "model.embeddings.tok_embeddings.weight", "decoder.weight"),
        ("eurobert-tied", "model.embed_tokens.weight", "lm_head.weight"),
    ],
)
def test_tied_decoder(name: str, words: str, decoder: str) -> None:
    config, tensors = saved(name, "ForMaskedLM")
    assert decoder not in tensors
    plain = loaded(config, tensors)
    assert same(loaded(config, {**tensors, decoder: tensors[words].clone()}), plain)
    assert same(loaded(config, {**without(tensors, words), decoder: tensors[words]}), plain)
    changed = tensors[words].clone()
    changed[-1, -1] += 1e-3
    message = refused(config, {**tensors, decoder: changed})
    assert decoder in message
    assert words in message
    message = refused(config, {**tensors, decoder: changed[:-1]})
    assert f"{decoder} has shape" in message


def test_tied_bias() -> None:
    config, tensors = saved("bert", "ForMaskedLM")
    bias, alias = "cls.predictions.bias", "cls.predictions.decoder.bias"
    plain = loaded(config, tensors)
    assert same(loaded(config, {**tensors, alias: tensors[bias].clone()}), plain)
    assert same(loaded(config, {**without(tensors, bias), alias: tensors[bias]}), plain)
    assert alias in refused(config, {**tensors, alias: tensors[bias] + 1})


@pytest.mark.parametrize("name", ["bert", "electra", "roberta", "ernie"])
def test_old_norms(name: str) -> None:
    config, tensors = saved(name, "ForMaskedLM")
    old = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
        for k, v in tensors.items()
    }
    assert old.keys() != tensors.keys()
    _, model = attempt(config, tensors)
    plain = {k: v.clone() for k, v in model.named_parameters()}
    _, model = attempt(config, old)
    assert same(dict(model.named_parameters()), plain)
    both = {**tensors, f"{FAMILIES[name].prefix}embeddings.LayerNorm.gamma": torch.zeros(16)}
    assert "unexpected" in refused(config, both)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "albert", "electra", "mpnet", "deberta", "big_bird"])
def test_counters_are_dropped_by_name(name: str) -> None:
    config, tensors = saved(name, "Model")
    counter = {"embeddings.position_ids": torch.arange(48)[None]}
    plan, _ = attempt(config, {**tensors, **counter})
    assert plan.weight_map.dropped == ["embeddings.position_ids"]
    config, tensors = saved(name, "ForMaskedLM")
    prefixed = f"{FAMILIES[TINY[name].model_type].prefix}embeddings.position_ids"
    plan, _ = attempt(config, {**tensors, prefixed: torch.arange(48)[None]})
    assert plan.weight_map.dropped == [prefixed]
    assert "unexpected" in refused(config, {**tensors, "position_ids": torch.arange(48)})


def test_deberta_discriminator_is_a_head_of_v3() -> None:
    config, tensors = saved("deberta-v3", "ForMaskedLM")
    width = config["hidden_size"]
    shapes = {"dense": (width, width), "LayerNorm": (width,), "classifier": (1, width)}
    extra = {f"mask_predictions.{part}.weight": torch.zeros(shape) for part, shape in shapes.items()}
    extra |= {f"mask_predictions.{part}.bias": torch.zeros(shape[:1]) for part, shape in shapes.items()}
    plan, _ = attempt(config, {**tensors, **extra})
    assert list(plan.heads) == ["mlm", "rtd"]
    assert "missing: mask_predictions.dense.bias" in refused(
        config, without({**tensors, **extra}, "mask_predictions.dense.bias")
    )


def test_deberta_discriminator_is_dropped_by_name_in_v1() -> None:
    config, tensors = saved("deberta", "ForMaskedLM")
    extra = {f"mask_predictions.{part}.weight": torch.zeros(2, 2) for part in ("dense", "classifier")}
    plan, _ = attempt(config, {**tensors, **extra})
    assert plan.weight_map.dropped == sorted(extra)


def test_companions() -> None:
    """bert-base's files: named after MaskedLM, with the pooler and the other pretraining head inside."""
    config, tensors = saved("bert", "ForPreTraining")
    plan, _ = attempt({**config, "architectures": ["BertForMaskedLM"]}, tensors)
    assert list(plan.heads) == ["mlm", "nsp"]
    kept = without(tensors, "cls.seq_relationship.weight", "cls.seq_relationship.bias")
    plan, _ = attempt({**config, "architectures": ["BertForMaskedLM"]}, kept)
    assert list(plan.heads) == ["mlm", "pooler"]
    message = refused({**config, "architectures": ["BertForMaskedLM"]}, without(tensors, "cls.seq_relationship.bias"))
    assert "missing: cls.seq_relationship.bias" in message
    # A head that is not named and is no companion is left over, not lost.
    extra = {"classifier.weight": torch.zeros(3, 16), "classifier.bias": torch.zeros(3)}
    assert "unexpected: classifier.bias, classifier.weight" in refused(config, {**tensors, **extra})


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), True, "1", None])
def test_numbers_that_are_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="x="):
        ConfigKeys({"x": value}).number("x")
    with pytest.raises(ConfigError, match="x="):
        ConfigKeys({"x": value}).integer("x", 3)


# --- JSON itself ---


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        "[]",
        "3",
        "null",
        "",
        "{",
        '{"a": 1}x',
        '{"a": ' + "9" * 5000 + "}",
        "[" * 100_000,
        "\ufeff{}",
    ],
    ids=lambda text: text[:12],
)
def test_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        store.read_json(tmp_path / "config.json")
