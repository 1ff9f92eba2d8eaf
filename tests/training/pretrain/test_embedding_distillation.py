"""Embeddings of several teachers, computed before training, and a student that learns them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import ConfigError
from bertie.tasks.embed import Embedder
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.text.tokenizer_training import train
from bertie.training.pretrain.corpus import Corpus
from bertie.training.pretrain.embedding_distillation import (
    EmbeddingDistillation,
    EmbeddingDistillationSampler,
    Passages,
    TeacherEnsemble,
    assign_clusters,
    check_teachers,
    embedding_targets,
)
from bertie.training.pretrain.sentence_distillation import EmbeddingTerms, PrincipalComponents, segment_mean
from tests.training.pretrain.corpus_texts import texts
from tests.training.pretrain.test_sentence_distillation import checkpoint, corpus_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(texts(60), vocab_size=900, lowercase=True, max_length=128)


@pytest.fixture(scope="module")
def corpus(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of(tmp_path_factory.mktemp("corpus") / "c", texts(60), tokenizer)


def flat(tokenizer: Tokenizer, written: list[str]) -> tuple[Any, Any]:
    ids = [np.asarray(tokenizer.encode(text).ids) for text in written]
    return np.concatenate(ids), np.concatenate([[0], np.cumsum([len(own) for own in ids])])


def normalized(teacher: Checkpoint, written: list[str]) -> Tensor:
    return F.normalize(torch.from_numpy(Embedder(teacher).embed(written)), dim=-1)


WRITTEN = ["a cat sat here", "the dog", "where was the house of the king", "a"]


def test_the_similarity_of_an_ensemble_is_the_mean_of_its_teachers(tokenizer: Tokenizer) -> None:
    teachers = [checkpoint(tokenizer, 16, seed=1), checkpoint(tokenizer, 24, seed=2)]
    embeddings = TeacherEnsemble(teachers).embed(*flat(tokenizer, WRITTEN))
    assert embeddings.shape == (4, 40)
    expected = sum(own @ own.T for own in (normalized(teacher, WRITTEN) for teacher in teachers)) / 2
    torch.testing.assert_close(embeddings @ embeddings.T, expected, atol=1e-5, rtol=0)


def test_prompts_are_prepended(tokenizer: Tokenizer) -> None:
    teachers = [checkpoint(tokenizer, 16, seed=1), checkpoint(tokenizer, 16, seed=2)]
    ensemble = TeacherEnsemble(teachers, ["the king ", ""])
    assert ensemble.max_length == 128 - (len(tokenizer.encode("the king").ids) - 2)
    parts = [normalized(teachers[0], [f"the king {text}" for text in WRITTEN]), normalized(teachers[1], WRITTEN)]
    expected = torch.cat(parts, dim=-1) / 2**0.5
    torch.testing.assert_close(ensemble.embed(*flat(tokenizer, WRITTEN)), expected, atol=1e-5, rtol=0)


def test_centering_removes_the_mean(tokenizer: Tokenizer, corpus: Corpus) -> None:
    teacher = checkpoint(tokenizer, 16, seed=1)
    passages = Passages(corpus, 32)
    ids, cu = passages.read(np.arange(len(passages)))
    plain, half, centered = (TeacherEnsemble([teacher], center=center) for center in (0.0, 0.5, 1.0))
    means = []
    for ensemble in (plain, half, centered):
        ensemble.fit(ids, cu)
        means.append(float(ensemble.embed(ids, cu).mean(0).norm()))
    assert means[0] > means[1] > means[2]
    assert means[2] < 0.5 * means[0]


def test_targets_preserve_similarities(tokenizer: Tokenizer, corpus: Corpus) -> None:
    ensemble = TeacherEnsemble([checkpoint(tokenizer, 16, seed=1), checkpoint(tokenizer, 16, seed=2)])
    student = checkpoint(tokenizer, 16, seed=3)
    passages = Passages(corpus, 48)
    targets, projection = embedding_targets(ensemble, student.model, passages, seed=0)
    assert targets.shape == (len(passages), 32)
    every = np.arange(len(passages))
    wide = ensemble.embed(*passages.read(every))
    torch.testing.assert_close(torch.from_numpy(targets).float(), wide, atol=1e-3, rtol=0)
    narrow = projection(wide)
    assert narrow.shape == (len(passages), 16)
    torch.testing.assert_close(narrow.norm(dim=-1), torch.ones(len(passages)), atol=1e-2, rtol=0)
    assert float((narrow @ narrow.T - wide @ wide.T).abs().mean()) < 0.05


def test_targets_equal_those_of_the_same_text_in_any_order(tokenizer: Tokenizer, corpus: Corpus) -> None:
    """Rows belong to their passages, although the teachers read them sorted by length."""
    teacher = checkpoint(tokenizer, 16, seed=1)
    passages = Passages(corpus, 48)
    targets, projection = embedding_targets(TeacherEnsemble([teacher]), teacher.model, passages, seed=0)
    for passage in (0, len(passages) // 2, len(passages) - 1):
        ids, _ = passages.read(np.array([passage]))
        batch = Batch.from_ids([ids])
        with torch.no_grad():
            own = segment_mean(teacher.model.hidden(batch), batch.text_of_token(), 1)
        # The projection is a rotation towards the student, which is the teacher here.
        projected = projection(torch.from_numpy(targets[[passage]]))
        assert F.cosine_similarity(own, projected).item() > 0.99


def test_a_step_has_the_gradient_of_its_terms(tokenizer: Tokenizer, corpus: Corpus) -> None:
    student = checkpoint(tokenizer, 16, seed=3).model.train()
    passages = Passages(corpus, 48)
    targets = np.random.default_rng(0).normal(size=(len(passages), 24)).astype(np.float16)
    terms = EmbeddingTerms(embeddings=2.0, similarities=3.0, neighbours=0.5)
    projection = PrincipalComponents.fit(torch.from_numpy(targets).float(), 16)
    objective = EmbeddingDistillation(terms, projection)
    sampler = EmbeddingDistillationSampler(passages, targets, 5, objective, budget=300, seed=1)
    task, examples = sampler.read(2)
    assert task.objective is objective
    objective.counts = {"texts": float(len(examples))}
    loss = objective.loss(student, objective.collate(examples))
    batch = Batch.from_ids([example.windows[0].ids for example in examples])
    s = F.normalize(segment_mean(student.hidden(batch), batch.text_of_token(), len(batch)), dim=-1)
    t = F.normalize(torch.from_numpy(np.stack([example.extras["target"] for example in examples])).float(), dim=-1)
    difference = s @ s.T - t @ t.T
    projected = F.normalize(t @ projection.basis, dim=-1)
    expected = 2 * (1 - (s * projected).sum(-1)).sum() + 3 * (difference**2).sum() / len(s)
    rest = (loss - expected).item()
    assert rest > 0  # the KL divergence
    assert EmbeddingTerms(2.0, 3.0).loss(s, t, projection).item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in student.parameters())


def test_invalid_teachers_are_refused(tokenizer: Tokenizer) -> None:
    teacher = checkpoint(tokenizer)
    with pytest.raises(ConfigError, match="prompts has 2 texts; it must have one per teacher, 1"):
        TeacherEnsemble([teacher], ["a", "b"])
    with pytest.raises(ConfigError, match=re.escape("center=2 must be from 0 to 1")):
        TeacherEnsemble([teacher], center=2)
    other = train(texts(20), vocab_size=160, lowercase=True, max_length=128)
    with pytest.raises(ConfigError, match="must have the model's tokenizer"):
        check_teachers([teacher, checkpoint(other)], tokenizer)
    teacher.sentence = None
    with pytest.raises(ConfigError, match="is not a sentence encoder"):
        TeacherEnsemble([teacher])


def test_a_student_learns_its_teachers(tokenizer: Tokenizer, corpus: Corpus, tmp_path: Path) -> None:
    from bertie.recipe import Recipe
    from bertie.training.pretrain.pretrain_recipe import PretrainRecipe
    from bertie.training.pretrain.run import pretrain

    for name, seed in (("student", 3), ("one", 1), ("two", 2)):
        checkpoint(tokenizer, seed=seed).save(tmp_path / name)
    objective = {
        "kind": "embedding_distillation", "teacher": ["one", "two"], "prompts": ["", "the "], "center": 0.5,
        "similarities": 5.0,
    }  # fmt: skip
    recipe = PretrainRecipe(
        model="student",
        corpus=str(corpus.folder),
        recipe=Recipe(lr=5e-3, batch_tokens=512, max_length=32, seed=1, pooling="mean"),
        steps=200,
        evals=0,
        objectives=(objective,),
    )
    pretrain(recipe, tmp_path / "out", data=tmp_path, device="cpu", progress=False)
    ensemble = TeacherEnsemble([Checkpoint.load(str(tmp_path / name)) for name in ("one", "two")], ["", "the "], 0.5)
    passages = Passages(corpus, 32)
    ids, cu = passages.read(np.arange(len(passages)))
    ensemble.fit(ids, cu)
    wanted = ensemble.embed(ids, cu)
    wanted = wanted @ wanted.T

    def error(name: str) -> float:
        model = Checkpoint.load(str(tmp_path / name)).model
        batch = Batch.from_ids(np.split(ids, cu[1:-1]))
        with torch.no_grad():
            own = F.normalize(segment_mean(model.hidden(batch), batch.text_of_token(), len(batch)), dim=-1)
        return float(((own @ own.T - wanted) ** 2).mean())

    assert error("out") < 0.6 * error("student")


def test_similar_embeddings_are_in_one_cluster() -> None:
    draw = np.random.default_rng(0)
    topics = np.eye(4)[np.arange(400) % 4]
    targets = topics + 0.1 * draw.standard_normal((400, 4))
    targets = (targets / np.linalg.norm(targets, axis=1, keepdims=True)).astype(np.float16)
    clusters = assign_clusters(targets, 8, seed=0, device=torch.device("cpu"))
    assert clusters.shape == (400,)
    for own in range(8):
        assert len(set(np.arange(400)[clusters == own] % 4)) <= 1
    with pytest.raises(ConfigError, match="clusters=401 must be at most 400"):
        assign_clusters(targets, 401, seed=0, device=torch.device("cpu"))


def test_a_step_has_several_passages_of_a_cluster(tokenizer: Tokenizer, corpus: Corpus) -> None:
    passages = Passages(corpus, 16)
    clusters = np.arange(len(passages)) % 3
    targets = np.zeros((len(passages), 4), np.float16)
    projection = PrincipalComponents(torch.eye(4))
    objective = EmbeddingDistillation(EmbeddingTerms(), projection)
    plain = EmbeddingDistillationSampler(passages, targets, 4, objective, budget=320, seed=0)
    sampler = EmbeddingDistillationSampler(passages, targets, 4, objective, budget=320, seed=0, clusters=clusters)
    assert sampler.fingerprint() != plain.fingerprint()
    assert objective.detect_spikes
    assert not EmbeddingDistillation(EmbeddingTerms(), projection, clusters=True).detect_spikes
    items = [sampler._packing.items(step) for step in range(sampler._packing.steps())]
    assert sorted(np.concatenate(items).tolist()) == list(range(len(passages)))
    largest = [max(np.bincount(clusters[own])) / len(own) for own in items if len(own) > 10]
    assert np.mean(largest) > 0.6
