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
    SupervisedContrastiveLoss,
    TripletLoss,
    infonce,
    similarity_distillation,
)
from bertie.training.embedding.similarity_functions import (
    Cosine,
    Embeddings,
    MaxSim,
    TokenEmbeddings,
    gather_across_ranks,
    maxsim,
)
from tests.training.embedding.loss_references import (
    CASES,
    CLASSES,
    ROWS,
    WIDTH,
    _infonce,
    as_leaf,
    assert_same,
    column_states,
    gradients,
    make_case,
    random_embeddings,
    random_labels,
    random_token_embeddings,
)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_as_in_loops(name: str, seed: int) -> None:
    loss, columns, values, auxiliary = make_case(name, seed)
    result = loss.loss(columns, values, auxiliary)
    assert result.shape == ()
    texts: list[Any] = [one.texts() if isinstance(one, TokenEmbeddings) else one for one in columns]
    expected = CASES[name][3](texts, values, auxiliary)
    assert_same(
        [result, *gradients(result, columns, auxiliary)],
        [expected, *gradients(expected, columns, auxiliary)],
        tolerance=1e-8,
    )


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("infonce")])
def test_a_table_in_parts_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, columns, values, auxiliary = make_case(name, 3)
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
    assert_same([whole, *gradients(whole, columns, auxiliary)], [parts, *gradients(parts, columns, auxiliary)])


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
    loss, columns, values, auxiliary = make_case(name, 5)
    if values is not None and values.is_floating_point():
        values = values.float()  # they take scores for nothing else
    result = loss.loss(columns, values, auxiliary)
    theirs = _theirs(name, auxiliary)([{"vectors": one} for one in columns], values)
    if isinstance(theirs, dict):
        theirs = torch.stack(list(theirs.values())).sum()
    if name == "kl cosine":
        theirs = theirs * 20**2  # they multiply by the square of the student's temperature
    assert_same(
        [result, *gradients(result, columns, auxiliary)],
        [theirs, *gradients(theirs, columns, auxiliary)],
        tolerance=1e-6,
    )


def test_late_interaction_as_in_sentence_transformers() -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import util

    queries, passages = random_token_embeddings(2, 7)
    theirs = util.maxsim(list(queries.texts()), list(passages.texts()))
    torch.testing.assert_close(maxsim(queries, passages), theirs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(MaxSim().pairwise(queries, passages), theirs.diag(), atol=1e-6, rtol=1e-6)


def test_splade_pool_as_in_sentence_transformers() -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    batch = Batch.from_ids([[1, 2, 3], [4], [5, 6]])
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    result = splade_pool(logits, batch)
    padded = nn.utils.rnn.pad_sequence(list(torch.split(logits, list(batch.lengths))), batch_first=True)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    theirs = SpladePooling()({"token_embeddings": padded, "attention_mask": mask})["sentence_embedding"]
    weights = torch.rand(3, 9)
    assert_same(
        [result, *torch.autograd.grad((result * weights).sum(), logits)],
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
        loss, columns, values, _ = make_case(name, 11)
        mine = [similarity.slice_rows(one, self.cut.start, self.cut.stop) for one in columns]
        moved = [
            TokenEmbeddings(self.layer(one.states), one.cu_seqlens)
            if isinstance(one, TokenEmbeddings)
            else self.layer(one)
            for one in mine
        ]
        count = self.cut.stop - self.cut.start
        expected = None if values is None else values[self.cut]
        world = RANKS if dist.is_initialized() else 1
        result: Tensor = loss.loss(moved, expected, self.auxiliary) * (count / ROWS * world)
        return result


def _alone(name: str) -> list[Tensor]:
    net = Net(name, slice(0, ROWS))
    result = net(name)
    result.backward()
    return [result.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def _process(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "meet").as_uri(), rank=rank, world_size=RANKS)
    result = {}
    for name in CASES:
        first = SHARES.get(name, 3)
        net = Net(name, slice(0, first) if rank == 0 else slice(first, ROWS))
        loss = net(name)
        loss.backward()
        result[name] = [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
        for tensor in result[name]:  # the mean over processes, which DistributedDataParallel takes
            dist.all_reduce(tensor)
            tensor /= RANKS
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    """What two processes found."""
    folder, root = tmp_path_factory.mktemp("ranks"), Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.embedding.test_losses", str(folder), str(rank)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        output = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(output)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(name: str, apart: list[dict[str, list[Tensor]]]) -> None:
    for result in apart:
        assert_same(result[name], _alone(name))


def test_a_process_alone_has_its_own() -> None:
    column = torch.ones(2, 3)
    assert gather_across_ranks(column) == (column, 0)


def test_negatives_come_from_where_they_are_gathered() -> None:
    queries, passages = random_embeddings(2, 0)
    others = random_embeddings(1, 1)[0]

    def gather(column: Embeddings) -> tuple[Embeddings, int]:
        return torch.cat([others, column_states(column)]), len(others)

    result = InfoNCELoss(gather=gather).loss([queries, passages], None, nn.ModuleDict())
    expected = _infonce()([queries, torch.cat([passages, others])], None, nn.ModuleDict())
    torch.testing.assert_close(result, expected)


# --- edges


def test_some_rows_of_tokens() -> None:
    tokens = random_token_embeddings(1, 0)[0]
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
    columns = [as_leaf(one) for _ in range(count)]
    values = random_labels(loss, count, 0)
    result = loss.loss(columns, None if values is None else values[:1], auxiliary)
    for tensor in (result, *gradients(result, columns, auxiliary)):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_large_vectors_have_finite_losses(name: str) -> None:
    loss, count, made, _ = CASES[name]
    auxiliary = loss.modules(WIDTH)
    scaled: list[Embeddings] = []
    for one in made(count, 0):
        states = column_states(one).float() * 1e4
        scaled.append(as_leaf(TokenEmbeddings(states, one.cu_seqlens) if isinstance(one, TokenEmbeddings) else states))
    values = random_labels(loss, count, 0)
    if values is not None and values.is_floating_point():
        values = values.float()
    result = loss.loss(scaled, values, auxiliary)
    for tensor in (result, *gradients(result, scaled, auxiliary)):
        assert tensor.isfinite().all()


def test_scores_of_any_scale_make_the_same_cosent() -> None:
    columns = random_embeddings(2, 0)
    scores = torch.tensor([0, 1, 2, 3, 3, 2, 1, 5.0])
    result = [CoSENTLoss().loss(columns, one, nn.ModuleDict()) for one in (scores, 100 * scores - 7, scores.exp())]
    assert result[0] == result[1] == result[2]
    assert CoSENTLoss().loss(columns, torch.ones(ROWS), nn.ModuleDict()) == 0


def test_neighbours_do_not_see_a_turn_nor_the_width() -> None:
    teacher = random_embeddings(1, 0)[0]
    turn = torch.linalg.qr(random_embeddings(1, 1, WIDTH)[0])[0]
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
    ("made", "output"),
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
            lambda: MatryoshkaLoss(InfoNCELoss(), (8,)).loss(random_embeddings(2, 0), None, nn.ModuleDict()),
            "dimension 8 must be at most 6",
        ),
    ],
)
def test_wrong_settings(made: Callable[[], object], output: str) -> None:
    with pytest.raises(ConfigError, match=output):
        made()


