"""Each loss and its gradients against a plain computation text by text, or against transformers; and that they fall."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned, NormConfig, Rotary
from bertie.errors import ConfigError, InputError
from bertie.nn import attention
from bertie.nn.model import Model
from bertie.nn.pooling import Pooling
from bertie.ops import dispatch
from bertie.ops.contracts import AttentionInputs
from bertie.ops.torch import eager
from bertie.text.batch import Batch
from bertie.training.objectives import (
    Objective,
    SingleLabelObjective,
    TokenClassificationObjective,
    TrainingExample,
    TrainingWindow,
)
from bertie.training.pretrain import distillation as distil
from bertie.training.pretrain.distillation import Embeddings, Logits, Relations, TokenLogits, TripleLoss, copy_layers
from bertie.training.sampling import TrainingTask
from tests.parity.test_transformers import check_gradients, ours
from tests.parity.tiny import build, texts
from tests.training import tiny

IDS = [[3, 9, 4, 11, 5], [7], [8, 8, 2, 6, 30, 12, 1, 3], [5, 6, 7]]


def make(seed: int = 0, depth: int = 2, dropout: float = 0.0, **changes: Any) -> Model:
    cfg = EncoderConfig(
        **{
            "vocab": 40,
            "width": 16,
            "layer_map": tuple(range(depth)),
            "heads": 2,
            "head_width": 8,
            "kv_heads": 2,
            "ff_width": 24,
            "activation": "gelu",
            "embeddings": EmbeddingConfig(width=16, segments=2),
            "positions": (Learned(32),),
            "patterns": (Full(),) * depth,
            "max_length": 32,
            "dropout": dropout,
            "attention_dropout": dropout,
            "init_std": 0.3,
        }
        | changes
    )
    torch.manual_seed(seed)
    width = cfg.width
    mlm = HeadConfig(kind="vocabulary", outputs=cfg.vocab, dense=width, activation="gelu", norm=NormConfig(), tied=True)
    return Model(cfg, {"mlm": mlm, "classify": HeadConfig(kind="text", outputs=3)})


def wide(seed: int = 9, dropout: float = 0.0) -> Model:
    """Another width and other heads than `make`'s."""
    shape = {"width": 24, "heads": 3, "kv_heads": 3, "embeddings": EmbeddingConfig(width=24, segments=2)}
    return make(seed, dropout=dropout, **shape)


def grads(of: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    of.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in of.named_parameters() if p.grad is not None}


def assert_same(of: nn.Module, found: Tensor, wanted: Tensor, atol: float = 1e-5) -> None:
    """Losses, and gradients of all parameters."""
    assert_close(found.detach(), wanted.detach(), atol=atol, rtol=1e-5)
    a, b = grads(of, found), grads(of, wanted)
    zero = {name: torch.zeros_like(p) for name, p in of.named_parameters()}
    assert any(g.abs().max() > 1e-3 for g in b.values()), "there is no gradient to compare"
    for name in zero:
        assert_close(a.get(name, zero[name]), b.get(name, zero[name]), atol=atol, rtol=1e-4, msg=f"gradient of {name}")


def kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Plainly, of probabilities."""
    p, q = torch.softmax(teacher / temperature, -1), torch.softmax(student / temperature, -1)
    return (p * (p / q).log()).sum(-1)


# --- a student's first weights ---


def test_layers_are_distilberts() -> None:
    teacher, student = make(0, depth=12), make(1, depth=6)
    teacher.heads.pop("classify")
    left = copy_layers(teacher, student)
    assert left == ["heads.classify.out.weight", "heads.classify.out.bias"]
    for i, layer in enumerate((0, 2, 4, 7, 9, 11)):  # transformers' extract_distilbert.py
        for a, b in zip(
            student.encoder.blocks[i].parameters(), teacher.encoder.blocks[layer].parameters(), strict=True
        ):
            assert torch.equal(a, b)
            assert a is not b
    assert torch.equal(student.encoder.embeddings.words.weight, teacher.encoder.embeddings.words.weight)
    assert torch.equal(student.head("mlm").dense.weight, teacher.head("mlm").dense.weight)  # type: ignore[union-attr]


def test_all_layers_make_the_teacher() -> None:
    teacher, student = make(0, depth=3), make(1, depth=3)
    copy_layers(teacher, student, [0, 1, 2])
    batch = Batch.from_ids(IDS)
    assert torch.equal(student(batch, "mlm"), teacher(batch, "mlm"))
    copy_layers(teacher, student, [2, 1, 0])
    assert not torch.allclose(student(batch, "mlm"), teacher(batch, "mlm"))


def test_what_does_not_fit_is_left_and_named() -> None:
    teacher = make(0, depth=4)
    student = make(1, vocab=50, embeddings=EmbeddingConfig(width=16))
    before = student.encoder.embeddings.words.weight.clone()
    left = copy_layers(teacher, student)
    assert set(left) == {
        "encoder.embeddings.words.weight",
        "heads.mlm.bias",
        "heads.classify.out.weight",
        "heads.classify.out.bias",
    }
    assert torch.equal(student.encoder.embeddings.words.weight, before)
    assert torch.equal(student.encoder.embeddings.positions.weight, teacher.encoder.embeddings.positions.weight)  # type: ignore[union-attr]


def test_shared_blocks_are_read_by_layer() -> None:
    teacher, student = make(0, depth=4, layer_map=(0, 0, 1, 1)), make(1)
    copy_layers(teacher, student, [1, 2])
    for i in (0, 1):
        assert torch.equal(student.encoder.blocks[i].ff.up.weight, teacher.encoder.blocks[i].ff.up.weight)


def test_layers_that_cannot_be_copied() -> None:
    with pytest.raises(ConfigError, match="width of the teacher is 24, of the student 16"):
        copy_layers(wide(), make())
    with pytest.raises(ConfigError, match="heads of the teacher is 2, of the student 4"):
        copy_layers(make(), make(heads=4, kv_heads=4, head_width=4))
    for layers in ([0], [0, 1, 2], [0, 4], [-1, 0]):
        with pytest.raises(ConfigError, match="must be 2 numbers, one a block of the student, from 0 to 3"):
            copy_layers(make(depth=4), make(), layers)
    first = {"pre_norm": True, "first_norm": False}  # the first block has no norm, which no other block can do without
    with pytest.raises(ConfigError, match=r"pre_attention.weight of the student's block 1, \(16,\)"):
        copy_layers(make(**first), make(**first), [0, 0])


# --- masked language models ---


def test_triple_loss_is_distilberts_on_transformers_models() -> None:
    """The formulas of transformers' research_projects/distillation/distiller.py, on padded batches."""
    teacher, student = build("bert", "ForMaskedLM", seed=1), build("bert", "ForMaskedLM", seed=2)
    ids, segments = texts("bert", "ForMaskedLM", 5, seed=3)
    longest = max(map(len, ids))
    padded = torch.tensor([one + [0] * (longest - len(one)) for one in ids])
    inputs = {
        "input_ids": padded,
        "token_type_ids": torch.tensor([one + [0] * (longest - len(one)) for one in segments]),
        "attention_mask": torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in ids]),
        "output_hidden_states": True,
    }
    real = inputs["attention_mask"].bool()
    torch.manual_seed(0)
    chosen = real & (torch.rand(real.shape) < 0.4)
    labels = torch.where(chosen, torch.randint(0, 60, padded.shape), -100)
    temperature = 2.0

    out = student(**inputs)
    with torch.no_grad():
        told = teacher(**inputs)
    soft = nn.KLDivLoss(reduction="batchmean")(
        F.log_softmax(out.logits[chosen] / temperature, dim=-1), F.softmax(told.logits[chosen] / temperature, dim=-1)
    )
    mlm = nn.CrossEntropyLoss(ignore_index=-100)(out.logits.flatten(0, 1), labels.flatten())
    h, g = out.hidden_states[-1][real], told.hidden_states[-1][real]
    cosine = nn.CosineEmbeddingLoss(reduction="mean")(h, g, torch.ones(len(h)))
    wanted = 5.0 * soft * temperature**2 + 2.0 * mlm + 1.0 * cosine
    wanted.backward()

    model, plan = ours(student)
    rows, targets = chosen[real].nonzero()[:, 0], labels[chosen]
    found = TripleLoss(ours(teacher)[0]).loss(model, Batch.from_ids(ids, segments), rows, targets) / len(rows)
    assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    found.backward()
    check_gradients(student, model, plan)


