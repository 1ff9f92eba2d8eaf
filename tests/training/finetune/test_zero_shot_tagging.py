"""Fine-tuning of `ZeroShotTagger`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bertie
from bertie import InputError, ZeroShotTagger
from bertie.errors import BertieWarning
from bertie.training.finetune.base import training_for
from bertie.training.finetune.data import read_dataset
from bertie.training.finetune.label_sampling import PromptSampler
from bertie.training.finetune.zero_shot_tagging import add_span_head, given_words, span_labels, tag_spans, to_tags
from bertie.training.span_objective import LABELS
from tests.parity.gliner_reference import FOLDER
from tests.training.finetune.toys import FAST, tagged_words

pytestmark = pytest.mark.filterwarnings("ignore:lr=")  # a fresh model has nothing to forget


def prepared(
    words: list[list[str]], tags: list[list[str]], model: Any = FOLDER / "plain", **options: Any
) -> tuple[ZeroShotTagger, PromptSampler]:
    """An untrained task, and what its training reads."""
    task = ZeroShotTagger(model, epochs=2, batch_size=2, **options)
    training = training_for(task)
    data = read_dataset("tag", words, tags)
    task._use(training.prepare(task._load_model(), data), None)
    sampler = training.plan(data)
    assert isinstance(sampler, PromptSampler)
    return task, sampler


def test_zero_shot_tagger(encoder: Path, tmp_path: Path) -> None:
    """Any encoder gets tokens for prompts and a span head; what is saved loads again, also in the package."""
    words, tags = tagged_words()
    task = ZeroShotTagger(encoder, **FAST | {"epochs": 10}).fit(words, tags, dev=(words, tags), progress=False)
    assert task.score(words, tags) > 0.95
    labels = span_labels({tag for row in tags for tag in row})
    text = "Jane and the Emma of that."
    assert [span.text for span in task.tag(text, labels).spans] == ["Jane", "Emma"]
    task.save(tmp_path / "out")
    loaded = bertie.load(tmp_path / "out")
    assert isinstance(loaded, ZeroShotTagger)
    assert loaded.tag(text, labels) == task.tag(text, labels)
    gliner = pytest.importorskip("gliner")
    model = gliner.GLiNER.from_pretrained(str(tmp_path / "out"))
    found = model.predict_entities(text, labels)
    assert [span["text"] for span in found] == ["Jane", "Emma"]
    ours = [span.score for span in task.tag(text, labels).spans]
    assert [span["score"] for span in found] == pytest.approx(ours, abs=1e-5)


def test_training_continues_from_a_span_head() -> None:
    """With the prompt tokens and settings that it has."""
    words, tags = [["Ada", "was", "born"], ["in", "London", "!"]], [["B-person", "O", "O"], ["O", "B-place", "O"]]
    before = bertie.Checkpoint.load(FOLDER / "plain")
    task, _ = prepared(words, tags)
    for a, b in zip(before.model.parameters(), task.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_fresh_head_leaves_the_encoder_as_it_was(encoder: Path) -> None:
    plain = bertie.Checkpoint.load(encoder)
    made = add_span_head(bertie.Checkpoint.load(encoder), seed=1)
    assert plain.tokenizer is not None
    ids = plain.tokenizer.encode("Jane walked to London.").ids
    batch = bertie.Batch.from_ids([ids])
    assert torch.equal(plain.model.hidden(batch), made.model.hidden(batch))
    assert made.tokenizer is not None
    assert made.tokenizer.vocab_size == made.model.config.vocab == plain.tokenizer.vocab_size + 2
    assert list(made.heads) == ["span"]


def test_prompts_are_drawn_by_epoch_and_seed() -> None:
    """Each has the labels of its text; the others, and the order, change from epoch to epoch."""
    kinds = ["person", "place", "date", "medicine", "writer"]
    words = [[f"Ada{i}", "was", "born"] for i in range(4)]
    tags = [[f"B-{kind}", "O", "O"] for kind in kinds[:4]]
    tags[3] = ["O", "O", "B-writer"]
    _, sampler = prepared(words, tags)
    _, again = prepared(words, tags)
    _, other = prepared(words, tags, seed=1)
    prompts = set()
    for step in range(sampler.total_steps):
        (_, first), (_, second), (_, third) = (s.read(step) for s in (sampler, again, other))
        for a, b in zip(first, second, strict=True):
            assert np.array_equal(a.windows[0].ids, b.windows[0].ids)
            (span,) = a.windows[0].values.tolist()
            assert 0 <= span[2] < len(a.extras[LABELS])
            prompts.add(tuple(a.windows[0].ids.tolist()))
        assert any(not np.array_equal(a.windows[0].ids, c.windows[0].ids) for a, c in zip(first, third, strict=True))
    assert len(prompts) == 8  # 4 texts in 2 epochs


def test_a_prompt_names_its_labels() -> None:
    """The tokens that stand for labels are their markers, and the targets are columns of this prompt."""
    words, tags = [["Ada", "saw", "London"]] * 4, [["B-person", "O", "B-place"]] * 4
    task, sampler = prepared(words, tags)
    marker = task.tokenizer.id("<<ENT>>")
    for step in range(sampler.total_steps):
        for example in sampler.read(step)[1]:
            window, columns = example.windows[0], example.extras[LABELS]
            assert (window.ids[columns] == marker).all()
            assert np.count_nonzero(window.ids == marker) == len(columns)
            for first, _, column in window.values.tolist():
                end = np.append(columns, np.flatnonzero(window.ids == task.tokenizer.id("<<SEP>>")))[column + 1]
                label = task.tokenizer.decode(window.ids[columns[column] + 1 : end])  # type: ignore[arg-type]
                assert label.replace(" ", "") == {0: "person", 2: "place"}[first]


def test_long_texts_are_trained_on_in_windows() -> None:
    words = [[*["word"] * 90, "Ada", *["word"] * 90, "London"], ["in", "Paris"]]
    tags = [[*["O"] * 90, "B-person", *["O"] * 90, "B-place"], ["O", "B-place"]]
    task, sampler = prepared(words, tags)
    examples = {len(e.windows): e for step in range(2) for e in sampler.read(step)[1]}
    (long,) = (example for count, example in examples.items() if count > 1)
    assert sum(window.weights.sum() for window in long.windows) == 182
    assert all(len(window) <= task.checkpoint.max_length for window in long.windows)
    found = [tuple(v) for window in long.windows for v in window.values[:, :2].tolist()]  # type: ignore[index]
    assert len(found) >= 2


def test_spans_that_cannot_be_learned_are_reported() -> None:
    words, tags = [["a", "b", "c", "d", "e", "f"], ["Ada", "is"]], [["B-title", *["I-title"] * 5], ["B-person", "O"]]
    with pytest.warns(BertieWarning, match="1 of 2 spans in the training data have more than 4 words"):
        prepared(words, tags)


def test_words_are_those_of_the_reading() -> None:
    """U.S. is four words to the model; a span of given words covers all of them."""
    words, tags = [["the", "U.S.", "!"], ["in", "London"]], [["O", "B-group", "O"], ["O", "O"]]
    _, sampler = prepared(words, tags)
    (gold,) = (
        window.values.tolist()[0]
        for example in sampler.read(0)[1]
        for window in example.windows
        if len(window.values)  # type: ignore[arg-type]
    )
    assert gold[:2] == [1, 4]


def test_data_without_spans_is_refused() -> None:
    with pytest.raises(InputError, match="the tag 'O' in each of its 2 rows"):
        prepared([["a"], ["b"]], [["O"], ["O"]])
    with pytest.raises(InputError, match="class_weights"):
        prepared([["a"], ["b"]], [["O"], ["B-x"]], class_weights="balanced")


def test_tags_and_spans() -> None:
    known = frozenset(["O", "B-a", "I-a", "B-b", "I-b", "S-a", "E-a"])
    assert tag_spans(["S-a", "B-a", "E-a", "I-b", "I-a"], known) == [(0, 0, "a"), (1, 2, "a"), (3, 3, "b"), (4, 4, "a")]
    tags = ["B-a", "I-a", "O", "B-b", "B-a"]
    assert to_tags(tag_spans(tags, known), 5) == tags


def test_predicted_spans_are_compared_by_given_words() -> None:
    example = read_dataset("tag", [["the", "U.S.", "Navy"], ["x"]], [["O", "B-g", "I-g"], ["O"]]).examples[0]
    spans = [bertie.TaggedSpan("g", 4, 5, "U", 0.6), bertie.TaggedSpan("h", 6, 13, "S. Navy", 0.9)]
    assert given_words(spans, example) == [(1, 2, "h")]


def test_evaluation_with_labels_that_were_not_trained_on(encoder: Path) -> None:
    words, tags = tagged_words(8)
    task = ZeroShotTagger(encoder, epochs=1, dev_fraction=0, refit=False, folds=0).fit(words, tags, progress=False)
    other = [[tag.replace("PER", "river").replace("LOC", "mountain") for tag in row] for row in tags]
    assert 0 <= task.score(words, other) <= 1
