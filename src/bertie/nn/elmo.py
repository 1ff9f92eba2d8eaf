"""ELMo: a character CNN below a bidirectional LSTM with projections, and the learned mix of its layers.

Deep contextualized word representations (Peters et al., 2018). A batch is flat: the words of all sentences one after
another. The LSTM reads it in the order of a `PackedSequence`: sentences by length, the first words of all of them, then
the second words of those that have one, and so on; nothing is padded. Each sentence starts from a zero state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from bertie.errors import ConfigError

DIRECTIONS = 2
FORGET_BIAS = 1.0  # which TensorFlow's LSTMCell adds to the forget gate, besides the stored bias
GATES = 4  # in TensorFlow's order: input, candidate, forget, output
BLOCK_ROWS = 1024  # whose gates are computed from the inputs at once: they are eight times the width of a real cell
CHARACTER_ROWS = 512  # words whose characters are convolved at once
NORM_EPS = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class ElmoConfig:
    """The shape of an ELMo model; the defaults are those of the original one (93.6 million parameters)."""

    filters: tuple[tuple[int, int], ...] = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))
    character_width: int = 16  # of the character embeddings
    characters: int = 261  # in the table of embeddings
    max_characters: int = 50  # of a word, with its two markers
    activation: Literal["relu", "tanh"] = "relu"  # after the convolutions
    highways: int = 2
    project_characters: bool = True  # whether there is a projection of the convolutions' outputs to `width`
    width: int = 512  # of each direction; what the LSTM's state is projected to
    cell_width: int = 4096
    layers: int = 2
    cell_clip: float = 3.0  # 0: no clipping
    projection_clip: float = 3.0
    skip_connections: bool = True  # from the input to the output of each layer but the first

    def __post_init__(self) -> None:
        least = {"character_width": 1, "max_characters": 3, "highways": 0, "width": 1, "cell_width": 1, "layers": 1}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {minimum}")
        if not self.filters:
            raise ConfigError("filters is empty: the character CNN needs at least one")
        for size, count in self.filters:
            if not 1 <= size <= self.max_characters or count < 1:
                raise ConfigError(
                    f"filters has [{size}, {count}]: the size must be from 1 to max_characters={self.max_characters}, "
                    "the number at least 1"
                )
        if not self.project_characters and self.filter_width != self.width:
            raise ConfigError(
                f"{self.filter_width} filters and width={self.width} differ: a projection of the characters is needed"
            )

    @property
    def filter_width(self) -> int:
        """The number of filters of all sizes."""
        return sum(count for _, count in self.filters)

    @property
    def dimension(self) -> int:
        """The dimension of a word's vectors: both directions."""
        return DIRECTIONS * self.width


class Highway(nn.Module):
    """`carry * relu(transform(x)) + (1 - carry) * x`, with the gate named as in bilm-tf."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform, self.carry = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, F) -> (n, F)."""
        return torch.lerp(x, F.relu(self.transform(x)), torch.sigmoid(self.carry(x)))


