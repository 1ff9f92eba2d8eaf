"""Held-out evaluation and fill-mask samples, against a computation token by token."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from bertie.errors import ConfigError, InputError, NotFoundError
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.training.pretrain import monitoring
from bertie.training.pretrain.corpus import Corpus, build_corpus
from bertie.training.pretrain.masking import Masking, masking_rng
from bertie.training.pretrain.monitoring import (
    SENTENCES,
    HeldOutEvaluation,
    evaluate_with_intervals,
    fill_mask_samples,
    write_samples,
)
from bertie.training.pretrain.packing import PackedCorpus
from tests.training.pretrain.corpus_texts import PIECES, SPECIALS, sentence, tokenizer_of
from tests.training.tiny import masked

REACH = 24


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of([*SPECIALS, ".", *PIECES, *(f"##{piece}" for piece in PIECES)])


@pytest.fixture(scope="module")
def corpus(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    draw = random.Random(0)
    folder = tmp_path_factory.mktemp("corpus")
    documents = [sentence(draw, draw.randint(1, 25)) for _ in range(40)]
    (folder / "in.txt").write_text("\n\n".join(documents) + "\n")
    build_corpus([str(folder / "in.txt")], tokenizer, folder / "out")
    return Corpus.open(folder / "out", tokenizer)


def model(vocab: int, std: float = 0.3) -> Model:
    return masked(vocab, REACH, dropout=0.5, std=std)


def held_out(corpus: Corpus, tokenizer: Tokenizer, step: int = 200, **options: Any) -> HeldOutEvaluation:
    return HeldOutEvaluation(
        PackedCorpus(corpus, step, REACH, seed=3), tokenizer, **({"budget": 150, "seed": 5} | options)
    )


# --- held-out evaluation ---


@torch.no_grad()
def each_document(of: Model, corpus: Corpus, tokenizer: Tokenizer, masking: Masking) -> dict[int, list[Any]]:
    """Loss, hits and count of each document: piece by piece, with all logits, from the corpus itself."""
    assert tokenizer.mask_id is not None
    never = corpus.manifest["tokenizer"]["special"]
    found: dict[int, list[Any]] = {}
    for d in range(len(corpus)):
        words = corpus.word_starts(d)
        for start in range(0, len(corpus.document(d)), REACH - 2):
            inner = corpus.document(d)[start : start + REACH - 2].astype(np.int64)
            ids = np.concatenate([[corpus.cls_id], inner, [corpus.sep_id]])
            special = np.isin(ids, never)
            begins = np.concatenate([[True], words[start : start + REACH - 2], [True]]) | special
            begins[1] = True
            rng = masking_rng(5, None, d * 1_000_003 + start)
            places = masking.choose(special, begins, np.array([0, len(ids)]), rng)
            masked, targets = masking.apply(
                ids, places, rng, vocab=tokenizer.vocab_size, mask_id=tokenizer.mask_id, never=never
            )
            logs = of(Batch.from_ids([masked]), "mlm").double().log_softmax(-1).numpy()[places]
            one = found.setdefault(d, [0.0, 0, 0])
            one[0] -= logs[np.arange(len(places)), targets].sum()
            one[1] += int((logs.argmax(1) == targets).sum())
            one[2] += len(places)
    return found


@pytest.mark.parametrize("unit", ["token", "word"])
def test_the_loss_is_the_mean_over_masked_tokens(corpus: Corpus, tokenizer: Tokenizer, unit: Any) -> None:
    of, masking = model(tokenizer.vocab_size), Masking(rate=0.3, unit=unit)
    slow = np.array(list(each_document(of.eval(), corpus, tokenizer, masking).values()))
    loss, right, count = slow.sum(0)
    found = held_out(corpus, tokenizer, masking=masking)(of)
    assert found["tokens"] == count > 200
    assert found["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert found["accuracy"] == right / count
    assert found["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-5)


def test_the_loss_does_not_depend_on_the_batches(
    corpus: Corpus, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = model(tokenizer.vocab_size)
    of.train()
    whole = held_out(corpus, tokenizer)
    before = whole(of)
    assert of.training
    assert whole(of) == before  # no dropout, and the same masks
    assert held_out(corpus, tokenizer, seed=6)(of)["loss"] != before["loss"]
    for other in (held_out(corpus, tokenizer, budget=1), held_out(corpus, tokenizer, step=90, budget=10_000)):
        assert other(of) == pytest.approx(before, rel=1e-6)
    monkeypatch.setattr(monitoring, "MAX_LOGITS", 3 * tokenizer.vocab_size)
    assert whole(of) == pytest.approx(before, rel=1e-6)


def test_a_uniform_model(corpus: Corpus, tokenizer: Tokenizer) -> None:
    vocab = tokenizer.vocab_size
    found = held_out(corpus, tokenizer)(model(vocab, std=1e-12))
    assert found["perplexity"] == pytest.approx(vocab, rel=1e-4)


def test_the_token_limit(corpus: Corpus, tokenizer: Tokenizer) -> None:
    of = model(tokenizer.vocab_size)
    masking = Masking(rate=1.0)  # all but the two around a piece are predicted
    whole = held_out(corpus, tokenizer, masking=masking)(of)["tokens"]
    assert whole == corpus.tokens
    part = held_out(corpus, tokenizer, masking=masking, limit=300)(of)["tokens"]
    assert 300 - REACH - 2 * 300 / 4 < part < 300
    assert 0 < held_out(corpus, tokenizer, masking=masking, limit=1)(of)["tokens"] <= REACH - 2


def test_intervals_resample_documents(corpus: Corpus, tokenizer: Tokenizer) -> None:
    of = model(tokenizer.vocab_size)
    slow = np.array(list(each_document(of.eval(), corpus, tokenizer, Masking()).values()))
    held = held_out(corpus, tokenizer)
    found = evaluate_with_intervals(of, held, resamples=300, seed=1)
    rng = np.random.default_rng(1)
    drawn = np.array([slow[rng.integers(0, len(slow), len(slow))].sum(0) for _ in range(300)])
    losses = drawn[:, 0] / drawn[:, 2]
    low, high = np.quantile(losses, (0.025, 0.975))
    # Corrected for bias and skewness, of which there is little.
    assert (found["loss"].low, found["loss"].high) == pytest.approx((low, high), abs=0.3 * (high - low))
    assert found["perplexity"].low == pytest.approx(math.exp(found["loss"].low), rel=1e-3)
    quick = held(of)
    assert {name: score.value for name, score in found.items()} == pytest.approx(
        {name: quick[name] for name in found}, rel=1e-12
    )
    for name, column in (("loss", 0), ("accuracy", 1)):  # the standard errors of both ways agree
        spread = (drawn[:, column] / drawn[:, 2]).std()
        assert quick[f"{name}_se"] == pytest.approx(spread, rel=0.2)


def test_invalid_arguments_are_refused(corpus: Corpus, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="budget=0"):
        held_out(corpus, tokenizer, budget=0)
    with pytest.raises(ConfigError, match="limit=0"):
        held_out(corpus, tokenizer, limit=0)
    bare = tokenizer_of([*SPECIALS[:4], ".", *PIECES])
    with pytest.raises(InputError, match="no mask token"):
        held_out(corpus, bare)
    of = model(tokenizer.vocab_size)
    with pytest.raises(NotFoundError, match="no head 'other'"):
        held_out(corpus, tokenizer, head="other")(of)


# --- fill-mask samples ---


def test_samples_are_the_likeliest_tokens(tokenizer: Tokenizer) -> None:
    of = model(tokenizer.vocab_size + 3)  # rows of the table that no token has
    of.train()
    texts = ["ba [MASK] de", "[MASK] gi ko [MASK]."]
    found = fill_mask_samples(of, tokenizer, texts, top=4)
    assert of.training
    assert [one["text"] for one in found] == texts
    of.eval()
    for one in found:
        encoding = tokenizer.encode(one["text"])
        with torch.no_grad():
            chances = of(Batch.from_encodings([encoding]), "mlm").softmax(-1).numpy()
        places = np.flatnonzero(encoding.ids == tokenizer.mask_id)
        assert len(places) == len(one["masks"])
        for place, guesses in zip(places, one["masks"], strict=True):
            best = np.argsort(-chances[place][: tokenizer.vocab_size])[:4]
            assert list(guesses) == [tokenizer.token(int(i)) for i in best]
            assert list(guesses.values()) == pytest.approx(chances[place][best].tolist(), abs=1e-4)


def test_a_tokenizer_with_another_mask_token() -> None:
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *PIECES]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(words[:5])
    found = fill_mask_samples(model(len(words)), Tokenizer(backend))
    assert len(found) == len(SENTENCES)
    assert [len(one["masks"]) for one in found] == [text.count("[MASK]") for text in SENTENCES]


def test_texts_that_cannot_be_filled_are_refused(tokenizer: Tokenizer) -> None:
    of = model(tokenizer.vocab_size)
    with pytest.raises(InputError, match=r"no \[MASK\]"):
        fill_mask_samples(of, tokenizer, ["ba de"])
    with pytest.raises(InputError, match="the model's limit is 24"):
        fill_mask_samples(of, tokenizer, ["ba " * 30 + "[MASK]"])
    with pytest.raises(InputError, match="no mask token"):
        fill_mask_samples(of, tokenizer_of([*SPECIALS[:4], *PIECES]))


def test_samples_of_a_repeated_step_are_replaced(tmp_path: Path) -> None:
    one = {"text": "a [MASK]", "masks": [{"\u2028é": 0.5}]}
    for step in (10, 20, 30):
        write_samples(tmp_path, step, [one, one])
    whole = (tmp_path / "samples.jsonl").read_bytes()
    for step in (20, 30):  # a run that was killed after its third went on from its first
        write_samples(tmp_path, step, [one, one])
    assert (tmp_path / "samples.jsonl").read_bytes() == whole
    lines = [json.loads(line) for line in whole.decode().split("\n") if line]
    assert [line["step"] for line in lines] == [10, 10, 20, 20, 30, 30]
    assert lines[0] == {"step": 10, **one}
