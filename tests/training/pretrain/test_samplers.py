"""Masked language modelling over a corpus: what each step hides, that the loop learns from it, and goes on with it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from bertie.errors import InputError
from bertie.nn.model import Model
from bertie.recipe import Recipe
from bertie.text.tokenizer import Tokenizer
from bertie.training.loop import Trainer
from bertie.training.pretrain.corpus import Corpus, build_corpus
from bertie.training.pretrain.masking import Masking
from bertie.training.pretrain.packing import PackedCorpus
from bertie.training.pretrain.samplers import MaskedLMSampler
from tests.training import tiny
from tests.training.test_corpus import SPECIALS, tokenizer_of

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


def test_what_a_step_reads_and_hides(corpus: Corpus, tokenizer: Tokenizer) -> None:
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


def test_static_masking_hides_the_same_in_every_epoch(corpus: Corpus, tokenizer: Tokenizer) -> None:
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


def test_it_learns_and_goes_on_where_it_stopped(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> None:
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
    steps.read = lambda step: stop(step) if step == 163 else read(step)  # type: ignore[assignment, method-assign]
    with pytest.raises(Stopped):
        run.run()
    steps.read = read  # type: ignore[method-assign]
    part = model(tokenizer.vocab_size)
    gone_on = Trainer(part, steps, recipe, folder=tmp_path / "run", resume=True, save_steps=70, progress=False).run()
    assert gone_on.curve == history.curve
    assert all((a == b).all() for a, b in zip(whole.state_dict().values(), part.state_dict().values(), strict=True))


def test_a_tokenizer_without_a_mask(corpus: Corpus) -> None:
    bare = tokenizer_of([*SPECIALS[:4], ".", *PAIRS, *PAIRS.values()])
    with pytest.raises(InputError, match="no mask token"):
        MaskedLMSampler(PackedCorpus(corpus, 200, REACH, seed=1), bare, 10)
