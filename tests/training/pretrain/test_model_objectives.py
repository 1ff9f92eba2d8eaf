"""Objectives over the whole model: micro-batches add up to the gradient of the step, and the loss is a sum of means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned, NormConfig
from bertie.errors import InputError
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.training.objectives import (
    HeadObjective,
    MicroBatch,
    ModelObjective,
    TrainingExample,
    TrainingWindow,
)
from bertie.training.prefetch import split_micro_batches
from bertie.training.pretrain.corpus import Corpus
from bertie.training.pretrain.masked_lm import EnhancedMaskDecoder, EnhancedMaskObjective, MaskedLMLoss
from bertie.training.pretrain.mlm_distillation import DistilBertLoss, MaskedLMDistillation
from bertie.training.pretrain.packing import PackedCorpus, PackingPlan
from bertie.training.pretrain.relation_distillation import RelationDistillation, RelationLoss
from bertie.training.pretrain.replaced_tokens import ReplacedTokenDetection, ReplacedTokenObjective
from bertie.training.pretrain.samplers import MaskedLMSampler
from bertie.training.pretrain.sentence_pairs import (
    NextSentence,
    SentenceOrder,
    SentencePairObjective,
)
from bertie.training.step import ObjectiveModule
from tests.training.pretrain.numbered_corpus import (
    CLS,
    MASK,
    MAX_LENGTH,
    SEP,
    build_numbered_corpus,
    default_documents,
    ids_of,
    numbered_tokenizer,
)
from tests.training.pretrain.objective_runs import gradients


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return numbered_tokenizer()


@pytest.fixture(scope="module")
def documents() -> list[list[list[int]]]:
    return default_documents()


@pytest.fixture(scope="module")
def corpus(tokenizer: Tokenizer, documents: Any, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build_numbered_corpus(tmp_path_factory.mktemp("corpus"), tokenizer, documents)


def config(width: int = 16, depth: int = 2) -> EncoderConfig:
    return EncoderConfig(
        vocab=60,
        width=width,
        layer_map=tuple(range(depth)),
        heads=2,
        head_width=width // 2,
        kv_heads=2,
        ff_width=24,
        activation="gelu",
        embeddings=EmbeddingConfig(width=16, segments=2, project="after_norm" if width != 16 else None),
        positions=(Learned(64),),
        patterns=(Full(),) * depth,
        max_length=64,
        init_std=0.3,
    )


MLM = HeadConfig(kind="vocabulary", outputs=60, dense=16, activation="gelu", norm=NormConfig(), tied=True)
RTD = HeadConfig(kind="token", outputs=1, dense=16, activation="gelu")
PAIR = HeadConfig(kind="text", outputs=2, dense=16, activation="tanh")


def model(heads: dict[str, HeadConfig], seed: int = 0, width: int = 16, depth: int = 2) -> Model:
    torch.manual_seed(seed)
    return Model(config(width, depth), heads).eval()


def items(count: int = 9, seed: int = 0) -> list[TrainingExample]:
    """Texts of two segments with hidden tokens, and all that any objective asks for."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        n = int(rng.integers(7, 20))
        ids = rng.integers(5, 60, n)
        ids[[0, n // 2, -1]] = CLS, SEP, SEP
        special = np.isin(ids, range(5))
        inner = np.flatnonzero(~special)
        rows = np.sort(rng.choice(inner, int(rng.integers(1, 4)), replace=False))
        targets = ids[rows].copy()
        ids[rows] = MASK
        segments = (np.arange(n) > n // 2).astype(np.int64)
        piece = TrainingWindow(ids, segments, values=targets, weights=np.ones(len(rows), np.float32), rows=rows)
        more = {"special": special, "label": np.array(rng.integers(2))}
        found.append(TrainingExample((piece,), extras=more))
    return found


def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest guesses instead of random ones: the same however a step is cut."""
    monkeypatch.setattr("bertie.training.pretrain.replaced_tokens.sample", lambda logits, draw=None: logits.argmax(-1))


def case(name: str) -> tuple[Model, ModelObjective]:
    if name in ("nsp", "sop"):
        kind = {"nsp": NextSentence, "sop": SentenceOrder}[name]()
        return model({"mlm": MLM, name: PAIR}), SentencePairObjective(kind)
    if name in ("tied", "gdes", "none"):
        student = model({"rtd": RTD}, 1)
        both = ReplacedTokenDetection(model({"mlm": MLM}, 2, width=8, depth=1), student, name, weight=7.0)  # type: ignore[arg-type]
        return student, ReplacedTokenObjective(both)
    student = model({"mlm": MLM}, 3)
    if name == "triple":
        return student, MaskedLMDistillation(DistilBertLoss(model({"mlm": MLM}, 4, depth=3)))
    if name == "related":
        return student, RelationDistillation(RelationLoss(model({}, 5, depth=3), heads=4))
    return student, EnhancedMaskObjective(student, seed=6)


CASES = ("nsp", "sop", "tied", "gdes", "none", "triple", "related", "enhanced")


@pytest.mark.parametrize("name", CASES)
def test_a_step_in_parts_has_the_gradient_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn(monkeypatch)
    of, objective = case(name)
    all_items = items()
    loss, whole = gradients(of, objective, [all_items])
    for budget in (1, 40):
        parts = split_micro_batches(all_items, budget)
        assert len(parts) > 2
        cut, found = gradients(of, objective, parts)
        assert cut == pytest.approx(loss, rel=1e-5)
        assert found.keys() == whole.keys()
        for key in whole:
            torch.testing.assert_close(found[key], whole[key], atol=2e-5, rtol=1e-4, msg=lambda m, k=key: f"{k}: {m}")
    moved = {key for key, grad in whole.items() if grad.abs().max() > 1e-6}
    assert any(key.startswith("encoder.blocks.1") for key in moved)
    if name in ("tied", "gdes", "none"):
        assert any(key.startswith("auxiliary.generator.encoder.blocks") for key in moved)
    if name == "enhanced":
        assert "auxiliary.decoder.positions.weight" in moved


def plain(name: str, of: Model, objective: Any, mini: MicroBatch, items: Sequence[TrainingExample]) -> Tensor:
    """The mean of each thing, written down as papers have it."""
    batch, rows, targets = mini.batch, mini.targets.rows, mini.targets.values
    assert rows is not None
    words = of.encoder.embeddings.words.weight
    if name in ("nsp", "sop"):
        labels = torch.tensor([int(item.extras["label"]) for item in items])
        masked = F.cross_entropy(of(batch, "mlm")[rows], targets)
        return masked + F.cross_entropy(of(batch, name), labels)
    if name in ("tied", "gdes", "none"):
        generator = of.auxiliary["generator"]
        assert isinstance(generator, Model)
        logits = generator(batch, "mlm")[rows]
        guesses = logits.argmax(-1)
        ids = batch.ids.clone()
        ids[rows] = guesses
        text = batch.ids.clone()
        text[rows] = targets
        predictions = of(batch.with_ids(ids), "rtd")[:, 0]
        special = torch.from_numpy(np.concatenate([item.extras["special"] for item in items]))
        found = F.binary_cross_entropy_with_logits(predictions[~special], (ids != text)[~special].float())
        return F.cross_entropy(logits, targets) + 7.0 * found
    if name == "triple":
        loss = objective.distillation
        theirs = loss.teacher(batch, "mlm")[rows].detach()
        ours = of(batch, "mlm")[rows]
        soft = F.kl_div((ours / 2).log_softmax(-1), (theirs / 2).softmax(-1), reduction="batchmean") * 4
        apart = 1 - F.cosine_similarity(of.hidden(batch), loss.teacher.hidden(batch).detach(), dim=-1)
        return 5 * soft + 2 * F.cross_entropy(ours, targets) + apart.mean()
    if name == "related":
        total: Tensor = objective.relations.loss(of, batch) / len(batch.ids)
        return total
    decoder = of.auxiliary["decoder"]
    assert isinstance(decoder, EnhancedMaskDecoder)
    logits = of.head("mlm")(decoder(of.encoder, batch)[rows], batch, words)
    return F.cross_entropy(logits, targets)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_a_sum_of_means(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn(monkeypatch)
    of, objective = case(name)
    all_items = items(7, seed=2)
    loss, found = gradients(of, objective, [all_items])
    mini = objective.collate(all_items)
    of.zero_grad(set_to_none=True)
    wanted = plain(name, of, objective, mini, all_items)
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    wanted.backward()
    for key, parameter in of.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[key], parameter.grad, atol=2e-5, rtol=1e-4)


def test_micro_batches_without_weight_add_nothing() -> None:
    """A process without texts of its own takes part with one that does not count."""
    of, objective = case("nsp")
    all_items = items()
    counted = objective.with_counts(objective.count_step(all_items))
    mini = replace(counted.collate(all_items[:1]), weight=0.0)
    loss = ObjectiveModule(of)(mini, "", counted)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in of.parameters())


def test_a_model_objective_is_no_head_objective() -> None:
    """The loop distinguishes the two."""
    _, objective = case("nsp")
    assert not isinstance(objective, HeadObjective)
    assert not hasattr(objective, "losses")
    assert objective.counts == {}  # counting a step leaves the objective as it was
    assert objective.count_step(items())["texts"] == 9


def test_only_single_head_samplers_can_be_recorded(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """CUDA graphs can record objectives over one head only."""
    packed = PackedCorpus(corpus, 400, MAX_LENGTH, 0)
    assert MaskedLMSampler(packed, tokenizer, 3).single_head
    of, objective = case("tied")
    other = MaskedLMSampler(packed, tokenizer, 3, objective=objective, heads=("rtd",))
    assert not other.single_head
    assert other.heads == ["rtd"]
    source, found = other.read(0)
    assert source.head == "rtd"
    for item in found:
        ids = ids_of(item)
        assert np.array_equal(item.extras["special"], np.isin(ids, range(5)))
    assert of.auxiliary["generator"] is objective.detection.generator  # type: ignore[attr-defined]


def test_the_pair_objective_contains_the_masked_lm_loss() -> None:
    """The pair's own part is what is left of it."""
    of, objective = case("sop")
    all_items = items()
    mini = objective.collate(all_items)
    assert mini.targets.rows is not None
    loss, _ = gradients(of, objective, [all_items])
    masked = MaskedLMLoss().loss(of, mini.batch, mini.targets.rows, mini.targets.values) / len(mini.targets.rows)
    said = SentenceOrder().loss(of, mini.batch, mini.extras["labels"]) / len(all_items)  # type: ignore[arg-type]
    assert loss == pytest.approx((masked + said).item(), rel=1e-5)


def test_packing_of_sizes() -> None:
    packing = PackingPlan(np.array([5, 4, 3, 2, 1] * 20, np.int32), 10, seed=0)
    read = np.concatenate([packing.items(n) for n in range(packing.steps())])
    assert sorted(read.tolist()) == list(range(100))
    assert all(packing.sizes[packing.items(n)].sum() <= 10 for n in range(packing.steps()))
    with pytest.raises(InputError, match="step -1 does not exist"):
        packing.locate(-1)


def test_texts_of_pairs_keep_their_segments() -> None:
    _, objective = case("nsp")
    all_items = items(4)
    mini = objective.collate(all_items)
    wanted = Batch.from_ids([i.windows[0].ids for i in all_items], [i.windows[0].segments for i in all_items])
    assert torch.equal(mini.batch.segments, wanted.segments)
    assert int(mini.batch.segments.max()) == 1
