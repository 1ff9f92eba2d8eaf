"""The endpoints of the playground: descriptions of models, and windows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.serve.api.playground import describe, map_windows
from bertie.serve.tickets import Ticket
from bertie.tasks import Reader
from tests.tasks import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("models") / "m"
    return Checkpoint.load(tiny.save(folder, "wordpiece", "ForQuestionAnswering"))


def test_windows_cover_the_text_and_each_character_is_owned_once(checkpoint: Checkpoint) -> None:
    question, document = "Who walked to London?", tiny.document(30)
    (answer,) = Reader(checkpoint).answer([(question, document)])
    found = map_windows(checkpoint, (question, document), Ticket())
    windows = found["windows"]
    assert len(windows) == answer.windows > 3
    assert (found["tokens_total"], found["tokens_read"]) == (answer.tokens_total, answer.tokens_read)
    assert all(one["tokens"] <= checkpoint.max_length for one in windows)
    assert all(one["start"] <= one["owns"][0] < one["owns"][1] <= one["end"] for one in windows)
    assert windows[0]["start"] == 0
    assert windows[-1]["owns"][1] == windows[-1]["end"] == len(document.rstrip())
    for one, following in pairwise(windows):
        assert following["start"] < one["end"]  # they overlap
        assert one["owns"][1] <= following["owns"][0]
        assert not document[one["owns"][1] : following["owns"][0]].strip()


def test_a_short_text_is_one_window(checkpoint: Checkpoint) -> None:
    text = "Emma walked."
    tokens = len(checkpoint.tokenizer.encode(text)) if checkpoint.tokenizer else 0
    whole = {"start": 0, "end": len(text), "owns": [0, len(text)], "tokens": tokens}
    assert map_windows(checkpoint, (text,), Ticket()) == {
        "windows": [whole],
        "tokens_total": tokens - 2,
        "tokens_read": tokens - 2,
    }


def test_descriptions_list_heads_by_task(tmp_path: Path) -> None:
    labels = ["contradiction", "entailment", "neutral"]
    made = tiny.save(tmp_path / "m", "wordpiece", "ForSequenceClassification", labels=labels)
    found = describe("mine", Checkpoint.load(made))
    assert (found["name"], found["layers"], found["heads"], found["max_length"]) == ("mine", 2, 2, tiny.REACH)
    assert found["mask_token"] == "[MASK]"
    assert list(found["tasks"]) == ["classify"]
    (head,) = found["tasks"]["classify"]
    assert (head["head"], head["labels"], head["pairs"], head["temperature"]) == ("classify", labels, True, 1.0)
    assert str(tmp_path) not in str(found)  # paths are not disclosed
