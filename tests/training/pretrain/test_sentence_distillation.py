"""A teacher with words of its own: pieces of the same words in two corpora, and what is learnt of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.errors import ConfigError, InputError
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.text.tokenizer_training import train
from bertie.training.objectives import TrainingExample
from bertie.training.prefetch import split_micro_batches
from bertie.training.pretrain.corpus import Corpus, build_corpus
from bertie.training.pretrain.initialization import new_model
from bertie.training.pretrain.masking import Masking
from bertie.training.pretrain.sentence_distillation import (
    AlignedCorpora,
    PrincipalComponents,
    SentenceDistillation,
    SentenceDistillationSampler,
)
from tests.training.pretrain.objective_runs import gradients

SYLLABLES = [a + b for a in "bdgklmnprstvz" for b in "aeiou"]
ODD = ["É", "naïve", "Ünal", "日本語", "😀", "don't", "a-b-c", "3.14", "[MASK]", "ﬁn", "İ", "ⅷ", "e\u0301t\u00e9", "§§"]


def word(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.06:
        return draw.choice(ODD)
    if kind < 0.08:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(60, 95)))  # many pieces
    if kind < 0.09:
        return "x" * 150  # which no WordPiece knows
    return "".join(draw.choices(SYLLABLES, k=draw.randint(1, 4)))


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        lines = [" ".join(word(draw) for _ in range(draw.randint(1, 40))) + "." for _ in range(draw.randint(1, 6))]
        found.append("\n".join(lines))
    return found


def corpus_of(folder: Path, documents: Sequence[str], tokenizer: Tokenizer, **options: Any) -> Corpus:
    folder.mkdir(exist_ok=True)
    (folder / "in.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    build_corpus([str(folder / "in.txt")], tokenizer, folder / "out", **options)
    return Corpus.open(folder / "out", tokenizer)


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return texts(60)


@pytest.fixture(scope="module")
def tokenizers(documents: list[str]) -> tuple[Tokenizer, Tokenizer]:
    """A large vocabulary, and one so small that its texts are twice as long."""
    large = train(documents, vocab_size=900, lowercase=True, max_length=128)
    small = train(documents[:20], vocab_size=160, lowercase=True, limit_alphabet=45, max_length=128)
    return large, small


@pytest.fixture(scope="module")
def corpora(documents: list[str], tokenizers: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Corpus]:
    top = tmp_path_factory.mktemp("corpora")
    ours, theirs = (corpus_of(top / str(i), documents, one) for i, one in enumerate(tokenizers))
    assert theirs.tokens > 1.5 * ours.tokens
    return ours, theirs


def checkpoint(tokenizer: Tokenizer, width: int = 16, seed: int = 0, depth: int = 2) -> Checkpoint:
    shape = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": 2, "intermediate_size": 24}
    made = new_model(
        {"model_type": "bert", **shape, "max_position_embeddings": 128, "initializer_range": 0.3}, tokenizer, seed=seed
    )
    made.sentence = SentenceModules.create(width, "mean", max_seq_length=128)
    made.model.eval()
    return made


# --- aligned corpora ---


def word_texts(tokenizer: Tokenizer, ids: Sequence[int], begins: Sequence[bool]) -> list[str]:
    """The text of each word; of unknown ones only that they are."""
    found: list[str] = []
    for id, first in zip(ids, begins, strict=True):
        token = tokenizer.token(int(id))
        if first:
            found.append(token)
        else:
            found[-1] += token.removeprefix("##")
    return found


def agree(one: str, other: str) -> bool:
    return one == other or "[UNK]" in (one, other)


@pytest.mark.parametrize("max_length", [24, 40, 128])
def test_passages_have_the_same_words(
    corpora: tuple[Corpus, Corpus], tokenizers: tuple[Tokenizer, Tokenizer], max_length: int
) -> None:
    aligned = AlignedCorpora(*corpora, max_length)
    assert aligned.left_out == 0
    taken: list[set[int]] = [set() for _ in range(len(corpora[0]))]
    known = 0
    for piece in range(len(aligned)):
        d = int(aligned.documents[piece])
        said: list[list[str]] = []
        for corpus, tokenizer, (starts, sizes) in zip(corpora, tokenizers, aligned.spans, strict=True):
            start, size = int(starts[piece]), int(sizes[piece])
            assert 0 < size <= max_length - 2
            begins = corpus.word_starts(d)
            assert begins[start]
            assert start + size == len(begins) or begins[start + size]  # no word is cut
            ids = corpus.document(d)[start : start + size]
            said.append(word_texts(tokenizer, ids.tolist(), begins[start : start + size].tolist()))
            if corpus is corpora[0]:
                numbers = set(np.flatnonzero(np.flatnonzero(begins) >= start)[: len(said[0])].tolist())
        assert len(said[0]) == len(said[1])
        assert all(agree(a, b) for a, b in zip(*said, strict=True)), said
        known += sum(a == b for a, b in zip(*said, strict=True))
        assert not taken[d] & numbers  # nothing is read twice
        taken[d] |= numbers
    for d, own in enumerate(taken):
        longest = [np.diff(np.append(np.flatnonzero(corpus.word_starts(d)), corpus.lengths[d])) for corpus in corpora]
        missing = set(range(len(longest[0]))) - own
        assert missing == {i for i in range(len(longest[0])) if max(one[i] for one in longest) > max_length - 2}
    total = sum(len(own) for own in taken)
    assert known > 0.8 * total
    if max_length == 24:
        assert total < sum(int(corpora[0].word_starts(d).sum()) for d in range(len(corpora[0])))  # some were too long


def test_passages_are_as_long_as_possible(corpora: tuple[Corpus, Corpus]) -> None:
    """One word more would be too long for one of the two."""
    aligned = AlignedCorpora(*corpora, 40)
    for piece in range(len(aligned)):
        d = int(aligned.documents[piece])
        more = []
        for corpus, (starts, sizes) in zip(corpora, aligned.spans, strict=True):
            begins = np.append(np.flatnonzero(corpus.word_starts(d)), corpus.lengths[d])
            end = int(starts[piece] + sizes[piece])
            after = begins[begins > end]
            more.append(None if len(after) == 0 else int(after[0] - starts[piece]))
        assert more == [None, None] or max(size for size in more if size is not None) > 38


def test_reading_passages(corpora: tuple[Corpus, Corpus]) -> None:
    aligned = AlignedCorpora(*corpora, 40)
    chosen = np.array([3, 0, 11])
    for (ids, cu, special, words), corpus, (starts, sizes) in zip(
        aligned.read(chosen), corpora, aligned.spans, strict=True
    ):
        assert (np.diff(cu) == sizes[chosen] + 2).all()
        for b, piece in enumerate(chosen.tolist()):
            part = slice(int(cu[b]), int(cu[b + 1]))
            start, size = int(starts[piece]), int(sizes[piece])
            own = corpus.document(int(aligned.documents[piece]))[start : start + size]
            assert ids[part].tolist() == [corpus.cls_id, *own.tolist(), corpus.sep_id]
            assert special[part][[0, -1]].all()
            assert words[part][[0, 1, -1]].all()


def test_documents_with_different_words_are_left_out(tmp_path: Path) -> None:
    """A byte-level BPE takes a run of signs for one word, where WordPiece takes each for itself."""
    plain = ["ba de gi ko lu", "ne pi ru so", "ta ve zo bu di ga"]
    odd = ["ba !!! de ...", "gi ?! ko"]
    every = [plain[0], odd[0], plain[1], odd[1], plain[2]]
    pieces = train(every * 5, vocab_size=60, lowercase=True)
    pairs = train(every * 5, kind="bpe", vocab_size=300)
    ours, theirs = corpus_of(tmp_path / "a", every, pieces), corpus_of(tmp_path / "b", every, pairs)
    aligned = AlignedCorpora(ours, theirs, 32)
    assert aligned.left_out == 2
    assert aligned.documents.tolist() == [0, 2, 4]
    only = [corpus_of(tmp_path / name, odd, one) for name, one in (("c", pieces), ("d", pairs))]
    with pytest.raises(InputError, match="have no document with the same words"):
        AlignedCorpora(*only, 32)  # type: ignore[arg-type, call-arg]


def test_corpora_that_do_not_match_are_refused(corpora: tuple[Corpus, Corpus], tokenizers: Any, tmp_path: Path) -> None:
    other = corpus_of(tmp_path / "c", texts(7, 3), tokenizers[1])
    with pytest.raises(InputError, match=r"has 60 documents and .* has 7; make both with `bertie corpus`"):
        AlignedCorpora(corpora[0], other, 40)
    with pytest.raises(InputError, match=r"^max_length=2 must be above 2"):
        AlignedCorpora(*corpora, 2)


# --- sampler ---


def steps(corpora: Any, tokenizers: Any, objective: Any = None, **options: Any) -> SentenceDistillationSampler:
    return SentenceDistillationSampler(
        AlignedCorpora(*corpora, options.pop("max_length", 40)),  # type: ignore[call-arg]
        tokenizers[0],
        options.pop("steps", 30),
        objective,
        **({"budget": 300, "seed": 4} | options),
    )


def test_steps(corpora: Any, tokenizers: Any) -> None:
    plan = steps(corpora, tokenizers, masking=Masking(rate=0.3))
    assert (plan.heads, plan.single_head) == (["mlm"], False)
    assert steps(corpora, tokenizers).heads == []
    seen: list[int] = []
    step = 0
    while plan.epochs_done(step) < 1:
        _, items = plan.read(step)
        assert sum(map(len, items)) <= 300
        pieces = plan._packing.items(step).tolist()
        seen += pieces
        again = plan.read(step)[1]
        for item, other, piece in zip(items, again, pieces, strict=True):
            own = item.windows[0]
            assert np.array_equal(own.ids, other.windows[0].ids)
            assert own.rows is not None
            assert len(own.rows)
            ids = np.array(own.ids)
            ids[own.rows] = own.values
            (wanted, *_), (theirs, *_) = plan.corpora.read(np.array([piece]))
            assert ids.tolist() == wanted.tolist()
            assert item.extras["teacher"].tolist() == theirs.tolist()  # reads all of it
            for name in ("words", "teacher_words"):
                numbers = item.extras[name]
                assert numbers[0] == numbers[-1] == -1
                assert set(np.diff(numbers[1:-1]).tolist()) <= {0, 1}
                assert numbers[1] == 0
                assert numbers[-2] + 1 == int(item.extras["count"])
        step += 1
    assert sorted(seen) == list(range(len(plan.corpora)))
    assert plan.fingerprint() != steps(corpora, tokenizers).fingerprint()


def test_invalid_samplers_are_refused(corpora: Any, tokenizers: Any) -> None:
    with pytest.raises(ConfigError, match=r"^steps=0 must be at least 1$"):
        steps(corpora, tokenizers, steps=0)


# --- objective ---


def asked(corpora: Any, tokenizers: Any, masking: Masking | None = None) -> list[TrainingExample]:
    return steps(corpora, tokenizers, masking=masking).read(1)[1]


def identity(model: Model) -> None:
    """Let the projection to the teacher's states change nothing."""
    project = model.auxiliary["words"]
    assert isinstance(project, nn.Linear)
    with torch.no_grad():
        project.weight.copy_(torch.eye(len(project.weight)))


