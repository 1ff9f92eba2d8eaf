"""One sentence in a text of twenty times the model's max_length: which task finds it, and where?

    python -m benchmarks.needles [needles.json]

The model is made by hand: each token tells all tokens of its window whether it is "zanzibar", and nothing else. So what
the table shows is how Bertie reads long texts, and not how good a model is. Filler says nothing for or against a class,
except in the row "outvoted", where it speaks for the other one: there the pooling of log-probabilities lets a text's
many sentences outweigh the one, which is what a label for the whole text means.
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

REACH = 32
PLACES = (0, 25, 50, 75, 100)  # percent
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] . zanzibar where the cat sat on a mat and it was warm".split()
FILLER = "the cat sat on a mat and it was warm ."
NEEDLE = "it was [MASK] zanzibar ."
KINDS = {"zanzibar": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}  # of a token; 0 for all others
WIDTH = 10  # two numbers a kind: x and -x, so that layer norms only scale
LOUD = 16.0  # how loudly a token speaks to its window


def save(folder: Path, head: str, **config: Any) -> Path:
    """A BERT of one layer with the given head of transformers."""
    import transformers

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 1}
    made = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=REACH, **sizes, **config)
    model = getattr(transformers, f"Bert{head}")(made)
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
        attention = bert.encoder.layer[0].attention  # queries and keys of zero: all are heard alike
        attention.self.value.weight[2, 2] = attention.self.value.weight[3, 3] = LOUD
        attention.output.dense.weight.copy_(eye)
        if bert.pooler is not None:
            bert.pooler.dense.weight.copy_(eye)
        if head == "ForMaskedLM":
            model.cls.predictions.transform.dense.weight.copy_(eye)
            model.cls.predictions.bias[:5] = -10.0  # no special token fills a mask
        elif head == "ForTokenClassification":
            model.classifier.weight[1] = 4 * needle
            model.classifier.bias[1] = -6.0  # to hear of it is not yet to be it
        elif head == "ForQuestionAnswering":
            model.qa_outputs.weight.copy_(torch.stack([needle, needle]))
        elif head == "ForSequenceClassification":
            model.classifier.weight[-1] = 6 * needle
            model.classifier.bias[:-1] = 1e-3  # where nothing was heard, rounding does not choose
    model.save_pretrained(folder)
    words = {word: i for i, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=words, model_max_length=REACH).save_pretrained(folder)
    return folder


def haystack(place: int | None) -> str:
    """A text of twenty times the max_length with the needle at `place` percent, or without it."""
    count = 20 * REACH // len(FILLER.split())
    lines = [FILLER] * count
    if place is not None:
        lines.insert(round(count * place / 100), NEEDLE)
    return " ".join(lines)


def found(folder: Path, overflow: Overflow) -> dict[str, list[bool]]:
    """For each task, whether the needle is found at each of PLACES."""
    names = {"id2label": {0: "calm", 1: "alarm"}, "label2id": {"calm": 0, "alarm": 1}}
    tags = {"id2label": {0: "O", 1: "LOC"}, "label2id": {"O": 0, "LOC": 1}}
    one = {"id2label": {0: "relevant"}, "label2id": {"relevant": 0}}
    classifier = Classifier.load(save(folder / "classify", "ForSequenceClassification", **names), overflow=overflow)
    reranker = Reranker.load(save(folder / "rerank", "ForSequenceClassification", **one), overflow=overflow)
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
    for place in PLACES:
        text = haystack(place)
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
            ("fill", filled(filler, text)),
        ):
            table.setdefault(name, []).append(hit)
    return table


def filled(filler: MaskedLM, text: str) -> bool:
    try:
        return filler.fill([text])[0].masks[0].candidates[0].token == "zanzibar"
    except InputError:  # no mask in what was read
        return False


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = {long: found(Path(folder) / long, long) for long in ("window", "truncate")}
    print(f"{'task':20s} {'overflow=':10s}" + "".join(f"{place:>6d}%" for place in PLACES))
    for name in results["window"]:
        for long, table in results.items():
            print(f"{name:20s} {long:10s}" + "".join(f"{'found' if hit else '-':>7s}" for hit in table[name]))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"places": PLACES, **results}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
