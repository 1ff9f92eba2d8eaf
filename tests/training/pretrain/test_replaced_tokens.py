"""Losses over what was hidden, pairs from documents, and a generator with its discriminator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned, NormConfig
from bertie.errors import ConfigError, InputError, NotFoundError
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.training.pretrain.masked_lm import MaskedLMLoss
from bertie.training.pretrain.masking import Masking, masking_rng
from bertie.training.pretrain.replaced_tokens import ReplacedTokenDetection, sample
from bertie.training.pretrain.sentence_pairs import NextSentence, SentenceOrder

VOCAB, MASK = 60, 4
SPECIAL = (0, 1, 2, 3, 4)


def config(width: int = 16, depth: int = 2, embedding: int = 12) -> EncoderConfig:
    return EncoderConfig(
        vocab=VOCAB,
        width=width,
        layer_map=tuple(range(depth)),
        heads=2,
        head_width=width // 2,
        kv_heads=2,
        ff_width=24,
        activation="gelu",
        embeddings=EmbeddingConfig(width=embedding, segments=2, project="after_norm"),
        positions=(Learned(64),),
        patterns=(Full(),) * depth,
        max_length=64,
        init_std=0.3,
    )


MLM = HeadConfig(kind="vocabulary", outputs=VOCAB, dense=12, activation="gelu", norm=NormConfig(), tied=True)
RTD = HeadConfig(kind="token", outputs=1, dense=16, activation="gelu")
OF_TEXT = HeadConfig(kind="text", outputs=2, dense=16, activation="tanh")


def built(heads: dict[str, HeadConfig], seed: int = 0, **shape: int) -> Model:
    torch.manual_seed(seed)
    return Model(config(**shape), heads).eval()


def step(seed: int = 0, lengths: tuple[int, ...] = (9, 30, 2, 17), below: int = VOCAB) -> Any:
    """A masked batch, its rows and targets, and which tokens are special."""
    rng = np.random.default_rng(seed)
    ids = [np.concatenate([[2], rng.integers(5, below, n - 2), [3]]) for n in lengths]
    flat = np.concatenate(ids)
    special = np.isin(flat, SPECIAL)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    masking, draw = Masking(rate=0.3), masking_rng(seed, 0, 0)
    places = masking.choose(special, ~special, cu, draw)
    masked, targets = masking.apply(flat, places, draw, below, MASK, SPECIAL)
    batch = Batch.from_ids(np.split(masked, cu[1:-1]))
    return batch, torch.from_numpy(places), torch.from_numpy(targets), torch.from_numpy(special)


@pytest.mark.parametrize("tied", [True, False])
def test_loss_is_that_of_all_logits(tied: bool) -> None:
    """Written plainly: logits everywhere, a probability for each token, and a sum over the hidden ones."""
    model = built({"mlm": replace(MLM, tied=tied)})
    batch, rows, targets, _ = step()
    loss = MaskedLMLoss().loss(model, batch, rows, targets)
    chances = model(batch, "mlm").double().softmax(-1)  # (T, V)
    plain = -sum(torch.log(chances[row, target]) for row, target in zip(rows, targets, strict=True))
    assert_close(loss.double(), plain, atol=1e-4, rtol=0)

    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for got, wanted in zip(gradients, torch.autograd.grad(plain, list(model.parameters())), strict=True):
        assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_only_hidden_rows_have_a_gradient() -> None:
    model = built({"mlm": MLM})
    batch, rows, targets, _ = step()
    hidden = model.hidden(batch).detach().requires_grad_()
    MaskedLMLoss().loss(model, batch, rows, targets, hidden).backward()
    assert hidden.grad is not None
    moved = hidden.grad.abs().sum(-1) > 0
    assert moved.nonzero()[:, 0].tolist() == rows.tolist()


def test_words_that_occur_nowhere_have_no_gradient() -> None:
    model = built({"mlm": replace(MLM, tied=False), "nsp": OF_TEXT})
    batch, rows, targets, _ = step(below=30)
    loss = MaskedLMLoss().loss(model, batch, rows, targets) + NextSentence().loss(
        model, batch, torch.tensor([0, 1, 1, 0])
    )
    loss.backward()
    grad = model.encoder.embeddings.words.weight.grad
    assert grad is not None
    moved = (grad.abs().sum(-1) > 0).nonzero()[:, 0].tolist()
    assert moved == sorted(set(batch.ids.tolist()))


def test_parts_of_a_step_add_up() -> None:
    model = built({"mlm": MLM})
    batch, rows, targets, _ = step(lengths=(9, 30))
    whole = MaskedLMLoss().loss(model, batch, rows, targets)
    parts = []
    for ids, inside, start in ((batch.ids[:9], rows < 9, 0), (batch.ids[9:], rows >= 9, 9)):
        part = Batch.from_ids([ids.numpy()])
        parts.append(MaskedLMLoss().loss(model, part, rows[inside] - start, targets[inside]))
    assert_close(sum(parts), whole, atol=1e-4, rtol=0)


def test_nothing_hidden_is_nothing_to_learn() -> None:
    model = built({"mlm": MLM})
    batch, rows, targets, _ = step()
    loss = MaskedLMLoss().loss(model, batch, rows[:0], targets[:0])
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_head_that_is_not_there() -> None:
    batch, rows, targets, _ = step()
    with pytest.raises(NotFoundError, match="'mlm'"):
        MaskedLMLoss().loss(built({"rtd": RTD}), batch, rows, targets)


# --- pairs ---


def documents(count: int, seed: int = 0, longest: int = 14) -> list[list[Any]]:
    """Each token is its document's number in thousands and its place there."""
    rng = np.random.default_rng(seed)
    made = []
    for d in range(count):
        ends = np.cumsum(rng.integers(1, longest, size=rng.integers(1, 30)))
        made.append(np.split(1000 * d + np.arange(ends[-1]), ends[:-1]))
    return made