def test_a_student_equal_to_its_teacher_has_zero_loss(corpora: Any, tokenizers: Any) -> None:
    teacher = checkpoint(tokenizers[0])
    student = deepcopy(teacher.model)
    items = asked((corpora[0], corpora[0]), tokenizers)
    objective = SentenceDistillation(student, teacher, similarities=1.0, neighbours=1.0)
    identity(student)
    loss, grads = gradients(student, objective, [items])
    assert abs(loss) < 1e-6
    assert max(float(grad.abs().max()) for grad in grads.values()) < 1e-3
    with torch.no_grad():
        student.encoder.blocks[0].ff.up.weight.mul_(3)
    assert gradients(student, objective, [items])[0] > 1e-3


def test_the_loss_is_that_of_each_word_and_text(corpora: Any, tokenizers: Any) -> None:
    """Word by word and text by text, in plain loops."""
    teacher, student = checkpoint(tokenizers[1], 12, 1, depth=3), checkpoint(tokenizers[0], 16, 2).model
    basis = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))  # any map to the student's width
    weights = {"words": 1.3, "embeddings": 0.7, "similarities": 2.1, "neighbours": 0.4, "mlm": 0.9}
    objective = SentenceDistillation(student, teacher, layers=2, components=PrincipalComponents(basis), **weights)
    items = asked(corpora, tokenizers, Masking(rate=0.2))
    loss, found = gradients(student, objective, [items])

    project = student.auxiliary["words"]
    of_words, of_texts, s_all, t_all, of_hidden = [], [], [], [], []
    for item in items:
        piece = item.windows[0]
        batch, theirs = Batch.from_ids([piece.ids]), Batch.from_ids([item.extras["teacher"]])
        h = student.hidden(batch)
        with torch.no_grad():
            states = list(teacher.model.encoder.hidden_states(theirs))
            g = sum(F.layer_norm(one, (12,)) for one in states[-2:])
            t = F.normalize(F.normalize(states[-1].mean(0), dim=0) @ basis, dim=0)
        for number in range(int(item.extras["count"])):
            ours = h[torch.from_numpy(item.extras["words"] == number)].mean(0)
            wanted = g[torch.from_numpy(item.extras["teacher_words"] == number)].mean(0)  # type: ignore[index]
            of_words.append(1 - F.cosine_similarity(project(ours), wanted, dim=0))
        s = F.normalize(h.mean(0), dim=0)
        of_texts.append(1 - s @ t)
        s_all.append(s)
        t_all.append(t)
        logits = student(batch, "mlm")[torch.from_numpy(piece.rows)]
        of_hidden.append(F.cross_entropy(logits, torch.from_numpy(piece.values), reduction="none"))
    s_, t_ = torch.stack(s_all), torch.stack(t_all)
    near = []
    for i in range(len(s_)):
        others = [j for j in range(len(s_)) if j != i]
        ours, theirs = (torch.log_softmax(20 * x[others] @ x[i], 0) for x in (s_, t_))
        near.append((theirs.exp() * (theirs - ours)).sum())  # type: ignore[attr-defined]
    wanted = (
        1.3 * torch.stack(of_words).mean()
        + 0.7 * torch.stack(of_texts).mean()
        + 2.1 * ((s_ @ s_.T - t_ @ t_.T) ** 2).mean()
        + 0.4 * torch.stack(near).mean()
        + 0.9 * torch.cat(of_hidden).mean()
    )
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    student.zero_grad(set_to_none=True)
    wanted.backward()
    for name, parameter in student.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("budget", [1, 90])