@pytest.mark.parametrize("weights", [(0.0, 1.0, 0.0), (3.0, 0.0, 0.0), (0.0, 0.0, 2.0), (1.0, 1.0, 1.0)])
def test_triple_loss_term_by_term(weights: tuple[float, float, float]) -> None:
    teacher, student = make(0), make(1)
    rows, targets = torch.tensor([1, 5, 9, 10]), torch.tensor([4, 0, 39, 4])
    soft, mlm, cosine = weights
    batch = Batch.from_ids(IDS)
    loss = TripleLoss(teacher, temperature=3.0, soft=soft, mlm=mlm, cosine=cosine)
    with torch.no_grad():
        t, g = teacher(batch, "mlm")[rows], teacher.hidden(batch)
    s, h = student(batch, "mlm")[rows], student.hidden(batch)
    apart = 1 - (h * g).sum(-1) / (h.norm(dim=-1) * g.norm(dim=-1))
    wanted = soft * 9 * kl(s, t, 3.0).sum() - mlm * torch.log_softmax(s, -1)[range(4), targets].sum()
    assert_same(student, loss.loss(student, batch, rows, targets), wanted + cosine * 4 * apart.mean())


def test_triple_loss_of_a_step_in_parts() -> None:
    loss, student = TripleLoss(make(0)), make(1)
    whole = loss.loss(student, Batch.from_ids(IDS), torch.tensor([1, 7, 16]), torch.tensor([4, 5, 6]))
    rate = 3 / sum(map(len, IDS))
    first = loss.loss(student, Batch.from_ids(IDS[:2]), torch.tensor([1]), torch.tensor([4]), rate=rate)
    second = loss.loss(student, Batch.from_ids(IDS[2:]), torch.tensor([1, 10]), torch.tensor([5, 6]), rate=rate)
    assert_same(student, whole, first + second)


