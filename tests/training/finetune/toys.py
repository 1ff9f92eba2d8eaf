"""Toy data for fine-tuning, and a tiny encoder that learns it in seconds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers

import bertie
from bertie.checkpoints.checkpoint import Checkpoint
from tests.tasks import tiny

FAST: dict[str, Any] = {"lr": 2e-3, "epochs": 5, "batch_size": 8, "dev_fraction": 0.0}
NAMES = ("emma", "jane", "austen", "london")


def sentiment_texts(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Sentences whose label is given by one word."""
    draw = random.Random(seed)
    plain = [word for word in tiny.WORDS if word not in ("beautiful", "terrible")]
    texts, moods = [], []
    for i in range(count):
        words = [draw.choice(plain) for _ in range(draw.randint(3, 8))]
        words[draw.randrange(len(words))] = ("terrible", "beautiful")[i % 2]
        texts.append(" ".join(words) + draw.choice(".!?"))
        moods.append(("bad", "good")[i % 2])
    return texts, moods


TEXTS, MOODS = sentiment_texts(96, seed=3)


def tagged_words(count: int = 64) -> tuple[list[list[str]], list[list[str]]]:
    """Lists of words, with a tag for each: the names are persons."""
    draw = random.Random(1)
    words = [[draw.choice((*NAMES, *tiny.WORDS[:12])) for _ in range(draw.randint(3, 9))] for _ in range(count)]
    return words, [["B-PER" if word.lower() in NAMES else "O" for word in sentence] for sentence in words]


def questions(count: int = 96) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """Questions with a context; the answer is its only name."""
    draw = random.Random(2)
    plain = [word for word in tiny.WORDS if word.lower() not in NAMES]
    pairs, answers = [], []
    for _ in range(count):
        words = [draw.choice(plain) for _ in range(6)]
        at = draw.randrange(6)
        words[at] = draw.choice(NAMES)
        pairs.append(("who was found", " ".join(words)))
        answers.append([words[at]])
    return pairs, answers


def assert_same_logits_in_transformers(checkpoint: Checkpoint, folder: Path, kind: str, text: str) -> None:
    """The saved model gives the same logits in transformers."""
    theirs = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder).eval()
    coded = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    assert checkpoint.tokenizer is not None
    (head,) = checkpoint.heads
    with torch.no_grad():
        expected = theirs(**coded).logits.flatten()
        got = checkpoint.model(bertie.Batch.from_encodings([checkpoint.tokenizer.encode(text)]), head).flatten()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def save_encoder(folder: Path) -> Path:
    """Save a small, freshly initialized BERT."""
    text = tiny.tokenizer("wordpiece")
    text.model_max_length = tiny.REACH
    config = transformers.BertConfig(
        vocab_size=len(text),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=tiny.REACH,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    text.save_pretrained(folder)
    return folder
