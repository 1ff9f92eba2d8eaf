"""Needle in a haystack: one sentence in a text of twenty times the max_length, for every task and position.

    python -m benchmarks.needles [needles.json]

The model's weights are set by hand: each token signals to all tokens of its window whether it is "zanzibar". So the
table shows how Bertie handles long texts, not how good a model is. Filler is neutral between the classes, except in the
row "outvoted", where it favours the other class: averaging log-probabilities over windows then lets the many sentences
outweigh the one, as a label for the whole text should.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bertie import Classifier, Embedder, MaskedLM, Reader, Reranker, Tagger
from bertie.errors import InputError
from bertie.pipeline.pipeline import Overflow

MAX_LENGTH = 32
POSITIONS = (0, 25, 50, 75, 100)  # percent of the text
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] . zanzibar where the cat sat on a mat and it was warm".split()
FILLER = "the cat sat on a mat and it was warm ."
NEEDLE = "it was [MASK] zanzibar ."
KINDS = {"zanzibar": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}  # token kinds; 0 for all others
WIDTH = 10  # two components per kind, x and -x, so that LayerNorm only scales
SIGNAL = 16.0  # attention value of the needle


def save(folder: Path, head: str, **config: Any) -> Path:
    """Save a one-layer BERT with the given transformers head."""
    import transformers

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 1}
    bert_config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=MAX_LENGTH, **sizes, **config)
    model = getattr(transformers, f"Bert{head}")(bert_config)
    bert = getattr(model, "bert", model)
    eye, needle = torch.eye(WIDTH), torch.zeros(WIDTH)
    needle[2] = 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith("LayerNorm.weight") else 0.0)
        for token, word in enumerate(WORDS):
            kind = KINDS.get(word, 0)
            bert.embeddings.word_embeddings.weight[token, 2 * kind] = 1.0
            bert.embeddings.word_embeddings.weight[token, 2 * kind + 1] = -1.0
        attention = bert.encoder.layer[0].attention  # zero queries and keys: uniform attention
        attention.self.value.weight[2, 2] = attention.self.value.weight[3, 3] = SIGNAL
        attention.output.dense.weight.copy_(eye)
        if bert.pooler is not None:
            bert.pooler.dense.weight.copy_(eye)
        if head == "ForMaskedLM":
            model.cls.predictions.transform.dense.weight.copy_(eye)
            model.cls.predictions.bias[:5] = -10.0  # never predict special tokens
        elif head == "ForTokenClassification":
            model.classifier.weight[1] = 4 * needle
            model.classifier.bias[1] = -6.0  # only the needle itself exceeds it
        elif head == "ForQuestionAnswering":
            model.qa_outputs.weight.copy_(torch.stack([needle, needle]))
        elif head == "ForSequenceClassification":
            model.classifier.weight[-1] = 6 * needle
            model.classifier.bias[:-1] = 1e-3  # without the needle, rounding must not decide
    model.save_pretrained(folder)
    words = {word: i for i, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=words, model_max_length=MAX_LENGTH).save_pretrained(folder)
    return folder


def haystack(position: int | None) -> str:
    """A text of twenty times max_length with the needle at `position` percent, or without it."""
    count = 20 * MAX_LENGTH // len(FILLER.split())
    lines = [FILLER] * count
    if position is not None:
        lines.insert(round(count * position / 100), NEEDLE)
    return " ".join(lines)


def find_needles(folder: Path, overflow: Overflow) -> dict[str, list[bool]]:
    """For each task, whether the needle is found at each position."""
    names = {"id2label": {0: "calm", 1: "alarm"}, "label2id": {"calm": 0, "alarm": 1}}
    tags = {"id2label": {0: "O", 1: "LOC"}, "label2id": {"O": 0, "LOC": 1}}
    relevance = {"id2label": {0: "relevant"}, "label2id": {"relevant": 0}}
    classifier = Classifier.load(save(folder / "classify", "ForSequenceClassification", **names), overflow=overflow)
    reranker = Reranker.load(save(folder / "rerank", "ForSequenceClassification", **relevance), overflow=overflow)
    tagger = Tagger.load(save(folder / "tag", "ForTokenClassification", **tags), overflow=overflow)
    reader = Reader.load(save(folder / "answer", "ForQuestionAnswering"), overflow=overflow)
    filler = MaskedLM.load(save(folder / "fill", "ForMaskedLM"), overflow=overflow)
    embedder = Embedder.load(save(folder / "embed", "Model"), overflow=overflow)
    outvoted = Classifier.load(folder / "classify", overflow=overflow)
    bias = outvoted.model.head("classify").out
    assert bias is not None
    bias.bias.data[0] = 2.0

    table: dict[str, list[bool]] = {}
    nothing, (before,) = haystack(None), embedder.similarity(["zanzibar"], [haystack(None)])[0]
    for position in POSITIONS:
        text = haystack(position)
        at = text.index("zanzibar")
        similarity = embedder.similarity(["zanzibar"], [text])[0, 0]
        (tagged,), (answers,) = tagger.tag([text]), reader.answer([("where", text)])
        for name, hit in (
            ("classify", classifier.classify([text])[0].label == "alarm"),
            ("classify, outvoted", outvoted.classify([text])[0].label == "alarm"),
            ("tag", [(span.start, span.text) for span in tagged.spans] == [(at, "zanzibar")]),
            ("answer", (answers.best.start, answers.best.text) == (at, "zanzibar")),
            ("rerank", reranker.rerank("where", [nothing, text])[0].index == 1),
            ("embed", bool(similarity > before + 1e-3)),
            ("fill", fills(filler, text)),
        ):
            table.setdefault(name, []).append(hit)
    return table


def fills(filler: MaskedLM, text: str) -> bool:
    try:
        return filler.fill([text])[0].masks[0].candidates[0].token == "zanzibar"
    except InputError:  # the mask was truncated
        return False


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = {way: find_needles(Path(folder) / way, way) for way in ("window", "truncate")}
    print(f"{'task':20s} {'overflow=':10s}" + "".join(f"{position:>6d}%" for position in POSITIONS))
    for name in results["window"]:
        for overflow, table in results.items():
            print(f"{name:20s} {overflow:10s}" + "".join(f"{'found' if hit else '-':>7s}" for hit in table[name]))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"positions": POSITIONS, **results}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
