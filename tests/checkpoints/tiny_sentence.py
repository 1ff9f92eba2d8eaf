"""A tiny BERT as transformers saves it, and a folder as sentence-transformers 2 wrote it."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bertie.checkpoints.sentence_modules import SentenceModules

WIDTH = 16
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a the cat dog sat ran on mat query : find".split()


def save_bert(folder: Path, labels: int | None = None, limit: int = 40, **config: Any) -> Path:
    """With labels it has a classification head."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config |= sizes | {"vocab_size": len(WORDS), "max_position_embeddings": 40}
    if labels is None:
        BertModel(BertConfig(**config)).save_pretrained(folder)
    else:
        BertForSequenceClassification(BertConfig(**config, num_labels=labels)).save_pretrained(folder)
    BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}, model_max_length=limit).save_pretrained(folder)
    return folder


def load(folder: Path) -> SentenceModules:
    modules = SentenceModules.from_folder(folder, WIDTH)
    assert modules is not None
    return modules.eval()


def old_folder(base: Path, folder: Path, lower_case: bool = False) -> Path:
    """The layout of version 2: flags, short type names, weights in pytorch_model.bin, the transformer in a folder."""
    torch.manual_seed(2)
    dense = nn.Linear(WIDTH * 2, 4)
    for name in ("0_Transformer", "1_Pooling", "2_Dense", "3_Normalize"):
        (folder / name).mkdir(parents=True)
    for file in base.iterdir():
        (folder / "0_Transformer" / file.name).write_bytes(file.read_bytes())
    names = ("0_Transformer", "1_Pooling", "2_Dense", "3_Normalize")
    entries = [
        {"idx": i, "name": str(i), "path": name, "type": f"sentence_transformers.models.{name[2:]}"}
        for i, name in enumerate(names)
    ]
    write(folder / "modules.json", entries)
    write(folder / "0_Transformer/sentence_bert_config.json", {"max_seq_length": 6, "do_lower_case": lower_case})
    flags = {"cls_token": True, "mean_tokens": True, "max_tokens": False, "mean_sqrt_len_tokens": False}
    pooling = {"word_embedding_dimension": WIDTH} | {f"pooling_mode_{key}": value for key, value in flags.items()}
    write(folder / "1_Pooling/config.json", pooling)
    tanh = "torch.nn.modules.activation.Tanh"
    config = {"in_features": WIDTH * 2, "out_features": 4, "bias": True, "activation_function": tanh}
    write(folder / "2_Dense/config.json", config)
    torch.save({f"linear.{k}": v for k, v in dense.state_dict().items()}, folder / "2_Dense/pytorch_model.bin")
    versions = {"sentence_transformers": "2.0.0", "transformers": "4.6.1", "pytorch": "1.8.1"}
    write(folder / "config_sentence_transformers.json", {"__version__": versions})
    return folder


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