def _empty() -> TokenEmbeddings:
    return TokenEmbeddings(torch.ones(3, WIDTH), torch.tensor([0, 2, 2, 3]))


@pytest.mark.parametrize(
    ("loss", "columns", "values", "output"),
    [
        (InfoNCELoss(), random_embeddings(1, 0), None, "InfoNCELoss takes 2 or more columns; there are 1"),
        (TripletLoss(), random_embeddings(2, 0), None, "TripletLoss takes 3 columns; there are 2"),
        (TripletLoss(), random_embeddings(4, 0), None, "TripletLoss takes 3 columns; there are 4"),
        (KLDivergenceLoss(), random_embeddings(2, 0), torch.ones(ROWS, 1), "KLDivergenceLoss takes 3 or more columns"),
        (InfoNCELoss(), [torch.ones(2, 4), torch.ones(3, 4)], None, r"as many rows in each column; there are \[2, 3\]"),
        (CoSENTLoss(), random_embeddings(2, 0), None, r"CoSENTLoss needs labels of shape \(8,\); they are none"),
        (CoSENTLoss(), random_embeddings(2, 0), torch.ones(ROWS, 1), r"they are of shape \(8, 1\)"),
        (MarginMSELoss(), random_embeddings(3, 0), torch.ones(ROWS), r"needs labels of shape \(8, 2\)"),
        (CosineSimilarityLoss(), random_embeddings(2, 0), 5 * torch.ones(ROWS), "needs labels from -1 to 1; one is 5"),
        (
            ContrastiveLoss(),
            random_embeddings(2, 0),
            -torch.ones(ROWS),
            "ContrastiveLoss needs labels from 0 to 1; one is -1",
        ),
        (
            SoftmaxLoss(3),
            random_embeddings(2, 0),
            torch.full((ROWS,), 3),
            "SoftmaxLoss needs labels from 0 to 2; one is 3",
        ),
        (
            SimilarityDistillationLoss(),
            random_embeddings(1, 0),
            torch.ones(ROWS),
            r"shape \(8, teacher's width\); they are of shape \(8,\)",
        ),
        (InfoNCELoss(), random_token_embeddings(2, 0), None, "not TokenEmbeddings"),
        (InfoNCELoss(score=MaxSim()), random_embeddings(2, 0), None, "MaxSim takes TokenEmbeddings"),
        (InfoNCELoss(score=MaxSim()), [_empty(), _empty()], None, "text 1 has no tokens"),
    ],
)
def test_wrong_input(loss: EmbeddingLoss, columns: Sequence[Embeddings], values: Tensor | None, output: str) -> None:
    with pytest.raises(InputError, match=output):
        loss.loss(columns, values, nn.ModuleDict())


def test_logits_of_another_batch() -> None:
    with pytest.raises(InputError, match=r"shape \(3, 5\); the batch needs \(2, V\)"):
        splade_pool(torch.ones(3, 5), Batch.from_ids([[1], [2]]))


if __name__ == "__main__":
    _process(Path(sys.argv[1]), int(sys.argv[2]))


def test_supervised_contrastive_against_a_loop() -> None:
    texts = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    labels = [0, 1, 0, 2, 1, 0]  # nothing is similar to the fourth
    unit = texts / texts.norm(dim=1, keepdim=True)
    total = 0.0
    for i, label in enumerate(labels):
        others = [j for j in range(6) if j != i]
        normalizer = math.log(sum(math.exp(4.0 * float(unit[i] @ unit[j])) for j in others))
        same = [4.0 * float(unit[i] @ unit[j]) - normalizer for j in others if labels[j] == label]
        total -= sum(same) / max(1, len(same))
    loss = SupervisedContrastiveLoss(scale=4.0).loss([texts], torch.tensor(labels), nn.ModuleDict())
    assert float(loss) == pytest.approx(total / 6, abs=1e-5)
