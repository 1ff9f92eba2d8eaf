"""Corners where a checkpoint once loaded without a word and answered with other numbers than transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.testing import assert_close
from transformers import AutoConfig, AutoTokenizer

import bertie
from bertie.checkpoints.model_spec import model_spec
from bertie.config import Full
from bertie.errors import ConfigError
from bertie.nn.heads import pool_mean
from bertie.ops import Relative
from bertie.ops.torch import grouped_attention as grouped
from bertie.text.batch import Batch
from tests.parity.tiny import TINY

IDS = [[1, 5, 6, 7, 2], [1, 8, 2]]


def save(folder: Path, name: str, config: dict[str, Any], suffix: str = "Model") -> Any:
    """A random model of transformers, saved with config.json as it is given here, not as transformers rewrites it."""
    torch.manual_seed(0)
    tiny = TINY[name]
    raw = {"model_type": tiny.model_type, "architectures": [tiny.stem + suffix], **tiny.config, **config}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    theirs = getattr(transformers, tiny.stem + suffix)(AutoConfig.from_pretrained(folder)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    return theirs


@pytest.mark.parametrize("terms", ["c2p|c2p", "c2p|", ["c2p", "p2c", "p2c"], ["c2p", ""], [" c2p"], "", [""]])
@pytest.mark.parametrize("relative", [True, False])
def test_deberta_counts_the_terms_it_finds(terms: Any, relative: bool) -> None:
    """transformers divides the scores by their number, repeated and empty ones among them."""
    config = TINY["deberta"].config | {"pos_att_type": terms, "relative_attention": relative}
    with pytest.raises(ConfigError, match="pos_att_type"):
        model_spec({"model_type": "deberta", **config}, None)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("nomic_bert", {"rope_theta": 50.0}),
        ("nomic_bert", {"rope_theta": 50.0, "rope_parameters": {"rope_type": "default", "rope_theta": 70.0}}),
        ("modernbert", {"causal_mask": False, "is_causal": False, "rope_scaling": None}),  # Ettin
        ("eurobert", {"clf_pooling": "late"}),  # EuroBERT-210m
        ("bert", {"embedding_size": 16, "sep_token_id": 2}),  # MuRIL
        ("bert", {"cell": {}, "emb_size": 312, "pre_trained": "", "structure": [], "training": ""}),  # TinyBERT
        ("roberta", {"language": "english", "name": "Roberta"}),  # deepset
        ("albert", {"pooler_fc_size": 768, "pooler_type": "first_token_transform"}),  # albert_chinese
    ],
)
def test_keys_of_published_checkpoints(tmp_path: Path, name: str, keys: dict[str, Any]) -> None:
    theirs = save(tmp_path, name, keys)
    found = bertie.Checkpoint.load(tmp_path).model.hidden(Batch.from_ids(IDS))
    assert_close(found, torch.cat([theirs(torch.tensor([i])).last_hidden_state[0] for i in IDS]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bert", {"embedding_size": 8}),
        ("modernbert", {"is_causal": True}),
        ("modernbert", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("eurobert", {"clf_pooling": "mean"}),
    ],
)
def test_the_same_keys_with_values_that_would_matter(name: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keys))):
        model_spec({"model_type": TINY[name].model_type, **TINY[name].config, **keys}, None)


def test_transformers_5_feeds_no_segments_with_its_generic_tokenizer(tmp_path: Path) -> None:
    save(tmp_path, "bert", {})
    words = {word: i for i, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)("a", "b")
    ours = bertie.Checkpoint.load(tmp_path).tokenizer
    assert ours is not None
    found = ours.encode("a", "b")
    assert found.ids.tolist() == theirs["input_ids"]
    assert found.segments.tolist() == theirs.get("token_type_ids", [0] * 5)


def test_half_precision_adds_up_a_long_text() -> None:
    """The sum of 4000 twenties is more than float16 holds; their mean is not."""
    batch = Batch.from_ids([[1] * 4000, [2] * 3])
    assert_close(pool_mean(torch.full((4003, 2), 20.0).half(), batch), torch.full((2, 2), 20.0).half())


def test_half_precision_scales_before_it_multiplies() -> None:
    """40 · 40 · 64 is more than float16 holds; a fourteenth of it is not."""
    x = torch.full((4, 1, 64), 40.0).half()
    rows = Relative(torch.zeros(7, dtype=torch.long), keys=torch.zeros(1, 1, 64).half().requires_grad_())
    assert_close(grouped.attend(x, x, x, (4,), scale=1 / 14, pattern=Full(), relative=rows), x)


def test_nomics_published_spelling() -> None:
    """As nomic-embed-text-v1.5 publishes it, with other sizes."""
    plain = {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "vocab_size": 64,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": True,
    }
    published = plain | {
        "activation_function": "swiglu",
        "attn_pdrop": 0.0,
        "auto_map": {"AutoModel": "x--y"},
        "causal": False,
        "dense_seq_output": True,
        "embd_pdrop": 0.0,
        "fused_bias_fc": True,
        "fused_dropout_add_ln": True,
        "layer_norm_epsilon": 1e-12,
        "max_trained_positions": 2048,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "n_embd": 16,
        "n_head": 2,
        "n_inner": 24,
        "n_layer": 2,
        "n_positions": 8192,
        "pad_vocab_size_multiple": 64,
        "parallel_block": False,
        "parallel_block_tied_norm": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "reorder_and_upcast_attn": False,
        "resid_pdrop": 0.0,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "torch_dtype": "float32",
        "transformers_version": "4.34.0",
        "use_flash_attn": True,
        "use_rms_norm": False,
        "use_xentropy": True,
    }
    present = plain | {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 2048,
        "rope_theta": 1000,
    }
    assert model_spec(published, None).encoder == model_spec(present, None).encoder
    for key, value in {
        "prenorm": True,
        "activation_function": "gelu",
        "rotary_scaling_factor": 2.0,
        "novel": 1,
    }.items():
        with pytest.raises(ConfigError, match=key):
            model_spec(published | {key: value}, None)
