"""Linear heads are saved and loaded, in transformers too where the family has such a head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import bertie
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.linear_head import with_linear_head
from bertie.config import HeadInfo
from tests.tasks import tiny

LABELS = ["no", "yes", "maybe"]
TEXTS = tiny.sentences(4)


@pytest.fixture(scope="module", params=["bert", "modernbert"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an encoder without a head."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "bert":
        return tiny.save(folder, "wordpiece", "")
    text = tiny.tokenizer("wordpiece")
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=len(text),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=tiny.REACH,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        cls_token_id=2,
        sep_token_id=3,
    )
    transformers.ModernBertForMaskedLM(config).save_pretrained(folder)
    text.save_pretrained(folder)
    return folder


def linear(encoder: Path) -> Checkpoint:
    """A linear head with random weights."""
    info = HeadInfo("classify", dict(enumerate(LABELS)), "single_label_classification")
    checkpoint = with_linear_head(Checkpoint.load(encoder), info)
    out = checkpoint.model.head("classify").out
    assert out is not None
    torch.nn.init.normal_(out.weight, generator=torch.Generator().manual_seed(1))
    return checkpoint


def test_the_head_is_linear_in_the_normalized_mean(encoder: Path) -> None:
    checkpoint = linear(encoder)
    results = bertie.Classifier(checkpoint).predict_proba(TEXTS)
    means = bertie.Embedder(Checkpoint.load(encoder), pooling="mean", normalize=False).embed(TEXTS)
    normalized = (means - means.mean(1, keepdims=True)) / np.sqrt(means.var(1, keepdims=True) + 1e-5)
    out = checkpoint.model.head("classify").out
    assert out is not None
    expected = torch.softmax(torch.from_numpy(normalized) @ out.weight.detach().T + out.bias.detach(), 1)
    assert results == pytest.approx(expected.numpy(), abs=1e-4)


def test_it_is_saved_and_loaded(encoder: Path, tmp_path: Path) -> None:
    task = bertie.Classifier(linear(encoder))
    task.save(tmp_path / "out")
    loaded = bertie.load(tmp_path / "out")
    assert isinstance(loaded, bertie.Classifier)
    assert loaded.info == task.info
    assert loaded.predict_proba(TEXTS) == pytest.approx(task.predict_proba(TEXTS), abs=1e-6)
    coded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(TEXTS[0], return_tensors="pt")
    if loaded.checkpoint.spec.heads:  # the family has such a head
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
        with torch.no_grad():
            expected = theirs(**coded).logits.softmax(-1)
        assert theirs.config.id2label == dict(enumerate(LABELS))
        assert loaded.predict_proba(TEXTS[:1]) == pytest.approx(expected.numpy(), abs=1e-5)
    else:
        encoded = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
        with torch.no_grad():
            assert encoded(**coded).last_hidden_state.shape[-1] == 32
