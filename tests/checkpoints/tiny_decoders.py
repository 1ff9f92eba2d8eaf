"""Tiny sentence-transformers folders of decoders and T5 encoders, with tokenizers of their kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

from tests.parity import tiny

WIDTH = 16
CORPUS = [
    "A cat sat on the mat, and the dog ran home.",
    "What do cats eat? Cats eat meat and fish.",
    "Instruct: find passages that answer the question\nQuery: where is the mat?",
    "task: search result | query: naïve café, 東京 and Ελλάδα",
    "Stocks fell by 3.5% on Tuesday; bonds rose.",
]
TEXTS = ["A cat sat on the mat.", "", "Stocks fell", "naïve café\n東京  ½", "the dog ran home and " * 5, "?"]


def _template(tokenizer: Tokenizer, before: str | None, after: str | None) -> Any:
    """As transformers writes it: special tokens before and after each text."""
    single = " ".join(part for part in (before, "$A", after) if part)
    pair = single + "".join(f" {part}" for part in (before and f"{before}:1", "$B:1", after and f"{after}:1") if part)
    used = [token for token in (before, after) if token]
    ids = [(token, tokenizer.token_to_id(token)) for token in used]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def byte_level(special: list[str], before: str | None, after: str | None) -> Tokenizer:
    """Byte-level BPE, as in Qwen and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    )
    template = _template(tokenizer, before, after)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def sentencepiece_bpe(special: list[str], before: str | None, after: str | None, prefix: bool) -> Tokenizer:
    """SentencePiece's BPE with byte fallback, as in Llama 2 and Mistral (with a space before the text) and Gemma."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    every = [*special, *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=360, special_tokens=every))
    # Bytes are ordinary tokens, not special ones.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = _template(tokenizer, before, after)
    return tokenizer


def unigram() -> Tokenizer:
    """SentencePiece's unigram model, as in T5."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(
        CORPUS * 3, trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>")
    )
    tokenizer.post_processor = _template(tokenizer, None, "</s>")
    return tokenizer


@dataclass(frozen=True)
class Folder:
    """How a folder is made: `shape` names a model of tests/parity/tiny.py."""

    shape: str
    tokenizer: Callable[[], Tokenizer]
    settings: dict[str, Any]  # tokenizer_config.json
    pooling: str = "lasttoken"
    dense: tuple[tuple[int, int], ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    suffix: str = "Model"


_GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 160}
_QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False}
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
_GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
FOLDERS = {
    "qwen3": Folder(
        "qwen3",
        lambda: byte_level(["<|endoftext|>", "<|im_end|>"], None, "<|endoftext|>"),
        _QWEN | {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 160},
        prompts={"query": "Instruct: find passages that answer the question\nQuery:", "document": ""},
    ),
    "qwen2": Folder(
        "qwen2",
        lambda: byte_level(["<|endoftext|>", "<|im_end|>"], None, "<|endoftext|>"),
        _GENERIC | _QWEN,
    ),
    "llama": Folder(
        "llama-scaled",
        lambda: byte_level(["<|begin_of_text|>", "<|end_of_text|>"], "<|begin_of_text|>", None),
        _GENERIC | {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>"},
        pooling="weightedmean",
    ),
    "mistral": Folder(
        "mistral",
        lambda: sentencepiece_bpe(["<unk>", "<s>", "</s>"], "<s>", "</s>", prefix=True),
        _LLAMA
        | {"tokenizer_class": "LlamaTokenizer", "model_max_length": 160, "add_bos_token": True, "add_eos_token": True},
        prompts={"web_search_query": "Instruct: find passages that answer the question\nQuery: "},
    ),
    "gemma3_text": Folder(
        "gemma3_text-bidirectional",
        lambda: sentencepiece_bpe(["<pad>", "<eos>", "<bos>", "<unk>"], "<bos>", "<eos>", prefix=False),
        _GENERIC | _GEMMA,
        pooling="mean",
        dense=((WIDTH, 24), (24, WIDTH)),
        prompts={"query": "task: search result | query: ", "document": "title: none | text: "},
    ),
    "t5": Folder(
        "t5-gated",
        unigram,
        _GENERIC | {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        pooling="mean",
        dense=((WIDTH, 12),),
        suffix="EncoderModel",
    ),
}


def save_transformer(name: str, folder: Path, suffix: str | None = None, **config: Any) -> Path:
    """The model as transformers saves it, with its tokenizer; `suffix` names another class, ForCausalLM."""
    entry = FOLDERS[name]
    tokenizer = entry.tokenizer()
    ids = {key: tokenizer.token_to_id(entry.settings.get(f"{key}_token") or "") for key in ("pad", "bos", "eos")}
    sizes = {"vocab_size": tokenizer.get_vocab_size() + 3, "max_position_embeddings": 160}
    if name == "t5":
        del sizes["max_position_embeddings"]
    changes = sizes | {f"{key}_token_id": value for key, value in ids.items()} | config
    tiny.build(entry.shape, suffix or entry.suffix, changes=changes).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(entry.settings), encoding="utf-8")
    return folder


def save_sentence_model(name: str, folder: Path) -> Path:
    """As sentence-transformers saves it: Transformer, Pooling, Dense, Normalize, and prompts."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as st

    entry = FOLDERS[name]
    base = save_transformer(name, folder / "base")
    torch.manual_seed(1)
    dense = [st.Dense(a, b, bias=False, activation_function=nn.Identity()) for a, b in entry.dense]
    chain = [st.Transformer(str(base)), st.Pooling(WIDTH, entry.pooling), *dense, st.Normalize()]
    options = {"prompts": entry.prompts} if entry.prompts else {}
    model = SentenceTransformer(modules=chain, device="cpu", **options)
    model.save(str(folder / "model"), create_model_card=False)
    return folder / "model"
