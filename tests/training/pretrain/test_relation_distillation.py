"""MiniLM's relation losses, against a computation text by text."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.config import Rotary
from bertie.errors import ConfigError
from bertie.nn import attention
from bertie.nn.model import Model
from bertie.ops import dispatch
from bertie.ops.torch import eager
from bertie.switches import disable
from bertie.text.batch import Batch
from bertie.training.pretrain import relation_distillation
from bertie.training.pretrain.relation_distillation import RelationLoss
from tests.parity.test_transformers import ours
from tests.parity.tiny import build, texts
from tests.training.pretrain.distillation_models import (
    IDS,
    assert_converges,
    assert_float32_under_autocast,
    assert_same,
    assert_teacher_is_fixed,
    grads,
    kl,
    make,
    wide,
)


def projected(model: Model, batch: Batch, layer: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of each text in a post-norm model: from the state below the layer, with weights cut by hand."""
    x = list(model.encoder.hidden_states(batch))[layer]
    qkv, out = model.encoder.blocks[model.config.layer_map[layer]].attention.qkv, []
    weights, biases = torch.split(qkv.weight, qkv.sizes), torch.split(qkv.bias, qkv.sizes)  # type: ignore[arg-type]
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        parts = [x[start:end] @ w.T + b for w, b in zip(weights, biases, strict=True)]
        out.append((parts[0], parts[1], parts[2]))
    return out


def related(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """(n, D), (n, D) -> (R, n, n) scores."""
    d = a.shape[1] // heads
    return torch.stack([a[:, r * d : (r + 1) * d] @ b[:, r * d : (r + 1) * d].T for r in range(heads)]) / d**0.5


def relations(teacher: Model, student: Model, batch: Batch, pairs: Any, heads: int, layer: int, mine: int) -> Tensor:
    total = torch.zeros(())
    with torch.no_grad():
        theirs = projected(teacher, batch, layer)
    for t, s in zip(theirs, projected(student, batch, mine), strict=True):
        for first, second in pairs:
            i, j = "qkv".index(first), "qkv".index(second)
            total = total + kl(related(s[i], s[j], heads), related(t[i], t[j], heads)).mean(0).sum()
    return total


@pytest.mark.parametrize("at_once", [1 << 24, 100, 1])
def test_relations_of_minilm(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relation_distillation, "MAX_SCORES", at_once)
    teacher, student, batch = make(0, depth=3), make(1), Batch.from_ids(IDS)
    found = RelationLoss(teacher, relations=("qk", "vv")).loss(student, batch)
    assert_same(student, found, relations(teacher, student, batch, ("qk", "vv"), 2, 2, 1))


@pytest.mark.parametrize("at_once", [1 << 24, 1000, 100, 1])
@pytest.mark.parametrize("heads", [1, 4, 8])
def test_relations_of_minilm_2(heads: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relation_distillation, "MAX_SCORES", at_once)
    teacher, student, batch = wide(), make(1), Batch.from_ids(IDS)
    found = RelationLoss(teacher, heads=heads, layer=0, student_layer=-2).loss(student, batch)
    assert_same(student, found, relations(teacher, student, batch, ("qq", "kk", "vv"), heads, 0, 0))


@pytest.mark.parametrize(("name", "layer"), [("bert", -1), ("eurobert-tied", -1), ("modernbert", 0)])
def test_attention_is_transformers(name: str, layer: int) -> None:
    """Learned and rotary positions, shared keys: attention as transformers itself gives it out."""
    suffix = "ForMaskedLM"
    theirs = [build(name, suffix, seed) for seed in (1, 2)]
    (teacher, _), (student, plan) = (ours(one) for one in theirs)
    ids, segments = texts(name, suffix, 4, seed=5)
    wanted = torch.zeros(())
    for one, kinds in zip(ids, segments, strict=True):
        given = {"input_ids": torch.tensor([one]), "attention_mask": torch.ones(1, len(one), dtype=torch.long)}
        if name == "bert":
            given["token_type_ids"] = torch.tensor([kinds])
        seen = []
        for model in theirs:
            model.set_attn_implementation("eager")
            seen.append(model(**given, output_attentions=True).attentions[layer][0])  # (H, n, n)
        p, q = seen[0].detach(), seen[1]
        wanted = wanted + (p * (p / q).log()).sum(-1).mean(0).sum()
    found = RelationLoss(teacher, relations=("qk",), layer=layer, student_layer=layer).loss(
        student, Batch.from_ids(ids, segments)
    )
    assert_close(found, wanted, atol=1e-4, rtol=1e-5)
    (found / len(ids)).backward()
    (wanted / len(ids)).backward()
    rules = {rule.ours: rule for rule in plan.weight_map.rules}
    at = f"encoder.blocks.{layer % student.config.depth}.attention.qkv.weight"
    named = {
        key: torch.zeros_like(p) if p.grad is None else p.grad
        for key, p in theirs[1].named_parameters(remove_duplicate=False)
    }
    of_theirs = rules[at].read([named[plan.weight_map.rename(key)] for key in rules[at].theirs])
    assert of_theirs.abs().max() > 1e-3
    assert_close(dict(student.named_parameters())[at].grad, of_theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["deberta-v2", "albert", "mpnet"])
def test_projections_are_those_of_the_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a block serves several layers, or also projects positions: the projections are the inputs of attention."""
    given: list[tuple[Tensor, ...]] = []
    attend = attention.attend  # type: ignore[attr-defined]

    def listen(inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        given.append((inputs.q, inputs.k, inputs.v))
        return attend(inputs, *args, **kwargs)

    model, _ = ours(build(name, "Model"))
    ids, segments = texts(name, "Model", 3, seed=1)
    batch = Batch.from_ids(ids, segments)
    monkeypatch.setattr(attention, "attend", listen)
    for layer in range(model.config.depth):
        given.clear()
        found = relation_distillation._project_qkv(model.encoder, batch, layer)
        assert len(given) == layer + 1  # nothing above is computed
        for a, b in zip(found, given[-1], strict=True):
            assert torch.equal(a, b)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_projections_are_copied_before_rotary_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without gradients, rotary embeddings are applied in place."""

    def in_place(q: Tensor, k: Tensor, *angles: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(x.copy_(y) for x, y in zip((q, k), eager.apply_rotary(q, k, *angles), strict=True))  # type: ignore[return-value]

    model, batch = make(positions=(Rotary((10.0, 10.0)),)), Batch.from_ids(IDS)
    with disable("native.training"), torch.no_grad():  # which round differently
        wanted = relation_distillation._project_qkv(model.encoder, batch, 1)
        rows = [replace(row, run=in_place) if row.operation == "rotary" else row for row in dispatch.ROWS]
        monkeypatch.setattr(dispatch, "ROWS", rows)
        dispatch.clear_cache()
        model.encoder.reset_dispatch()
        found = relation_distillation._project_qkv(model.encoder, batch, 1)
    dispatch.clear_cache()
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_relations_with_gradient_checkpointing() -> None:
    teacher, batch = make(0), Batch.from_ids(IDS)
    plain, saving = make(1).train(), make(1).train()
    saving.encoder.gradient_checkpointing = True
    wanted = grads(plain, RelationLoss(teacher).loss(plain, batch))
    found = grads(saving, RelationLoss(teacher).loss(saving, batch))
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name])


