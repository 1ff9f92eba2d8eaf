"""The objective of embedding models: a loss over all embeddings of a step, in little memory.

A row of the data is several texts, such as an anchor, a positive and a negative. A loss over embeddings
(`bertie.training.embedding.losses`) needs those of all rows of a step at once. Where a step has more
tokens than a micro-batch may hold, its gradient is computed by gradient caching (GradCache, Gao et al.
2021): first the embeddings of all micro-batches without a graph, then the loss and its gradient with
respect to each embedding, then each micro-batch again with a graph, continuing from these gradients.
Both passes use the same dropout. Memory is that of one micro-batch, however many rows a step has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.errors import ConfigError
from bertie.text.batch import Batch
from bertie.training.embedding.losses import LOSSES, EmbeddingLoss, SoftmaxLoss
from bertie.training.embedding.similarity_functions import Embeddings, TokenEmbeddings
from bertie.training.objectives import InBatchObjective, MicroBatch, Targets, TrainingExample, TrainingWindow

if TYPE_CHECKING:
    from bertie.checkpoints.late_interaction import LateInteractionModules
    from bertie.checkpoints.sentence_modules import SentenceModules
    from bertie.nn.model import Model

Output = Literal["dense", "tokens", "sparse"]


def named_loss(text: str, *, classes: int = 0) -> EmbeddingLoss:
    """Build a loss from its name, with settings after a colon; `classes` is for softmax.

    >>> named_loss("triplet:margin=0.2,distance=cosine")
    TripletLoss(margin=0.2, distance='cosine')
    """
    name, _, settings = text.partition(":")
    if name not in LOSSES:
        raise ConfigError(f"loss={text!r} must be one of {', '.join(LOSSES)}")
    kind = LOSSES[name]
    defaults = {field.name: field.default for field in getattr(kind, "__dataclass_fields__", {}).values()}
    arguments: dict[str, Any] = {"classes": classes} if kind is SoftmaxLoss else {}
    for setting in filter(None, settings.split(",")):
        key, sign, value = setting.partition("=")
        if not sign or not isinstance(defaults.get(key), bool | float | str):
            allowed = ", ".join(key for key, default in defaults.items() if isinstance(default, bool | float | str))
            raise ConfigError(
                f"loss={text!r}: {setting!r} must be one of {allowed or 'nothing'}, followed by '=' and a value"
            )
        arguments[key] = _parse_setting(text, value, defaults[key])
    return kind(**arguments)


def _parse_setting(text: str, value: str, default: Any) -> Any:
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        return float(value) if isinstance(default, float) else value
    except (KeyError, ValueError):
        allowed = "true or false" if isinstance(default, bool) else "a number"
        raise ConfigError(f"loss={text!r}: {value!r} must be {allowed}") from None


def make_row(texts: Sequence[Sequence[TrainingWindow]], value: Any = None) -> TrainingExample:
    """Combine several texts, each given by its windows, into one training example.

    >>> first, second = (TrainingWindow(np.arange(n), np.zeros(n, int)) for n in (3, 4))
    >>> len(make_row([[first], [second]]))
    7
    """
    windows = tuple(window for text in texts for window in text)
    counts = np.array([len(text) for text in texts])
    return TrainingExample(windows, None if value is None else np.asarray(value), extras={"windows": counts})


class EmbeddingObjective(InBatchObjective):
    """A loss over the embeddings of all texts of a step.

    `output` is "dense" (one embedding per text, as from an `Embedder`), "tokens" (one per token, for late
    interaction) or "sparse" (term weights from the head "mlm", for SPLADE). The sentence modules and the
    modules that the loss trains are in `model.auxiliary` between `attach` and `detach`.
    """

    level = "text"
    loss: EmbeddingLoss

    def __init__(self, loss: EmbeddingLoss, output: Output = "dense") -> None:
        if output not in get_args(Output):
            raise ConfigError(f"output={output!r} must be one of {', '.join(get_args(Output))}")
        self.loss, self.output = loss, output

    def attach(self, model: Model, modules: SentenceModules | LateInteractionModules | None) -> None:
        """Add the modules that are trained with the model; None: the model has all of them."""
        width = model.config.vocab if self.output == "sparse" or modules is None else modules.dimension
        if modules is not None:
            model.auxiliary["sentence"] = modules.to(model.device)
        model.auxiliary["loss"] = self.loss.modules(width).to(model.device)

    @staticmethod
    def detach(model: Model) -> None:
        """Remove these modules again."""
        for name in {"sentence", "loss"} & set(model.auxiliary):
            model.auxiliary.pop(name)

    def collate(self, items: Sequence[TrainingExample]) -> MicroBatch:
        """Concatenate the texts row by row into one flat batch."""
        windows = [window for item in items for window in item.windows]
        counts = np.concatenate([item.extras["windows"] for item in items])
        values = [item.value for item in items if item.value is not None]
        skips = [window.values for window in windows if window.values is not None]
        targets = Targets(
            torch.from_numpy(np.stack(values)) if values else torch.zeros(len(items), 0),
            torch.ones(len(items), len(counts) // len(items)),  # (B, C)
            torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
            torch.tensor([window.share for window in windows], dtype=torch.float32),
        )
        batch = Batch.from_ids([w.ids for w in windows], [w.segments for w in windows])
        extras: Mapping[str, Tensor] = {"skips": torch.from_numpy(np.stack(skips))} if skips else {}
        return MicroBatch(batch, targets, float(len(items)), extras)

    def example_weight(self, item: TrainingExample) -> float:
        """All rows have the same weight."""
        return 1.0

    # --- a micro-batch ---

    def embed(self, model: Model, mini: MicroBatch, head: str) -> Tensor:
        """(R, D) embeddings of the texts: one row per text, or per token."""
        batch, targets = mini.batch, mini.targets
        texts = targets.weights.numel()
        hidden = model.hidden(batch, head or None)
        if self.output == "sparse":
            words = model.encoder.embeddings.words.weight
            weights = model.head(head).largest_logits(hidden, words, batch.lengths).float().relu().log1p()  # (W, V)
            if len(weights) == texts:
                return weights
            # The maximum over a text's windows; weights are never negative.
            index = targets.owner[:, None].expand_as(weights)
            return weights.new_zeros(texts, weights.shape[1]).scatter_reduce(0, index, weights, "amax")
        modules = cast("SentenceModules", model.auxiliary["sentence"])
        with torch.autocast(hidden.device.type, enabled=False):
            if self.output == "tokens":
                return modules.project(hidden.float())  # (T, D)
            skips = mini.extras.get("skips")
            pooled = modules.pooling(hidden, batch, None if skips is None else cast(Tensor, skips).tolist()).float()
            if len(pooled) > texts:
                whole = pooled.new_zeros(texts, pooled.shape[1])
                pooled = whole.index_add(0, targets.owner, pooled * targets.share[:, None])  # (W, D) -> (N, D)
            return modules.project(pooled)

    def surrogate_loss(self, model: Model, mini: MicroBatch, head: str) -> Tensor:
        """() a scalar with the cached gradients: of the embeddings, and of the modules that the loss trains."""
        gradient, auxiliary = (cast(Tensor, mini.extras[name]) for name in ("gradient", "auxiliary"))
        total = (self.embed(model, mini, head) * gradient).sum()
        weights = list(model.auxiliary["loss"].parameters())
        cached = torch.split(auxiliary, [weight.numel() for weight in weights])
        for weight, weight_gradient in zip(weights, cached, strict=True):
            total = total + (weight.flatten() * weight_gradient).sum()
        return total

    # --- the whole step ---

    def step_loss(self, model: Model, embeddings: Tensor, micro_batches: Sequence[MicroBatch], total: float) -> Tensor:
        """() this process's part of the loss: the parts add up to the mean over the step's `total` rows.

        `embeddings` are those of all its micro-batches. A collective: every process must call it, even one
        without rows.
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

    def _columns(self, embeddings: Tensor, minis: Sequence[MicroBatch], like: MicroBatch) -> list[Embeddings]:
        """The embeddings by column of the data."""
        columns = like.targets.weights.shape[1]
        if self.output != "tokens":
            return list(embeddings.view(-1, columns, embeddings.shape[1]).unbind(1))  # (B C, D) -> C of (B, D)
        counts = [self.token_counts(mini) for mini in minis]
        sizes = torch.cat([torch.zeros(0, dtype=torch.int64), *counts])  # (B C,) on the host
        texts = torch.split(embeddings, sizes.tolist())
        out: list[Embeddings] = []
        for column in range(columns):
            ends = F.pad(sizes[column::columns].cumsum(0), (1, 0)).to(embeddings.device)
            out.append(TokenEmbeddings(torch.cat([embeddings[:0], *texts[column::columns]]), ends))
        return out

    def token_counts(self, mini: MicroBatch) -> Tensor:
        """(N,) number of tokens of each text, over all its windows."""
        sizes = torch.zeros(mini.targets.weights.numel(), dtype=torch.int64)
        return sizes.index_add(0, mini.targets.owner.cpu(), torch.tensor(mini.batch.lengths))