def follows(first: Any, second: Any) -> bool:
    return bool(second[0] == first[-1] + 1)


def whole(part: Any) -> bool:
    return bool((np.diff(part) == 1).all())


def test_next_sentence_pairs() -> None:
    docs = documents(200)
    borders = {int(s[0]) for doc in docs for s in doc} | {int(doc[-1][-1]) + 1 for doc in docs}
    pairs = list(NextSentence.pairs(docs, 40, np.random.default_rng(1)))
    for pair in pairs:
        assert len(pair.first) + len(pair.second) <= 40
        assert whole(pair.first)
        assert whole(pair.second)
        assert follows(pair.first, pair.second) == (pair.label == 0)
        assert (pair.first[0] // 1000 == pair.second[0] // 1000) == (pair.label == 0)
        # No sentence is cut, on either side and for either label: a cut would tell them apart.
        for part in (pair.first, pair.second):
            assert int(part[0]) in borders
            assert int(part[-1]) + 1 in borders

    # Every token is read: first, or second in its place.
    read = np.concatenate([np.concatenate([p.first, *([p.second] if p.label == 0 else [])]) for p in pairs])
    assert np.array_equal(read, np.concatenate([s for doc in docs for s in doc]))

    ends = {int(doc[-1][-1]) for doc in docs}
    assert all(pair.label == 1 for pair in pairs if int(pair.first[-1]) in ends)
    free = [pair.label for pair in pairs if int(pair.first[-1]) not in ends]
    assert len(free) > 500
    assert abs(np.mean(free) - 0.5) <= 3 * np.sqrt(0.25 / len(free))


def test_sentence_order_pairs() -> None:
    docs = documents(300, seed=2)
    pairs = list(SentenceOrder.pairs(docs, 40, np.random.default_rng(1)))
    for pair in pairs:
        assert len(pair.first) + len(pair.second) <= 40
        assert follows(pair.first, pair.second) == (pair.label == 0)
        assert follows(pair.second, pair.first) == (pair.label == 1)
    labels = np.array([pair.label for pair in pairs])
    assert abs(labels.mean() - 0.5) <= 3 * np.sqrt(0.25 / len(labels))
    # Which of the two is longer must not tell the label.
    longer = np.array([len(pair.first) - len(pair.second) for pair in pairs])
    assert abs(np.corrcoef(labels, longer)[0, 1]) <= 3 / np.sqrt(len(labels))
    # All is read, except single tokens that are left alone.
    read = sum(len(pair.first) + len(pair.second) for pair in pairs)
    total = sum(len(s) for doc in docs for s in doc)
    assert total - len(docs) < read <= total


@pytest.mark.parametrize("kind", [NextSentence, SentenceOrder])
def test_long_sentences_and_the_smallest_room(kind: Any) -> None:
    docs = [[np.arange(25)], [1000 + np.arange(7)]]
    for room in (2, 3, 9):
        pairs = list(kind.pairs(docs, room, np.random.default_rng(0)))
        assert all(
            len(pair.first) and len(pair.second) and len(pair.first) + len(pair.second) <= room for pair in pairs
        )
        seen = {int(x) for pair in pairs for x in (*pair.first, *pair.second)}
        assert len(seen) >= 30


def test_the_same_seed_makes_the_same_pairs() -> None:
    docs = documents(10)
    for kind in (NextSentence, SentenceOrder):
        one, two, other = (
            [(*p.first.tolist(), -1, *p.second.tolist()) for p in kind.pairs(docs, 30, np.random.default_rng(seed))]
            for seed in (1, 1, 2)
        )
        assert one == two != other


def test_documents_that_make_no_pairs() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="at least 2"):
        list(NextSentence.pairs(documents(1), 20, rng))
    with pytest.raises(InputError, match="document 1 has no tokens"):
        list(SentenceOrder.pairs([[np.arange(3)], []], 20, rng))
    with pytest.raises(InputError, match="room=1"):
        list(SentenceOrder.pairs(documents(2), 1, rng))


