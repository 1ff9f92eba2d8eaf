"""Decoders and T5 encoders as embedders: whole folders beside sentence-transformers, and what is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import bertie
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.model_spec import model_spec
from bertie.config import Causal, Full, Sliding
from bertie.errors import ConfigError, NotFoundError
from bertie.tasks.embed import Embedder
from bertie.text.batch import Batch
from bertie.text.windows import windows
from tests.checkpoints.tiny_decoders import FOLDERS, TEXTS, save_sentence_model, save_transformer

pytest.importorskip("sentence_transformers")
LONG = " ".join(["the cat sat on the mat, and the dog ran home."] * 30)
PAIRS = [
    ("where is the mat", "the mat is home"),
    ("what do cats eat", "cats eat fish"),
    ("did stocks fall", "they fell"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda name: save_sentence_model(name, tmp_path_factory.mktemp(name)))


def theirs(folder: Path, texts: list[str], **options: Any) -> np.ndarray[Any, Any]:
    from sentence_transformers import SentenceTransformer

    found: np.ndarray[Any, Any] = SentenceTransformer(str(folder), device="cpu").encode(texts, **options)
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_equals_sentence_transformers(name: str, folders: Any, tmp_path: Path) -> None:
    """Tokens, prompts, pooling and dense layers; and so does the folder that is saved here."""
    embedder = Embedder.load(folders(name))
    embedder.save(tmp_path / "copy")
    for prompt in (None, *FOLDERS[name].prompts):
        wanted = theirs(folders(name), TEXTS, prompt_name=prompt)
        np.testing.assert_allclose(embedder.embed(TEXTS, prompt_name=prompt), wanted, atol=1e-5)
        np.testing.assert_allclose(theirs(tmp_path / "copy", TEXTS, prompt_name=prompt), wanted, atol=1e-6)
    assert isinstance(bertie.load(folders(name)), Embedder)


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_those_of_transformers(name: str, folders: Any) -> None:
    expected = transformers.AutoTokenizer.from_pretrained(folders(name))
    tokenizer = Embedder.load(folders(name)).tokenizer
    assert [tokenizer.encode(text).ids.tolist() for text in TEXTS] == [expected(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("name", FOLDERS)
def test_long_texts_are_read_in_windows(name: str, folders: Any) -> None:
    embedder = Embedder.load(folders(name))
    result = next(embedder.embed_each([LONG]))
    assert result.windows > 1
    assert result.tokens_read == result.tokens_total > embedder.checkpoint.max_length
    encoding = embedder.tokenizer.encode(LONG)
    whole = next(embedder.embed_each([LONG[:200]]))
    assert (whole.windows, result.tokens_total) == (1, int((~encoding.special).sum()))


@pytest.mark.parametrize("name", FOLDERS)
def test_windows_do_not_cut_words(name: str, folders: Any) -> None:
    """Tokenizers of Llama and Gemma do not split texts into words: the spaces in the tokens tell."""
    text = "cats and dogs ran home on the mat " * 40
    encoding = Embedder.load(folders(name)).tokenizer.encode(text)
    found = windows(encoding, (text,), 64)
    assert len(found) > 3
    for window in found:
        offsets = window.encoding.offsets[~window.encoding.special]
        start, end = int(offsets[0, 0]), int(offsets[-1, 1])
        assert text[start] == " " or text[start - 1 : start] in ("", " ")
        assert text[end - 1] == " " or text[end : end + 1] in ("", " ")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", FOLDERS)
def test_an_embedding_does_not_depend_on_the_batch(name: str, precision: Any, folders: Any) -> None:
    embedder = Embedder.load(folders(name), precision=precision)
    together = embedder.embed([*TEXTS, LONG])
    for text, vector in zip([*TEXTS, LONG], together, strict=True):
        assert np.array_equal(embedder.embed([text])[0], vector)


@pytest.mark.parametrize("name", FOLDERS)
def test_int8(name: str, folders: Any, tmp_path: Path) -> None:
    embedder = Embedder.load(folders(name))
    exact = embedder.embed(TEXTS)
    assert (Embedder.load(folders(name), precision="int8").embed(TEXTS) * exact).sum(1).min() > 0.98
    embedder.checkpoint.save(tmp_path / "int8", precision="int8")
    assert (Embedder.load(tmp_path / "int8").embed(TEXTS) * exact).sum(1).min() > 0.98


@pytest.mark.filterwarnings("ignore:lr=")  # high, for few steps
@pytest.mark.parametrize("name", FOLDERS)
def test_training(name: str, folders: Any, tmp_path: Path) -> None:
    embedder = Embedder(folders(name), epochs=12, lr=3e-3, batch_size=3, seed=0, dev_fraction=0.0)
    before = embedder.similarity([a for a, _ in PAIRS], [b for _, b in PAIRS])
    embedder.fit(PAIRS * 4, progress=False)
    after = embedder.similarity([a for a, _ in PAIRS], [b for _, b in PAIRS])

    def margin(similarity: np.ndarray[Any, Any]) -> float:
        return float(np.trace(similarity) / 3 - (similarity.sum() - np.trace(similarity)) / 6)

    assert margin(after) > margin(before) + 0.05
    embedder.save(tmp_path / "trained")
    np.testing.assert_allclose(theirs(tmp_path / "trained", TEXTS), embedder.embed(TEXTS), atol=1e-5)


# --- checkpoints of the class for generation ---


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_causal_language_models_load_without_their_output_layer(name: str, tied: bool, tmp_path: Path) -> None:
    folder = save_transformer(name, tmp_path / "lm", "ForCausalLM", tie_word_embeddings=tied)
    checkpoint = Checkpoint.load(folder)
    assert checkpoint.spec.weight_map.dropped == ([] if tied else ["lm_head.weight"])
    assert not checkpoint.heads
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ids = [5, 9, 20, 11]
    wanted = model(torch.tensor([ids])).last_hidden_state[0]
    with torch.no_grad():
        torch.testing.assert_close(checkpoint.model.hidden(Batch.from_ids([ids])), wanted, atol=1e-5, rtol=0)

    checkpoint.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["architectures"][0].endswith("ForCausalLM" if tied else "Model")
    assert not any("lm_head" in key for key in load_file(tmp_path / "saved/model.safetensors"))
    back = transformers.AutoModel.from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(back(torch.tensor([ids])).last_hidden_state[0], wanted, atol=1e-6, rtol=0)


def test_a_complete_t5_loads_without_its_decoder(tmp_path: Path) -> None:
    folder = save_transformer("t5", tmp_path / "t5", "ForConditionalGeneration")
    checkpoint = Checkpoint.load(folder)
    assert all(name.startswith("decoder.") or name == "lm_head.weight" for name in checkpoint.spec.weight_map.dropped)
    checkpoint.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["architectures"] == ["T5EncoderModel"]
    original = transformers.T5EncoderModel.from_pretrained(folder).eval()
    back = transformers.T5EncoderModel.from_pretrained(tmp_path / "saved").eval()
    ids = torch.tensor([[5, 9, 20, 11]])
    wanted = original(ids).last_hidden_state
    assert torch.equal(back(ids).last_hidden_state, wanted)
    with torch.no_grad():
        found = checkpoint.model.hidden(Batch.from_ids(ids.tolist()))
    torch.testing.assert_close(found, wanted[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "pooling"), [("qwen3", "lasttoken"), ("mistral", "lasttoken"), ("t5", "mean")])
def test_default_pooling(name: str, pooling: str, tmp_path: Path) -> None:
    """In a causal encoder only the last token has seen the whole text."""
    suffix = None if name == "t5" else "ForCausalLM"
    folder = save_transformer(name, tmp_path, suffix)
    embedder = Embedder.load(folder)
    assert embedder.modules.pooling.modes == (pooling,)
    np.testing.assert_allclose(embedder.embed(TEXTS), theirs(folder, TEXTS), atol=1e-5)  # its rule is the class's name
    bidirectional = save_transformer("llama", tmp_path / "bidirectional", is_causal=False)
    assert Embedder.load(bidirectional).modules.pooling.modes == ("mean",)
    assert not any(isinstance(p, Causal) for p in Embedder.load(bidirectional).model.config.patterns)


# --- configs as they are published ---

_SHARED = {
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.2",
    "use_cache": True,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-Embedding": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151669,
    },
    "EmbeddingGemma": {
        "_sliding_window_pattern": 6,
        "architectures": ["Gemma3TextModel"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 768,
        "intermediate_size": 1152,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
        "max_position_embeddings": 2048,
        "num_attention_heads": 3,
        "num_hidden_layers": 24,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rope_scaling": None,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "vocab_size": 262144,
        "use_bidirectional_attention": True,
    },
    "e5-mistral": {
        "_name_or_path": "mistral",
        "architectures": ["MistralModel"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_act": "silu",
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Llama-3.1": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "sentence-t5": {
        "architectures": ["T5EncoderModel"],
        "model_type": "t5",
        "d_ff": 3072,
        "d_kv": 64,
        "d_model": 768,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "feed_forward_proj": "relu",
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-06,
        "n_positions": 512,
        "num_decoder_layers": 12,
        "num_heads": 12,
        "num_layers": 12,
        "output_past": True,
        "pad_token_id": 0,
        "relative_attention_num_buckets": 32,
        "task_specific_params": {"summarization": {"num_beams": 4}},
        "vocab_size": 32128,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    """Every key is known, and means what it means to transformers, whose own form of the file is read alike."""
    config = {**({} if name == "sentence-t5" else _SHARED), **PUBLISHED[name]}
    found = model_spec(config, None).encoder
    theirs = transformers.AutoConfig.for_model(**config)
    assert found == model_spec(json.loads(theirs.to_json_string(use_diff=False)), None).encoder
    assert (found.width, found.depth) == (theirs.hidden_size, theirs.num_hidden_layers)
    if name == "EmbeddingGemma":  # transformers: a distance below 257
        assert found.patterns[:6] == (*(Sliding(256),) * 5, Full())
    if name == "e5-mistral":
        assert set(found.patterns) == {Causal(4095)}


# --- what is refused ---


def test_other_tasks_say_that_there_are_embeddings_only(folders: Any, tmp_path: Path) -> None:
    folder = folders("qwen3")
    for task in (bertie.MaskedLM, bertie.Classifier, bertie.Tagger, bertie.Reader, bertie.Reranker):
        with pytest.raises(NotFoundError, match=r"qwen3 model, which Bertie uses for embeddings only.*generation"):
            task.load(folder)
    with pytest.raises(ConfigError, match="head='mlm' is not one of qwen3's: none, as qwen3 is used for embeddings"):
        bertie.load(folder, head="mlm")
    with pytest.raises(ConfigError, match="head='classify' is not available for qwen3; it has: none"):
        Checkpoint.load(folder).with_head("classify", ["a", "b"])
    with pytest.raises(AttributeError, match="it does not generate text"):
        Embedder.load(folder).generate  # noqa: B018
    file = save_transformer("qwen3", tmp_path) / "config.json"
    config = json.loads(file.read_text()) | {"architectures": ["Qwen3ForSequenceClassification"]}
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"Qwen3ForSequenceClassification.*one of Qwen3Model, Qwen3ForCausalLM"):
        Checkpoint.load(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("add_eos_token", False), ("add_bos_token", False)])
def test_settings_that_contradict_the_template(key: str, value: bool, tmp_path: Path) -> None:
    folder = save_transformer("mistral", tmp_path)
    file = folder / "tokenizer_config.json"
    Checkpoint.load(folder)
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=f"tokenizer_config.json says {key}={value} and the template .* adds"):
        Checkpoint.load(folder)


def test_quantized_and_custom_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = save_transformer("llama", tmp_path)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for change, message in (
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "modeling.Bidirectional"}}, "auto_map"),
        ({"model_type": "mixtral"}, "model_type='mixtral' is not supported"),
        ({"num_local_experts": 8}, "num_local_experts"),
    ):
        file.write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=message):
            Checkpoint.load(folder)