class CharacterEncoder(nn.Module):
    """A word's vector from its characters: convolutions, the maximum over all places, highway layers, a projection."""

    def __init__(self, cfg: ElmoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embedding = nn.Parameter(torch.empty(cfg.characters, cfg.character_width))
        self.convolutions = nn.ModuleList(nn.Conv1d(cfg.character_width, count, size) for size, count in cfg.filters)
        self.highways = nn.ModuleList(Highway(cfg.filter_width) for _ in range(cfg.highways))
        self.projection = nn.Linear(cfg.filter_width, cfg.width) if cfg.project_characters else nn.Identity()
        nn.init.normal_(self.embedding)
        for module in self.modules():
            if isinstance(module, nn.Conv1d | nn.Linear):  # so that different words differ even without training
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
                nn.init.zeros_(cast(Tensor, module.bias))

    def forward(self, ids: Tensor) -> Tensor:
        """(n, characters) ids -> (n, width)."""
        return torch.cat([self._words(block) for block in torch.split(ids, CHARACTER_ROWS)])

    def _words(self, ids: Tensor) -> Tensor:
        activation = F.relu if self.cfg.activation == "relu" else torch.tanh
        # Id 0, no character, has no row.
        x = F.embedding(ids - 1, self.embedding).transpose(1, 2)  # (n, characters, d) -> (n, d, characters)
        x = torch.cat([activation(convolution(x).amax(dim=-1)) for convolution in self.convolutions], dim=-1)  # (n, F)
        for highway in self.highways:
            x = highway(x)
        projected: Tensor = self.projection(x)
        return projected


class BidirectionalLayer(nn.Module):
    """One LSTM layer in both directions, with clipped cells and clipped projections of its state.

    The weights are stored as TensorFlow does, with the gates in the order of `GATES`.
    """

    def __init__(self, cfg: ElmoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        width, cell = cfg.width, cfg.cell_width
        self.weight = nn.Parameter(torch.empty(DIRECTIONS, 2 * width, GATES * cell))  # of the input, then of the state
        self.bias = nn.Parameter(torch.zeros(DIRECTIONS, GATES * cell))
        self.projection = nn.Parameter(torch.empty(DIRECTIONS, cell, width))
        for parameter in (self.weight, self.projection):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, x: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        """(2, T, width) -> (2, T, width), in the order of a `PackedSequence`, of each direction in its own order."""
        width, cell = self.cfg.width, self.cfg.cell_width
        of_input, of_state = torch.split(self.weight, width, dim=1)
        forget = torch.zeros_like(self.bias)
        forget[:, 2 * cell : 3 * cell] = FORGET_BIAS
        bias = (self.bias + forget).unsqueeze(1)
        state, memory = x.new_zeros(DIRECTIONS, batch_sizes[0], width), x.new_zeros(DIRECTIONS, batch_sizes[0], cell)
        outputs: list[Tensor] = []
        start = 0
        for sizes in _blocks(batch_sizes):
            gates = torch.baddbmm(bias, x[:, start : start + sum(sizes)], of_input)  # (2, rows, 4 * cell)
            start += sum(sizes)
            for step in torch.split(gates, sizes, dim=1):
                n = step.shape[1]  # sentences that have a word here
                state, memory = self._step(step, state[:, :n], memory[:, :n], of_state)
                outputs.append(state)
        return torch.cat(outputs, dim=1)

    def _step(self, gates: Tensor, state: Tensor, memory: Tensor, of_state: Tensor) -> tuple[Tensor, Tensor]:
        """The next state and memory of n sentences: (2, n, width) and (2, n, cell)."""
        take, candidate, keep, release = torch.baddbmm(gates, state, of_state).chunk(GATES, dim=-1)
        memory = torch.sigmoid(take) * torch.tanh(candidate) + torch.sigmoid(keep) * memory
        if clip := self.cfg.cell_clip:
            memory = memory.clamp(-clip, clip)
        state = torch.bmm(torch.sigmoid(release) * torch.tanh(memory), self.projection)
        if clip := self.cfg.projection_clip:
            state = state.clamp(-clip, clip)
        return state, memory


def _blocks(batch_sizes: Sequence[int]) -> list[list[int]]:
    """Group time steps into blocks of about BLOCK_ROWS rows."""
    blocks: list[list[int]] = [[]]
    for size in batch_sizes:
        if blocks[-1] and sum(blocks[-1]) + size > BLOCK_ROWS:
            blocks.append([])
        blocks[-1].append(size)
    return blocks


@dataclass(frozen=True, slots=True)
class PackedOrder:
    """The order in which an LSTM reads a flat batch.

    >>> order = PackedOrder.of([1, 3])  # words a, and b c d
    >>> order.forward.tolist(), order.backward.tolist(), order.batch_sizes
    ([1, 0, 2, 3], [3, 0, 2, 1], [2, 1, 1])
    """

    forward: Tensor  # (T,) places in the flat batch, in the order of reading
    backward: Tensor  # (T,) the same from the ends of the sentences to their beginnings
    batch_sizes: list[int]  # sentences that have a first, second, … word

    @classmethod
    def of(cls, lengths: Sequence[int]) -> PackedOrder:
        """The order for sentences of these lengths."""
        sizes = np.asarray(lengths, np.int64)
        order = np.argsort(-sizes, kind="stable")
        ranked = sizes[order]
        first = (np.cumsum(sizes) - sizes)[order]
        batch_sizes = np.searchsorted(-ranked, -np.arange(ranked[0]), side="left")
        steps = np.repeat(np.arange(ranked[0]), batch_sizes)
        ranks = np.concatenate([np.arange(n) for n in batch_sizes])
        forward, backward = first[ranks] + steps, first[ranks] + ranked[ranks] - 1 - steps
        return cls(torch.from_numpy(forward), torch.from_numpy(backward), batch_sizes.tolist())


class ElmoModel(nn.Module):
    """The bidirectional language model without its output layer."""

    def __init__(self, cfg: ElmoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.characters = CharacterEncoder(cfg)
        self.layers = nn.ModuleList(BidirectionalLayer(cfg) for _ in range(cfg.layers))

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.characters.embedding.device

    def forward(self, ids: Tensor, words: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute all layers of all words, the character encoder's output first.

        Args:
            ids: (U, characters) character ids of each distinct word.
            words: (T,) index into `ids` of each word of the flat batch, sentence boundaries included.
            lengths: words of each sentence, boundaries included.

        Returns:
            (layers + 1, T, 2 * width): in each row the forward direction, then the backward one.
        """
        order = PackedOrder.of(lengths)
        places = torch.stack([order.forward, order.backward]).to(words.device)  # (2, T)
        tokens = self.characters(ids)[words]  # (T, width)
        outputs = [torch.cat([tokens, tokens], dim=-1)]
        x = tokens[places]  # (2, T, width)
        for number, layer in enumerate(self.layers):
            y = layer(x, order.batch_sizes)
            x = x + y if number and self.cfg.skip_connections else y
            # Back into the order of the batch: the inverse of a permutation is where it sorts to.
            outputs.append(torch.cat([x[d][places[d].argsort()] for d in range(DIRECTIONS)], dim=-1))
        return torch.stack(outputs)


class ScalarMix(nn.Module):
    """The weighted mean of layers, `gamma * sum(softmax(weights) * layers)`: what a task learns of ELMo.

    With `layer_norm`, each layer of each word is normalized first to mean 0 and variance 1 over its dimensions.
    AllenNLP normalizes over all words of a batch instead, so that there a word's vector depends on its neighbours in
    the batch.
    """

    def __init__(self, layers: int, *, layer_norm: bool = False) -> None:
        super().__init__()
        self.layer_norm = layer_norm
        self.weights = nn.Parameter(torch.zeros(layers))
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, layers: Tensor) -> Tensor:
        """(layers, T, D) -> (T, D)."""
        if self.layer_norm:
            layers = F.layer_norm(layers, layers.shape[-1:], eps=NORM_EPS)
        mixed: Tensor = self.gamma * torch.tensordot(self.weights.softmax(0), layers, dims=1)
        return mixed


class LayerMixTagger(nn.Module):
    """The trained part of a tagger over ELMo: the mix of its layers, a bidirectional LSTM and an output layer.

    `lstm_width` is the width of each direction of the LSTM; 0: the output layer reads the mix itself.
    """

    def __init__(
        self, cfg: ElmoConfig, labels: int, *, lstm_width: int = 0, layer_norm: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.mix = ScalarMix(cfg.layers + 1, layer_norm=layer_norm)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(cfg.dimension, lstm_width, bidirectional=True) if lstm_width else None
        self.out = nn.Linear(DIRECTIONS * lstm_width or cfg.dimension, labels)

    def forward(self, layers: Tensor, lengths: Sequence[int]) -> Tensor:
        """(layers, T, D) of the words of all sentences -> (T, labels)."""
        x = self.dropout(self.mix(layers))
        if self.lstm is not None:
            order = PackedOrder.of(lengths)
            forward = order.forward.to(x.device)
            packed = PackedSequence(x[forward], torch.tensor(order.batch_sizes))
            x = self.dropout(self.lstm(packed)[0].data[forward.argsort()])
        logits: Tensor = self.out(x)
        return logits
