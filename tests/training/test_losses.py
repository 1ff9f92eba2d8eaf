"""Each loss over vectors: against loops in plain sight, against sentence-transformers, and over two processes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from bertie.errors import ConfigError, InputError
from bertie.nn.pooling import splade_pool
from bertie.text.batch import Batch
from bertie.training.embedding import similarity_functions as similarity
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
    infonce,
    similarity_distillation,
)
from bertie.training.embedding.similarity_functions import (
    Cosine,
    DotProduct,
    Embeddings,
    MaxSim,
    TokenEmbeddings,
    gather_across_ranks,
    maxsim,
)

ROWS, WIDTH, CLASSES = 8, 6, 3
Reference = Callable[[list[Any], Any, nn.ModuleDict], Tensor]


# --- data


def _vectors(count: int, seed: int, rows: int = ROWS, width: int = WIDTH) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=draw, dtype=torch.float64) for _ in range(count)]


def _words(count: int, seed: int) -> list[Tensor]:
    """Like SPLADE embeddings: many entries are 0."""
    return [one.relu().log1p() for one in _vectors(count, seed)]


def _token_vectors(count: int, seed: int) -> list[TokenEmbeddings]:
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        lengths = torch.randint(1, 6, (ROWS,), generator=draw)
        states = torch.randn(int(lengths.sum()), WIDTH, generator=draw, dtype=torch.float64)
        made.append(TokenEmbeddings(states, pad(lengths.cumsum(0), (1, 0)).int()))
    return made


def _values(loss: EmbeddingLoss, columns: int, seed: int) -> Tensor | None:
    draw = torch.Generator().manual_seed(seed)
    if loss.inputs == "classes":
        return torch.randint(CLASSES, (ROWS,), generator=draw)
    if loss.inputs == "scores":
        found = torch.randint(0, 2 if isinstance(loss, ContrastiveLoss) else 4, (ROWS,), generator=draw)
        return found / max(1, int(found.max()))  # with ties
    if loss.inputs == "lists":
        return 3 * torch.randn(ROWS, columns - 1, generator=draw, dtype=torch.float64)
    if loss.inputs == "vectors":
        return torch.randn(ROWS, 2 * WIDTH, generator=draw, dtype=torch.float64)
    return None


def _leaf(column: Embeddings) -> Embeddings:
    if isinstance(column, TokenEmbeddings):
        return TokenEmbeddings(column.states.detach().clone().requires_grad_(), column.cu_seqlens)
    return column.detach().clone().requires_grad_()


def _state(column: Embeddings) -> Tensor:
    return column.states if isinstance(column, TokenEmbeddings) else column


def _parameters(columns: Sequence[Embeddings], auxiliary: nn.ModuleDict) -> list[Tensor]:
    return [*map(_state, columns), *auxiliary.parameters()]


def _gradients(found: Tensor, columns: Sequence[Embeddings], auxiliary: nn.ModuleDict) -> list[Tensor]:
    return list(torch.autograd.grad(found, _parameters(columns, auxiliary), materialize_grads=True))


def _assert_same(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-9) -> None:
    assert len(ours) == len(theirs)
    assert any(one.abs().max() > 1e-4 for one in ours[1:]), "there is nothing to compare"
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance, check_dtype=False)


# --- the same in loops, number by number


def _cos(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / ((a * a).sum().sqrt() * (b * b).sum().sqrt())


def _late(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([max([(x * y).sum() for y in b], key=Tensor.item) for x in a]).sum()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum()


def _average(found: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(found)).sum() / len(found)


def _surprise(scores: list[Tensor], right: int) -> Tensor:
    return torch.stack([one.exp() for one in scores]).sum().log() - scores[right]


def _softmax(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
    layer: Any = auxiliary["softmax"]
    each = []
    for u, v, y in zip(*columns, values.tolist(), strict=True):
        x = torch.cat([u, v, torch.stack([abs(i - j) for i, j in zip(u, v, strict=True)])])
        each.append(_surprise([(w * x).sum() + b for w, b in zip(layer.weight, layer.bias, strict=True)], y))
    return _average(each)


def _regression(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
    return _average([(_cos(a, b) - y) ** 2 for a, b, y in zip(*columns, values, strict=True)])


def _cosent(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
    found = [_cos(a, b) for a, b in zip(*columns, strict=True)]
    total = torch.ones((), dtype=torch.float64)
    for i, ours in enumerate(values.tolist()):
        for j, other in enumerate(values.tolist()):
            if ours > other:
                total = total + (20 * (found[j] - found[i])).exp()
    return total.log()


def _contrastive(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
    each = []
    for a, b, y in zip(*columns, values.tolist(), strict=True):
        far = 1 - _cos(a, b)
        each.append(far**2 / 2 if y else (torch.zeros(()) if far > 0.5 else (0.5 - far) ** 2 / 2))
    return _average(each)


def _triplet(distance: Callable[[Tensor, Tensor], Tensor], margin: float) -> Reference:
    def reference(columns: list[Any], values: None, auxiliary: nn.ModuleDict) -> Tensor:
        each = [distance(a, p) - distance(a, n) + margin for a, p, n in zip(*columns, strict=True)]
        return _average([one if one > 0 else one * 0 for one in each])

    return reference


def _infonce(
    score: Callable[[Tensor, Tensor], Tensor] = _cos, scale: float = 20.0, symmetric: bool = False
) -> Reference:
    def reference(columns: list[Any], values: None, auxiliary: nn.ModuleDict) -> Tensor:
        queries, own, *_ = columns
        candidates = [passage for column in columns[1:] for passage in column]
        each = [_surprise([scale * score(q, c) for c in candidates], i) for i, q in enumerate(queries)]
        if symmetric:
            each += [_surprise([scale * score(q, p) for q in queries], i) for i, p in enumerate(own)]
        return _average(each)

    return reference


def _matryoshka(inner: Reference, weights: dict[int, float]) -> Reference:
    def reference(columns: list[Any], values: Any, auxiliary: nn.ModuleDict) -> Tensor:
        found = []
        for dimension, weight in weights.items():
            cut = [[row[:dimension] / (row[:dimension] ** 2).sum().sqrt() for row in column] for column in columns]
            found.append(weight * inner(cut, values, dict(auxiliary.items()).get(str(dimension), auxiliary)))  # type: ignore[arg-type]
        return torch.stack(found).sum()

    return reference


def _margins(scale: float, score: Callable[[Tensor, Tensor], Tensor]) -> Reference:
    def reference(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
        each = []
        for (q, first, *others), wanted in zip(zip(*columns, strict=True), values, strict=True):
            for other, score_t in zip(others, wanted[1:], strict=True):
                each.append((scale * (score(q, first) - score(q, other)) - (wanted[0] - score_t)) ** 2)
        return _average(each)

    return reference


def _divergence(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for j in range(len(ours)):
        p, q = -_surprise(theirs, j), -_surprise(ours, j)
        total = total + p.exp() * (p - q)
    return total


def _kl(scale: float, score: Callable[[Tensor, Tensor], Tensor], teacher_scale: float = 1.0) -> Reference:
    def reference(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
        rows = zip(zip(*columns, strict=True), values, strict=True)
        return _average(
            [_divergence([scale * score(q, p) for p in ps], list(teacher_scale * wanted)) for (q, *ps), wanted in rows]
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


def _neighbours(columns: list[Any], values: Tensor, auxiliary: nn.ModuleDict) -> Tensor:
    (ours,) = columns
    each = []
    for i in range(len(ours)):
        others = [j for j in range(len(ours)) if j != i]
        each.append(
            _divergence([5 * _cos(ours[i], ours[j]) for j in others], [5 * _cos(values[i], values[j]) for j in others])
        )
    return _average(each)


def _squared(a: Tensor, b: Tensor) -> Tensor:
    return ((a - b) ** 2).sum()


SPARSE = SpladeLoss(InfoNCELoss(scale=1.0, score=DotProduct()), query_weight=0.3, passage_weight=0.1)
# name: the loss, how many columns, of which kind, and the same in loops
CASES: dict[str, tuple[EmbeddingLoss, int, Callable[[int, int], Sequence[Embeddings]], Reference]] = {
    "softmax": (SoftmaxLoss(CLASSES), 2, _vectors, _softmax),
    "cosine": (CosineSimilarityLoss(), 2, _vectors, _regression),
    "cosent": (CoSENTLoss(), 2, _vectors, _cosent),
    "contrastive": (ContrastiveLoss(0.5), 2, _vectors, _contrastive),
    "triplet squared": (TripletLoss(), 3, _vectors, _triplet(_squared, 1.0)),
    "triplet euclidean": (
        TripletLoss(0.7, "euclidean"),
        3,
        _vectors,
        _triplet(lambda a, b: _squared(a, b).sqrt(), 0.7),
    ),
    "triplet cosine": (TripletLoss(0.2, "cosine"), 3, _vectors, _triplet(lambda a, b: 1 - _cos(a, b), 0.2)),
    "infonce": (InfoNCELoss(), 2, _vectors, _infonce()),
    "infonce hard": (InfoNCELoss(scale=5.0), 4, _vectors, _infonce(scale=5.0)),
    "infonce symmetric": (InfoNCELoss(symmetric=True), 3, _vectors, _infonce(symmetric=True)),
    "infonce late": (InfoNCELoss(0.5, True, MaxSim()), 3, _token_vectors, _infonce(_late, 0.5, True)),
    "matryoshka": (
        MatryoshkaLoss(InfoNCELoss(), (6, 3, 2), (1.0, 0.5, 0.25)),
        3,
        _vectors,
        _matryoshka(_infonce(), {6: 1.0, 3: 0.5, 2: 0.25}),
    ),
    "matryoshka softmax": (
        MatryoshkaLoss(SoftmaxLoss(CLASSES), (2, 6)),
        2,
        _vectors,
        _matryoshka(_softmax, {2: 1.0, 6: 1.0}),
    ),
    "margin": (MarginMSELoss(), 3, _vectors, _margins(1.0, _dot)),
    "margin cosine": (MarginMSELoss(4.0, Cosine()), 5, _vectors, _margins(4.0, _cos)),
    "margin late": (MarginMSELoss(score=MaxSim()), 3, _token_vectors, _margins(1.0, _late)),
    "kl": (KLDivergenceLoss(), 3, _vectors, _kl(1.0, _dot)),
    "kl cosine": (KLDivergenceLoss(20.0, Cosine(), 0.5), 5, _vectors, _kl(20.0, _cos, 0.5)),
    "kl late": (KLDivergenceLoss(score=MaxSim()), 4, _token_vectors, _kl(1.0, _late)),
    "flops": (SPARSE, 3, _words, _flops),
    "neighbours": (SimilarityDistillationLoss(5.0), 1, _vectors, _neighbours),
}


def _case(name: str, seed: int) -> tuple[EmbeddingLoss, list[Embeddings], Tensor | None, nn.ModuleDict]:
    loss, count, made, _ = CASES[name]
    auxiliary = loss.modules(WIDTH).double()
    return loss, [_leaf(one) for one in made(count, seed)], _values(loss, count, seed), auxiliary


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_as_in_loops(name: str, seed: int) -> None:
    loss, columns, values, auxiliary = _case(name, seed)
    found = loss.loss(columns, values, auxiliary)
    assert found.shape == ()
    texts: list[Any] = [one.texts() if isinstance(one, TokenEmbeddings) else one for one in columns]
    wanted = CASES[name][3](texts, values, auxiliary)
    _assert_same(
        [found, *_gradients(found, columns, auxiliary)],
        [wanted, *_gradients(wanted, columns, auxiliary)],
        tolerance=1e-8,
    )


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("infonce")])
def test_a_table_in_parts_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, columns, values, auxiliary = _case(name, 3)
    whole = loss.loss(columns, values, auxiliary)
    kind = MaxSim if "late" in name else Cosine
    table, made = kind.matrix, []

    def watched(self: Any, a: Embeddings, b: Embeddings) -> Tensor:
        made.append(table(self, a, b))
        return made[-1]

    monkeypatch.setattr(infonce, "BLOCK", 30)
    monkeypatch.setattr(kind, "matrix", watched)
    parts = loss.loss(columns, values, auxiliary)
    assert len(made) >= 3
    assert all(one.numel() <= ROWS * ROWS * (len(columns) - 1) / 2 for one in made)
    _assert_same([whole, *_gradients(whole, columns, auxiliary)], [parts, *_gradients(parts, columns, auxiliary)])


# --- sentence-transformers


class Given(nn.Module):
    """A model of sentence-transformers that has the vectors already."""

    device = torch.device("cpu")

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """A new dict, for MatryoshkaLoss writes into it."""
        return {"sentence_embedding": features["vectors"]}

    def get_embedding_dimension(self) -> int:
        """As wide as all vectors here."""
        return WIDTH


def _theirs(name: str, auxiliary: nn.ModuleDict) -> nn.Module:
    from sentence_transformers import util
    from sentence_transformers.sentence_transformer import losses as st
    from sentence_transformers.sparse_encoder import losses as sparse

    model: Any = Given()
    if name == "softmax":
        loss: nn.Module = st.SoftmaxLoss(model, WIDTH, CLASSES).double()
        loss.classifier = auxiliary["softmax"]
        return loss
    ranking = st.MultipleNegativesRankingLoss
    made: dict[str, Callable[[], nn.Module]] = {
        "cosine": lambda: st.CosineSimilarityLoss(model),
        "cosent": lambda: st.CoSENTLoss(model),
        "contrastive": lambda: st.ContrastiveLoss(model, margin=0.5),
        "triplet euclidean": lambda: st.TripletLoss(model, triplet_margin=0.7),
        "triplet cosine": lambda: st.TripletLoss(
            model, distance_metric=st.TripletDistanceMetric.COSINE, triplet_margin=0.2
        ),
        "infonce": lambda: ranking(model),
        "infonce hard": lambda: ranking(model, scale=5.0),
        "infonce symmetric": lambda: st.MultipleNegativesSymmetricRankingLoss(model),
        "matryoshka": lambda: st.MatryoshkaLoss(model, ranking(model), [6, 3, 2], [1.0, 0.5, 0.25]),
        "margin": lambda: st.MarginMSELoss(model),
        "kl": lambda: st.DistillKLDivLoss(model),
        "kl cosine": lambda: st.DistillKLDivLoss(
            model, similarity_fct=util.pairwise_cos_sim, student_temperature=1 / 20, teacher_temperature=2.0
        ),
        "flops": lambda: sparse.SpladeLoss(model, sparse.SparseMultipleNegativesRankingLoss(model), 0.1, 0.3),
    }
    return made[name]()


PEERS = [
    "softmax",
    "cosine",
    "cosent",
    "contrastive",
    "triplet euclidean",
    "triplet cosine",
    "infonce",
    "infonce hard",
    "infonce symmetric",
    "matryoshka",
    "margin",
    "kl",
    "kl cosine",
    "flops",
]


@pytest.mark.parametrize("name", PEERS)
def test_as_in_sentence_transformers(name: str) -> None:
    pytest.importorskip("sentence_transformers")
    loss, columns, values, auxiliary = _case(name, 5)
    if values is not None and values.is_floating_point():
        values = values.float()  # they take scores for nothing else
    found = loss.loss(columns, values, auxiliary)
    theirs = _theirs(name, auxiliary)([{"vectors": one} for one in columns], values)
    if isinstance(theirs, dict):
        theirs = torch.stack(list(theirs.values())).sum()
    if name == "kl cosine":
        theirs = theirs * 20**2  # they multiply by the square of the student's temperature
    _assert_same(
        [found, *_gradients(found, columns, auxiliary)],
        [theirs, *_gradients(theirs, columns, auxiliary)],
        tolerance=1e-6,
    )


def test_late_interaction_as_in_sentence_transformers() -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import util

    queries, passages = _token_vectors(2, 7)
    theirs = util.maxsim(list(queries.texts()), list(passages.texts()))
    torch.testing.assert_close(maxsim(queries, passages), theirs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(MaxSim().pairwise(queries, passages), theirs.diag(), atol=1e-6, rtol=1e-6)


def test_splade_pool_as_in_sentence_transformers() -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    batch = Batch.from_ids([[1, 2, 3], [4], [5, 6]])
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = splade_pool(logits, batch)
    padded = nn.utils.rnn.pad_sequence(list(torch.split(logits, list(batch.lengths))), batch_first=True)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    theirs = SpladePooling()({"token_embeddings": padded, "attention_mask": mask})["sentence_embedding"]
    weights = torch.rand(3, 9)
    _assert_same(
        [found, *torch.autograd.grad((found * weights).sum(), logits)],
        [theirs, *torch.autograd.grad((theirs * weights).sum(), logits)],
        tolerance=1e-6,
    )


# --- two processes

RANKS = 2
SHARES = {"infonce": 8, "infonce late": 8}  # rows of the first process, where not 3 of 8


class Net(nn.Module):
    """Vectors by a linear layer, and the loss behind it, weighted as the trainer does."""

    def __init__(self, name: str, rows: slice) -> None:
        super().__init__()
        self.cut = rows
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        nn.init.eye_(self.layer.weight)
        nn.init.constant_(self.layer.bias, 0.1)
        self.auxiliary = CASES[name][0].modules(WIDTH).double()

    def forward(self, name: str) -> Tensor:
        """-> ()."""
        loss, columns, values, _ = _case(name, 11)
        mine = [similarity.slice_rows(one, self.cut.start, self.cut.stop) for one in columns]
        moved = [
            TokenEmbeddings(self.layer(one.states), one.cu_seqlens)
            if isinstance(one, TokenEmbeddings)
            else self.layer(one)
            for one in mine
        ]
        count = self.cut.stop - self.cut.start
        wanted = None if values is None else values[self.cut]
        world = RANKS if dist.is_initialized() else 1
        found: Tensor = loss.loss(moved, wanted, self.auxiliary) * (count / ROWS * world)
        return found


def _alone(name: str) -> list[Tensor]:
    net = Net(name, slice(0, ROWS))
    found = net(name)
    found.backward()
    return [found.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def _process(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "meet").as_uri(), rank=rank, world_size=RANKS)
    found = {}
    for name in CASES:
        first = SHARES.get(name, 3)
        net = Net(name, slice(0, first) if rank == 0 else slice(first, ROWS))
        loss = net(name)
        loss.backward()
        found[name] = [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
        for tensor in found[name]:  # the mean over processes, which DistributedDataParallel takes
            dist.all_reduce(tensor)
            tensor /= RANKS
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    """What two processes found."""
    folder, root = tmp_path_factory.mktemp("ranks"), Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.test_losses", str(folder), str(rank)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(name: str, apart: list[dict[str, list[Tensor]]]) -> None:
    for found in apart:
        _assert_same(found[name], _alone(name))


def test_a_process_alone_has_its_own() -> None:
    column = torch.ones(2, 3)
    assert gather_across_ranks(column) == (column, 0)


def test_negatives_come_from_where_they_are_gathered() -> None:
    queries, passages = _vectors(2, 0)
    others = _vectors(1, 1)[0]

    def gather(column: Embeddings) -> tuple[Embeddings, int]:
        return torch.cat([others, _state(column)]), len(others)

    found = InfoNCELoss(gather=gather).loss([queries, passages], None, nn.ModuleDict())
    wanted = _infonce()([queries, torch.cat([passages, others])], None, nn.ModuleDict())
    torch.testing.assert_close(found, wanted)


# --- edges


def test_some_rows_of_tokens() -> None:
    tokens = _token_vectors(1, 0)[0]
    some = similarity.slice_rows(similarity.slice_rows(tokens, 1, 7), 2, 5)
    assert isinstance(some, TokenEmbeddings)
    assert some.cu_seqlens[0] == 0
    for ours, theirs in zip(some.texts(), tokens.texts()[3:6], strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_one_row_and_equal_vectors_have_finite_gradients(name: str) -> None:
    loss, count, made, _ = CASES[name]
    auxiliary = loss.modules(WIDTH).double()
    one = similarity.slice_rows(made(1, 0)[0], 0, 1)
    columns = [_leaf(one) for _ in range(count)]
    values = _values(loss, count, 0)
    found = loss.loss(columns, None if values is None else values[:1], auxiliary)
    for tensor in (found, *_gradients(found, columns, auxiliary)):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_large_vectors_have_finite_losses(name: str) -> None:
    loss, count, made, _ = CASES[name]
    auxiliary = loss.modules(WIDTH)
    scaled: list[Embeddings] = []
    for one in made(count, 0):
        states = _state(one).float() * 1e4
        scaled.append(_leaf(TokenEmbeddings(states, one.cu_seqlens) if isinstance(one, TokenEmbeddings) else states))
    values = _values(loss, count, 0)
    if values is not None and values.is_floating_point():
        values = values.float()
    found = loss.loss(scaled, values, auxiliary)
    for tensor in (found, *_gradients(found, scaled, auxiliary)):
        assert tensor.isfinite().all()


def test_scores_of_any_scale_make_the_same_cosent() -> None:
    columns = _vectors(2, 0)
    scores = torch.tensor([0, 1, 2, 3, 3, 2, 1, 5.0])
    found = [CoSENTLoss().loss(columns, one, nn.ModuleDict()) for one in (scores, 100 * scores - 7, scores.exp())]
    assert found[0] == found[1] == found[2]
    assert CoSENTLoss().loss(columns, torch.ones(ROWS), nn.ModuleDict()) == 0


def test_neighbours_do_not_see_a_turn_nor_the_width() -> None:
    teacher = _vectors(1, 0)[0]
    turn = torch.linalg.qr(_vectors(1, 1, WIDTH)[0])[0]
    assert similarity_distillation(pad(3 * teacher @ turn, (0, 2)), teacher).abs() < 1e-12
    assert similarity_distillation(teacher[torch.arange(ROWS).flip(0)], teacher) > 0.1


def test_softmax_begins_the_same_each_time() -> None:
    torch.manual_seed(5)
    first = SoftmaxLoss(2).modules(4).state_dict()
    torch.manual_seed(6)
    for name, tensor in SoftmaxLoss(2).modules(4).state_dict().items():
        torch.testing.assert_close(tensor, first[name], atol=0, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_modules_are_there_for_softmax_alone(name: str) -> None:
    assert bool(list(CASES[name][0].modules(WIDTH).parameters())) == ("softmax" in name)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: InfoNCELoss(scale=0), "scale=0 must be greater than 0"),
        (lambda: CoSENTLoss(scale=-1), "scale=-1"),
        (lambda: CoSENTLoss(scale=math.nan), "scale=nan"),
        (lambda: TripletLoss(margin=math.inf), "margin=inf"),
        (
            lambda: TripletLoss(distance="manhattan"),  # type: ignore[arg-type]
            "distance='manhattan' must be squared, euclidean or cosine",
        ),
        (lambda: ContrastiveLoss(margin=0), "margin=0"),
        (lambda: SoftmaxLoss(classes=1), "classes=1 must be at least 2"),
        (lambda: MarginMSELoss(scale=0), "scale=0"),
        (lambda: KLDivergenceLoss(teacher_scale=0), "teacher_scale=0"),
        (lambda: SimilarityDistillationLoss(0), "scale=0"),
        (lambda: SpladeLoss(InfoNCELoss(), -1.0, 0.0), "query_weight=-1.0 must be 0 or greater"),
        (lambda: MatryoshkaLoss(InfoNCELoss(), ()), r"dimensions=\(\) must be one or more"),
        (lambda: MatryoshkaLoss(InfoNCELoss(), (4, 4)), r"dimensions=\(4, 4\)"),
        (lambda: MatryoshkaLoss(InfoNCELoss(), (4, 2), (1.0,)), r"weights=\(1.0,\) must be 2"),
        (lambda: MatryoshkaLoss(InfoNCELoss(), (4, 2), (1.0, 0.0)), "weights=0.0"),
        (lambda: MatryoshkaLoss(InfoNCELoss(), (8, 4)).modules(6), r"dimensions=\(8, 4\) must be at most 6"),
        (
            lambda: MatryoshkaLoss(InfoNCELoss(), (8,)).loss(_vectors(2, 0), None, nn.ModuleDict()),
            "dimension 8 must be at most 6",
        ),
    ],
)
def test_wrong_settings(made: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made()


def _empty() -> TokenEmbeddings:
    return TokenEmbeddings(torch.ones(3, WIDTH), torch.tensor([0, 2, 2, 3]))


@pytest.mark.parametrize(
    ("loss", "columns", "values", "said"),
    [
        (InfoNCELoss(), _vectors(1, 0), None, "InfoNCELoss takes 2 or more columns; there are 1"),
        (TripletLoss(), _vectors(2, 0), None, "TripletLoss takes 3 columns; there are 2"),
        (TripletLoss(), _vectors(4, 0), None, "TripletLoss takes 3 columns; there are 4"),
        (KLDivergenceLoss(), _vectors(2, 0), torch.ones(ROWS, 1), "KLDivergenceLoss takes 3 or more columns"),
        (InfoNCELoss(), [torch.ones(2, 4), torch.ones(3, 4)], None, r"as many rows in each column; there are \[2, 3\]"),
        (CoSENTLoss(), _vectors(2, 0), None, r"CoSENTLoss needs labels of shape \(8,\); they are none"),
        (CoSENTLoss(), _vectors(2, 0), torch.ones(ROWS, 1), r"they are of shape \(8, 1\)"),
        (MarginMSELoss(), _vectors(3, 0), torch.ones(ROWS), r"needs labels of shape \(8, 2\)"),
        (CosineSimilarityLoss(), _vectors(2, 0), 5 * torch.ones(ROWS), "needs labels from -1 to 1; one is 5"),
        (ContrastiveLoss(), _vectors(2, 0), -torch.ones(ROWS), "ContrastiveLoss needs labels from 0 to 1; one is -1"),
        (SoftmaxLoss(3), _vectors(2, 0), torch.full((ROWS,), 3), "SoftmaxLoss needs labels from 0 to 2; one is 3"),
        (
            SimilarityDistillationLoss(),
            _vectors(1, 0),
            torch.ones(ROWS),
            r"shape \(8, teacher's width\); they are of shape \(8,\)",
        ),
        (InfoNCELoss(), _token_vectors(2, 0), None, "not TokenEmbeddings"),
        (InfoNCELoss(score=MaxSim()), _vectors(2, 0), None, "MaxSim takes TokenEmbeddings"),
        (InfoNCELoss(score=MaxSim()), [_empty(), _empty()], None, "text 1 has no tokens"),
    ],
)
def test_wrong_input(loss: EmbeddingLoss, columns: Sequence[Embeddings], values: Tensor | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        loss.loss(columns, values, nn.ModuleDict())


def test_logits_of_another_batch() -> None:
    with pytest.raises(InputError, match=r"shape \(3, 5\); the batch needs \(2, V\)"):
        splade_pool(torch.ones(3, 5), Batch.from_ids([[1], [2]]))


if __name__ == "__main__":
    _process(Path(sys.argv[1]), int(sys.argv[2]))