def test_triple_loss_refuses_what_it_cannot_compare() -> None:
    batch, rows = Batch.from_ids(IDS), torch.tensor([0])
    with pytest.raises(ConfigError, match="vocab of the teacher is 50, of the student 40"):
        TripleLoss(make(vocab=50)).loss(make(), batch, rows, rows)
    with pytest.raises(ConfigError, match="width of the teacher is 24, of the student 16"):
        TripleLoss(wide()).loss(make(), batch, rows, rows)
    assert torch.isfinite(TripleLoss(wide(), cosine=0.0).loss(make(), batch, rows, rows))
    for wrong in ({"temperature": 0.0}, {"soft": -1.0}, {"cosine": float("nan")}, {"mlm": float("inf")}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            TripleLoss(make(), **wrong)


def test_a_teacher_is_only_asked() -> None:
    """Dropout is off in it, whatever mode it came in, and it has no gradients."""
    student, batch = make(1), Batch.from_ids(IDS)
    rows = torch.tensor([1, 2])
    for step in (
        lambda of: TripleLoss(of).loss(student, batch, rows, rows),
        lambda of: Relations(of).loss(student, batch),
        lambda of: Embeddings(16, 16, cosine=1.0).loss(student, batch, Told(of)),
    ):
        teacher = make(0, dropout=0.5).train()
        loss = step(teacher)
        loss.backward()
        assert loss.item() == step(make(0)).item()
        assert all(p.grad is None for p in teacher.parameters())
    asked, wanted = (Logits().ask(tiny.model(dropout=p).train(), "classify", tiny.items(3)) for p in (0.5, 0.0))
    for one, other in zip(asked, wanted, strict=True):
        assert one.value is not None
        assert one.value.tolist() == other.value.tolist()  # type: ignore[union-attr]


# --- relations between tokens ---


def projected(model: Model, batch: Batch, layer: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of each text in a post-norm model: from the state below the layer, with weights cut by hand."""
    x = list(model.encoder.hidden_states(batch))[layer]
    qkv, out = model.encoder.blocks[model.config.layer_map[layer]].attention.qkv, []
    weights, biases = torch.split(qkv.weight, qkv.sizes), torch.split(qkv.bias, qkv.sizes)
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
    monkeypatch.setattr(distil, "AT_ONCE", at_once)
    teacher, student, batch = make(0, depth=3), make(1), Batch.from_ids(IDS)
    found = Relations(teacher, pairs=("qk", "vv")).loss(student, batch)
    assert_same(student, found, relations(teacher, student, batch, ("qk", "vv"), 2, 2, 1))


@pytest.mark.parametrize("at_once", [1 << 24, 1000, 100, 1])
@pytest.mark.parametrize("heads", [1, 4, 8])
def test_relations_of_minilm_2(heads: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distil, "AT_ONCE", at_once)
    teacher, student, batch = wide(), make(1), Batch.from_ids(IDS)
    found = Relations(teacher, heads=heads, layer=0, student_layer=-2).loss(student, batch)
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
    found = Relations(teacher, pairs=("qk",), layer=layer, student_layer=layer).loss(
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
def test_the_layer_that_is_meant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a block serves several layers, or projects positions too: the queries are those that attend is given."""
    given: list[tuple[Tensor, ...]] = []
    attend = attention.attend

    def listen(inputs: AttentionInputs, backends: Any) -> Tensor:
        given.append((inputs.q, inputs.k, inputs.v))
        return attend(inputs, backends)

    model, _ = ours(build(name, "Model"))
    ids, segments = texts(name, "Model", 3, seed=1)
    batch = Batch.from_ids(ids, segments)
    monkeypatch.setattr(attention, "attend", listen)
    for layer in range(model.config.depth):
        given.clear()
        found = distil._projected(model.encoder, batch, layer)
        assert len(given) == layer + 1  # nothing above is computed
        for a, b in zip(found, given[-1], strict=True):
            assert torch.equal(a, b)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_is_projected_is_not_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without gradients, positions turn queries and keys where they lie."""

    def in_place(q: Tensor, k: Tensor, *angles: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(x.copy_(y) for x, y in zip((q, k), eager.rotate_pair(q, k, *angles), strict=True))  # type: ignore[return-value]

    model, batch = make(positions=(Rotary((10.0, 10.0)),)), Batch.from_ids(IDS)
    with torch.no_grad():
        wanted = distil._projected(model.encoder, batch, 1)
        rows = [replace(row, run=in_place) if row.operation == "rotary" else row for row in dispatch.ROWS]
        monkeypatch.setattr(dispatch, "ROWS", rows)
        dispatch.clear_cache()
        model.encoder.reset_dispatch()
        found = distil._projected(model.encoder, batch, 1)
    dispatch.clear_cache()
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_relations_with_gradient_checkpointing() -> None:
    teacher, batch = make(0), Batch.from_ids(IDS)
    plain, saving = make(1).train(), make(1).train()
    saving.encoder.gradient_checkpointing = True
    wanted = grads(plain, Relations(teacher).loss(plain, batch))
    found = grads(saving, Relations(teacher).loss(saving, batch))
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name])


def test_relations_stay_inside_a_text() -> None:
    """A batch's loss is the sum of its texts' losses, and none from a teacher to itself."""
    relations, student = Relations(make(0)), make(1)
    alone = torch.stack([relations.loss(student, Batch.from_ids([one])) for one in IDS])
    assert_close(relations.loss(student, Batch.from_ids(IDS)), alone.sum(), atol=1e-5, rtol=0)
    assert alone[1].item() == 0.0  # of one token, which has only itself
    assert relations.loss(make(0), Batch.from_ids(IDS)).item() == 0.0


def test_relations_that_cannot_be() -> None:
    student, batch = make(1), Batch.from_ids(IDS)
    for pairs in (("qk",), ("vv",)):
        with pytest.raises(ConfigError, match="3 heads in the teacher and 2 in the student"):
            Relations(wide(), pairs=pairs).loss(student, batch)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="heads=6 must divide the width 16 of 'qq' in the student"):
        Relations(wide(), heads=6).loss(student, batch)
    with pytest.raises(ConfigError, match="layer=2 of the teacher must lie between -2 and 1"):
        Relations(make(0), layer=2).loss(student, batch)
    with pytest.raises(ConfigError, match="must be one or more of qk, qq, kk, vv"):
        Relations(make(0), pairs=("qv",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="heads=0 must be at least 1"):
        Relations(make(0), heads=0)
    deberta, _ = ours(build("deberta-v2", "Model"))
    with pytest.raises(ConfigError, match="'qk' needs full attention with learned or rotary positions"):
        Relations(deberta, pairs=("qk",)).loss(deberta, batch)


# --- classes ---


def read_dataset(objective: Logits, teacher: Model, head: str, items: list[TrainingExample]) -> list[TrainingExample]:
    asked = objective.ask(teacher, head, items, budget=30)
    assert [[p.ids.tolist() for p in one.windows] for one in asked] == [
        [p.ids.tolist() for p in one.windows] for one in items
    ]
    return asked


@pytest.mark.parametrize(("temperature", "hard"), [(1.0, 0.0), (3.0, 0.25), (2.0, 1.0)])
def test_logits_of_texts(temperature: float, hard: float) -> None:
    teacher, student = tiny.model(seed=1), tiny.model(seed=2)
    items = tiny.items(7, windows=3)
    items[2] = replace(items[2], value=None)
    objective = Logits(temperature, hard)
    mini = objective.collate(read_dataset(objective, teacher, "classify", items))
    found = objective.loss(student(mini.batch, "classify"), mini.batch, mini.targets)
    assert mini.weight == pytest.approx(sum(item.weight for item in items))

    wanted = torch.zeros(())
    for item in items:
        s, t = (
            sum(
                piece.share * torch.log_softmax(model(Batch.from_ids([piece.ids]), "classify")[0], -1)
                for piece in item.windows
            )
            for model in (student, teacher)
        )
        loss = (1 - hard) * temperature**2 * kl(s, t.detach(), temperature)
        if item.value is not None:
            loss = loss - hard * torch.log_softmax(s, -1)[int(item.value)]
        wanted = wanted + item.weight * loss
    assert_same(student, found, wanted)


def test_hard_logits_are_plain_training() -> None:
    """With nothing of the teacher, and texts in one window or several: `SingleLabelObjective` and `TokenClassificationObjective`."""
    for objective, plain, head, items in (
        (Logits(hard=1.0), SingleLabelObjective(), "classify", tiny.items(5, windows=3)),
        (TokenLogits(hard=1.0), TokenClassificationObjective(), "tag", tiny.tagged(5)),
    ):
        assert isinstance(plain, Objective)
        student = tiny.model(seed=2)
        asked, given = objective.collate(read_dataset(objective, tiny.model(seed=1), head, items)), plain.collate(items)
        found = objective.loss(student(asked.batch, head), asked.batch, asked.targets)
        assert_same(student, found, plain.loss(student(given.batch, head), given.batch, given.targets))


def test_logits_of_tokens() -> None:
    teacher, student = tiny.model(seed=1), tiny.model(seed=2)
    rng = np.random.default_rng(0)
    items = tiny.tagged(4)
    items.append(TrainingExample((tiny.piece(rng, 0), tiny.piece(rng, 1))))  # no labels: every token is asked for
    objective = TokenLogits(2.0, 0.5)
    mini = objective.collate(read_dataset(objective, teacher, "tag", items))
    found = objective.loss(student(mini.batch, "tag"), mini.batch, mini.targets)
    wanted = torch.zeros(())
    for item in items:
        for piece in item.windows:
            s, t = (model(Batch.from_ids([piece.ids]), "tag") for model in (student, teacher))
            for i in range(len(piece)):
                weight = 1.0 if piece.weights is None else float(piece.weights[i])
                loss = 0.5 * 4 * kl(s[i], t[i].detach(), 2.0)
                if piece.values is not None:
                    loss = loss - 0.5 * torch.log_softmax(s[i], -1)[int(piece.values[i])]
                wanted = wanted + weight * loss
    assert_same(student, found, wanted)


def test_what_no_one_asks_for_counts_for_nothing() -> None:
    objective = TokenLogits(hard=0.5)
    values = np.array([[2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    piece = TrainingWindow(np.array([1, 2]), np.array([0, 0]), 1.0, values, np.array([1.0, 0.0]))
    mini = objective.collate([TrainingExample((piece,))])
    outputs = torch.tensor([[1.0, 0.0], [float("nan"), 0.0]], requires_grad=True)
    loss = objective.loss(outputs, mini.batch, mini.targets)
    loss.backward()
    assert torch.isfinite(loss)
    assert outputs.grad is not None
    assert outputs.grad[1].tolist() == [0.0, 0.0]
    assert outputs.grad[0].abs().min() > 0


def test_logits_that_do_not_fit() -> None:
    teacher, items = tiny.model(), tiny.items(3)
    with pytest.raises(ConfigError, match=r"head 'tag' of the teacher gives .* Logits needs a row a text"):
        Logits().ask(teacher, "tag", items)
    with pytest.raises(ConfigError, match=r"head 'classify' of the teacher gives .* TokenLogits needs a row a token"):
        TokenLogits().ask(teacher, "classify", items)
    mini = Logits().collate(Logits().ask(teacher, "classify", items))
    with pytest.raises(ConfigError, match="the teacher has 3 classes, the student 2"):
        Logits().loss(torch.zeros(3, 2), mini.batch, mini.targets)
    for wrong in ({"temperature": -1.0}, {"hard": 1.5}, {"hard": -0.1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Logits(**wrong)


def test_a_student_learns_its_teachers_classes_from_texts_without_labels() -> None:
    """Through the trainer as it is: the teacher's answers travel in the items."""
    teacher, held = tiny.model(seed=1), tiny.items(64, seed=5)
    tiny.trainer(teacher, tiny.source(96), tiny.recipe(epochs=6)).run()
    assert tiny.accuracy(teacher, held) > 0.9
    objective, student = Logits(), tiny.model(seed=2)
    unlabelled = [replace(item, value=None) for item in tiny.items(96, seed=3)]
    asked = objective.ask(teacher, "classify", unlabelled)
    tiny.trainer(student, TrainingTask("classify", objective, asked), tiny.recipe(epochs=6)).run()
    assert tiny.accuracy(student, held) > 0.9


# --- vectors of texts ---


class Told(nn.Module):
    """A teacher of vectors."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        vectors: Tensor = Pooling("mean")(self.model.hidden(batch), batch)
        return vectors


def huber(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 1, x**2 / 2, x.abs() - 0.5)


def unit(x: Tensor) -> Tensor:
    return x / x.norm()


def plain(term: str, s: Tensor, t: Tensor, p: Tensor, w: list[float]) -> Any:
    """Text by text, pair by pair and triple by triple."""
    n, whole = len(s), sum(w)
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]

    def mean(x: Tensor) -> Any:
        return sum(w[i] * w[j] * (x[i] - x[j]).norm() for i, j in pairs) / sum(w[i] * w[j] for i, j in pairs)

    def angle(x: Tensor, i: int, j: int, k: int) -> Tensor:
        return unit(x[i] - x[j]) @ unit(x[k] - x[j])

    if term == "cosine":
        return sum(w[i] * (1 - unit(p[i]) @ unit(t[i])) for i in range(n))
    if term == "mse":
        return sum(w[i] * ((p[i] - t[i]) ** 2).mean() for i in range(n))
    if term == "distances":
        a, b = ({(i, j): (x[i] - x[j]).norm() / mean(x) for i, j in pairs} for x in (s, t))
        return sum(w[i] * w[j] * huber(a[i, j] - b[i, j]) for i, j in pairs) / whole
    if term == "angles":
        triples = [(i, j, k) for i, j in pairs for k in range(n) if k != j]
        return sum(w[i] * w[j] * w[k] * huber(angle(s, i, j, k) - angle(t, i, j, k)) for i, j, k in triples) / whole**2
    return sum(w[i] * w[j] * (unit(s[i]) @ unit(s[j]) - unit(t[i]) @ unit(t[j])) ** 2 for i, j in pairs) / whole


@pytest.mark.parametrize("term", ["cosine", "mse", "distances", "angles", "similarities"])
@pytest.mark.parametrize("width", [16, 24])
@pytest.mark.parametrize("weighted", [False, True])
def test_embeddings(term: str, width: int, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distil, "AT_ONCE", 300)  # angles at a few corners at a time
    student, batch = make(1), Batch.from_ids(IDS)
    torch.manual_seed(0)
    wanted, weights = torch.randn(4, width), [0.5, 2.0, 1.0, 3.0] if weighted else [1.0] * 4
    objective = Embeddings(16, width, pooling="cls", **{term: 2.0})
    assert (objective.project is not None) == (width == 24 and term in ("cosine", "mse"))
    both = nn.ModuleList([student, objective])
    s = student.hidden(batch)[[0, 5, 6, 14]]
    p = s if objective.project is None else s @ objective.project.weight.T
    found = objective.loss(student, batch, wanted, torch.tensor(weights) if weighted else None)
    assert_same(both, found, 2.0 * plain(term, s, wanted, p, weights))


def test_embeddings_of_torch() -> None:
    """The means of torch's own losses, times the number of texts; RKD's as its authors average them."""
    torch.manual_seed(0)
    s, t = torch.randn(6, 5), torch.randn(6, 5)

    def found(term: str) -> Tensor:
        return Embeddings(5, 5, **{term: 1.0}).between(s, t) / 6

    assert_close(found("mse"), F.mse_loss(s, t))
    assert_close(found("cosine"), F.cosine_embedding_loss(s, t, torch.ones(6)))
    a, b = (torch.cdist(x, x) / torch.pdist(x).mean() for x in (s, t))
    assert_close(found("distances"), F.smooth_l1_loss(a, b))
    a, b = (F.normalize(x[None] - x[:, None], dim=-1) for x in (s, t))
    assert_close(found("angles"), F.smooth_l1_loss(a @ a.mT, b @ b.mT))
    assert_close(found("similarities"), F.mse_loss(*(F.cosine_similarity(x[None], x[:, None], dim=-1) for x in (s, t))))


ALL = {"cosine": 1.0, "mse": 1.0, "distances": 1.0, "angles": 2.0, "similarities": 1.0}


def test_embeddings_without_weight_count_for_nothing() -> None:
    torch.manual_seed(0)
    s, t, w = torch.randn(5, 6), torch.randn(5, 6), torch.tensor([1.0, 0.0, 2.0, 1.0, 0.0])
    s[1], t[4] = float("nan"), float("inf")
    s.requires_grad_(True)
    objective = Embeddings(6, 6, **ALL)
    kept = [0, 2, 3]
    found = objective.between(s, t, w)
    found.backward()
    assert_close(found, objective.between(s[kept], t[kept], w[kept]))
    assert s.grad is not None
    assert s.grad[[1, 4]].abs().max() == 0
    assert torch.isfinite(s.grad).all()


def test_embeddings_of_one_text_twice_and_of_one_alone() -> None:
    """Distances of 0 have no direction: the gradient there is 0, not NaN."""
    torch.manual_seed(0)
    objective = Embeddings(6, 6, **ALL)
    for count in (1, 2, 4):
        s = torch.randn(1, 6).repeat(count, 1).requires_grad_(True)
        objective.between(s, torch.randn(1, 6).repeat(count, 1)).backward()
        assert s.grad is not None
        assert torch.isfinite(s.grad).all()


def test_embeddings_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="all terms are 0"):
        Embeddings(8, 8)
    with pytest.raises(ConfigError, match="mse=-1"):
        Embeddings(8, 8, mse=-1.0)
    objective = Embeddings(8, 12, mse=1.0)
    with pytest.raises(InputError, match=r"wanted has shape \(3, 12\); \(2, 12\) is needed"):
        objective.between(torch.zeros(2, 8), torch.zeros(3, 12))
    with pytest.raises(InputError, match=r"vectors has shape \(2, 12\); \(2, 8\) is needed"):
        objective.between(torch.zeros(2, 12), torch.zeros(2, 12))


# --- all of them ---


def test_losses_are_float32_in_half_precision() -> None:
    """Passes are in bfloat16, what is made of them is not."""
    teacher, student, batch = make(0), make(1), Batch.from_ids(IDS)
    rows = torch.tensor([1, 6, 9])
    for step in (
        lambda: TripleLoss(teacher).loss(student, batch, rows, rows),
        lambda: Relations(teacher, pairs=("qk", "qq", "vv")).loss(student, batch),
        lambda: Embeddings(16, 16, **ALL).loss(student, batch, Told(teacher)),
    ):
        wanted = grads(student, step())
        with torch.autocast("cpu", torch.bfloat16):
            loss = step()
        assert loss.dtype == torch.float32
        for name, found in grads(student, loss).items():
            apart = (found - wanted[name]).norm() / wanted[name].norm().clamp(min=0.1)
            assert apart < 0.1, name


# --- a student's loss to its teacher falls, on texts it has not seen too ---


def batches(seed: int, count: int) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [Batch.from_ids([rng.integers(1, 40, n) for n in rng.integers(1, 12, 8)]) for _ in range(count)]


@pytest.mark.parametrize("kind", ["triple", "minilm", "minilm2", "cosine", "mse", "rkd", "similarities"])
def test_a_student_comes_closer_to_its_teacher(kind: str) -> None:
    same = kind in ("triple", "minilm")
    teacher, student = (make(0, depth=3) if same else wide()), make(1)
    own = Embeddings(
        16, 24, **({"distances": 1.0, "angles": 2.0} if kind == "rkd" else {kind: 1.0} if kind in ALL else ALL)
    )

    def loss(batch: Batch) -> Tensor:
        if kind == "triple":
            rows = torch.arange(0, len(batch.ids), 3)
            return TripleLoss(teacher, mlm=0.0).loss(student, batch, rows, batch.ids[rows]) / len(rows)
        if kind == "minilm":
            return Relations(teacher, pairs=("qk", "vv")).loss(student, batch) / len(batch.ids)
        if kind == "minilm2":
            return Relations(teacher, heads=4).loss(student, batch) / len(batch.ids)
        return own.loss(student, batch, Told(teacher)) / len(batch)

    def held() -> float:
        with torch.no_grad():
            return float(np.mean([loss(batch).item() for batch in batches(99, 3)]))

    before = held()
    optimizer = torch.optim.Adam([*student.parameters(), *own.parameters()], lr=0.01)
    for batch in batches(1, 40):
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
    assert held() < 0.8 * before
