"""Plans beyond one corpus: pairs of texts, batches that grow, several plans in turn; and how their steps add up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned, NormConfig
from bertie.errors import ConfigError, InputError
from bertie.nn.model import Model
from bertie.recipe import Recipe
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.training.objectives import (
    HeadObjective,
    MaskedLMObjective,
    MicroBatch,
    ModelObjective,
    TrainingExample,
    TrainingWindow,
)
from bertie.training.prefetch import split_micro_batches
from bertie.training.pretrain.corpus import Corpus, build_corpus
from bertie.training.pretrain.masked_lm import EnhancedMaskDecoder, EnhancedMaskObjective, MaskedLMLoss
from bertie.training.pretrain.masking import Masking
from bertie.training.pretrain.mlm_distillation import DistilBertLoss, MaskedLMDistillation
from bertie.training.pretrain.packing import PackedCorpus, PackingPlan
from bertie.training.pretrain.relation_distillation import RelationDistillation, RelationLoss
from bertie.training.pretrain.replaced_tokens import ReplacedTokenDetection, ReplacedTokenObjective
from bertie.training.pretrain.samplers import BatchSizeWarmup, MaskedLMSampler, MixtureSampler
from bertie.training.pretrain.sentence_pairs import (
    SECTION,
    STATIC_COPIES,
    NextSentence,
    SentenceOrder,
    SentencePairObjective,
    SentencePairSampler,
)
from bertie.training.sampling import TrainingTask
from bertie.training.schedule import Schedule
from bertie.training.step import ObjectiveModule
from tests.training.pretrain.objective_runs import gradients
from tests.training.test_corpus import SPECIALS, tokenizer_of

REACH = 32
WORDS = 4000
CLS, SEP, MASK = 2, 3, 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for each word of the corpus: what it is tells where it stood."""
    return tokenizer_of([*SPECIALS, *(f"w{i}" for i in range(WORDS))])


def made(folder: Path, tokenizer: Tokenizer, documents: Sequence[Sequence[Sequence[int]]]) -> Corpus:
    text = "\n\n".join("\n".join(" ".join(f"w{i}" for i in line) for line in one) for one in documents)
    (folder / "in.txt").write_text(text + "\n")
    build_corpus([str(folder / "in.txt")], tokenizer, folder / "out")
    return Corpus.open(folder / "out", tokenizer)


def numbered(sizes: Sequence[int], seed: int = 0) -> list[list[list[int]]]:
    """Documents of so many tokens, all tokens different and counted through, in lines of some length."""
    draw, at, found = random.Random(seed), 0, []
    for size in sizes:
        lines, end = [], at + size
        while at < end:
            step = min(draw.randint(1, 9), end - at)
            lines.append(list(range(at, at + step)))
            at += step
        found.append(lines)
    return found


@pytest.fixture(scope="module")
def documents() -> list[list[list[int]]]:
    draw = random.Random(1)
    return numbered([draw.randint(8, 70) for _ in range(70)] + [900])  # the last is longer than a section