def test_a_step_in_parts_has_the_gradient_of_the_whole(corpora: Any, tokenizers: Any, budget: int) -> None:
    teacher, student = checkpoint(tokenizers[1], seed=1), checkpoint(tokenizers[0], seed=2).model
    objective = SentenceDistillation(student, teacher, words=1.5, embeddings=0.5, mlm=2.0, layers=2)
    items = asked(corpora, tokenizers, Masking(rate=0.2))
    loss, whole = gradients(student, objective, [items])
    parts = split_micro_batches(items, budget)
    assert len(parts) > 2
    cut, found = gradients(student, objective, parts)
    assert cut == pytest.approx(loss, rel=1e-5)
    for name in whole:
        torch.testing.assert_close(found[name], whole[name], atol=2e-5, rtol=1e-3)


def test_gradients(corpora: Any, tokenizers: Any) -> None:
    teacher, student = checkpoint(tokenizers[1], seed=1), checkpoint(tokenizers[0], seed=2).model
    before = {name: tensor.clone() for name, tensor in teacher.model.state_dict().items()}
    teacher.model.train()  # it is asked in evaluation mode all the same
    objective = SentenceDistillation(student, teacher, similarities=1.0)
    items = asked(corpora, tokenizers)
    loss, found = gradients(student, objective, [items])
    assert gradients(student, objective, [items])[0] == loss
    moved = {name for name, grad in found.items() if grad.abs().max() > 1e-6}
    assert {"auxiliary.words.weight", "auxiliary.words.bias", "encoder.embeddings.words.weight"} <= moved
    assert any(name.startswith("encoder.blocks.0.") for name in moved)
    assert not any(name.startswith("heads.") for name in moved)  # nothing was hidden
    assert all(parameter.grad is None for parameter in teacher.model.parameters())
    for name, tensor in teacher.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_words_are_compared_only_where_the_counts_agree(corpora: Any, tokenizers: Any) -> None:
    teacher, student = checkpoint(tokenizers[1], seed=1), checkpoint(tokenizers[0], seed=2).model
    items = asked(corpora, tokenizers)
    objective = SentenceDistillation(student, teacher, embeddings=0.0)
    without = [replace(items[0], extras={**items[0].extras, "count": np.array(0)}), *items[1:]]
    some = gradients(student, objective, [without])[0]
    assert some == pytest.approx(gradients(student, objective, [items[1:]])[0], rel=1e-5)
    assert some != pytest.approx(gradients(student, objective, [items])[0], rel=1e-4)
    none = [replace(item, extras={**item.extras, "count": np.array(0)}) for item in items]
    objective = SentenceDistillation(student, teacher, words=1.0, embeddings=0.5)
    vectors = SentenceDistillation(student, teacher, words=0.0, embeddings=0.5)
    assert gradients(student, objective, [none])[0] == pytest.approx(gradients(student, vectors, [items])[0], rel=1e-5)


