"""What an encoder learns from text alone: hidden tokens, which text follows which, and tokens that were replaced.

As with every objective here, losses are sums, and what they are to be divided by is known beforehand: the number of
hidden tokens, of pairs, of tokens that are predictions. So a step cut into micro-batches adds up to the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from bertie.config import EncoderConfig
from bertie.errors import ConfigError, InputError
from bertie.nn.encoder import Encoder
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.training.objectives import MicroBatch, ModelObjective, TrainingExample

Ids = NDArray[np.integer]
Document = Sequence[Ids]  # its sentences


# --- hidden tokens ---


class MaskedLoss:
    """Finding what was hidden. Only the hidden places go through the head.

    >>> from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned
    >>> cfg = EncoderConfig(
    ...     vocab=50, width=8, layer_map=(0,), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(),), max_length=32)
    >>> model = Model(cfg, {"mlm": HeadConfig(kind="vocabulary", outputs=50, tied=True)})
    >>> batch = Batch.from_ids([[2, 4, 9, 3], [2, 7, 4, 3]])                                       # 4: the mask
    >>> MaskedLoss().loss(model, batch, torch.tensor([1, 6]), torch.tensor([21, 30])).shape      # of two tokens
    torch.Size([])
    """

    head: ClassVar[str] = "mlm"

    def logits(self, model: Model, batch: Batch, rows: Tensor, hidden: Tensor | None = None) -> Tensor:
        """(M, V) of the tokens at `rows` (M,) of the flat batch, in float32.

        `hidden` (T, D) saves a pass, where another objective of the same batch has them already.
        """
        if hidden is None:
            hidden = model.hidden(batch, self.head)
        logits: Tensor = model.head(self.head)(hidden[rows], batch, model.encoder.embeddings.words.weight)
        return logits.float()

    def loss(self, model: Model, batch: Batch, rows: Tensor, targets: Tensor, hidden: Tensor | None = None) -> Tensor:
        """() the cross-entropy of `targets` (M,) at `rows` (M,), summed: to be divided by M."""
        return _surprise(self.logits(model, batch, rows, hidden), targets)


class EnhancedDecoder(nn.Module):
    """Absolute positions, told only at the end: DeBERTa's enhanced mask decoder, for encoders of relative positions.

    The last block runs `times` over the states before it. What asks is these states and each token's position, then
    the answer; what is looked at stays the same. `positions` (max_length, D) is a table of its own, and not part of what
    is saved for inference. Give its states to `MaskedLoss.loss` as `hidden`.
    """

    def __init__(self, cfg: EncoderConfig, times: int = 2) -> None:
        super().__init__()
        if cfg.depth < 2 or times < 1:
            raise ConfigError(f"an enhanced decoder needs depth={cfg.depth} of at least 2 and times={times} of 1")
        self.positions, self.times = nn.Embedding(cfg.max_length, cfg.width), times
        nn.init.normal_(self.positions.weight, std=cfg.init_std)

    def forward(self, encoder: Encoder, batch: Batch) -> Tensor:
        """-> (T, D)."""
        depth = encoder.cfg.depth
        *_, states = islice(encoder.hidden_states(batch), depth)  # (T, D) all but the last block's
        block, context = encoder.blocks[encoder.cfg.layer_map[-1]], encoder.pass_context(batch)
        asking: Tensor = states + self.positions(batch.positions)
        for _ in range(self.times):
            asking = block(states, batch, context, depth - 1, asking)
        out: Tensor = asking if encoder.norm is None else encoder.norm(asking)
        return out


def _surprise(logits: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(logits, targets, reduction="sum")


# --- pairs ---


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs of tokens, without special tokens, and what is to be said of them."""

    first: Ids
    second: Ids
    label: int


class _Pairs:
    """A label a pair, from a head over texts."""

    head: ClassVar[str]

    def loss(self, model: Model, batch: Batch, labels: Tensor, hidden: Tensor | None = None) -> Tensor:
        """() the cross-entropy of `labels` (B,), summed: to be divided by B. `hidden` (T, D) saves a pass."""
        if hidden is None:
            hidden = model.hidden(batch, self.head)
        logits: Tensor = model.head(self.head)(hidden, batch, model.encoder.embeddings.words.weight)  # (B, 2)
        return _surprise(logits.float(), labels)