@pytest.fixture(scope="module")
def corpus(tokenizer: Tokenizer, documents: Any, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return made(tmp_path_factory.mktemp("corpus"), tokenizer, documents)


def pair_steps(corpus: Corpus, tokenizer: Tokenizer, kind: Any = NextSentence, **options: Any) -> SentencePairSampler:
    return SentencePairSampler(
        corpus, tokenizer, **({"steps": 50, "pairs": kind(), "budget": 400, "max_length": REACH, "seed": 3} | options)
    )


def ids_of(item: TrainingExample) -> Any:
    """What was there before anything was hidden."""
    piece = item.windows[0]
    ids = np.array(piece.ids)
    assert piece.rows is not None
    ids[piece.rows] = piece.values
    return ids


def halves(item: TrainingExample) -> tuple[Any, Any]:
    """The two texts of a pair, as the numbers of their words; and that all around them is as it should be."""
    ids, segments = ids_of(item), item.windows[0].segments
    first = int(np.flatnonzero(ids == SEP)[0])
    assert ids[0] == CLS
    assert ids[-1] == SEP
    assert (ids == SEP).sum() == 2
    assert segments.tolist() == [0] * (first + 1) + [1] * (len(ids) - first - 1)
    return ids[1:first] - 5, ids[first + 1 : -1] - 5


def same_items(a: Sequence[TrainingExample], b: Sequence[TrainingExample]) -> bool:
    def told(items: Sequence[TrainingExample]) -> Any:
        return [
            (p.ids.tolist(), p.segments.tolist(), np.array(p.rows).tolist(), np.array(p.values).tolist())
            for item in items
            for p in item.windows
        ] + [[(name, value.tolist()) for name, value in item.extras.items()] for item in items]

    return bool(told(a) == told(b))


# --- pairs ---


@pytest.mark.parametrize("kind", [NextSentence, SentenceOrder])
def test_halves_are_from_where_their_label_says(
    corpus: Corpus, tokenizer: Tokenizer, documents: Any, kind: Any
) -> None:
    plan = pair_steps(corpus, tokenizer, kind)
    owner = {word: d for d, lines in enumerate(documents) for line in lines for word in line}
    for step in range(plan.total_steps):
        source, items = plan.read(step)
        assert source.head == "mlm"
        for item in items:
            assert len(item) <= REACH
            first, second = halves(item)
            for half in (first, second):
                assert len(half)
                assert (np.diff(half) == 1).all()  # in one piece
            label = int(item.extras["label"])
            if kind is SentenceOrder:
                one, other = (first, second) if label == 0 else (second, first)
                assert one[-1] + 1 == other[0]
                assert owner[one[0]] == owner[other[0]]
            elif label == 0:
                assert first[-1] + 1 == second[0]
                assert owner[first[0]] == owner[second[0]]
            else:
                assert first[-1] + 1 != second[0] or owner[first[0]] != owner[second[0]]


@pytest.mark.parametrize("kind", [NextSentence, SentenceOrder])
def test_labels_are_balanced(corpus: Corpus, tokenizer: Tokenizer, documents: Any, kind: Any) -> None:
    plan = pair_steps(corpus, tokenizer, kind, steps=200)
    section = SECTION * (REACH - 3)
    last = {lines[-1][-1] for lines in documents} | {documents[-1][0][0] + section * k - 1 for k in (1, 2)}
    labels = []
    for step in range(plan.total_steps):
        for item in plan.read(step)[1]:
            first, _ = halves(item)
            if kind is SentenceOrder or first[-1] not in last:  # nothing follows those
                labels.append(int(item.extras["label"]))
    assert len(labels) > 2000
    assert abs(np.mean(labels) - 0.5) < 4 * 0.5 / np.sqrt(len(labels))


@pytest.mark.parametrize("kind", [NextSentence, SentenceOrder])
def test_an_epoch_reads_all_of_every_document(corpus: Corpus, tokenizer: Tokenizer, documents: Any, kind: Any) -> None:
    """Long ones as well, which are taken in sections."""
    plan = pair_steps(corpus, tokenizer, kind)
    seen: Counter[int] = Counter()
    step = 0
    while plan.epochs_done(step) < 1:
        for item in plan.read(step)[1]:
            first, second = halves(item)
            own = [first, second] if kind is SentenceOrder or not int(item.extras["label"]) else [first]
            seen.update(int(x) for half in own for x in half)
        step += 1
    every = [word for lines in documents for line in lines for word in line]
    missed = [word for word in every if seen[word] == 0]
    # Of sentence order, single tokens at the end of a document are left out.
    assert len(missed) <= (len(documents) + 2 if kind is SentenceOrder else 0)
    assert plan.epochs_done(step) == 1.0
    extra = sum(seen.values()) - len(every) + len(missed)
    assert extra <= SECTION * REACH  # at most the text that a lonely one is paired with


def test_pairs_are_masked_as_asked(corpus: Corpus, tokenizer: Tokenizer) -> None:
    plan = pair_steps(corpus, tokenizer, masking=Masking(rate=0.2, mask=0.5, random=0.25), steps=100)
    tokens = hidden = as_mask = kept = 0
    for step in range(plan.total_steps):
        for item in plan.read(step)[1]:
            piece = item.windows[0]
            assert piece.rows is not None
            assert piece.values is not None
            assert not np.isin(piece.values, range(5)).any()  # no special token is hidden
            read = np.array(piece.ids)[piece.rows]
            tokens += len(piece) - 3
            hidden += len(piece.rows)
            as_mask += int((read == MASK).sum())
            kept += int((read == piece.values).sum())
    assert hidden / tokens == pytest.approx(0.2, abs=0.01)
    assert as_mask / hidden == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(hidden))
    assert kept / hidden == pytest.approx(0.25, abs=4 * 0.5 / np.sqrt(hidden))