def test_several_objectives_share_auxiliary_modules(corpora: Any, tokenizers: Any) -> None:
    teacher, student = checkpoint(tokenizers[1], 12, 1), checkpoint(tokenizers[0], 16, 2).model
    SentenceDistillation(student, teacher, components=PrincipalComponents(torch.eye(12, 16)))
    first = student.auxiliary["words"]
    with torch.no_grad():
        first.weight.add_(1.0)
    SentenceDistillation(student, teacher, words=2.0)
    assert student.auxiliary["words"] is first
    assert list(student.auxiliary) == ["words", "components"]


def test_invalid_arguments_are_refused(tokenizers: Any) -> None:
    teacher, student = checkpoint(tokenizers[1], 12), checkpoint(tokenizers[0], 16).model
    for name in ("words", "embeddings", "similarities", "neighbours", "mlm"):
        for value in (-1.0, float("inf"), float("nan")):
            with pytest.raises(ConfigError, match=f"^{name}={value} must be 0 or greater$"):
                SentenceDistillation(student, teacher, **{name: value})  # type: ignore[arg-type]
    for layers in (0, 3):
        with pytest.raises(ConfigError, match=f"^layers={layers} must be from 1 to 2, the teacher's depth$"):
            SentenceDistillation(student, teacher, layers=layers)
    with pytest.raises(ConfigError, match=r"^the teacher's embeddings have dimension 12, the student's 16$"):
        SentenceDistillation(student, teacher)
    assert SentenceDistillation(student, teacher, embeddings=0.0).words == 1.0
    teacher.sentence = None
    with pytest.raises(ConfigError, match="is not a sentence encoder: set embeddings, similarities, neighbours to 0"):
        SentenceDistillation(student, teacher)


