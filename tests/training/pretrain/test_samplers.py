"""Masked language modelling over a corpus: what each step hides, that the loop learns from it, and goes on with it."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.errors import ConfigError, InputError
from bertie.nn.model import Model
from bertie.recipe import Recipe
from bertie.text.tokenizer import Tokenizer
from bertie.training.loop import Trainer
from bertie.training.objectives import MaskedLMObjective, TrainingExample
from bertie.training.pretrain.corpus import Corpus, build_corpus
from bertie.training.pretrain.masking import Masking
from bertie.training.pretrain.packing import PackedCorpus
from bertie.training.pretrain.samplers import BatchSizeWarmup, MaskedLMSampler, MixtureSampler
from bertie.training.sampling import TrainingTask
from bertie.training.schedule import Schedule
from tests.training import tiny
from tests.training.pretrain.corpus_texts import SPECIALS, tokenizer_of

PAIRS = {"ba": "de", "gi": "ko", "lu": "ma", "ne": "pi"}  # what follows what
REACH = 24


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of([*SPECIALS, ".", *PAIRS, *PAIRS.values()])


@pytest.fixture(scope="module")
def corpus(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    draw = random.Random(0)
    documents = []
    for _ in range(120):
        first = draw.choices(list(PAIRS), k=draw.randint(2, 14))
        documents.append(" ".join(f"{one} {PAIRS[one]}" for one in first) + " .")
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "in.txt").write_text("\n\n".join(documents) + "\n")
    build_corpus([str(folder / "in.txt")], tokenizer, folder / "out")
    return Corpus.open(folder / "out", tokenizer)


def model(vocab: int) -> Model:
    return tiny.masked(vocab, REACH, dropout=0.1, std=0.1)


def plan(corpus: Corpus, tokenizer: Tokenizer, steps: int = 60, static: bool = False) -> MaskedLMSampler:
    return MaskedLMSampler(PackedCorpus(corpus, 200, REACH, seed=1), tokenizer, steps, masking=Masking(), static=static)


def test_a_step_reads_packed_sequences_and_masks_them(corpus: Corpus, tokenizer: Tokenizer) -> None:
    steps = plan(corpus, tokenizer)
    for step in (0, 7, 31):
        ids, cu, special, _ = steps.packed.batch(step)
        source, items = steps.read(step)
        mini = source.objective.collate(items)
        assert mini.targets.rows is not None
        rows = mini.targets.rows.numpy()
        assert mini.batch.cu_seqlens.tolist() == cu.tolist()
        assert (mini.targets.values.numpy() == ids[rows]).all()
        assert not special[rows].any()
        same = np.ones(len(ids), dtype=bool)
        same[rows] = False
        assert (mini.batch.ids.numpy()[same] == ids[same]).all()
        assert mini.weight == len(rows) > 0
        again = source.objective.collate(steps.read(step)[1])
        assert (again.batch.ids == mini.batch.ids).all()


def test_static_masking_repeats_in_every_epoch(corpus: Corpus, tokenizer: Tokenizer) -> None:
    for static in (True, False):
        steps = plan(corpus, tokenizer, static=static)
        seen: list[dict[tuple[int, int], tuple[int, ...]]] = [{}, {}]
        for step in range(steps.packed.steps(0) + steps.packed.steps(1)):
            epoch = steps.epoch_of(step)
            for (document, start, _), item in zip(steps.packed.step(step), steps.read(step)[1], strict=True):
                seen[epoch][document, start] = tuple(item.windows[0].ids.tolist())
        assert seen[0].keys() == seen[1].keys()
        share = np.mean([seen[0][key] == seen[1][key] for key in seen[0]])
        assert share == 1.0 if static else share < 0.5


def test_it_learns_and_resumes(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> None:
    steps = plan(corpus, tokenizer, steps=300)
    recipe = Recipe(lr=1e-2, micro_tokens=120, warmup=0.05)
    whole = model(tokenizer.vocab_size)
    history = Trainer(whole, steps, recipe, progress=False).run()
    assert history.steps == 300
    assert history.curve[-1]["loss"] < 0.75 * history.curve[0]["loss"]

    class Stopped(Exception):
        pass

    def stop(step: int) -> None:
        raise Stopped

    part = model(tokenizer.vocab_size)
    run = Trainer(part, steps, recipe, folder=tmp_path / "run", save_steps=70, progress=False)
    read = steps.read
    steps.read = lambda step: stop(step) if step == 163 else read(step)  # type: ignore[return-value]
    with pytest.raises(Stopped):
        run.run()
    steps.read = read
    part = model(tokenizer.vocab_size)
    gone_on = Trainer(part, steps, recipe, folder=tmp_path / "run", resume=True, save_steps=70, progress=False).run()
    assert gone_on.curve == history.curve
    assert all((a == b).all() for a, b in zip(whole.state_dict().values(), part.state_dict().values(), strict=True))


def test_a_tokenizer_without_a_mask_token_is_refused(corpus: Corpus) -> None:
    bare = tokenizer_of([*SPECIALS[:4], ".", *PAIRS, *PAIRS.values()])
    with pytest.raises(InputError, match="no mask token"):
        MaskedLMSampler(PackedCorpus(corpus, 200, REACH, seed=1), bare, 10)


# --- batch-size warmup and mixtures ---


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
def test_batch_size_warmup(total: int, full: int, share: float) -> None:
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


def test_batch_size_warmup_follows_the_schedule_by_tokens() -> None:
    """Half of the tokens is half of the way, however few steps there were."""
    plan = BatchSizeWarmup(Counted(800), 8, 0.5)
    schedule = Schedule(Recipe(warmup=0.0, schedule="linear"), plan.total_steps)
    for step in range(plan.total_steps):
        left = 1 - plan._ends[step] / 800
        assert schedule.factor(plan.schedule_position(step)) == pytest.approx(left)


@pytest.mark.parametrize(("full", "share"), [(0, 0.5), (8, 0.0), (8, 1.0)])
def test_batch_size_warmup_refuses(full: int, share: float) -> None:
    with pytest.raises(ConfigError, match=f"full={full} must be at least 1 and share={share} between 0 and 1"):
        BatchSizeWarmup(Counted(5), full, share)


def test_a_mixture_draws_by_shares() -> None:
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
def test_a_mixture_refuses(shares: list[float]) -> None:
    with pytest.raises(ConfigError, match="must be 2 numbers above 0, one per sampler"):
        MixtureSampler([Counted(5), Counted(5)], shares, 5, 0)
    with pytest.raises(ConfigError, match="must be 0 numbers"):
        MixtureSampler([], [], 5, 0)
