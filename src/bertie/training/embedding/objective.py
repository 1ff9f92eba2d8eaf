"""Training over vectors: what a step reads, and how losses that compare all its texts are trained in little memory.

A row of the data is several texts: two that belong together, say, and one that does not. A loss over vectors
(`bertie.training.embedding.losses`) needs those of all rows of a step at once. Where a step has more tokens than a micro-batch may
hold, its gradient is computed in two passes (Gao et al. 2021): the vectors of all micro-batches without a graph, then
the loss and its gradient by each vector, then each micro-batch again with a graph, from these gradients on. Both
passes draw the same dropout. So the tokens held at a time are those of one micro-batch, however many rows a step has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.errors import ConfigError
from bertie.nn.pooling import splade_pool
from bertie.text.batch import Batch
from bertie.training.embedding.losses import (
    KL,
    Contrastive,
    CoSENT,
    CosineRegression,
    InfoNCE,
    MarginMSE,
    Softmax,
    Triplet,
    VectorLoss,
)
from bertie.training.embedding.similarity import Tokens, Vectors
from bertie.training.objectives import InBatchObjective, MicroBatch, Targets, TrainingExample, TrainingWindow

if TYPE_CHECKING:
    from bertie.checkpoints.sentence_modules import SentenceModules
    from bertie.nn.model import Model

Reading = Literal["vectors", "tokens", "lexical"]

LOSSES: dict[str, type[VectorLoss]] = {
    "infonce": InfoNCE,
    "triplet": Triplet,
    "softmax": Softmax,
    "cosine": CosineRegression,
    "cosent": CoSENT,
    "contrastive": Contrastive,
    "margin-mse": MarginMSE,
    "kl": KL,
}


def named_loss(text: str, *, classes: int = 0) -> VectorLoss:
    """A loss by its name, with what it is set to behind a colon; `classes` is for softmax.

    >>> named_loss("triplet:margin=0.2,distance=cosine")
    Triplet(margin=0.2, distance='cosine')
    """
    name, _, settings = text.partition(":")
    if name not in LOSSES:
        raise ConfigError(f"loss={text!r} must be one of {', '.join(LOSSES)}")
    kind = LOSSES[name]
    usual = {one.name: one.default for one in getattr(kind, "__dataclass_fields__", {}).values()}
    given: dict[str, Any] = {"classes": classes} if kind is Softmax else {}
    for one in filter(None, settings.split(",")):
        key, sign, value = one.partition("=")
        if not sign or not isinstance(usual.get(key), bool | float | str):
            allowed = ", ".join(key for key, default in usual.items() if isinstance(default, bool | float | str))
            raise ConfigError(f"loss={text!r}: {one!r} must be one of {allowed or 'nothing'}, and a value behind '='")
        given[key] = _value(text, value, usual[key])
    return kind(**given)


def _value(text: str, value: str, usual: Any) -> Any:
    try:
        if isinstance(usual, bool):
            return {"true": True, "false": False}[value.lower()]
        return float(value) if isinstance(usual, float) else value
    except (KeyError, ValueError):
        wanted = "true or false" if isinstance(usual, bool) else "a number"
        raise ConfigError(f"loss={text!r}: {value!r} must be {wanted}") from None


def row(texts: Sequence[Sequence[TrainingWindow]], value: Any = None) -> TrainingExample:
    """A row of several texts, each by its windows, as one item.

    >>> one, two = (TrainingWindow(np.arange(n), np.zeros(n, int)) for n in (3, 4))
    >>> len(row([[one], [two]]))
    7
    """
    pieces = tuple(piece for text in texts for piece in text)
    counts = np.array([len(text) for text in texts])
    return TrainingExample(pieces, None if value is None else np.asarray(value), extras={"windows": counts})


class EmbeddingObjective(InBatchObjective):
    """A loss over the vectors of a step's texts, all at once.

    `reading` says what a text becomes: one vector, as an `Embedder` has it; a vector for each of its tokens, for late
    interaction; or weights of the words of the vocabulary, by the head "mlm", for SPLADE. What follows the encoder, and
    what the loss trains besides, lies in `model.auxiliary`: `begin` puts it there, and `end` takes it away.
    """

    level = "text"
    loss: VectorLoss

    def __init__(self, loss: VectorLoss, reading: Reading = "vectors") -> None:
        if reading not in get_args(Reading):
            raise ConfigError(f"reading={reading!r} must be one of {', '.join(get_args(Reading))}")
        self.loss, self.reading = loss, reading

    def begin(self, model: Model, modules: SentenceModules) -> None:
        """Give the model what is trained with it."""
        width = model.config.vocab if self.reading == "lexical" else modules.dimension
        model.auxiliary["sentence"] = modules.to(model.device)
        model.auxiliary["loss"] = self.loss.modules(width).to(model.device)

    @staticmethod
    def end(model: Model) -> None:
        """Take it away again."""
        for name in ("sentence", "loss"):
            model.auxiliary.pop(name)

    def collate(self, items: Sequence[TrainingExample]) -> MicroBatch:
        """Lay the texts of all rows end to end: those of the first row, those of the second, and so on."""
        pieces = [piece for item in items for piece in item.windows]
        counts = np.concatenate([item.extras["windows"] for item in items])
        values = [item.value for item in items if item.value is not None]
        skips = [piece.values for piece in pieces if piece.values is not None]
        targets = Targets(
            torch.from_numpy(np.stack(values)) if values else torch.zeros(len(items), 0),
            torch.ones(len(items), len(counts) // len(items)),  # (B, C)
            torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
            torch.tensor([piece.share for piece in pieces], dtype=torch.float32),
        )
        batch = Batch.from_ids([p.ids for p in pieces], [p.segments for p in pieces])
        more: Mapping[str, Tensor] = {"skips": torch.from_numpy(np.stack(skips))} if skips else {}
        return MicroBatch(batch, targets, float(len(items)), more)

    def example_weight(self, item: TrainingExample) -> float:
        """Rows count alike."""
        return 1.0

    # --- one micro-batch ---

    def embed(self, model: Model, mini: MicroBatch, head: str) -> Tensor:
        """(R, D) what the texts become: a row a text, or a row a token."""
        batch, targets = mini.batch, mini.targets
        texts = targets.weights.numel()
        modules = cast("SentenceModules", model.auxiliary["sentence"])
        hidden = model.hidden(batch, head or None)
        if self.reading == "lexical":
            logits = model.head(head)(hidden, batch, model.encoder.embeddings.words.weight)  # (T, V)
            found = splade_pool(logits.float(), batch)
            if len(found) == texts:
                return found
            # Of several windows the greatest; weights are never below 0.
            at = targets.owner[:, None].expand_as(found)
            return found.new_zeros(texts, found.shape[1]).scatter_reduce(0, at, found, "amax")
        with torch.autocast(hidden.device.type, enabled=False):
            if self.reading == "tokens":
                return modules.project(hidden.float())  # (T, D)
            skips = mini.extras.get("skips")
            pooled = modules.pooling(hidden, batch, None if skips is None else cast(Tensor, skips).tolist()).float()
            if len(pooled) > texts:
                whole = pooled.new_zeros(texts, pooled.shape[1])
                pooled = whole.index_add(0, targets.owner, pooled * targets.share[:, None])  # (W, D) -> (N, D)
            return modules.project(pooled)

    def surrogate_loss(self, model: Model, mini: MicroBatch, head: str) -> Tensor:
        """() what has the gradient that the micro-batch was given: of its rows, and of what the loss trains."""
        gradient, auxiliary = (cast(Tensor, mini.extras[name]) for name in ("gradient", "auxiliary"))
        found = (self.embed(model, mini, head) * gradient).sum()
        weights = list(model.auxiliary["loss"].parameters())
        for weight, given in zip(weights, torch.split(auxiliary, [one.numel() for one in weights]), strict=True):
            found = found + (weight.flatten() * given).sum()
        return found

    # --- the whole step ---

    def step_loss(self, model: Model, embeddings: Tensor, micro_batches: Sequence[MicroBatch], total: float) -> Tensor:
        """() this process's part of the loss: the parts of all add up to the mean over the step's `total` rows.

        `embeddings` are the rows of all its micro-batches. Every process must call it, even one without rows.
        """
        own = [mini for mini in micro_batches if mini.weight > 0]
        values = None
        if micro_batches[0].targets.values.numel():
            values = torch.cat([mini.targets.values for mini in own] or [micro_batches[0].targets.values[:0]])
        with torch.autocast(embeddings.device.type, enabled=False):
            mean = self.loss.loss(
                self._columns(embeddings, own, micro_batches[0]), values, cast(nn.ModuleDict, model.auxiliary["loss"])
            )
        return mean * (sum(mini.weight for mini in own) / total)

    def _columns(self, found: Tensor, minis: Sequence[MicroBatch], like: MicroBatch) -> list[Vectors]:
        """The rows by the columns of the data."""
        columns = like.targets.weights.shape[1]
        if self.reading != "tokens":
            return list(found.view(-1, columns, found.shape[1]).unbind(1))  # (B C, D) -> C of (B, D)
        sizes = torch.cat([torch.zeros(0, dtype=torch.int64), *(_sizes(mini) for mini in minis)])  # (B C,) on the host
        texts = torch.split(found, sizes.tolist())
        out: list[Vectors] = []
        for number in range(columns):
            ends = F.pad(sizes[number::columns].cumsum(0), (1, 0)).to(found.device)
            out.append(Tokens(torch.cat([found[:0], *texts[number::columns]]), ends))
        return out


def _sizes(mini: MicroBatch) -> Tensor:
    """(N,) how many tokens each text has, over all its windows."""
    sizes = torch.zeros(mini.targets.weights.numel(), dtype=torch.int64)
    return sizes.index_add(0, mini.targets.owner.cpu(), torch.tensor(mini.batch.lengths))
