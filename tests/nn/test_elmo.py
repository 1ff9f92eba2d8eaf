"""ELMo's modules against slow loops over single words, straight from the equations of the paper and of bilm-tf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch.nn.utils.rnn import pack_sequence

import bertie
from bertie.errors import ConfigError
from bertie.nn import elmo
from bertie.nn.elmo import ElmoConfig, ElmoModel, LayerMixTagger, PackedOrder, ScalarMix

LENGTHS = [3, 1, 6, 6, 2]
TINY = {"filters": ((1, 3), (3, 5)), "character_width": 4, "width": 6, "cell_width": 7, "max_characters": 9}


def model(**changes: object) -> ElmoModel:
    return bertie.Elmo.random(ElmoConfig(**{**TINY, **changes}), seed=3).model  # type: ignore[arg-type]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def words_by_loop(encoder: elmo.CharacterEncoder, ids: np.ndarray) -> np.ndarray:
    """One word and one place at a time, in float64."""
    state = {name: value.double().numpy() for name, value in encoder.state_dict().items()}
    activation = np.tanh if encoder.cfg.activation == "tanh" else lambda x: np.maximum(x, 0)
    rows = []
    for word in ids - 1:
        characters = state["embedding"][word]
        x = np.zeros(0)
        for i, (size, _) in enumerate(encoder.cfg.filters):
            weight, bias = state[f"convolutions.{i}.weight"], state[f"convolutions.{i}.bias"]
            places = [
                bias + np.einsum("kd,ndk->n", characters[p : p + size], weight)
                for p in range(len(characters) - size + 1)
            ]
            x = np.concatenate([x, activation(np.max(places, axis=0))])
        for k in range(encoder.cfg.highways):
            gate = sigmoid(state[f"highways.{k}.carry.weight"] @ x + state[f"highways.{k}.carry.bias"])
            new = np.maximum(state[f"highways.{k}.transform.weight"] @ x + state[f"highways.{k}.transform.bias"], 0)
            x = gate * new + (1 - gate) * x
        if encoder.cfg.project_characters:
            x = state["projection.weight"] @ x + state["projection.bias"]
        rows.append(x)
    return np.stack(rows)


def layers_by_loop(network: ElmoModel, ids: np.ndarray, lengths: list[int]) -> np.ndarray:
    """Each sentence by itself, each direction by itself, one word at a time."""
    cfg, cell = network.cfg, network.cfg.cell_width
    tokens = words_by_loop(network.characters, ids)
    outputs = [[] for _ in range(cfg.layers + 1)]
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        sentence = tokens[end - length : end]
        outputs[0].append(np.concatenate([sentence, sentence], axis=1))
        inputs = [sentence, sentence[::-1]]
        for number, layer in enumerate(network.layers):
            state = {name: value.double().numpy() for name, value in layer.state_dict().items()}
            for direction in range(2):
                weight, bias, projection = (state[name][direction] for name in ("weight", "bias", "projection"))
                hidden, memory, steps = np.zeros(cfg.width), np.zeros(cell), []
                for x in inputs[direction]:
                    i, j, f, o = np.split(np.concatenate([x, hidden]) @ weight + bias, 4)
                    memory = sigmoid(f + 1) * memory + sigmoid(i) * np.tanh(j)
                    if cfg.cell_clip:
                        memory = np.clip(memory, -cfg.cell_clip, cfg.cell_clip)
                    hidden = (sigmoid(o) * np.tanh(memory)) @ projection
                    if cfg.projection_clip:
                        hidden = np.clip(hidden, -cfg.projection_clip, cfg.projection_clip)
                    steps.append(hidden)
                skip = inputs[direction] if number and cfg.skip_connections else 0
                inputs[direction] = np.stack(steps) + skip
            outputs[number + 1].append(np.concatenate([inputs[0], inputs[1][::-1]], axis=1))
    return np.stack([np.concatenate(rows) for rows in outputs])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "tanh", "highways": 0, "layers": 1},
        {"skip_connections": False, "layers": 3},
        {"cell_clip": 0.1, "projection_clip": 0.05},
        {"cell_clip": 0.0, "projection_clip": 0.0},
        {"project_characters": False, "width": 8},
        {"layers": 4, "highways": 3, "max_characters": 4},
    ],
)
def test_against_loops(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elmo, "BLOCK_ROWS", 5)  # so that there are several blocks of time steps
    monkeypatch.setattr(elmo, "CHARACTER_ROWS", 4)
    network = model(**changes)
    ids = np.random.default_rng(0).integers(1, 262, (sum(LENGTHS), network.cfg.max_characters))
    ours = network(torch.from_numpy(ids), torch.arange(len(ids)), LENGTHS)
    assert_allclose(ours, layers_by_loop(network, ids, LENGTHS), atol=1e-5)


def test_repeated_words_are_encoded_once() -> None:
    network = model()
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, 262, (4, 9)))
    words = torch.tensor([0, 1, 2, 1, 0, 3, 3])
    assert_allclose(network(ids, words, [3, 4]), network(ids[words], torch.arange(7), [3, 4]), atol=1e-6)


def test_gradients_reach_all_weights() -> None:
    network = model().requires_grad_()
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, 262, (sum(LENGTHS), 9)))
    network(ids, torch.arange(len(ids)), LENGTHS).square().sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_packed_order_is_that_of_torch() -> None:
    flat = torch.arange(sum(LENGTHS))
    order = PackedOrder.of(LENGTHS)
    sentences = list(torch.split(flat, LENGTHS))
    packed = pack_sequence(sentences, enforce_sorted=False)
    assert order.batch_sizes == packed.batch_sizes.tolist()
    assert sorted(order.forward.tolist()) == flat.tolist()
    backward = pack_sequence([sentence.flip(0) for sentence in sentences], enforce_sorted=False)
    # torch may rank sentences of the same length in another order.
    assert order.forward.sort()[0].equal(packed.data.sort()[0])
    for start, size in zip(np.cumsum([0, *order.batch_sizes]), order.batch_sizes, strict=False):
        step = slice(start, start + size)
        assert set(order.forward[step].tolist()) == set(packed.data[step].tolist())
        assert set(order.backward[step].tolist()) == set(backward.data[step].tolist())


@pytest.mark.parametrize("layer_norm", [False, True])
def test_scalar_mix(layer_norm: bool) -> None:
    layers = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    mix = ScalarMix(3, layer_norm=layer_norm)
    normed = (layers - layers.mean(-1, keepdim=True)) / layers.std(-1, correction=0, keepdim=True)
    expected = normed if layer_norm else layers
    assert_allclose(mix(layers).detach(), expected.mean(0), atol=1e-5)  # before training: the mean
    with torch.no_grad():
        mix.weights.copy_(torch.tensor([1.0, -2.0, 0.5]))
        mix.gamma.fill_(0.3)
    weights = np.exp([1.0, -2.0, 0.5]) / np.exp([1.0, -2.0, 0.5]).sum()
    assert_allclose(mix(layers).detach(), 0.3 * np.tensordot(weights, expected.numpy(), 1), atol=1e-5)


@pytest.mark.parametrize("lstm_width", [0, 5])
def test_tagger_layers_are_independent_of_the_batch(lstm_width: int) -> None:
    cfg = ElmoConfig(**TINY)  # type: ignore[arg-type]
    torch.manual_seed(0)
    head = LayerMixTagger(cfg, 4, lstm_width=lstm_width, dropout=0.5).eval()
    layers = torch.randn(3, sum(LENGTHS), cfg.dimension)
    together = head(layers, LENGTHS).detach()
    parts = [head(part, [part.shape[1]]) for part in torch.split(layers, LENGTHS, dim=1)]
    assert_allclose(together, torch.cat(parts).detach(), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"filters": ()}, "filters is empty"),
        ({"filters": ((60, 4),)}, r"\[60, 4\].*from 1 to max_characters=9"),
        ({"width": 0}, "width=0 must be at least 1"),
        ({"max_characters": 2}, "max_characters=2 must be at least 3"),
        ({"project_characters": False}, "8 filters and width=6 differ"),
    ],
)
def test_impossible_shapes(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElmoConfig(**{**TINY, **changes})  # type: ignore[arg-type]
