"""Models with random weights for serving benchmarks: the shapes of real checkpoints, or next to no cost.

A tokenizer folder is copied where one is given. Otherwise the vocabulary is that of the novel in
src/bertie/recipes: WordPiece for BERT's shape, Unigram for DeBERTa-v3's, as in the real checkpoints.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import CONFIGS, DEVICE, DTYPE, config_of

BOOK = Path(__file__).parents[1] / "src" / "bertie" / "recipes" / "examples" / "book.txt"
TOKENIZER_FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spm.model")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_LENGTH = 256  # of the embedders, as all-MiniLM-L6-v2
DIMENSION = 384  # of the embeddings


def book_texts(count: int, tokens: int | None = None, seed: int = 0) -> list[str]:
    """Excerpts of the novel; with `tokens`, of two words fewer, which is their length with [CLS] and [SEP]."""
    words, draw = BOOK.read_text(encoding="utf-8").split(), random.Random(seed)
    texts = []
    for _ in range(count):
        size = tokens - 2 if tokens else int(draw.lognormvariate(3.2, 0.8)) + 2
        start = draw.randrange(len(words) - size)
        texts.append(" ".join(words[start : start + min(size, MAX_LENGTH // 2)]))
    return texts


def embedder(folder: Path, *, cheap: bool = False, tokenizer: Path | None = None) -> Path:
    """Write a sentence-transformers folder in the shape of all-MiniLM-L6-v2, with random weights.

    Args:
        cheap: one layer of width 64, with a dense layer to 384 dimensions: replies have the real size,
            and the forward pass costs next to nothing.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModel

    config = dict(CONFIGS["minilm"])
    if cheap:
        config |= {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    auto_model: Any = AutoModel
    model = auto_model.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(folder)
    _copy_or_make(tokenizer, folder, _write_wordpiece)
    kinds = ["Transformer", "Pooling", *(["Dense"] if cheap else []), "Normalize"]
    modules = []
    for i, kind in enumerate(kinds):
        path = "" if i == 0 else f"{i}_{kind}"
        modules.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"})
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH, "do_lower_case": False})
    width = config["hidden_size"]
    _write_json(
        folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    )
    if cheap:
        activation = "torch.nn.modules.linear.Identity"
        dense = {"in_features": width, "out_features": DIMENSION, "bias": False, "activation_function": activation}
        _write_json(folder / "2_Dense" / "config.json", dense)
        weight = {"linear.weight": torch.randn(DIMENSION, width)}
        save_file(weight, folder / "2_Dense" / "model.safetensors")
    return folder


def deberta_classifier(folder: Path, *, tiny: bool = False, tokenizer: Path | None = None) -> Path:
    """Write a classifier in the shape of DeBERTa-v3-large, with random weights."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = config_of("deberta-v3-large", tiny) | {"vocab_size": CONFIGS["deberta-v3-large"]["vocab_size"]}
    torch.manual_seed(0)
    auto_model: Any = AutoModelForSequenceClassification
    with torch.device(DEVICE):  # random numbers for 434 million weights take long on a CPU
        model = auto_model.from_config(AutoConfig.for_model(**config, num_labels=3), dtype=DTYPE)
    model.save_pretrained(folder)
    _copy_or_make(tokenizer, folder, _write_unigram)
    return folder


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer, and unpack those that are compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if name == "spm.model" and (folder / "tokenizer.json").exists():
            continue
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
        elif (source / f"{name}.gz").exists():
            (folder / name).write_bytes(gzip.decompress((source / f"{name}.gz").read_bytes()))


def _copy_or_make(source: Path | None, folder: Path, make: Any) -> None:
    if source is not None and source.exists():
        copy_tokenizer(source, folder)
    else:
        make(folder)


def _words() -> Sequence[tuple[str, int]]:
    return Counter(BOOK.read_text(encoding="utf-8").lower().split()).most_common(20_000)


def _write_wordpiece(folder: Path) -> None:
    words = [word for word, _ in _words()]
    characters = sorted({character for word in words for character in word})
    pieces = [*SPECIAL, *characters, *(f"##{character}" for character in characters), *words]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(pieces)) + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": MAX_LENGTH}
    _write_json(folder / "tokenizer_config.json", settings)


def _write_unigram(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    counts = _words()
    total = sum(count for _, count in counts)
    scores = {f"▁{word}": math.log(count / total) for word, count in counts}
    characters = {character: -20.0 for piece in scores for character in piece}
    special = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")  # in the order of DeBERTa-v3
    vocabulary = [(piece, 0.0) for piece in special] + list({**characters, **scores}.items())
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=special.index("[UNK]"), byte_fallback=False))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    ids = [(name, special.index(name)) for name in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ids)
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name.strip('[]').lower()}_token": name for name in special}
    _write_json(folder / "special_tokens_map.json", names)
    _write_json(folder / "tokenizer_config.json", names | {"tokenizer_class": "DebertaV2Tokenizer"})


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
