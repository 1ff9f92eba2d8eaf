"""Tiny random checkpoints as transformers saves them, with tokenizers that split words into pieces."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from bertie.text.tokenizer_training import train

REACH = 48
WORDS = (
    "the a and of to in was with for that Emma Jane Austen London Berlin river mountain novel letter writer reader "
    "walked wrote found opened returned remembered quickly slowly never always yesterday children windows houses "
    "gardens morning evening beautiful terrible unusual government understanding international relationship history"
).split()
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        words = [draw.choice(WORDS) for _ in range(draw.randint(3, 9))]
        if draw.random() < 0.3:
            words[-2] += draw.choice([",", ";", "'s", "-like", " (it seemed)"])
        found.append(" ".join(words).capitalize() + draw.choice(".!?"))
    return found


def document(count: int, seed: int = 0) -> str:
    """Sentences in paragraphs."""
    draw = random.Random(seed)
    return "".join(one + draw.choice([" ", " ", " ", "\n", "\n\n"]) for one in sentences(count, seed))


@cache
def tokenizer(kind: str) -> Any:
    """A WordPiece or a byte-level BPE tokenizer of few tokens, trained here and now."""
    lines = sentences(300)
    if kind == "wordpiece":
        vocab = train(
            lines, vocab_size=160, min_frequency=1
        )._backend.get_vocab()  # the same each time, unlike the library's
        return transformers.BertTokenizer(vocab=vocab)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bpe = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    bpe.train_from_iterator(lines, vocab_size=450, special_tokens=special, show_progress=False)
    state = json.loads(bpe._tokenizer.to_str())["model"]
    merges = [tuple(one) for one in state["merges"]]
    return transformers.RobertaTokenizer(vocab=state["vocab"], merges=merges)


def save(
    folder: Path, kind: str, head: str, *, labels: list[str] | None = None, max_length: int = REACH, **config: Any
) -> Path:
    """`head`: as in transformers' names of classes, such as ForMaskedLM; "" for a bare encoder."""
    torch.manual_seed(0)
    text = tokenizer(kind)
    text.model_max_length = max_length
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    stem, extra = ("Bert", {}) if kind == "wordpiece" else ("Roberta", {"type_vocab_size": 1})
    names: dict[str, Any] = {}
    if labels is not None:
        names = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    made = getattr(transformers, f"{stem}Config")(
        vocab_size=len(text),
        max_position_embeddings=max_length + (0 if kind == "wordpiece" else 2),
        pad_token_id=text.pad_token_id,
        **sizes,
        **extra,
        **names,
        **config,
    )
    model = getattr(transformers, f"{stem}{head or 'Model'}")(made)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" not in key.lower():
                parameter.copy_(torch.randn_like(parameter) * 0.25)
    model.save_pretrained(folder)
    text.save_pretrained(folder)
    return folder
