"""Counting tokens before the work: exact in slices, never above what the queue counts, cheap for short texts."""

from __future__ import annotations

import random

import pytest

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.serve import costs
from bertie.serve.context import RequestContext
from bertie.serve.costs import SLICE, check_tokens, count_tokens, text_groups
from bertie.serve.tickets import Cancelled, Ticket, TokenLimitExceeded
from bertie.tasks import Reranker
from bertie.text.tokenizer import Tokenizer
from bertie.text.windows import truncate, windows
from tests.serve.conftest import Running

WORDS = "cat sat on the mat unbelievable Zürich 中文字 , . dog [MASK]".split()


@pytest.fixture(scope="module")
def tokenizer(models: dict[str, str]) -> Tokenizer:
    found = Checkpoint.load(models["embed"]).tokenizer
    assert found is not None
    return found


def test_counts_of_slices_equal_those_of_the_whole(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "SLICE", 100)
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=k)) for k in (0, 1, 5, 30, 200, 1000)]
    counts = count_tokens(texts, tokenizer, Ticket())
    for text in texts:
        exact = len(tokenizer.encode(text)) - tokenizer.special_count
        slices = len(text) // 50 + 1
        assert exact - 4 * slices <= counts[text] <= exact if len(text) > 100 else counts[text] == exact


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_is_never_above_what_the_windows_have(tokenizer: Tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    length = draw.choice([12, 20, 40])
    item = tuple(" ".join(draw.choices(WORDS, k=draw.choice([0, 1, 9, 30, 200]))) for _ in range(draw.choice([1, 2])))
    encoding = tokenizer.encode_batch([item[0] if len(item) == 1 else (item[0], item[1])])[0]
    read = sum(map(len, windows(encoding, item, length)))
    check_tokens([item], tokenizer, Ticket(max_tokens=read), length)
    cut = sum(map(len, truncate(encoding, item, length)))
    check_tokens([item], tokenizer, Ticket(max_tokens=cut), length, windows=False)
    if read > 5 * length:  # and it is not far below
        with pytest.raises(TokenLimitExceeded):
            check_tokens([item], tokenizer, Ticket(max_tokens=read // 5), length)


def test_a_pair_of_long_texts_counts_every_window(tokenizer: Tokenizer) -> None:
    """Each span of one is read with each span of the other: 2,000 tokens are 70,000."""
    pair = ("cat " * 1000, "dog " * 1000)
    check_tokens([pair], tokenizer, Ticket(max_tokens=2000), 4096)
    with pytest.raises(TokenLimitExceeded):
        check_tokens([pair], tokenizer, Ticket(max_tokens=40_000), 40)


def test_short_texts_are_not_tokenized_twice(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "count_tokens", None)
    check_tokens([("a cat sat",)] * 1024, tokenizer, Ticket(max_tokens=1_000_000), 512)
    check_tokens([("a" * 999_999,)], tokenizer, Ticket(max_tokens=1_000_000), 512)


def test_groups_are_bounded_and_look_at_the_deadline() -> None:
    texts = ["a" * 30_000] * 5 + ["b" * 200_000] + ["c"] * 10
    groups = list(text_groups(texts, Ticket()))
    assert [text for group in groups for text in group] == texts
    assert all(len(group) == 1 or sum(map(len, group)) <= SLICE for group in groups)
    late = Ticket()
    late.cancelled.set()
    with pytest.raises(Cancelled):
        list(text_groups(texts, late))


def test_a_long_query_is_not_tokenized_with_every_document(server: Running) -> None:
    body = {"query": "x" * 20_000, "texts": ["a"] * 1000, "model": "rerank", "truncate": True}
    reply = server.post("/rerank", body)
    assert reply.status_code == 413
    assert reply.json()["error"] == "1,000 pairs of 20,001,000 characters together > maximum of 8,388,608"
    context = RequestContext(Ticket())
    task = server.app.service.task(Reranker, "rerank", context)
    server.app.service.check_tokens([("x" * 8000, "a")] * 1000, task, context)
    context.release()
