"""The graph that is exported computes what transformers does: every family and head, ragged, padded on either side."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.compress.padded_model import PaddedModel
from bertie.errors import ConfigError
from bertie.nn.linear import to_int8
from bertie.nn.pooling import MODES
from bertie.nn.sentence_layers import Dense, EmbeddingLayerNorm, Normalize
from bertie.text.batch import Batch
from tests.compress.padded import expected, padded_inputs, ragged, tiny_model, unpadded
from tests.parity.test_transformers import ours
from tests.parity.tiny import CASES, build


@pytest.mark.parametrize(("name", "suffix"), CASES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_equals_transformers(name: str, suffix: str, side: Literal["left", "right"]) -> None:
    theirs, model, key = tiny_model(name, suffix)
    ids, segments = ragged(name, suffix)
    wanted = expected(theirs, key, ids, segments)
    # What padding holds must not matter: any id, not only the padding id.
    inputs = padded_inputs(model, ids, segments, side, pad=5 if side == "left" else None)
    with torch.no_grad():
        outputs = model(*map(torch.from_numpy, inputs.values()))
    assert len(outputs) == len(model.output_names)
    assert all(torch.isfinite(output).all() for output in outputs)
    got = unpadded(model, [output.numpy() for output in outputs], inputs["attention_mask"])
    for a, b in zip(got, wanted, strict=True):
        assert_allclose(a, b, atol=1e-5, rtol=0)


def test_names() -> None:
    _, answer, _ = tiny_model("bert", "ForQuestionAnswering")
    assert answer.input_names == ["input_ids", "attention_mask", "token_type_ids"]
    assert answer.output_names == ["start_logits", "end_logits"]
    _, bare, _ = tiny_model("distilbert", "Model")
    assert (bare.input_names, bare.output_names) == (["input_ids", "attention_mask"], ["last_hidden_state"])
    _, one_segment, _ = tiny_model("xlm-roberta", "ForTokenClassification")  # its table has one row
    assert (one_segment.input_names, one_segment.output_names) == (["input_ids", "attention_mask"], ["logits"])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_pooling_and_layers(weighted: bool, side: Literal["left", "right"]) -> None:
    model, _ = ours(build("bert", "Model"))
    torch.manual_seed(0)
    width = 16 * len(MODES)
    sentence = SentenceModules.create(16, MODES, normalize=False)
    if weighted:
        sentence = sentence.with_token_weights(torch.rand(64) * 3 - 1, [str(i) for i in range(64)])
    layers = [Dense(width, 12, residual=True), EmbeddingLayerNorm(12), Dense(12, 12, activation="GELU"), Normalize()]
    sentence.layers.extend(layers)
    sentence.truncate_dim = 5
    ids, segments = ragged("bert", "Model")
    padded = PaddedModel(model, sentence=sentence)
    inputs = padded_inputs(padded, ids, segments, side)
    batch = Batch.from_ids(ids, segments)
    with torch.no_grad():
        hidden, vectors = padded(*map(torch.from_numpy, inputs.values()))
        wanted = sentence(model.hidden(batch), batch)
    assert padded.output_names == ["last_hidden_state", "sentence_embedding"]
    assert vectors.shape == (len(ids), 5)
    assert_allclose(vectors, wanted, atol=1e-5)
    assert_allclose(hidden[inputs["attention_mask"] > 0], model.hidden(batch).detach(), atol=1e-5)


def test_pooling_without_the_prompt_is_left_to_the_caller() -> None:
    model, _ = ours(build("bert", "Model"))
    sentence = SentenceModules.create(16, "mean", include_prompt=False)
    assert PaddedModel(model, sentence=sentence).output_names == ["last_hidden_state"]


def test_temperature() -> None:
    model, _ = ours(build("bert", "ForSequenceClassification"))
    inputs = [torch.tensor([[3, 4, 5]]), torch.tensor([[1, 1, 1]]), torch.tensor([[0, 0, 0]])]
    plain, scaled = (PaddedModel(model, "classify", temperature=value)(*inputs)[0] for value in (1.0, 2.5))
    assert_allclose(scaled.detach(), plain.detach() / 2.5, rtol=1e-6)


def test_quantized_models_are_refused() -> None:
    model, _ = ours(build("bert", "Model"))
    to_int8(model.encoder)
    with pytest.raises(ConfigError, match="a model in int8 cannot be exported; load it with precision='fp32'"):
        PaddedModel(model)


def test_masked_tokens_have_no_weight() -> None:
    """A large value at padding changes nothing, not even in the last bit."""
    _, model, _ = tiny_model("modernbert", "Model")
    ids, segments = ragged("modernbert", "Model")
    first, second = (padded_inputs(model, ids, segments, pad=pad) for pad in (0, 63))
    with torch.no_grad():
        a, b = (model(*map(torch.from_numpy, inputs.values()))[0].numpy() for inputs in (first, second))
    real = first["attention_mask"] > 0
    assert np.array_equal(a[real], b[real])
