"""Reference implementations of the losses in plain loops, with random data for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bertie.training.embedding.losses import (
    ContrastiveLoss,
    CoSENTLoss,
    CosineSimilarityLoss,
    EmbeddingLoss,
    InfoNCELoss,
    KLDivergenceLoss,
    MarginMSELoss,
    MatryoshkaLoss,
    SimilarityDistillationLoss,
    SoftmaxLoss,
    SpladeLoss,
    TripletLoss,
)
from bertie.training.embedding.similarity_functions import (
    Cosine,
    DotProduct,
    Embeddings,
    MaxSim,
    TokenEmbeddings,
)

ROWS, WIDTH, CLASSES = 8, 6, 3
Reference = Callable[[list[Any], Any, nn.ModuleDict], Tensor]


# --- data


def random_embeddings(count: int, seed: int, rows: int = ROWS, width: int = WIDTH) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=draw, dtype=torch.float64) for _ in range(count)]


def sparse_embeddings(count: int, seed: int) -> list[Tensor]:
    """Like SPLADE embeddings: many entries are 0."""
    return [one.relu().log1p() for one in random_embeddings(count, seed)]


def random_token_embeddings(count: int, seed: int) -> list[TokenEmbeddings]:
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        lengths = torch.randint(1, 6, (ROWS,), generator=draw)
        states = torch.randn(int(lengths.sum()), WIDTH, generator=draw, dtype=torch.float64)
        made.append(TokenEmbeddings(states, pad(lengths.cumsum(0), (1, 0)).int()))
    return made


def random_labels(loss: EmbeddingLoss, columns: int, seed: int) -> Tensor | None:
    draw = torch.Generator().manual_seed(seed)
    if loss.inputs == "classes":
        return torch.randint(CLASSES, (ROWS,), generator=draw)
    if loss.inputs == "scores":
        result = torch.randint(0, 2 if isinstance(loss, ContrastiveLoss) else 4, (ROWS,), generator=draw)
        return result / max(1, int(result.max()))  # with ties
    if loss.inputs == "lists":
        return 3 * torch.randn(ROWS, columns - 1, generator=draw, dtype=torch.float64)
    if loss.inputs == "vectors":
        return torch.randn(ROWS, 2 * WIDTH, generator=draw, dtype=torch.float64)
    return None


def as_leaf(column: Embeddings) -> Embeddings:
    if isinstance(column, TokenEmbeddings):
        return TokenEmbeddings(column.states.detach().clone().requires_grad_(), column.cu_seqlens)
    return column.detach().clone().requires_grad_()


def column_states(column: Embeddings) -> Tensor:
    return column.states if isinstance(column, TokenEmbeddings) else column


def all_parameters(columns: Sequence[Embeddings], auxiliary: nn.ModuleDict) -> list[Tensor]:
    return [*map(column_states, columns), *auxiliary.parameters()]


def gradients(result: Tensor, columns: Sequence[Embeddings], auxiliary: nn.ModuleDict) -> list[Tensor]:
    return list(torch.autograd.grad(result, all_parameters(columns, auxiliary), materialize_grads=True))


def assert_same(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-9) -> None:
    assert len(ours) == len(theirs)
    assert any(one.abs().max() > 1e-4 for one in ours[1:]), "there is nothing to compare"
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance, check_dtype=False)


# --- reference implementations, in loops


def _cos(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / ((a * a).sum().sqrt() * (b * b).sum().sqrt())


def late_interaction(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([max([(x * y).sum() for y in b], key=Tensor.item) for x in a]).sum()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


def average(result: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(result)).sum() / len(result)


def negative_log_likelihood(scores: list[Tensor], right: int) -> Tensor:
    return torch.stack([one.exp() for one in scores]).sum().log() - scores[right]


def _softmax(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
    layer: Any = auxiliary["softmax"]
    each = []
    for u, v, y in zip(*columns, values.tolist(), strict=True):
        x = torch.cat([u, v, torch.stack([abs(i - j) for i, j in zip(u, v, strict=True)])])
        each.append(
            negative_log_likelihood([(w * x).sum() + b for w, b in zip(layer.weight, layer.bias, strict=True)], y)
        )
    return average(each)


def _regression(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
    return average([(_cos(a, b) - y) ** 2 for a, b, y in zip(*columns, values, strict=True)])


def _cosent(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
    result = [_cos(a, b) for a, b in zip(*columns, strict=True)]
    total = torch.ones((), dtype=torch.float64)
    for i, ours in enumerate(values.tolist()):
        for j, other in enumerate(values.tolist()):
            if ours > other:
                total = total + (20 * (result[j] - result[i])).exp()
    return total.log()


def _contrastive(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
    each = []
    for a, b, y in zip(*columns, values.tolist(), strict=True):
        far = 1 - _cos(a, b)
        each.append(far**2 / 2 if y else (torch.zeros(()) if far > 0.5 else (0.5 - far) ** 2 / 2))
    return average(each)


def _triplet(distance: Callable[[Tensor, Tensor], Tensor], margin: float) -> Reference:
    def reference(columns: list[Any], values: None, auxiliary: nn.ModuleDict) -> Tensor:
        each = [distance(a, p) - distance(a, n) + margin for a, p, n in zip(*columns, strict=True)]
        return average([one if one > 0 else one * 0 for one in each])

    return reference


def _infonce(
    score: Callable[[Tensor, Tensor], Tensor] = _cos, scale: float = 20.0, symmetric: bool = False
) -> Reference:
    def reference(columns: list[Any], values: None, auxiliary: nn.ModuleDict) -> Tensor:
        queries, own, *_ = columns
        candidates = [passage for column in columns[1:] for passage in column]
        each = [negative_log_likelihood([scale * score(q, c) for c in candidates], i) for i, q in enumerate(queries)]
        if symmetric:
            each += [negative_log_likelihood([scale * score(q, p) for q in queries], i) for i, p in enumerate(own)]
        return average(each)

    return reference


def _matryoshka(inner: Reference, weights: dict[int, float]) -> Reference:
    def reference(columns: list[Any], values: Any, auxiliary: nn.ModuleDict) -> Tensor:
        result = []
        for dimension, weight in weights.items():
            cut = [[row[:dimension] / (row[:dimension] ** 2).sum().sqrt() for row in column] for column in columns]
            result.append(weight * inner(cut, values, dict(auxiliary.items()).get(str(dimension), auxiliary)))  # type: ignore[arg-type]
        return torch.stack(result).sum()

    return reference


def _margins(scale: float, score: Callable[[Tensor, Tensor], Tensor]) -> Reference:
    def reference(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
        each = []
        for (q, first, *others), expected in zip(zip(*columns, strict=True), values, strict=True):
            for other, score_t in zip(others, expected[1:], strict=True):
                each.append((scale * (score(q, first) - score(q, other)) - (expected[0] - score_t)) ** 2)
        return average(each)

    return reference


def _divergence(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for j in range(len(ours)):
        p, q = -negative_log_likelihood(theirs, j), -negative_log_likelihood(ours, j)
        total = total + p.exp() * (p - q)
    return total


def _kl(scale: float, score: Callable[[Tensor, Tensor], Tensor], teacher_scale: float = 1.0) -> Reference:
    def reference(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
        rows = zip(zip(*columns, strict=True), values, strict=True)
        return average(
            [_divergence([scale * score(q, p) for p in ps], list(teacher_scale * t)) for (q, *ps), t in rows]
        )

    return reference


def _flops(columns: list[Any], values: None, auxiliary: nn.ModuleDict) -> Tensor:
    queries, *others = columns
    passages = [passage for column in others for passage in column]
    total = _infonce(_dot, 1.0)(columns, values, auxiliary)
    for texts, weight in ((list(queries), 0.3), (passages, 0.1)):
        for word in range(WIDTH):
            total = total + weight * (torch.stack([text[word] for text in texts]).sum() / len(texts)) ** 2
    return total


def _similarity_distillation(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
    (ours,) = columns
    each = []
    for i in range(len(ours)):
        others = [j for j in range(len(ours)) if j != i]
        each.append(
            _divergence([5 * _cos(ours[i], ours[j]) for j in others], [5 * _cos(values[i], values[j]) for j in others])
        )
    return average(each)


def _squared(a: Tensor, b: Tensor) -> Tensor:
    return ((a - b) ** 2).sum()


SPARSE = SpladeLoss(InfoNCELoss(scale=1.0, score=DotProduct()), query_weight=0.3, passage_weight=0.1)
# name: the loss, how many columns, of which kind, and the same in loops
CASES: dict[str, tuple[EmbeddingLoss, int, Callable[[int, int], Sequence[Embeddings]], Reference]] = {
    "softmax": (SoftmaxLoss(CLASSES), 2, random_embeddings, _softmax),
    "cosine": (CosineSimilarityLoss(), 2, random_embeddings, _regression),
    "cosent": (CoSENTLoss(), 2, random_embeddings, _cosent),
    "contrastive": (ContrastiveLoss(0.5), 2, random_embeddings, _contrastive),
    "triplet squared": (TripletLoss(), 3, random_embeddings, _triplet(_squared, 1.0)),
    "triplet euclidean": (
        TripletLoss(0.7, "euclidean"),
        3,
        random_embeddings,
        _triplet(lambda a, b: _squared(a, b).sqrt(), 0.7),
    ),
    "triplet cosine": (TripletLoss(0.2, "cosine"), 3, random_embeddings, _triplet(lambda a, b: 1 - _cos(a, b), 0.2)),
    "infonce": (InfoNCELoss(), 2, random_embeddings, _infonce()),
    "infonce hard": (InfoNCELoss(scale=5.0), 4, random_embeddings, _infonce(scale=5.0)),
    "infonce symmetric": (InfoNCELoss(symmetric=True), 3, random_embeddings, _infonce(symmetric=True)),
    "infonce late": (
        InfoNCELoss(0.5, True, MaxSim()),
        3,
        random_token_embeddings,
        _infonce(late_interaction, 0.5, True),
    ),
    "matryoshka": (
        MatryoshkaLoss(InfoNCELoss(), (6, 3, 2), (1.0, 0.5, 0.25)),
        3,
        random_embeddings,
        _matryoshka(_infonce(), {6: 1.0, 3: 0.5, 2: 0.25}),
    ),
    "matryoshka softmax": (
        MatryoshkaLoss(SoftmaxLoss(CLASSES), (2, 6)),
        2,
        random_embeddings,
        _matryoshka(_softmax, {2: 1.0, 6: 1.0}),
    ),
    "margin": (MarginMSELoss(), 3, random_embeddings, _margins(1.0, _dot)),
    "margin cosine": (MarginMSELoss(4.0, Cosine()), 5, random_embeddings, _margins(4.0, _cos)),
    "margin late": (MarginMSELoss(score=MaxSim()), 3, random_token_embeddings, _margins(1.0, late_interaction)),
    "kl": (KLDivergenceLoss(), 3, random_embeddings, _kl(1.0, _dot)),
    "kl cosine": (KLDivergenceLoss(20.0, Cosine(), 0.5), 5, random_embeddings, _kl(20.0, _cos, 0.5)),
    "kl late": (KLDivergenceLoss(score=MaxSim()), 4, random_token_embeddings, _kl(1.0, late_interaction)),
    "flops": (SPARSE, 3, sparse_embeddings, _flops),
    "neighbours": (SimilarityDistillationLoss(5.0), 1, random_embeddings, _similarity_distillation),
}


def make_case(name: str, seed: int) -> tuple[EmbeddingLoss, list[Embeddings], Tensor | None, nn.ModuleDict]:
    loss, count, made, _ = CASES[name]
    auxiliary = loss.modules(WIDTH).double()
    return loss, [as_leaf(one) for one in made(count, seed)], random_labels(loss, count, seed), auxiliary
