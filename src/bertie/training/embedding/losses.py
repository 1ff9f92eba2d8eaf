"""Losses over vectors: what an embedder's vectors of one whole batch should be like.

A row of a batch is a few texts and perhaps a value. `columns` are the vectors of the first texts of all rows, of the
second ones, and so on; `values` are tensors of what is wanted of the rows:

    inputs      texts of a row               value of a row
    pairs       a, p  or  a, p, n1 … nk      none: p belongs to a, and the n do not
    classes     a, b                         a class, 0 to n − 1                        (B,) int64
    scores      a, b                         how alike they are, greater is more alike  (B,)
    triplets    a, p, n                      none: p belongs to a, and n does not
    lists       query, p1 … pk               a teacher's score of each p                (B, k)
    vectors     a                            a teacher's vector                         (B, D')

Vectors come in float32. A loss is the mean over the rows. Of several processes each gives its own rows, and all must
ask: the mean of their losses and of their gradients, weighted by their rows, is that of one process with all rows. As
gradients cross between processes on the way back, a weight belongs to the loss, not to the gradients afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.errors import ConfigError, InputError
from bertie.training.embedding.similarity import (
    Cosine,
    Dot,
    Gather,
    Similarity,
    Vectors,
    across_ranks,
    joined,
    of_all,
    plain,
    rows_of,
    states_of,
    with_states,
)

Inputs = Literal["pairs", "classes", "scores", "triplets", "lists", "vectors"]
Distance = Literal["squared", "euclidean", "cosine"]

BLOCK = 1 << 22  # numbers; a table of similarities that is larger is made in parts


class VectorLoss(ABC):
    """A loss over the vectors of a batch's texts."""

    @property
    @abstractmethod
    def inputs(self) -> Inputs:
        """What a row is made of: see the table above."""

    def modules(self, width: int) -> nn.ModuleDict:
        """What is trained besides the model, for vectors of this width: mostly nothing."""
        return nn.ModuleDict()

    @abstractmethod
    def loss(self, columns: Sequence[Vectors], values: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """() the mean over the rows; `auxiliary` has what `modules` made."""


@dataclass(frozen=True)
class Softmax(VectorLoss):
    """Sentence-BERT's: which class a pair is of, told by a linear layer that is thrown away afterwards.

        mean of the cross-entropy of W (u, v, |u − v|) + b with the class

    Use it where pairs have classes and no order, as in inference: entailment, neutral, contradiction.

    >>> loss = Softmax(classes=3)
    >>> auxiliary = loss.modules(width=2)
    >>> loss.loss([torch.ones(4, 2), torch.zeros(4, 2)], torch.tensor([0, 1, 2, 0]), auxiliary).shape
    torch.Size([])
    """

    classes: int

    inputs = "classes"

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise ConfigError(f"classes={self.classes} must be at least 2")

    def modules(self, width: int) -> nn.ModuleDict:
        """The linear layer, the same each time."""
        layer = nn.Linear(3 * width, self.classes)
        nn.init.normal_(layer.weight, std=0.02, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(layer.bias)
        return nn.ModuleDict({"softmax": layer})

    def loss(self, columns: Sequence[Vectors], values: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `VectorLoss.loss`."""
        u, v = map(plain, _columns(self, columns, 2))
        wanted = _within(self, _values(self, values, len(u)), 0, self.classes - 1)
        logits = auxiliary["softmax"](torch.cat([u, v, (u - v).abs()], -1))  # (B, 3 D) -> (B, classes)
        return _mean(F.cross_entropy(logits, wanted.long(), reduction="none"))


@dataclass(frozen=True)
class CosineRegression(VectorLoss):
    """The squared distance of the cosine to the score, which is −1 to 1 or, mostly, 0 to 1.

        mean of (cos(a, b) − score)²

    Use it where scores say how alike two texts are, and their size is to be kept.

    >>> a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    >>> CosineRegression().loss([a, b], torch.tensor([0.5]), nn.ModuleDict()).item()
    0.25
    """

    inputs = "scores"

    def loss(self, columns: Sequence[Vectors], values: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `VectorLoss.loss`."""
        a, b = _columns(self, columns, 2)
        wanted = _within(self, _values(self, values, len(a)), -1, 1)
        return _mean((Cosine().pairs(a, b) - wanted) ** 2)


@dataclass(frozen=True)
class CoSENT(VectorLoss):
    """Pairs in the order of their scores: of any two, the one with the greater score should have the greater cosine.

        log(1 + Σ exp(scale · (cosⱼ − cosᵢ)))      over all i and j of the batch with scoreᵢ > scoreⱼ

    Scores may have any scale, for only their order counts. Pairs of all processes are compared.

    Use it where scores say how alike two texts are: it ranks better than `CosineRegression`.

    >>> a, b = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])     # cosines 1 and 0
    >>> round(CoSENT(scale=1.0).loss([a, b], torch.tensor([5.0, 2.0]), nn.ModuleDict()).item(), 4)     # log(1 + 1/e)
    0.3133
    """

    scale: float = 20.0

    inputs = "scores"

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    def loss(self, columns: Sequence[Vectors], values: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `VectorLoss.loss`."""
        a, b = _columns(self, columns, 2)
        wanted, order = of_all(_values(self, values, len(a))).sort()
        cosines = of_all(Cosine().pairs(a, b))[order] * self.scale
        # Sorted, all i of a j lie behind it, from the first with a greater score on: sums from the end have them all,
        # and no table of pairs is needed.
        behind = (-cosines).flip(0).logcumsumexp(0).flip(0)
        behind = F.pad(behind, (0, 1), value=-inf)[torch.searchsorted(wanted, wanted, right=True)]
        return F.pad(cosines + behind, (1, 0)).logsumexp(0)  # the 1 of the sum is exp(0)


@dataclass(frozen=True)
class Contrastive(VectorLoss):
    """Pairs that belong together (1) near each other, others (0) at least a margin apart.

        mean of ½ (y · d² + (1 − y) · max(0, margin − d)²)      d = 1 − cos(a, b)

    Use it where pairs are only told to belong together or not, as in questions that are duplicates or are not.

    >>> a, b = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0]])     # distances 0
    >>> Contrastive(margin=0.5).loss([a, b], torch.tensor([1.0, 0.0]), nn.ModuleDict()).item()     # ½ · ½ · 0.5²
    0.0625
    """

    margin: float = 0.5

    inputs = "scores"

    def __post_init__(self) -> None:
        _positive("margin", self.margin)

    def loss(self, columns: Sequence[Vectors], values: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `VectorLoss.loss`."""
        a, b = _columns(self, columns, 2)
        y = _within(self, _values(self, values, len(a)), 0, 1)
        d = 1 - Cosine().pairs(a, b)
        return _mean((y * d**2 + (1 - y) * (self.margin - d).relu() ** 2) / 2)


@dataclass(frozen=True)
class Triplet(VectorLoss):
    """A text nearer to one that belongs to it than to one that does not, by a margin.

        mean of max(0, d(a, p) − d(a, n) + margin)      d = ‖x − y‖² "squared", ‖x − y‖ "euclidean", 1 − cos "cosine"

    Use it where each text comes with one that belongs to it and one that does not. `InfoNCE` reads the same rows, and
    learns more from them.

    >>> a, p, n = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.1]])
    >>> round(Triplet(margin=1.0).loss([a, p, n], None, nn.ModuleDict()).item(), 2)     # 1 − 1.21 + 1
    0.79
    """

    margin: float = 1.0
    distance: Distance = "squared"

    inputs = "triplets"

    def __post_init__(self) -> None:
        _positive("margin", self.margin)
        if self.distance not in ("squared", "euclidean", "cosine"):
            raise ConfigError(f"distance={self.distance!r} must be squared, euclidean or cosine")

    def loss(self, columns: Sequence[Vectors], values: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `VectorLoss.loss`."""
        a, p, n = map(plain, _columns(self, columns, 3))
        return _mean((self._far(a, p) - self._far(a, n) + self.margin).relu())

    def _far(self, a: Tensor, b: Tensor) -> Tensor:
        if self.distance == "cosine":
            return 1 - Cosine().pairs(a, b)
        return ((a - b) ** 2).sum(-1) if self.distance == "squared" else torch.linalg.vector_norm(a - b, dim=-1)


@dataclass(frozen=True)
class InfoNCE(VectorLoss):
    """Each text's own passage among all passages of the batch: cross-entropy, with the others as negatives.

        mean of −log( exp(scale · s(aᵢ, pᵢ)) / Σⱼ exp(scale · s(aᵢ, cⱼ)) )      c: every p, and every hard negative n

    `symmetric` takes the mean with the other direction, each p among all a. `score` is `Cosine()`, `Dot()` with a
    scale near 1 for vectors whose length counts, or `MaxSim()`, also near 1, for late interaction. `gather` brings a
    column's rows of all processes, so that these are negatives too.

    Use it where there are pairs that belong together: the larger the batch, the better. No two rows should have the
    same p, which would count as wrong.

    >>> a, p = torch.eye(2), torch.eye(2)
    >>> round(InfoNCE(scale=1.0).loss([a, p], None, nn.ModuleDict()).item(), 4)     # log(1 + 1/e)
    0.3133
    """

    scale: float = 20.0
    symmetric: bool = False
    score: Similarity = field(default_factory=Cosine)
    gather: Gather = across_ranks

    inputs = "pairs"

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    def loss(self, columns: Sequence[Vectors], values: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `VectorLoss.loss`."""
        queries, own, *hard = _columns(self, columns, 2, more=True)
        passages, start = self.gather(own)
        right = torch.arange(start, start + len(queries), device=states_of(own).device)
        candidates = joined([passages, *(self.gather(one)[0] for one in hard)])
        total = self._sum(queries, candidates, right, self.score.table)
        if self.symmetric:  # of the same scores: a query's tokens look for a passage's, and never the other way round
            everyone = self.gather(queries)[0]
            total = (total + self._sum(own, everyone, right, lambda p, q: self.score.table(q, p).T)) / 2
        return total / max(1, len(queries))

    def _sum(
        self, texts: Vectors, candidates: Vectors, right: Tensor, table: Callable[[Vectors, Vectors], Tensor]
    ) -> Tensor:
        """() the fused_linear_cross_entropy at each text's right candidate, summed."""

        def part(rows: Vectors, others: Vectors, right: Tensor) -> Tensor:
            return F.cross_entropy(table(rows, others) * self.scale, right, reduction="sum")

        a, b = states_of(texts), states_of(candidates)
        parts = -(-len(a) * len(b) // BLOCK)
        if parts <= 1:
            return part(texts, candidates, right)
        # A table for 16,384 pairs is a gigabyte, and its gradient another: each part's gradient is made at once.
        total, grads_a, grad_b = a.new_zeros(()), [], torch.zeros_like(b)
        b_here = b.detach().requires_grad_()
        step = -(-len(texts) // parts)
        for at in range(0, len(texts), step):
            rows = rows_of(texts, at, at + step)
            a_here = states_of(rows).detach().requires_grad_()
            with torch.enable_grad():
                one = part(with_states(rows, a_here), with_states(candidates, b_here), right[at : at + step])
            more_a, more_b = torch.autograd.grad(one, (a_here, b_here))
            total += one.detach()
            grads_a.append(more_a)
            grad_b += more_b
        # The differences are 0, and have these gradients.
        return total + ((a - a.detach()) * torch.cat(grads_a)).sum() + ((b - b.detach()) * grad_b).sum()


@dataclass(frozen=True)
class Matryoshka(VectorLoss):
    """A loss over the first numbers of the vectors too, so that short vectors can be cut from long ones.

        Σ weight · loss(the first d numbers of each vector, made to have length 1)      over the dimensions d

    Weights are 1 unless given. What the inner loss trains besides the model it has once for each dimension.

    Use it around any other loss, if vectors will be stored shorter than the model makes them.

    >>> a, p = torch.tensor([[1.0, 0.0], [1.0, 5.0]]), torch.tensor([[1.0, 0.0], [1.0, 5.0]])
    >>> loss = Matryoshka(InfoNCE(), dimensions=(2, 1))
    >>> round(loss.loss([a, p], None, nn.ModuleDict()).item(), 4)     # one number does not tell them apart: log 2
    0.6931
    """

    inner: VectorLoss
    dimensions: tuple[int, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.dimensions or min(self.dimensions) < 1 or len(set(self.dimensions)) < len(self.dimensions):
            raise ConfigError(f"dimensions={self.dimensions} must be one or more, different, and each at least 1")
        if self.weights is not None:
            if len(self.weights) != len(self.dimensions):
                raise ConfigError(f"weights={self.weights} must be {len(self.dimensions)}, one for each dimension")
            for weight in self.weights:
                _positive("weights", weight)

    @property
    def inputs(self) -> Inputs:
        """Those of the inner loss."""
        return self.inner.inputs

    def modules(self, width: int) -> nn.ModuleDict:
        """Those of the inner loss for each dimension."""
        if max(self.dimensions) > width:
            raise ConfigError(f"dimensions={self.dimensions} must be at most {width}, the vectors' width")
        made = {str(dimension): self.inner.modules(dimension) for dimension in self.dimensions}
        return nn.ModuleDict({name: modules for name, modules in made.items() if len(modules)})

    def loss(self, columns: Sequence[Vectors], values: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `VectorLoss.loss`."""
        total = states_of(columns[0]).new_zeros(())
        for dimension, weight in zip(self.dimensions, self.weights or (1.0,) * len(self.dimensions), strict=True):
            name = str(dimension)
            inner = auxiliary[name] if name in auxiliary else nn.ModuleDict()
            assert isinstance(inner, nn.ModuleDict)
            total = total + weight * self.inner.loss([_cut(one, dimension) for one in columns], values, inner)
        return total


def _cut(column: Vectors, dimension: int) -> Vectors:
    """The first numbers of each vector, of length 1."""
    states = states_of(column)
    if dimension > states.shape[-1]:
        raise ConfigError(f"dimension {dimension} must be at most {states.shape[-1]}, the vectors' width")
    return with_states(column, F.normalize(states[:, :dimension], dim=-1))


@dataclass(frozen=True)
class MarginMSE(VectorLoss):
    """How much better the first passage is than each other one, as a teacher says: its scores are real numbers.

        mean over rows and j > 1 of (scale · (s(q, p₁) − s(q, pⱼ)) − (t₁ − tⱼ))²

    `score` is `Dot()`, or `Cosine()` with a scale as large as the teacher's margins are, or `MaxSim()`.

    Use it to distil a cross-encoder into an embedder. The first passage need not be the best.

    >>> q, p, n = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 1.0]])     # margin 1
    >>> MarginMSE().loss([q, p, n], torch.tensor([[7.0, 4.0]]), nn.ModuleDict()).item()     # (1 − 3)²
    4.0
    """

    scale: float = 1.0
    score: Similarity = field(default_factory=Dot)

    inputs = "lists"

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    def loss(self, columns: Sequence[Vectors], values: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `VectorLoss.loss`."""
        ours, theirs = _lists(self, self.score, columns, values)
        ours = ours * self.scale
        return _mean((((ours[:, :1] - ours[:, 1:]) - (theirs[:, :1] - theirs[:, 1:])) ** 2).mean(-1))


@dataclass(frozen=True)
class KL(VectorLoss):
    """Each query's passages, ordered and spaced as a teacher has them.

        mean of Σⱼ Pⱼ log(Pⱼ / Qⱼ)      P = softmax over j of teacher_scale · tⱼ, Q of scale · s(q, pⱼ)

    The teacher's scores are logits; for scores between 0 and 1 take a `teacher_scale` of 10 or so, or P is flat.
    `score` is `Dot()`, or `Cosine()` with a scale of 20 or so, or `MaxSim()`.

    Use it to distil a cross-encoder into an embedder, with several passages a query.

    >>> q, p, n = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 1.0]])     # 3 and 2
    >>> KL().loss([q, p, n], torch.tensor([[8.0, 7.0]]), nn.ModuleDict()).item()
    0.0
    """

    scale: float = 1.0
    score: Similarity = field(default_factory=Dot)
    teacher_scale: float = 1.0

    inputs = "lists"

    def __post_init__(self) -> None:
        _positive("scale", self.scale)
        _positive("teacher_scale", self.teacher_scale)

    def loss(self, columns: Sequence[Vectors], values: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `VectorLoss.loss`."""
        ours, theirs = _lists(self, self.score, columns, values)
        return _mean(_apart(ours * self.scale, theirs * self.teacher_scale))


@dataclass(frozen=True)
class Flops(VectorLoss):
    """SPLADE's: a loss over `lexical` vectors, and a price for words that many texts have, which makes most weights 0.

        inner + query_weight · R(queries) + passage_weight · R(all others)      R = Σ over words (mean over texts)²

    R is over the texts of all processes. The inner loss is mostly `InfoNCE(scale=1.0, score=Dot())`.

    Use it to train sparse vectors: an index of words can search them. Larger weights make them sparser.

    >>> q, p = torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0, 1.0]])
    >>> inner = InfoNCE(scale=1.0, score=Dot())     # 0, for there is nothing but the right passage
    >>> loss = Flops(inner, query_weight=0.1, passage_weight=0.01)
    >>> round(loss.loss([q, p], None, nn.ModuleDict()).item(), 4)     # 0.1 · 4 + 0.01 · (9 + 1)
    0.5
    """

    inner: VectorLoss
    query_weight: float
    passage_weight: float

    def __post_init__(self) -> None:
        for name, weight in (("query_weight", self.query_weight), ("passage_weight", self.passage_weight)):
            if not 0 <= weight < inf:
                raise ConfigError(f"{name}={weight} must be 0 or greater, and finite")

    @property
    def inputs(self) -> Inputs:
        """Those of the inner loss."""
        return self.inner.inputs

    def modules(self, width: int) -> nn.ModuleDict:
        """Those of the inner loss."""
        return self.inner.modules(width)

    def loss(self, columns: Sequence[Vectors], values: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `VectorLoss.loss`."""
        queries, *passages = map(plain, _columns(self, columns, 2, more=True))
        price = self.query_weight * _flops(queries) + self.passage_weight * _flops(torch.cat(passages))
        return self.inner.loss(columns, values, auxiliary) + price


def _flops(weights: Tensor) -> Tensor:
    """(B, V) -> () the sum over words of the squared mean over the texts of all processes."""
    total = of_all(weights.sum(0, keepdim=True)).sum(0)  # (V,)
    count = of_all(weights.new_tensor([len(weights)])).sum()
    return ((total / count) ** 2).sum()


@dataclass(frozen=True)
class Neighbours(VectorLoss):
    """The texts of a batch lying to each other as they do for a teacher: `neighbours`, over those of all processes.

    Use it to distil an embedder into another one, whose vectors may have another width.

    >>> vectors = torch.eye(3)
    >>> Neighbours().loss([vectors], vectors, nn.ModuleDict()).item()
    0.0
    """

    scale: float = 20.0

    inputs = "vectors"

    def __post_init__(self) -> None:
        _positive("scale", self.scale)

    def loss(self, columns: Sequence[Vectors], values: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `VectorLoss.loss`; values are the teacher's vectors (B, D')."""
        (ours,) = map(plain, _columns(self, columns, 1))
        if values is None or values.ndim != 2 or len(values) != len(ours):
            has = "none" if values is None else f"of shape {tuple(values.shape)}"
            raise InputError(f"Neighbours needs values of shape ({len(ours)}, a teacher's width); they are {has}")
        return neighbours(of_all(ours), of_all(values), self.scale)


def neighbours(student: Tensor, teacher: Tensor, scale: float = 20.0) -> Tensor:
    """(B, D), (B, D') -> () how far the student's neighbourhoods are from the teacher's.

        mean over i of Σⱼ Pᵢⱼ log(Pᵢⱼ / Qᵢⱼ)      Pᵢ = softmax over j ≠ i of scale · cos(tᵢ, tⱼ), Q the same of s

    >>> neighbours(torch.eye(3), torch.eye(3)[[1, 2, 0]]).item()
    0.0
    """
    ours, theirs = (_without_diagonal(Cosine().table(x, x) * scale) for x in (student, teacher))
    return _mean(_apart(ours, theirs))


def _without_diagonal(table: Tensor) -> Tensor:
    """(B, B) -> (B, B − 1)."""
    count = len(table)
    # Without its first number, a row of B + 1 ends with a number of the diagonal.
    return table.flatten()[1:].view(max(0, count - 1), count + 1)[:, :-1].reshape(count, max(0, count - 1))


# --- the parts of the above


def _positive(name: str, value: float) -> None:
    if not 0 < value < inf:
        raise ConfigError(f"{name}={value} must be greater than 0, and finite")


def _columns(loss: VectorLoss, columns: Sequence[Vectors], count: int, *, more: bool = False) -> Sequence[Vectors]:
    """The columns, as many as there should be and all with as many rows."""
    name = type(loss).__name__
    if len(columns) < count or (len(columns) > count and not more):
        raise InputError(f"{name} takes {count}{' or more' if more else ''} columns; there are {len(columns)}")
    if len({len(column) for column in columns}) > 1:
        raise InputError(f"{name} needs as many rows in each column; there are {[len(c) for c in columns]}")
    return columns


def _values(loss: VectorLoss, values: Tensor | None, *shape: int) -> Tensor:
    """The values, which must be there and of this shape."""
    if values is None or tuple(values.shape) != shape:
        has = "none" if values is None else f"of shape {tuple(values.shape)}"
        raise InputError(f"{type(loss).__name__} needs values of shape {shape}; they are {has}")
    return values


def _within(loss: VectorLoss, values: Tensor, low: float, high: float) -> Tensor:
    """The values, none of which may be outside."""
    outside = values[(values < low) | (values > high)]
    if len(outside):
        raise InputError(f"{type(loss).__name__} needs values from {low} to {high}; one is {outside[0].item():.6g}")
    return values


def _lists(
    loss: VectorLoss, score: Similarity, columns: Sequence[Vectors], values: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(B, k) the student's scores of each row's passages, and the teacher's."""
    queries, *passages = _columns(loss, columns, 3, more=True)
    theirs = _values(loss, values, len(queries), len(passages))
    return torch.stack([score.pairs(queries, one) for one in passages], 1), theirs


def _apart(ours: Tensor, theirs: Tensor) -> Tensor:
    """(B, k) logits, (B, k) logits -> (B,) the divergence of the first ones' distribution from the second ones'."""
    return F.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def _mean(each: Tensor) -> Tensor:
    """The mean, 0 for a process that has no rows in a batch."""
    return each.sum() / max(1, len(each))
