"""Writes the reference files of test_gliner.py: tiny random models, with what the package `gliner` computes.

The package needs older versions of transformers than the tests run with, so it is no dependency of theirs. It works
with these, too; to write the files again:

    pip install --no-deps gliner==0.2.29
    python -m tests.parity.gliner_reference
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, DebertaV2Config, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "gliner"
TEXTS = [
    "Ada Lovelace was born in London.",
    "Aspirin eases a head-ache, and U.S. doctors prescribe it to patients!",
    "Yes",
    "In 1815 the novel_of Jane Austen (the second edition) was printed by John Murray in London: a success.",
    "Emma",
    "a",
]
LABELS = [["person", "medicine", "place of birth"], ["date"]]
# Spans of words and labels of the first texts, for the loss.
SPANS = [[(0, 1, "person"), (5, 5, "place of birth")], [(0, 0, "medicine"), (2, 3, "medicine"), (0, 0, "person")], []]
LOSSES = {"plain": (-1.0, 0.0), "lstm": (0.75, 2.0)}  # alpha and gamma: binary cross-entropy, and focal loss
OPTIONS = [(flat, multi) for flat in (True, False) for multi in (True, False)]


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of few tokens."""
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    lines = [*TEXTS, *(label for labels in LABELS for label in labels)]
    if kind == "unigram":
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.normalizer = normalizers.Sequence([normalizers.NFKC()])
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer: Any = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="[UNK]")
    else:
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer(lowercase=True)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=special)
    backend.train_from_iterator(lines, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", **names)


def encoder(kind: str, vocab: int) -> Any:
    """A tiny encoder's config."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    shared = {"vocab_size": vocab, "max_position_embeddings": 192, **sizes}
    if kind == "wordpiece":
        return BertConfig(**shared)
    return DebertaV2Config(
        **shared,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
        type_vocab_size=0,
    )


def write(name: str, kind: str, *, noise: float, seed: int, **options: Any) -> None:
    """Write a model and its references."""
    from gliner import GLiNER
    from gliner.config import GLiNERConfig

    target = FOLDER / name
    shutil.rmtree(target, ignore_errors=True)
    random.seed(seed)
    torch.manual_seed(seed)
    base = target / "base"
    text = tokenizer(kind)
    text.save_pretrained(base)
    config = GLiNERConfig(
        model_name=str(base), encoder_config=encoder(kind, len(text)).to_dict(), max_width=4, dropout=0.1, **options
    )
    model = GLiNER.from_config(config, backbone_from_pretrained=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)  # far from the thresholds of a fresh model
    model.config.model_name = "base"
    model.save_pretrained(target, safe_serialization=True)
    shutil.rmtree(base)
    (target / "reference.json").write_text(json.dumps(references(model), indent=None) + "\n", encoding="utf-8")
    save_file(gradients(model, *LOSSES[name]), target / "gradients.safetensors")
    for file in target.glob("*.safetensors"):
        file.chmod(0o644)


def references(model: Any) -> list[dict[str, Any]]:
    """The logits and entities of all texts, in one padded batch."""
    result = []
    for labels in LABELS:
        prepared = model.prepare_batch(TEXTS, labels)
        batch = model.collate_batch(prepared["input_x"], labels)
        logits = model.run_batch(batch)[0]  # (B, W, K, C)
        rows = [_valid(logits[b, : len(tokens)]) for b, tokens in enumerate(batch["tokens"])]
        threshold = separate(rows)
        entities = {
            f"{flat}-{multi}": model.inference(TEXTS, labels, threshold=threshold, flat_ner=flat, multi_label=multi)
            for flat, multi in OPTIONS
        }
        digits = [[round(value, 7) for value in row] for row in rows]
        result.append({"labels": labels, "threshold": threshold, "logits": digits, "entities": entities})
    return result


def _valid(logits: torch.Tensor) -> list[float]:
    """(W, K, C) -> the logits of spans within the text, by start, then width, then label."""
    count, widths, _ = logits.shape
    values = [logits[start, width].tolist() for start in range(count) for width in range(min(widths, count - start))]
    return [value for row in values for value in row]


def separate(rows: list[list[float]]) -> float:
    """A threshold in the widest gap among the upper scores; another CPU's rounding must not change what is found."""
    scores = torch.sigmoid(torch.tensor([value for row in rows for value in row])).sort().values
    upper = scores[int(0.6 * len(scores)) : int(0.8 * len(scores))]
    gap = int(upper.diff().argmax())
    for row in rows:
        ordered = torch.sigmoid(torch.tensor(row)).sort().values
        assert ordered[ordered > upper[gap]].diff().gt(2e-6).all(), "scores too close to each other: change the seed"
    return float(upper[gap : gap + 2].mean())


def gradients(model: Any, alpha: float, gamma: float) -> dict[str, torch.Tensor]:
    """The gradient of the summed loss with respect to each weight, and the loss."""
    words = model.prepare_inputs(TEXTS[: len(SPANS)])[0]
    rows = [{"tokenized_text": tokens, "ner": spans} for tokens, spans in zip(words, SPANS, strict=True)]
    collator = model.data_collator_class(model.config, data_processor=model.data_processor, prepare_labels=True)
    batch = collator(rows, entity_types=[LABELS[0]] * len(rows))
    model.zero_grad()
    output = model.model(**batch, alpha=alpha, gamma=gamma, reduction="sum")
    output.loss.backward()
    parameters = dict(model.model.named_parameters())
    found = {name: p.grad.contiguous() for name, p in parameters.items() if p.grad is not None}
    return {**found, "loss": output.loss.detach()}


if __name__ == "__main__":
    write("lstm", "unigram", noise=0.22, seed=0, hidden_size=12, num_rnn_layers=1)
    write("plain", "wordpiece", noise=0.15, seed=0, hidden_size=16, num_rnn_layers=0)
