"""Local stand-ins for the hub ids in the documentation: the built-in model with each of its heads.

The folders are called as the hub ids, so that a snippet that runs in the folder above them finds them by the same name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import bertie

SENTENCES = "sentence-transformers/all-MiniLM-L6-v2"
MASKED = "google-bert/bert-base-uncased"
HEADS = {  # hub ids by the head that stands in for them
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": "sentiment",
    "dslim/bert-base-NER": "ner",
    "MoritzLaurer/deberta-v3-base-zeroshot-v2.0": "nli",
    "facebook/bart-large-mnli": "nli",  # of txtai's snippets
    "cross-encoder/ms-marco-MiniLM-L6-v2": "rerank",
}


def write(folder: Path) -> None:
    """Write all of them below a folder."""
    bertie.Embedder.load().save(folder / SENTENCES)
    (folder / MASKED).parent.mkdir()
    (folder / MASKED).symlink_to(folder / SENTENCES)
    for name, head in HEADS.items():
        _with_head(folder / SENTENCES, head, folder / name)


def _with_head(source: Path, name: str, target: Path) -> None:
    """Save the encoder with one head as a model of transformers."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertForTokenClassification

    raw = json.loads((source / "config.json").read_text("utf-8"))
    labels: dict[str, str] = raw.pop("bertie")["heads"][name]["labels"]
    config = BertConfig(**{key: value for key, value in raw.items() if key not in ("architectures", "_name_or_path")})
    config.id2label = {int(index): label for index, label in labels.items()}
    config.label2id = {label: index for index, label in config.id2label.items()}
    model: Any = (BertForTokenClassification if name == "ner" else BertForSequenceClassification)(config)
    head = load_file(source / "heads.safetensors")
    weights = load_file(source / "model.safetensors")
    state = {key: value for key, value in weights.items() if key.startswith("bert.")}
    state |= {f"classifier.{part}": head[f"{name}.out.{part}"] for part in ("weight", "bias")}
    if name != "ner":
        state |= {f"bert.pooler.dense.{part}": head[f"{name}.dense.{part}"] for part in ("weight", "bias")}
    missing = set(model.state_dict()) - set(state)
    assert missing <= {"bert.embeddings.position_ids"}, missing
    model.load_state_dict(state, strict=False)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
