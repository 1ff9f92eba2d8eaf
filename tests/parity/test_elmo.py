"""ELMo against AllenNLP 2.10.1 on tiny random weights: generate.py in elmo/ has written its outputs.

`make test-slow` also compares with TensorFlow: AllenNLP 0.9.0's wheel holds weights that bilm-tf has written, and its
outputs.
"""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from benchmarks.real_models import fetch
from numpy.testing import assert_allclose, assert_array_equal

import bertie
from bertie.nn.elmo import ScalarMix
from bertie.text.characters import character_ids
from tests.parity.elmo.generate import SENTENCES

FOLDER = Path(__file__).parent / "elmo"


@pytest.fixture(params=["relu", "tanh"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(name: str) -> bertie.Elmo:
    return bertie.Elmo.load(FOLDER / f"{name}_options.json", FOLDER / f"{name}_weights.hdf5", device="cpu")


def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}_reference.npz") as file:
        return dict(file)


def mix(name: str, *, layer_norm: bool = False) -> ScalarMix:
    layers = reference(name)["layers"]
    module = ScalarMix(len(layers), layer_norm=layer_norm)
    with torch.no_grad():
        module.weights.copy_(torch.tensor([0.5 * k - 0.3 for k in range(len(layers))]))
    return module


def test_character_ids(name: str) -> None:
    assert_array_equal(character_ids(word for words in SENTENCES for word in words), reference(name)["ids"])


def test_layers(name: str) -> None:
    results = load(name).embed_tokens(SENTENCES)
    ours = np.concatenate([result.layers for result in results], axis=1)
    assert ours.dtype == np.float32
    assert_allclose(ours, reference(name)["layers"], rtol=1e-6, atol=1e-5)


def test_one_sentence_at_a_time(name: str) -> None:
    model, expected = load(name), reference(name)["layers"]
    ours = np.concatenate([model.embed_tokens([words])[0].layers for words in SENTENCES], axis=1)
    assert_allclose(ours, expected, rtol=1e-6, atol=1e-5)


def test_the_values_are_clipped() -> None:
    """Else the comparison would say nothing about clipping."""
    options = load("relu").config
    layers = reference("relu")["layers"]
    first = np.abs(layers[1])  # the first LSTM layer has no skip connection
    assert (np.isclose(first, options.projection_clip)).mean() > 0.1
    assert first.max() <= options.projection_clip + 1e-6


def test_mix(name: str) -> None:
    expected = reference(name)
    layers = torch.from_numpy(expected["layers"])
    assert_allclose(mix(name)(layers).detach(), expected["mix_of_elmo"], atol=1e-5)
    assert_allclose(mix(name, layer_norm=True)(layers).detach(), expected["mix_with_norm"], atol=1e-5)


def test_gradients_of_the_mix(name: str) -> None:
    expected, module = reference(name), mix(name)
    with torch.no_grad():
        module.gamma.fill_(1.5)
    mixed = module(torch.from_numpy(expected["layers"]))
    assert_allclose(mixed.detach(), expected["mix"], atol=1e-5)
    ((mixed - torch.from_numpy(expected["target"])) ** 2).mean().backward()
    assert module.weights.grad is not None
    assert module.gamma.grad is not None
    assert_allclose(module.weights.grad, expected["mix_gradient"], atol=1e-5)
    assert_allclose(module.gamma.grad, expected["gamma_gradient"][0], atol=1e-5)


@pytest.mark.slow
def test_tensorflow() -> None:
    """The outputs of bilm-tf with its own weights, of the first batch: later ones start from its state."""
    folder = fetch("elmo-bilm-tf")
    model = bertie.Elmo.load(folder / "options.json", folder / "lm_weights.hdf5", device="cpu")
    sentences = [texts[0].split() for texts in json.loads((folder / "sentences.json").read_text("utf-8"))]
    for k, result in enumerate(model.embed_tokens(sentences)):
        with h5py.File(folder / f"lm_embeddings_{k}.hdf5", "r") as file:
            expected = np.concatenate(list(file["0"][...]), axis=-1)  # (2, n, width): both directions
        assert len(result.words) > 10
        assert_allclose(result.layers[-1], expected, atol=1e-5)
    words = (folder / "vocab_test.txt").read_text("utf-8").split()
    with h5py.File(folder / "elmo_token_embeddings.hdf5", "r") as file:
        assert_allclose(model.embed_tokens([words])[0].layers[0, :, : model.config.width], file["embedding"], atol=1e-5)
