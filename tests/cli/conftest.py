"""Tiny models of every kind, as transformers saves them, with a tokenizer that knows a few words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bertie.checkpoints import hub
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.config import HeadInfo
from tests.checkpoints.tiny_sentence import WIDTH, WORDS, save_bert

NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}
NER = {0: "O", 1: "B-PER", 2: "I-PER"}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder for each verb."""
    top = tmp_path_factory.mktemp("models")
    save_models(top)
    return {folder.name: str(folder) for folder in top.iterdir()}


def save_models(top: Path) -> None:
    """Save a tiny model for each verb."""
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        BertForMultipleChoice,
        BertForNextSentencePrediction,
        BertForQuestionAnswering,
        BertForTokenClassification,
        ElectraConfig,
        ElectraForPreTraining,
    )

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
        ("choose", BertForMultipleChoice),
        ("nsp", BertForNextSentencePrediction),
        ("detect-replaced", ElectraForPreTraining),
    ):
        torch.manual_seed(1)
        labels = {"id2label": NER, "label2id": {one: i for i, one in NER.items()}} if name == "tag" else {}
        config = ElectraConfig if name == "detect-replaced" else BertConfig
        kind(config(**sizes, **labels)).save_pretrained(top / name)
        for file in (top / "embed").glob("*token*"):
            (top / name / file.name).write_bytes(file.read_bytes())
    for one, other in (("similarity", "embed"), ("tokenize", "embed")):
        (top / one).symlink_to(top / other)


SINGLE = "single_label_classification"
HEADS = {
    "sentiment": HeadInfo("classify", dict(enumerate(["negative", "neutral", "positive"])), SINGLE),
    "ner": HeadInfo("tag", dict(enumerate("O B-PER I-PER B-ORG I-ORG B-LOC I-LOC".split()))),
    "qa": HeadInfo("answer"),
    "rerank": HeadInfo("classify", {0: "LABEL_0"}, task="rerank"),
    "nli": HeadInfo("classify", dict(enumerate(["entailment", "neutral", "contradiction"])), SINGLE),
}


def save_small(folder: Path, bare: Path, heads: dict[str, HeadInfo]) -> None:
    """A tiny model of the built-in one's make: its own head, a pooling, and named heads."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(4)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    ids = {"pad_token_id": 0, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3}
    config = ModernBertConfig(**sizes, **ids, vocab_size=len(WORDS), max_position_embeddings=2048, local_attention=32)
    plain = folder.parents[1] / "plain"
    ModernBertForMaskedLM(config).save_pretrained(plain)
    for file in bare.glob("*token*"):
        (plain / file.name).write_text(file.read_text().replace('"model_max_length": 40', '"model_max_length": 2048'))
    checkpoint = Checkpoint.load(plain)
    for number, (name, info) in enumerate(heads.items()):
        checkpoint.add_head(name, info, seed=number)
    with torch.no_grad():  # large enough for the words to make a difference
        for parameter in checkpoint.model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    checkpoint.sentence = SentenceModules.create(WIDTH, pooling="mean")
    checkpoint.save(folder)


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory, models: dict[str, str]) -> Path:
    """A folder of built-in models, with one."""
    top = tmp_path_factory.mktemp("built-in")
    save_small(top / "models" / hub.DEFAULT, Path(models["embed"]), HEADS)
    return top / "models"


@pytest.fixture
def small(small_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The built-in model, a tiny one."""
    monkeypatch.setattr(hub, "BUILT_IN", small_folder)
    return hub.DEFAULT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