# --- principal components ---


def test_components_preserve_inner_products() -> None:
    draw = torch.Generator().manual_seed(0)
    scales = 0.8 ** torch.arange(32.0)
    turn = torch.linalg.qr(torch.randn(32, 32, generator=draw))[0]
    vectors = F.normalize((torch.randn(500, 32, generator=draw) * scales) @ turn + 0.3, dim=-1)
    held, seen = vectors[:100], vectors[100:]
    wanted = held @ held.T

    def lost(directions: PrincipalComponents) -> float:
        made = directions(held)
        assert made.shape == (100, 8)
        torch.testing.assert_close(made.norm(dim=-1), torch.ones(100))
        return float(((made @ made.T - wanted) ** 2).mean())

    found = PrincipalComponents.fit(seen, 8)
    torch.testing.assert_close(found.basis.T @ found.basis, torch.eye(8), atol=1e-5, rtol=0)
    random_ones = [lost(PrincipalComponents(torch.linalg.qr(torch.randn(32, 8, generator=draw))[0])) for _ in range(20)]
    assert lost(found) < 0.2 * min(random_ones)
    singular = torch.linalg.svd(seen, full_matrices=False)[2][:8].T  # the same space
    torch.testing.assert_close(found.basis @ found.basis.T, singular @ singular.T, atol=1e-4, rtol=0)
    whole = PrincipalComponents.fit(seen, 32)
    assert lost_all(whole, held) < 1e-10


def test_components_align_with_the_student() -> None:
    """A student distilled with the components of other texts stays where it was; inner products are the same."""
    draw = torch.Generator().manual_seed(0)
    scales = 0.8 ** torch.arange(32.0)
    vectors = F.normalize(torch.randn(600, 32, generator=draw) * scales + 0.1, dim=-1)
    student = PrincipalComponents.fit(vectors[:200], 8)(vectors) + 0.05 * torch.randn(600, 8, generator=draw)
    seen, held = slice(200, 500), slice(500, 600)
    anew = PrincipalComponents.fit(vectors[seen], 8)
    turned = anew.align(vectors[seen], student[seen])

    def near(directions: PrincipalComponents) -> float:
        return float(F.cosine_similarity(directions(vectors[held]), student[held], dim=-1).mean())

    assert near(turned) > 0.95
    assert near(turned) > near(anew)
    torch.testing.assert_close(turned.basis.T @ turned.basis, torch.eye(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(turned.basis @ turned.basis.T, anew.basis @ anew.basis.T, atol=1e-5, rtol=0)


def lost_all(directions: PrincipalComponents, vectors: Tensor) -> float:
    made = directions(vectors)
    return float(((made @ made.T - vectors @ vectors.T) ** 2).mean())