# --- replaced tokens ---


def two(sharing: Any = "tied") -> ReplacedTokenDetection:
    generator = built({"mlm": MLM}, width=8, depth=1)
    return ReplacedTokenDetection(generator, built({"rtd": RTD}, seed=1), sharing)


def test_guesses_are_drawn_by_their_probability() -> None:
    logits = torch.tensor([1.0, -2.0, 0.5, 3.0, float("-inf")])
    drawn = sample(logits.expand(100_000, -1), torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=5) / len(drawn)
    wanted = logits.softmax(-1)
    assert share[4] == 0
    assert ((share - wanted).abs() <= 3 * (wanted * (1 - wanted) / len(drawn)).sqrt()).all()


def test_what_the_discriminator_reads() -> None:
    both = two()
    batch, rows, targets, special = step()
    losses = both(batch, rows, targets, special, torch.Generator().manual_seed(1))
    again = both(batch, rows, targets, special, torch.Generator().manual_seed(1))
    assert torch.equal(losses.ids, again.ids)
    text = batch.ids.index_copy(0, rows, targets)
    assert torch.equal(losses.replaced, losses.ids != text)
    assert losses.replaced.any()
    others = torch.ones(len(text), dtype=torch.bool).index_fill(0, rows, False)
    assert torch.equal(losses.ids[others], text[others])
    assert torch.equal(losses.logits, both.discriminator(replace(batch, ids=losses.ids), "rtd")[:, 0])

    # A generator that is always right leaves nothing replaced.
    head = both.generator.head("mlm")
    assert head.bias is not None
    with torch.no_grad():
        head.bias.copy_(torch.full((VOCAB,), -1e4).index_fill(0, torch.tensor([7]), 1e4))
    certain = both(batch, rows, torch.full_like(targets, 7), special)
    assert not certain.replaced.any()


