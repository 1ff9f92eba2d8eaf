"""Tiny models of every kind, as transformers saves them, with a tokenizer that knows a few words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.sentence.tiny import WIDTH, WORDS, save_bert

NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}
NER = {0: "O", 1: "B-PER", 2: "I-PER"}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder for each verb."""
    from transformers import BertConfig, BertForMaskedLM, BertForQuestionAnswering, BertForTokenClassification

    top = tmp_path_factory.mktemp("models")
    save_bert(top / "embed")
    save_bert(top / "classify", labels=3)
    save_bert(top / "rerank", labels=1)
    save_bert(top / "nli", labels=3, id2label=NLI, label2id={name: i for i, name in NLI.items()})
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": len(WORDS), "max_position_embeddings": 40}
    for name, kind in (
        ("fill", BertForMaskedLM),
        ("tag", BertForTokenClassification),
        ("answer", BertForQuestionAnswering),
    ):
        torch.manual_seed(1)
        labels = {"id2label": NER, "label2id": {one: i for i, one in NER.items()}} if name == "tag" else {}
        kind(BertConfig(**sizes, **labels)).save_pretrained(top / name)
        for file in (top / "embed").glob("*token*"):
            (top / name / file.name).write_bytes(file.read_bytes())
    for one, other in (("similar", "embed"), ("tokenize", "embed")):
        (top / one).symlink_to(top / other)
    return {folder.name: str(folder) for folder in top.iterdir()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