@pytest.mark.parametrize("static", [True, False])
def test_pairs_repeat_after_ten_epochs_and_only_then(tokenizer: Tokenizer, tmp_path: Path, static: bool) -> None:
    corpus = made(tmp_path, tokenizer, numbered([30, 40, 55, 60, 25, 90]))
    plan = pair_steps(corpus, tokenizer, static=static, steps=1000, budget=100)
    ends = [0]
    for epoch in range(2 * STATIC_COPIES + 1):
        ends.append(next(step for step in range(ends[-1], 10**4) if plan.epochs_done(step) >= epoch + 1))
    cycle = ends[STATIC_COPIES]
    first = [plan.read(step)[1] for step in range(cycle)]
    assert all(same_items(first[step], plan.read(step)[1]) for step in range(0, cycle, 7))  # asked twice
    again = [same_items(first[step], plan.read(step + cycle)[1]) for step in range(cycle)]
    assert all(again) if static else not any(again)
    for one, other in pairwise(ends[:STATIC_COPIES]):
        assert not any(same_items(first[one], items) for items in first[other : other + 3])
    assert len({str([item.windows[0].ids.tolist() for item in items]) for items in first}) == cycle


def test_a_step_of_a_single_text_finds_another(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As at the end of an epoch: what comes from elsewhere needs an elsewhere."""
    corpus = made(tmp_path, tokenizer, numbered([30, 30, 30]))
    plan = pair_steps(corpus, tokenizer, budget=64, steps=40)
    assert min(len(plan._packing.items(step)) for step in range(40)) == 1
    for step in range(40):
        assert len(plan.read(step)[1])


def test_pairs_that_cannot_be_made(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^steps=0 must be at least 1$"):
        pair_steps(corpus, tokenizer, steps=0)
    with pytest.raises(InputError, match=r"^max_length=4 must be at least 5: a pair and its special tokens$"):
        pair_steps(corpus, tokenizer, max_length=4)
    assert pair_steps(corpus, tokenizer, max_length=5).read(0)[1]
    bare = tokenizer_of([*[word for word in SPECIALS if word != "[MASK]"], "w1"])
    with pytest.raises(InputError, match="need a tokenizer with CLS, SEP and mask tokens"):
        pair_steps(corpus, bare)
    with pytest.raises(InputError, match="has a single text; pairs need at least 2"):
        pair_steps(made(tmp_path, tokenizer, numbered([30])), tokenizer)


# --- growing, mixed ---


class Counted:
    """A plan whose step n reads one item of n + 1 tokens."""

    single_head = True

    def __init__(self, total: int, head: str = "a") -> None:
        self.total_steps, self.heads, self.epoch_starts, self.head = total, [head], [0, total], head

    def epoch_of(self, step: int) -> int:
        return step // 10

    def epochs_done(self, step: int) -> float:
        return step / 10

    def schedule_position(self, step: int) -> float:
        return step

    def fingerprint(self) -> Any:
        return [self.total_steps]

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        assert 0 <= step < self.total_steps
        return TrainingTask(self.head, MaskedLMObjective(), ()), [TrainingExample((), extras={"step": np.array(step)})]


@pytest.mark.parametrize(("total", "full", "share"), [(1000, 8, 0.3), (17, 4, 0.5), (5, 8, 0.9), (64, 1, 0.5)])
def test_growing_steps(total: int, full: int, share: float) -> None:
    plan = BatchSizeWarmup(Counted(total), full, share)
    read = [[int(item.extras["step"]) for item in plan.read(step)[1]] for step in range(plan.total_steps)]
    assert [small for one in read for small in one] == list(range(total))
    sizes = [len(one) for one in read]
    assert sizes[0] == 1
    assert all(a <= b for a, b in pairwise(sizes[:-1]))
    assert max(sizes) <= full
    done = np.cumsum(sizes)
    assert all(size == full for size, end in zip(sizes[:-1], done, strict=False) if end - size >= share * total)
    paces = [plan.schedule_position(step) for step in range(plan.total_steps + 1)]
    assert paces[0] == 0
    assert paces[-1] == plan.total_steps
    assert all(a < b for a, b in pairwise(paces))
    assert plan.epochs_done(plan.total_steps) == pytest.approx(total / 10)
    assert plan.epoch_of(plan.total_steps - 1) == read[-1][0] // 10
    assert plan.epoch_starts == [0, plan.total_steps]


def test_growing_keeps_to_the_schedule_by_tokens() -> None:
    """Half of the tokens is half of the way, however few steps there were."""
    plan = BatchSizeWarmup(Counted(800), 8, 0.5)
    schedule = Schedule(Recipe(warmup=0.0, schedule="linear"), plan.total_steps)
    for step in range(plan.total_steps):
        left = 1 - plan._ends[step] / 800
        assert schedule.factor(plan.schedule_position(step)) == pytest.approx(left)


@pytest.mark.parametrize(("full", "share"), [(0, 0.5), (8, 0.0), (8, 1.0)])
def test_growing_refuses(full: int, share: float) -> None:
    with pytest.raises(ConfigError, match=f"full={full} must be at least 1 and share={share} between 0 and 1"):
        BatchSizeWarmup(Counted(5), full, share)


def test_plans_in_turn() -> None:
    plans = [Counted(4000, "a"), Counted(4000, "b"), Counted(300, "a")]
    mixed = MixtureSampler(plans, [3, 1, 1], 4000, seed=5)
    read = [mixed.read(step) for step in range(4000)]
    numbers = np.array([source.sampler for source, _ in read])
    for number, share in enumerate((0.6, 0.2, 0.2)):
        assert abs((numbers == number).mean() - share) < 4 * np.sqrt(share * (1 - share) / 4000)
        own = [int(items[0].extras["step"]) for source, items in read if source.sampler == number]
        total = plans[number].total_steps
        assert own == [i % total for i in range(len(own))]  # in its own order, and again from its beginning
    assert [source.head for source, _ in read] == [plans[n].head for n in numbers]
    assert mixed.heads == ["a", "b"]
    assert mixed.epochs_done(2000) == 0.5
    same, other = MixtureSampler(plans, [3, 1, 1], 4000, seed=5), MixtureSampler(plans, [3, 1, 1], 4000, seed=6)
    assert [same.read(step)[0].sampler for step in range(4000)] == numbers.tolist()
    assert [other.read(step)[0].sampler for step in range(4000)] != numbers.tolist()
    assert mixed.fingerprint() == same.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("shares", [[1.0], [1.0, 0.0], [1.0, -1.0]])
def test_mixed_refuses(shares: list[float]) -> None:
    with pytest.raises(ConfigError, match="must be 2 numbers above 0, one per sampler"):
        MixtureSampler([Counted(5), Counted(5)], shares, 5, 0)
    with pytest.raises(ConfigError, match="must be 0 numbers"):
        MixtureSampler([], [], 5, 0)


def test_warm_up_stable_decay() -> None:
    schedule = Schedule(Recipe(schedule="wsd", warmup=0.1, decay=0.2), 100)
    factors = [schedule.factor(step) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert factors[10:80] == [1.0] * 70
    assert factors[80:] == pytest.approx([(100 - step) / 20 for step in range(80, 100)])
    assert min(factors) > 0
    assert Schedule(Recipe(schedule="wsd", decay=1.0, warmup=0.0), 4).factor(3) == 0.25
    assert Schedule(Recipe(schedule="wsd", decay=0.01, warmup=0.0), 3).factor(2) == 1.0
    for decay in (0.0, 1.5, -0.1):
        with pytest.raises(ConfigError, match=f"^decay={decay} must be a number above 0 and at most 1$"):
            Recipe(decay=decay)


# --- objectives over the whole model: parts add up ---


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


def test_what_has_no_weight_adds_nothing() -> None:
    """A process without texts of its own takes part with one that does not count."""
    of, objective = case("nsp")
    all_items = items()
    counted = objective.with_counts(objective.count_step(all_items))
    mini = replace(counted.collate(all_items[:1]), weight=0.0)
    loss = ObjectiveModule(of)(mini, "", counted)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in of.parameters())


def test_a_loss_over_the_model_has_none_of_outputs() -> None:
    """The loop must not take it for one over a head."""
    _, objective = case("nsp")
    assert not isinstance(objective, HeadObjective)
    assert not hasattr(objective, "losses")
    assert objective.counts == {}  # counting a step leaves the objective as it was
    assert objective.count_step(items())["texts"] == 9


def test_hidden_tokens_alone_are_still_plain(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """What asks for one head's outputs can be recorded on a GPU; the others cannot."""
    packed = PackedCorpus(corpus, 400, REACH, 0)
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


def test_masked_loss_is_that_of_the_objective_for_pairs() -> None:
    """The pair's own part is what is left of it."""
    of, objective = case("sop")
    all_items = items()
    mini = objective.collate(all_items)
    assert mini.targets.rows is not None
    loss, _ = gradients(of, objective, [all_items])
    masked = MaskedLMLoss().loss(of, mini.batch, mini.targets.rows, mini.targets.values) / len(mini.targets.rows)
    said = SentenceOrder().loss(of, mini.batch, mini.extras["labels"]) / len(all_items)  # type: ignore[arg-type]
    assert loss == pytest.approx((masked + said).item(), rel=1e-5)


def test_packing_of_sizes_alone() -> None:
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
