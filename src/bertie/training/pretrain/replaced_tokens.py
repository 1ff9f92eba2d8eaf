"""Replaced-token detection: ELECTRA, with DeBERTa-v3's gradient-disentangled embedding sharing."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from bertie.errors import ConfigError
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.training.objectives import MicroBatch, ModelObjective, TrainingExample
from bertie.training.pretrain.masked_lm import MaskedLMLoss, summed_cross_entropy

Sharing = Literal["none", "tied", "gdes"]


class ReplacedTokenLosses(NamedTuple):
    """The two summed losses of a batch, and the input of the discriminator."""

    generator: Tensor  # () to be divided by the number of masked tokens
    discriminator: Tensor  # () to be divided by the number of tokens that are not special
    ids: Tensor  # (T,) the text with masked tokens replaced by the generator's samples
    replaced: Tensor  # (T,) bool: where the samples differ from the text
    logits: Tensor  # (T,) of the discriminator, in float32


class ReplacedTokenDetection(nn.Module):
    """A small generator fills in masked tokens; the discriminator detects the tokens that were
    replaced.

    A sample that equals the original token counts as original. `sharing` of embeddings:

    - "none": separate embeddings.
    - "tied": word, segment and position embeddings are shared and trained by both, as in ELECTRA.
    - "gdes": the discriminator's word embeddings are the generator's, without gradient, plus a
      separate table that starts at zero: DeBERTa-v3's gradient-disentangled embedding sharing.

    `trained()` returns the discriminator as a standalone model.
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
                self._check_shapes(name)
                setattr(discriminator.encoder.embeddings, name, getattr(generator.encoder.embeddings, name))
        elif sharing == "gdes":
            self._check_shapes("words")
            words = discriminator.encoder.embeddings.words
            nn.init.zeros_(words.weight)
            parametrize.register_parametrization(words, "weight", _AddDetached(generator.encoder.embeddings.words))

    def _check_shapes(self, name: str) -> None:
        tables = [getattr(model.encoder.embeddings, name) for model in (self.generator, self.discriminator)]
        first, second = (None if table is None else tuple(table.weight.shape) for table in tables)
        if first != second:
            raise ConfigError(
                f"sharing={self.sharing!r} needs embeddings of one shape: {name} of the generator has {first}, of the "
                f"discriminator {second}"
            )

    def forward(
        self, batch: Batch, rows: Tensor, targets: Tensor, special: Tensor, generator: torch.Generator | None = None
    ) -> ReplacedTokenLosses:
        """A batch with masked tokens: `targets` (M,) at `rows` (M,). `special` (T,) tokens are not predicted."""
        with parametrize.cached():  # add the embedding tables once per pass
            logits = MaskedLMLoss().logits(self.generator, batch, rows)  # (M, V)
            samples = sample(logits.detach(), generator)
            ids = batch.ids.index_copy(0, rows, samples)
            replaced = torch.zeros_like(special).index_copy(0, rows, samples != targets)
            predictions = self.discriminator(batch.with_ids(ids), "rtd")[:, 0].float()  # (T, 1) -> (T,)
        with torch.autocast(predictions.device.type, enabled=False):
            losses = F.binary_cross_entropy_with_logits(predictions, replaced.float(), reduction="none")
            detection = torch.where(special, 0.0, losses).sum()
        return ReplacedTokenLosses(summed_cross_entropy(logits, targets), detection, ids, replaced, predictions)

    def total(self, losses: ReplacedTokenLosses, masked: float, predicted: float) -> Tensor:
        """() the generator's mean loss plus `weight` times the discriminator's.

        `masked` and `predicted` count the masked tokens and those that are not special, in the
        whole step.
        """
        return losses.generator / masked + self.weight * losses.discriminator / predicted

    @torch.no_grad()
    def trained(self) -> Model:
        """Copy the discriminator, with its own embeddings."""
        words = self.discriminator.encoder.embeddings.words
        own = nn.Embedding(words.num_embeddings, words.embedding_dim, words.padding_idx, _weight=words.weight.clone())
        return deepcopy(self.discriminator, {id(words): own})  # the copy has `own` in place of `words`


class _AddDetached(nn.Module):
    """Adds another table, without gradient."""

    def __init__(self, base: nn.Embedding) -> None:
        super().__init__()
        self.base = base

    def forward(self, own: Tensor) -> Tensor:
        """(V, E) -> (V, E)."""
        return self.base.weight.detach() + own


def sample(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """(M, V) -> (M,) sample from the softmax on the logits' device, without synchronizing.

    >>> sample(torch.tensor([[0.0, 60.0, 0.0]])).tolist()
    [1]
    """
    # Gumbel-max trick: argmax(logit − log(exponential noise)) is distributed as the softmax.
    return (logits - torch.empty_like(logits).exponential_(generator=generator).log()).argmax(-1)


class ReplacedTokenObjective(ModelObjective):
    """Trains both models of a `ReplacedTokenDetection`; the generator is in the model's `auxiliary` modules."""

    def __init__(self, detection: ReplacedTokenDetection) -> None:
        super().__init__()
        self.detection = detection
        detection.discriminator.auxiliary["generator"] = detection.generator

    def loss(self, model: Model, micro_batch: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        rows, special = micro_batch.targets.rows, micro_batch.extras["special"]
        assert rows is not None
        assert isinstance(special, Tensor)
        losses = self.detection(micro_batch.batch, rows, micro_batch.targets.values, special)
        discriminator = self.detection.weight * self.mean(losses.discriminator, "predicted")
        return self.mean(losses.generator, "masked") + discriminator

    def count(self, example: TrainingExample) -> dict[str, float]:
        """Special tokens are not predicted."""
        return {**super().count(example), "predicted": float(np.logical_not(example.extras["special"]).sum())}

    def collate(self, examples: Sequence[TrainingExample]) -> MicroBatch:
        """Concatenate examples, with their special tokens."""
        special = torch.from_numpy(np.concatenate([example.extras["special"] for example in examples]))
        return replace(super().collate(examples), extras={"special": special})
