"""Answers from an index: the same as reading its passages, with places in the documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertie import Index, Reader
from bertie.errors import InputError
from bertie.search.ask import default_reader, read_passages
from bertie.search.searcher import SearchResults

pytest.importorskip("bm25s")
DOCUMENTS = {
    "novels": "Emma is a novel by Jane Austen. It was first published in December 1815.\n\n" * 6,
    "rivers": "The Rhine flows through Cologne. Its source is in Switzerland.",
    "batteries": "Zinc batteries were invented by Alessandro Volta in Italy.",
}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    index = Index.create(tmp_path_factory.mktemp("ask") / "index", chunk_size=48)
    index.add([{"id": id, "text": text} for id, text in DOCUMENTS.items()])
    return index


@pytest.fixture(scope="module")
def reader(index: Index) -> Reader:
    return default_reader(index)


def test_answers_with_their_places(index: Index, reader: Reader) -> None:
    result = index.ask("Who invented zinc batteries?", reader=reader)
    assert result.best is not None
    assert (result.best.text, result.best.document) == ("Alessandro Volta", "batteries")
    result = index.ask("When was Emma first published?", top_k=3)  # in several places
    assert result.answers[0].text == "December 1815"
    assert len({(answer.start, answer.end) for answer in result.answers}) == 3, "each place once"
    for answer in result.answers:
        assert DOCUMENTS[answer.document][answer.start : answer.end] == answer.text
        assert answer.passage in result.passages
    assert result.answers[0].score >= result.answers[1].score >= result.answers[2].score
    assert {"encode", "dense", "lexical", "read"} <= set(result.timings)
    assert 0 < result.tokens_total == result.tokens_read


def test_equals_reading_the_hits(index: Index, reader: Reader) -> None:
    question = "What is the source of the Rhine?"
    hits = index.search(question, 3)
    direct = reader.answer(question, [hit.text for hit in hits])
    result = index.ask(question, 3, reader=reader)
    assert result.passages == hits.hits
    assert result.best is not None
    assert (result.best.text, result.best.score) == (direct.best.text, direct.best.score)
    assert result.no_answer_score == direct.no_answer_score


def test_no_answer(index: Index, reader: Reader) -> None:
    assert index.ask("Who wrote Emma?", reader=reader, no_answer_threshold=1).has_answer
    result = index.ask("Who wrote Emma?", reader=reader, no_answer_threshold=0)
    assert (result.has_answer, result.best, result.answers) == (False, None, ())
    assert len(result.passages) == 5, "what was read is there nevertheless"
    assert 0 < result.no_answer_score <= 1
    nothing = index.ask("Who wrote Emma?", reader=reader, where={"lang": "none"})
    assert (nothing.answers, nothing.passages, nothing.no_answer_score) == ((), (), 1.0)


def test_fitted_threshold_is_the_default(index: Index, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    fitted = Reader(reader.checkpoint)
    info = replace(reader.info, calibration=replace(reader.info.calibration, no_answer_threshold=0.0))
    monkeypatch.setattr(Reader, "info", property(lambda self: info))
    assert not index.ask("Who wrote Emma?", reader=fitted).has_answer
    assert index.ask("Who wrote Emma?", reader=fitted, no_answer_threshold=1).has_answer


def test_errors(index: Index, reader: Reader) -> None:
    for options, message in (
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"k": 0}, "k=0 must be at least 1"),
        ({"no_answer_threshold": 2}, "no_answer_threshold=2 must be a probability"),
    ):
        with pytest.raises(InputError, match=message):
            index.ask("who", reader=reader, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="top_k=0"):
        read_passages(SearchResults("who", (), {}), reader, top_k=0)


def test_reader_of_another_model(tmp_path: Path) -> None:
    """A model without such a head uses the built-in reader."""
    from tests.checkpoints.tiny_sentence import save_bert

    with Index.create(tmp_path / "index", save_bert(tmp_path / "m")) as other:
        other.add(["Emma is a novel by Jane Austen."])
        result = other.ask("Who wrote Emma?")
    assert result.best is not None
    assert result.best.text == "Jane Austen"