def test_relations_stay_inside_a_text() -> None:
    """A batch's loss is the sum of its texts' losses, and none from a teacher to itself."""
    relations, student = RelationLoss(make(0)), make(1)
    alone = torch.stack([relations.loss(student, Batch.from_ids([one])) for one in IDS])
    assert_close(relations.loss(student, Batch.from_ids(IDS)), alone.sum(), atol=1e-5, rtol=0)
    assert alone[1].item() == 0.0  # of one token, which has only itself
    with disable("native.training"):  # they round differently, and the teacher does without them
        assert relations.loss(make(0), Batch.from_ids(IDS)).item() == 0.0


def test_relations_that_do_not_fit_are_refused() -> None:
    student, batch = make(1), Batch.from_ids(IDS)
    for pairs in (("qk",), ("vv",)):
        with pytest.raises(ConfigError, match="3 heads in the teacher and 2 in the student"):
            RelationLoss(wide(), relations=pairs).loss(student, batch)
    with pytest.raises(ConfigError, match="heads=6 must divide the width 16 of 'qq' in the student"):
        RelationLoss(wide(), heads=6).loss(student, batch)
    with pytest.raises(ConfigError, match="layer=2 of the teacher must lie between -2 and 1"):
        RelationLoss(make(0), layer=2).loss(student, batch)
    with pytest.raises(ConfigError, match="must be one or more of qk, qq, kk, vv"):
        RelationLoss(make(0), relations=("qv",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="heads=0 must be at least 1"):
        RelationLoss(make(0), heads=0)
    deberta, _ = ours(build("deberta-v2", "Model"))
    with pytest.raises(ConfigError, match="'qk' needs full attention with learned or rotary positions"):
        RelationLoss(deberta, relations=("qk",)).loss(deberta, batch)


def test_the_teacher_is_fixed() -> None:
    student, batch = make(1), Batch.from_ids(IDS)
    assert_teacher_is_fixed(lambda teacher: RelationLoss(teacher).loss(student, batch))


def test_the_loss_is_float32_in_half_precision() -> None:
    teacher, student, batch = make(0), make(1), Batch.from_ids(IDS)
    assert_float32_under_autocast(
        student, lambda: RelationLoss(teacher, relations=("qk", "qq", "vv")).loss(student, batch)
    )


@pytest.mark.parametrize("version", [1, 2])
def test_a_student_comes_closer_to_its_teacher(version: int) -> None:
    teacher, student = (make(0, depth=3) if version == 1 else wide()), make(1)
    relations = RelationLoss(teacher, relations=("qk", "vv")) if version == 1 else RelationLoss(teacher, heads=4)
    assert_converges(student, lambda batch: relations.loss(student, batch) / len(batch.ids))
