"""`SparseEmbedder.fit` and `LateInteraction.fit`: what they learn, save and refuse, and their gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import bertie
from bertie import LateInteraction, SparseEmbedder
from bertie.errors import ConfigError, InputError, NotFoundError
from bertie.training.embedding import losses
from bertie.training.finetune.base import training_for
from bertie.training.finetune.data import read_dataset
from tests.tasks import tiny
from tests.training.embedding.test_embedder import FAST, pairs, scored

pytestmark = pytest.mark.filterwarnings("ignore:lr=")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("mlm"), "wordpiece", "ForMaskedLM")


def test_sparse_training(folder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    dev, texts = pairs(48, seed=1), [row[0] for row in pairs(8, seed=2)]
    options = FAST | {"query_regularizer": 0.05, "document_regularizer": 0.05}
    before = SparseEmbedder.load(folder)
    trained = SparseEmbedder(folder, **options).fit(pairs(160), dev=dev, progress=False)
    assert trained.score(dev) > before.score(dev)
    assert trained.history_.evaluations[-1]["recall_1"] == pytest.approx(trained.score(dev), abs=0.05)
    counts = [np.mean([len(result) for result in model.embed(texts)]) for model in (before, trained)]
    assert counts[1] < counts[0]  # the regularizer
    trained.save(tmp_path / "splade")
    theirs = SparseEncoder(str(tmp_path / "splade"), device="cpu").encode(texts).to_dense().numpy()
    ours = bertie.load(tmp_path / "splade")
    assert isinstance(ours, SparseEmbedder)
    matrix = ours.matrix(ours.embed(texts))
    np.testing.assert_allclose(np.stack([matrix.dense(i) for i in range(len(texts))]), theirs, atol=1e-5)
    again = SparseEmbedder(tmp_path / "splade", **options).fit(pairs(32), dev=dev, progress=False)
    assert again.checkpoint.splade is not None


def test_late_interaction_training(folder: Path, tmp_path: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    dev, texts = pairs(48, seed=1), [row[0] for row in pairs(8, seed=2)]
    options: dict[str, Any] = FAST | {"dimension": 16, "query_length": 16}
    first = LateInteraction(folder, **options | {"lr": 1e-9, "epochs": 1}).fit(pairs(16), dev=dev, progress=False)
    trained = LateInteraction(folder, **options).fit(pairs(160), dev=dev, progress=False)
    assert trained.score(dev) > first.score(dev)
    trained.save(tmp_path / "colbert")
    ours = bertie.load(tmp_path / "colbert", overflow="truncate")
    assert isinstance(ours, LateInteraction)
    assert ours.settings.query_length == 16
    theirs = MultiVectorEncoder(str(tmp_path / "colbert"), device="cpu")
    for own, other in zip(ours.embed_queries(texts), theirs.encode_query(texts, convert_to_numpy=True), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)
    with pytest.raises(ConfigError, match="dimension=8 must be 16"):
        LateInteraction(tmp_path / "colbert", dimension=8).fit(pairs(4), dev=pairs(4), progress=False)


@pytest.mark.parametrize("attend", [False, True])
def test_gradients_of_late_interaction(folder: Path, attend: bool) -> None:
    """The loss and its gradients as computed text by text with transformers, the padded way."""
    import transformers

    task = LateInteraction(folder, dimension=8, query_length=14, batch_size=4)
    training = training_for(task)
    data = read_dataset("embed", pairs(4, columns=3))
    checkpoint = training.prepare(bertie.Checkpoint.load(folder), data)
    assert checkpoint.late_interaction is not None
    checkpoint.late_interaction = checkpoint.late_interaction.with_settings(attend_to_expansion=attend)
    task._use(checkpoint, None)
    model, modules = task.model, checkpoint.late_interaction
    objective = training.objective(data)
    objective.attach(model, modules)  # type: ignore[attr-defined]
    mini = objective.collate(list(training.items(data)))
    embeddings = objective.embed(model, mini, "")  # type: ignore[attr-defined]
    loss = objective.step_loss(model, embeddings, [mini], 4.0)  # type: ignore[attr-defined]
    loss.backward()

    encoder = transformers.AutoModel.from_pretrained(folder).eval()
    weight = modules.layers[0].linear.weight.detach().clone().requires_grad_()
    tokenizer = task.tokenizer
    assert tokenizer.mask_id is not None

    def encode(text: str, length: int) -> torch.Tensor:
        ids = tokenizer.encode(text).ids.tolist()
        added = max(0, length - len(ids))
        mask = torch.tensor([[1] * len(ids) + [int(attend)] * added])
        hidden = encoder(torch.tensor([ids + [tokenizer.mask_id] * added]), attention_mask=mask).last_hidden_state[0]
        rows = F.normalize(hidden @ weight.T, dim=-1)
        return rows if length else rows[[id not in task.skiplist_ids for id in ids]]

    queries = [encode(example.texts[0], 14) for example in data.examples]
    documents = [encode(example.texts[i], 0) for i in (1, 2) for example in data.examples]
    scores = torch.stack([torch.stack([(q @ d.T).amax(1).sum() for d in documents]) for q in queries])
    expected = F.cross_entropy(scores, torch.arange(4))
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    projection = modules.layers[0].linear.weight.grad
    torch.testing.assert_close(projection, weight.grad, atol=1e-5, rtol=1e-4)
    words = model.encoder.embeddings.words.weight.grad
    torch.testing.assert_close(words, encoder.embeddings.word_embeddings.weight.grad, atol=1e-5, rtol=1e-4)


def test_gradients_of_sparse_embeddings(folder: Path) -> None:
    """The loss and its gradients as computed with transformers, the padded way."""
    import transformers

    task = SparseEmbedder(folder, query_regularizer=0.01, document_regularizer=0.02, batch_size=4)
    training = training_for(task)
    data = read_dataset("embed", pairs(4))
    checkpoint = training.prepare(bertie.Checkpoint.load(folder), data)
    task._use(checkpoint, None)
    objective = training.objective(data)
    objective.attach(task.model, None)  # type: ignore[attr-defined]
    mini = objective.collate(list(training.items(data)))
    loss = objective.step_loss(task.model, objective.embed(task.model, mini, "mlm"), [mini], 4.0)  # type: ignore[attr-defined]
    loss.backward()

    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    texts = [example.texts[i] for i in (0, 1) for example in data.examples]
    rows = []
    for text in texts:
        logits = theirs(torch.tensor([task.tokenizer.encode(text).ids.tolist()])).logits[0]
        rows.append(torch.log1p(torch.relu(logits)).amax(0))
    first, second = torch.stack(rows[:4]), torch.stack(rows[4:])
    penalty = 0.01 * (first.mean(0) ** 2).sum() + 0.02 * (second.mean(0) ** 2).sum()
    expected = F.cross_entropy(first @ second.T, torch.arange(4)) + penalty
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    words = task.model.encoder.embeddings.words.weight.grad
    torch.testing.assert_close(words, theirs.get_input_embeddings().weight.grad, atol=2e-5, rtol=1e-4)


def test_losses(folder: Path) -> None:
    data = read_dataset("embed", pairs(6, columns=3))
    late = training_for(LateInteraction(bertie.Checkpoint.load(folder), loss="infonce:scale=2"))
    late.task._use(late.prepare(bertie.Checkpoint.load(folder), data), None)
    loss = late.objective(data).loss  # type: ignore[attr-defined]
    assert loss.scale == 2.0
    assert type(loss.score).__name__ == "MaxSim"
    sparse = training_for(SparseEmbedder(bertie.Checkpoint.load(folder)))
    loss = sparse.objective(data).loss  # type: ignore[attr-defined]
    assert isinstance(loss, losses.SpladeLoss)
    assert loss.inner.scale == 1.0  # type: ignore[attr-defined]


def test_refusals(folder: Path, tmp_path: Path) -> None:
    texts, scores = scored(8)
    with pytest.raises(InputError, match="late interaction is trained on matching texts"):
        LateInteraction(folder).fit(texts, scores, progress=False)
    with pytest.raises(NotFoundError, match="no masked-language-modelling head"):
        SparseEmbedder(tiny.save(tmp_path / "bare", "wordpiece", "")).fit(pairs(4), dev=pairs(4), progress=False)
    with pytest.raises(InputError, match="matryoshka"):
        LateInteraction.from_recipe(folder, bertie.Recipe(matryoshka=(8,)))
    with pytest.raises(InputError, match="pooling='cls' is for dense embeddings"):
        SparseEmbedder.from_recipe(folder, bertie.Recipe(pooling="cls"))
    with pytest.raises(InputError, match="query_length=0"):
        LateInteraction(folder, query_length=0)