class NextSentence(_Pairs):
    """Whether the second text follows the first (0) or comes from elsewhere (1): BERT's.

    >>> documents = [[np.array([1, 2]), np.array([3, 4]), np.array([5, 6])], [np.array([7, 8]), np.array([9])]]
    >>> [len(pair.first) + len(pair.second) <= 6 for pair in NextSentence.pairs(documents, 6, np.random.default_rng(0))]
    [True, True, True]
    """

    head = "nsp"

    @staticmethod
    def pairs(documents: Sequence[Document], room: int, rng: np.random.Generator) -> Iterator[Pair]:
        """Pairs of at most `room` tokens, from each document in turn.

        The first part takes whole sentences up to half the room, a random number of them; the second fills the rest.
        Half of the seconds come from a random place of another document, and what they stand for is read later. A
        document's last sentence has nothing to follow it, and is always paired so. Sentences are nowhere cut,
        except into parts of half the room where they are longer: no label can be told by a cut.
        """
        if len(documents) < 2:
            raise InputError(f"documents has {len(documents)}; a second text from elsewhere needs at least 2")
        cut = [_cut(document, room, d) for d, document in enumerate(documents)]
        for d, sentences in enumerate(cut):
            at = 0
            while at < len(sentences):
                end = at + _fitting(sentences[at : at + room], room)
                most = max(1, min(_fitting(sentences[at:end], room // 2), end - at - 1))
                middle = at + int(rng.integers(1, most + 1))
                first = np.concatenate(sentences[at:middle])
                if middle == end or rng.random() < 0.5:
                    other = cut[_other(d, len(cut), rng)]
                    start = int(rng.integers(len(other)))
                    left = room - len(first)
                    taken = other[start : start + _fitting(other[start : start + left], left)]
                    yield Pair(first, np.concatenate(taken), 1)
                    at = middle
                else:
                    yield Pair(first, np.concatenate(sentences[middle:end]), 0)
                    at = end


class SentenceOrder(_Pairs):
    """Whether two neighbouring texts are in order (0) or have changed places (1): ALBERT's.

    >>> pairs = SentenceOrder.pairs([[np.array([1, 2]), np.array([3])]], 6, np.random.default_rng(0))
    >>> [(pair.first.tolist(), pair.second.tolist(), pair.label) for pair in pairs]
    [([1, 2], [3], 0)]
    """

    head = "sop"

    @staticmethod
    def pairs(documents: Sequence[Document], room: int, rng: np.random.Generator) -> Iterator[Pair]:
        """Pairs of at most `room` tokens, from each document in turn.

        They are parted at a random end of a sentence. A document's last sentence, if it is left alone, is parted in
        its middle; a single token is left out.
        """
        for d, document in enumerate(documents):
            sentences = _cut(document, room, d)
            at = 0
            while at < len(sentences):
                chunk = sentences[at : at + _fitting(sentences[at : at + room], room)]
                at += len(chunk)
                if len(chunk) == 1:
                    chunk = np.array_split(chunk[0], 2)
                middle = int(rng.integers(1, len(chunk)))
                first, second = np.concatenate(chunk[:middle]), np.concatenate(chunk[middle:])
                if len(second) == 0:
                    continue
                yield Pair(second, first, 1) if rng.random() < 0.5 else Pair(first, second, 0)


def _cut(document: Document, room: int, number: int) -> list[Ids]:
    """The sentences, those longer than half the room in parts: so that any two fit."""
    if room < 2:
        raise InputError(f"room={room} must be at least 2 tokens: one for each of a pair")
    half = room // 2
    parts = [sentence[at : at + half] for sentence in document for at in range(0, len(sentence), half)]
    if not parts:
        raise InputError(f"document {number} has no tokens; leave it out")
    return parts


def _fitting(sentences: Sequence[Ids], room: int) -> int:
    """How many of the sentences fit."""
    used = 0
    for count, sentence in enumerate(sentences):
        used += len(sentence)
        if used > room:
            return count
    return len(sentences)


def _other(number: int, count: int, rng: np.random.Generator) -> int:
    """Another number below `count`, each as likely."""
    drawn = int(rng.integers(count - 1))
    return drawn + (drawn >= number)


# --- replaced tokens ---

Sharing = Literal["none", "tied", "gdes"]


class Replaced(NamedTuple):
    """The two losses of a batch, as sums, and what the discriminator read."""

    masked: Tensor  # () the generator's, to be divided by the number of hidden tokens
    found: Tensor  # () the discriminator's, to be divided by the number of tokens that are not special
    ids: Tensor  # (T,) the text with the generator's guesses in the hidden places
    replaced: Tensor  # (T,) bool: where these are wrong
    logits: Tensor  # (T,) how likely the discriminator holds each token to be replaced, in float32


class ReplacedTokens(nn.Module):
    """A small generator fills hidden places; the discriminator finds which tokens are not the text's own: ELECTRA's.

    A guess that is right counts as the text's own. `sharing` says what the two have in common:

    - "none": nothing.
    - "tied": the tables of words, segments and positions, trained by both, as in ELECTRA.
    - "gdes": the generator's words, which it alone trains. The discriminator adds a table of its own to them, zero at
      first: DeBERTa-v3's gradient-disentangled sharing.

    `trained()` is the discriminator as a model of its own.
    """

    def __init__(self, generator: Model, discriminator: Model, sharing: Sharing = "tied", weight: float = 50.0) -> None:
        super().__init__()
        if sharing not in get_args(Sharing):
            raise ConfigError(f"sharing={sharing!r} must be one of {', '.join(get_args(Sharing))}")
        if not 0 < weight < float("inf"):
            raise ConfigError(f"weight={weight} must be a number greater than 0")
        generator.head("mlm")
        discriminator.head("rtd")
        if generator.config.vocab != discriminator.config.vocab:
            raise ConfigError(
                f"the generator's vocab={generator.config.vocab} must be the discriminator's "
                f"vocab={discriminator.config.vocab}"
            )
        self.generator, self.discriminator = generator, discriminator
        self.sharing, self.weight = sharing, weight
        if sharing == "tied":
            for name in ("words", "segments", "positions"):
                self._same_shape(name)
                setattr(discriminator.encoder.embeddings, name, getattr(generator.encoder.embeddings, name))
        elif sharing == "gdes":
            self._same_shape("words")
            words = discriminator.encoder.embeddings.words
            nn.init.zeros_(words.weight)
            parametrize.register_parametrization(words, "weight", _Above(generator.encoder.embeddings.words))

    def _same_shape(self, name: str) -> None:
        tables = [getattr(model.encoder.embeddings, name) for model in (self.generator, self.discriminator)]
        first, second = (None if table is None else tuple(table.weight.shape) for table in tables)
        if first != second:
            raise ConfigError(
                f"sharing={self.sharing!r} needs embeddings of one shape: {name} of the generator has {first}, of the "
                f"discriminator {second}"
            )

    def forward(
        self, batch: Batch, rows: Tensor, targets: Tensor, special: Tensor, draw: torch.Generator | None = None
    ) -> Replaced:
        """A batch with hidden tokens: `targets` (M,) at `rows` (M,). `special` (T,) tokens are not predictions."""
        with parametrize.cached():  # one sum of tables a pass
            logits = MaskedLoss().logits(self.generator, batch, rows)  # (M, V)
            guesses = sample(logits.detach(), draw)
            ids = batch.ids.index_copy(0, rows, guesses)
            replaced = torch.zeros_like(special).index_copy(0, rows, guesses != targets)
            predictions = self.discriminator(batch.with_ids(ids), "rtd")[:, 0].float()  # (T, 1) -> (T,)
        with torch.autocast(predictions.device.type, enabled=False):
            each = F.binary_cross_entropy_with_logits(predictions, replaced.float(), reduction="none")
            found = torch.where(special, 0.0, each).sum()
        return Replaced(_surprise(logits, targets), found, ids, replaced, predictions)

    def total(self, losses: Replaced, hidden: float, predictions: float) -> Tensor:
        """() the generator's mean loss and `weight` times the discriminator's, over all that the step asks for.

        `hidden` and `predictions` count the hidden tokens and those that are not special, in the whole step.
        """
        return losses.masked / hidden + self.weight * losses.found / predictions

    @torch.no_grad()
    def trained(self) -> Model:
        """The discriminator with tables of its own. It shares no memory with what goes on training."""
        words = self.discriminator.encoder.embeddings.words
        plain = nn.Embedding(words.num_embeddings, words.embedding_dim, words.padding_idx, _weight=words.weight.clone())
        return deepcopy(self.discriminator, {id(words): plain})  # a copy in which `plain` stands for the words


class _Above(nn.Module):
    """A table on top of another one, to which no gradient goes."""

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__()
        self.base = base

    def forward(self, own: Tensor) -> Tensor:
        """(V, E) -> (V, E)."""
        return self.base.weight.detach() + own


def sample(logits: Tensor, draw: torch.Generator | None = None) -> Tensor:
    """(M, V) -> (M,) one of V by its probability, drawn on the logits' device without waiting for it.

    >>> sample(torch.tensor([[0.0, 60.0, 0.0]])).tolist()
    [1]
    """
    # Gumbel's trick: the largest of logit − log(exponential noise) is each with its softmax.
    return (logits - torch.empty_like(logits).exponential_(generator=draw).log()).argmax(-1)


# --- as objectives of the loop ---


class MaskedPairs(ModelObjective):
    """Hidden tokens, and what is to be said of a pair: the mean of each. BERT's with `NextSentence`, ALBERT's with
    `SentenceOrder`.
    """

    def __init__(self, pairs: _Pairs) -> None:
        super().__init__()
        self.masked, self.pairs = MaskedLoss(), pairs

    def loss(self, model: Model, mini: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        rows, labels = mini.targets.rows, mini.extras["labels"]
        assert rows is not None
        assert isinstance(labels, Tensor)
        hidden = model.hidden(mini.batch)
        masked = self.masked.loss(model, mini.batch, rows, mini.targets.values, hidden)
        said = self.pairs.loss(model, mini.batch, labels, hidden)
        return self.mean(masked, "masked") + self.mean(said, "texts")

    def collate(self, items: Sequence[TrainingExample]) -> MicroBatch:
        """Lay items end to end."""
        labels = torch.tensor([int(item.extras["label"]) for item in items])
        return replace(super().collate(items), extras={"labels": labels})


class EnhancedMasked(ModelObjective):
    """Hidden tokens by way of an `EnhancedDecoder`, which lies in the model's `auxiliary`: DeBERTa's."""

    def __init__(self, model: Model, seed: int = 0) -> None:
        super().__init__()
        decoder = EnhancedDecoder(model.config).to(model.device)
        draw = torch.Generator(model.device).manual_seed(seed)
        nn.init.normal_(decoder.positions.weight, std=model.config.init_std, generator=draw)
        model.auxiliary["decoder"] = decoder
        self.masked = MaskedLoss()

    def loss(self, model: Model, mini: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        rows, decoder = mini.targets.rows, model.auxiliary["decoder"]
        assert rows is not None
        hidden = decoder(model.encoder, mini.batch)
        return self.mean(self.masked.loss(model, mini.batch, rows, mini.targets.values, hidden), "masked")


class Replacement(ModelObjective):
    """Tokens that a generator replaced, to be found by the model: the means of `ReplacedTokens`' two losses.

    The generator lies in the model's `auxiliary`, and trains with it.
    """

    def __init__(self, both: ReplacedTokens) -> None:
        super().__init__()
        self.both = both
        both.discriminator.auxiliary["generator"] = both.generator

    def loss(self, model: Model, mini: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        rows, special = mini.targets.rows, mini.extras["special"]
        assert rows is not None
        assert isinstance(special, Tensor)
        losses = self.both(mini.batch, rows, mini.targets.values, special)
        return self.mean(losses.masked, "masked") + self.both.weight * self.mean(losses.found, "predictions")

    def count(self, item: TrainingExample) -> dict[str, float]:
        """Special tokens are not predictions."""
        return {**super().count(item), "predictions": float(np.logical_not(item.extras["special"]).sum())}

    def collate(self, items: Sequence[TrainingExample]) -> MicroBatch:
        """Lay items end to end."""
        special = torch.from_numpy(np.concatenate([item.extras["special"] for item in items]))
        return replace(super().collate(items), extras={"special": special})