def test_special_tokens_have_no_gradient() -> None:
    both = two("none")
    batch, rows, targets, special = step()
    kept: list[torch.Tensor] = []

    def keep(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        args[0].retain_grad()
        kept.append(args[0])

    both.discriminator.head("rtd").register_forward_pre_hook(keep)
    both(batch, rows, targets, special).discriminator.backward()
    assert kept[0].grad is not None
    assert torch.equal(kept[0].grad.abs().sum(-1) > 0, ~special)


def gradients(both: ReplacedTokenDetection, loss: str) -> dict[str, float]:
    """How far each of the two tables of words is moved by one of the two losses."""
    batch, rows, targets, special = step()
    both.zero_grad()
    getattr(both(batch, rows, targets, special, torch.Generator().manual_seed(0)), loss).backward()
    generator = both.generator.encoder.embeddings.words.weight.grad
    own = dict(both.discriminator.named_parameters())
    delta = own.get(
        "encoder.embeddings.words.parametrizations.weight.original", own.get("encoder.embeddings.words.weight")
    )
    assert delta is not None
    return {
        name: 0.0 if g is None else float(g.abs().sum()) for name, g in (("generator", generator), ("own", delta.grad))
    }


def test_sharing() -> None:
    """Which loss moves which table."""
    for sharing in ("none", "gdes"):
        both = two(sharing)
        masked, found = gradients(both, "generator"), gradients(both, "discriminator")
        assert masked["generator"] > 0
        assert masked["own"] == 0
        assert found["generator"] == 0
        assert found["own"] > 0
    both = two("tied")
    assert both.discriminator.encoder.embeddings.words is both.generator.encoder.embeddings.words
    assert both.discriminator.encoder.embeddings.positions is both.generator.encoder.embeddings.positions
    assert gradients(both, "generator")["own"] > 0
    assert gradients(both, "discriminator")["generator"] > 0
    names = [name for name, _ in both.named_parameters()]
    assert not any("discriminator.encoder.embeddings.words" in name for name in names), "counted twice"


def test_gdes_starts_at_the_generators_table_and_follows_it() -> None:
    both = two("gdes")
    base, words = both.generator.encoder.embeddings.words, both.discriminator.encoder.embeddings.words
    assert torch.equal(words.weight, base.weight)
    with torch.no_grad():
        base.weight += 1
        words.parametrizations.weight.original += 0.5  # type: ignore[union-attr, operator]
    assert_close(words.weight, base.weight + 0.5)


@pytest.mark.parametrize("sharing", ["none", "tied", "gdes"])
def test_the_trained_discriminator_is_a_plain_model(sharing: Any) -> None:
    both = two(sharing)
    optimizer = torch.optim.SGD(both.parameters(), lr=0.01)
    batch, rows, targets, special = step()
    first = None
    for _ in range(3):
        losses = both(batch, rows, targets, special, torch.Generator().manual_seed(0))
        total = both.total(losses, len(rows), float((~special).sum()))
        first = first or total.item()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    model = both.trained()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in built({"rtd": RTD}).named_parameters()]
    before = model(batch, "rtd")
    assert_close(before, both.discriminator(batch, "rtd"), atol=0, rtol=0)
    with torch.no_grad():
        for parameter in both.parameters():
            parameter.zero_()
    assert torch.equal(model(batch, "rtd"), before)


def test_a_state_can_be_saved_and_restored() -> None:
    one, other = two("gdes"), two("gdes")
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(torch.randn_like(parameter))
    other.load_state_dict(one.state_dict())
    batch, rows, targets, special = step()
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]
    a, b = (both(batch, rows, targets, special, draw) for both, draw in zip((one, other), draws, strict=True))
    assert torch.equal(a.discriminator, b.discriminator)
    assert torch.equal(a.generator, b.generator)


def test_models_that_cannot_share() -> None:
    generator = built({"mlm": replace(MLM, dense=8)}, width=8, embedding=8)
    for sharing in ("tied", "gdes"):
        with pytest.raises(ConfigError, match=r"words of the generator has \(60, 8\)"):
            ReplacedTokenDetection(generator, built({"rtd": RTD}), sharing)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sharing='some'"):
        ReplacedTokenDetection(generator, built({"rtd": RTD}), "some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weight=0"):
        ReplacedTokenDetection(generator, built({"rtd": RTD}), "none", weight=0)
    with pytest.raises(NotFoundError, match="'rtd'"):
        ReplacedTokenDetection(generator, generator)
    small = Model(replace(config(), vocab=50), {"rtd": RTD})
    with pytest.raises(ConfigError, match="vocab=60"):
        ReplacedTokenDetection(generator, small, "none")
