"""DistilBERT's initialization and loss, against transformers and term by term."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.config import EmbeddingConfig
from bertie.errors import ConfigError
from bertie.text.batch import Batch
from bertie.training.pretrain.mlm_distillation import DistilBertLoss, copy_layers
from tests.parity.test_transformers import check_gradients, ours
from tests.parity.tiny import build, texts
from tests.training.pretrain.distillation_models import (
    IDS,
    assert_converges,
    assert_float32_under_autocast,
    assert_same,
    assert_teacher_is_fixed,
    kl,
    make,
    wide,
)

# --- initialization ---


def test_layers_are_spaced_as_in_distilbert() -> None:
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
    assert torch.equal(student.head("mlm").dense.weight, teacher.head("mlm").dense.weight)


def test_copying_all_layers_gives_the_teacher() -> None:
    teacher, student = make(0, depth=3), make(1, depth=3)
    copy_layers(teacher, student, [0, 1, 2])
    batch = Batch.from_ids(IDS)
    assert torch.equal(student(batch, "mlm"), teacher(batch, "mlm"))
    copy_layers(teacher, student, [2, 1, 0])
    assert not torch.allclose(student(batch, "mlm"), teacher(batch, "mlm"))


def test_weights_of_other_shapes_are_skipped_and_returned() -> None:
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
    assert torch.equal(student.encoder.embeddings.positions.weight, teacher.encoder.embeddings.positions.weight)


def test_shared_blocks_are_read_by_layer() -> None:
    teacher, student = make(0, depth=4, layer_map=(0, 0, 1, 1)), make(1)
    copy_layers(teacher, student, [1, 2])
    for i in (0, 1):
        assert torch.equal(student.encoder.blocks[i].ff.up.weight, teacher.encoder.blocks[i].ff.up.weight)  # type: ignore[arg-type]


def test_layers_that_cannot_be_copied() -> None:
    with pytest.raises(ConfigError, match="width of the teacher is 24, of the student 16"):
        copy_layers(wide(), make())
    with pytest.raises(ConfigError, match="heads of the teacher is 2, of the student 4"):
        copy_layers(make(), make(heads=4, kv_heads=4, head_width=4))
    for layers in ([0], [0, 1, 2], [0, 4], [-1, 0]):
        with pytest.raises(ConfigError, match="must be 2 numbers, one per block of the student, from 0 to 3"):
            copy_layers(make(depth=4), make(), layers)
    first = {"pre_norm": True, "first_norm": False}  # the first block has no norm, which no other block can do without
    with pytest.raises(ConfigError, match=r"pre_attention.weight of the student's block 1, \(16,\)"):
        copy_layers(make(**first), make(**first), [0, 0])


# --- loss ---


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
    real = inputs["attention_mask"].bool()  # type: ignore[attr-defined]
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
    found = DistilBertLoss(ours(teacher)[0]).loss(model, Batch.from_ids(ids, segments), rows, targets) / len(rows)
    assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    found.backward()
    check_gradients(student, model, plan)


@pytest.mark.parametrize("weights", [(0.0, 1.0, 0.0), (3.0, 0.0, 0.0), (0.0, 0.0, 2.0), (1.0, 1.0, 1.0)])
def test_triple_loss_term_by_term(weights: tuple[float, float, float]) -> None:
    teacher, student = make(0), make(1)
    rows, targets = torch.tensor([1, 5, 9, 10]), torch.tensor([4, 0, 39, 4])
    soft, mlm, cosine = weights
    batch = Batch.from_ids(IDS)
    loss = DistilBertLoss(teacher, temperature=3.0, soft=soft, mlm=mlm, cosine=cosine)
    with torch.no_grad():
        t, g = teacher(batch, "mlm")[rows], teacher.hidden(batch)
    s, h = student(batch, "mlm")[rows], student.hidden(batch)
    apart = 1 - (h * g).sum(-1) / (h.norm(dim=-1) * g.norm(dim=-1))
    wanted = soft * 9 * kl(s, t, 3.0).sum() - mlm * torch.log_softmax(s, -1)[range(4), targets].sum()
    assert_same(student, loss.loss(student, batch, rows, targets), wanted + cosine * 4 * apart.mean())


def test_triple_loss_of_micro_batches_adds_up() -> None:
    loss, student = DistilBertLoss(make(0)), make(1)
    whole = loss.loss(student, Batch.from_ids(IDS), torch.tensor([1, 7, 16]), torch.tensor([4, 5, 6]))
    rate = 3 / sum(map(len, IDS))
    first = loss.loss(student, Batch.from_ids(IDS[:2]), torch.tensor([1]), torch.tensor([4]), rate=rate)
    second = loss.loss(student, Batch.from_ids(IDS[2:]), torch.tensor([1, 10]), torch.tensor([5, 6]), rate=rate)
    assert_same(student, whole, first + second)


def test_models_that_do_not_match_are_refused() -> None:
    batch, rows = Batch.from_ids(IDS), torch.tensor([0])
    with pytest.raises(ConfigError, match="vocab of the teacher is 50, of the student 40"):
        DistilBertLoss(make(vocab=50)).loss(make(), batch, rows, rows)
    with pytest.raises(ConfigError, match="width of the teacher is 24, of the student 16"):
        DistilBertLoss(wide()).loss(make(), batch, rows, rows)
    assert torch.isfinite(DistilBertLoss(wide(), cosine=0.0).loss(make(), batch, rows, rows))
    for wrong in ({"temperature": 0.0}, {"soft": -1.0}, {"cosine": float("nan")}, {"mlm": float("inf")}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DistilBertLoss(make(), **wrong)


def test_the_teacher_is_fixed() -> None:
    student, batch, rows = make(1), Batch.from_ids(IDS), torch.tensor([1, 2])
    assert_teacher_is_fixed(lambda teacher: DistilBertLoss(teacher).loss(student, batch, rows, rows))


def test_the_loss_is_float32_in_half_precision() -> None:
    teacher, student, batch, rows = make(0), make(1), Batch.from_ids(IDS), torch.tensor([1, 6, 9])
    assert_float32_under_autocast(student, lambda: DistilBertLoss(teacher).loss(student, batch, rows, rows))


def test_a_student_comes_closer_to_its_teacher() -> None:
    teacher, student = make(0, depth=3), make(1)

    def loss(batch: Batch) -> Tensor:
        rows = torch.arange(0, len(batch.ids), 3)
        return DistilBertLoss(teacher, mlm=0.0).loss(student, batch, rows, batch.ids[rows]) / len(rows)

    assert_converges(student, loss)
