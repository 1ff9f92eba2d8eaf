"""One step of each pretraining objective equals transformers': our ragged batch against their padded one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.training.pretrain.masked_lm import EnhancedMaskDecoder, MaskedLMLoss
from bertie.training.pretrain.replaced_tokens import ReplacedTokenDetection
from bertie.training.pretrain.sentence_pairs import NextSentence, SentenceOrder
from tests.parity.test_transformers import as_saved, ours
from tests.parity.tiny import build

PAD, MASK = 0, 4


class Step:
    """A ragged batch with hidden tokens, flat for us and padded for them."""

    def __init__(self, theirs: Any, seed: int = 0, pairs: bool = True) -> None:
        draw = random.Random(seed)
        lengths = [draw.randint(2, 30) for _ in range(5)]
        pad = theirs.config.pad_token_id if theirs.config.pad_token_id is not None else PAD
        ids = [[draw.randrange(5, 60) for _ in range(n)] for n in lengths]
        segments = [[int(pairs and 2 * i >= n) for i in range(n)] for n in lengths]
        self.batch = Batch.from_ids(ids, segments)
        self.rows = torch.tensor(sorted(draw.sample(range(sum(lengths)), k=sum(lengths) // 5)))
        self.targets = self.batch.ids[self.rows]
        self.batch.ids[self.rows[::2]] = MASK  # some are read as they are
        self.labels = torch.tensor([draw.randint(0, 1) for _ in lengths])

        wanted = torch.full_like(self.batch.ids, -100).index_copy(0, self.rows, self.targets)
        self.real = torch.tensor([[i < n for i in range(max(lengths))] for n in lengths])
        self.padded: dict[str, Any] = {
            "input_ids": self.pad(self.batch.ids, pad),
            "attention_mask": self.real.long(),
            "labels": self.pad(wanted, -100),
        }
        if pairs:
            self.padded["token_type_ids"] = self.pad(self.batch.segments, 0)

    def pad(self, flat: torch.Tensor, value: int) -> torch.Tensor:
        return torch.full(self.real.shape, value, dtype=flat.dtype).masked_scatter(self.real, flat)


def check_gradients(theirs: Any, model: Model, plan: Any) -> None:
    gradients = as_saved(
        theirs,
        {
            key: torch.zeros_like(p) if p.grad is None else p.grad
            for key, p in theirs.named_parameters(remove_duplicate=False)
        },
    )
    parameters = {name.replace("parametrizations.weight.original", "weight"): p for name, p in model.named_parameters()}
    moved = 0
    for rule in plan.weight_map.rules:
        wanted = rule.read([gradients[plan.weight_map.rename(key)] for key in rule.theirs])
        got = parameters[rule.ours].grad
        got = torch.zeros_like(wanted) if got is None else got
        assert_close(got, wanted, atol=1e-4, rtol=0, msg=lambda m, rule=rule: f"{rule.ours}: {m}")
        moved += int(wanted.abs().max() > 1e-3)
    assert moved > len(plan.weight_map.rules) / 2, "too few parameters had a gradient to compare"


@pytest.mark.parametrize(
    "name",
    [
        "bert",
        "bert-untied",
        "roberta",
        "distilbert",
        "albert",
        "electra",
        "mpnet",
        "deberta",
        "deberta-v3",
        "modernbert",
    ],
)
def test_masked_tokens(name: str) -> None:
    theirs = build(name, "ForMaskedLM")
    model, plan = ours(theirs)
    step = Step(theirs, pairs=name in ("bert", "bert-untied", "albert", "electra"))
    expected = theirs(**step.padded).loss
    loss = MaskedLMLoss().loss(model, step.batch, step.rows, step.targets) / len(step.rows)
    assert_close(loss, expected, atol=1e-5, rtol=0)
    expected.backward()
    loss.backward()
    check_gradients(theirs, model, plan)


@pytest.mark.parametrize(
    ("name", "label", "pairs"),
    [("bert", "next_sentence_label", NextSentence()), ("albert", "sentence_order_label", SentenceOrder())],
)
def test_masked_tokens_with_pairs(name: str, label: str, pairs: Any) -> None:
    """The two together, as BERT and ALBERT learned, in one pass of the encoder."""
    theirs = build(name, "ForPreTraining")
    model, plan = ours(theirs)
    step = Step(theirs, seed=1)
    expected = theirs(**step.padded, **{label: step.labels}).loss
    hidden = model.hidden(step.batch)
    masked = MaskedLMLoss().loss(model, step.batch, step.rows, step.targets, hidden)
    paired = pairs.loss(model, step.batch, step.labels, hidden)
    loss = masked / len(step.rows) + paired / len(step.labels)
    assert_close(loss, expected, atol=1e-5, rtol=0)
    expected.backward()
    loss.backward()
    check_gradients(theirs, model, plan)


def test_next_sentence_alone() -> None:
    theirs = build("bert", "ForNextSentencePrediction")
    model, plan = ours(theirs)
    step = Step(theirs, seed=2)
    expected = theirs(**step.padded | {"labels": step.labels}).loss
    loss = NextSentence().loss(model, step.batch, step.labels) / len(step.labels)
    assert_close(loss, expected, atol=1e-5, rtol=0)
    expected.backward()
    loss.backward()
    check_gradients(theirs, model, plan)


TABLES = ("word_embeddings", "token_type_embeddings", "position_embeddings")


@pytest.mark.parametrize("sharing", ["none", "tied", "gdes"])
def test_replaced_tokens(sharing: Any) -> None:
    their_generator, theirs = build("electra", "ForMaskedLM"), build("electra", "ForPreTraining", seed=1)
    (generator, generator_plan), (model, plan) = ours(their_generator), ours(theirs)
    step = Step(theirs, seed=3)
    # transformers has no step of the two together: its two models, with their tables shared by hand.
    if sharing == "tied":
        for table in TABLES:
            setattr(theirs.electra.embeddings, table, getattr(their_generator.electra.embeddings, table))
    elif sharing == "gdes":
        own = theirs.electra.embeddings.word_embeddings.weight
        own.data.copy_(their_generator.electra.embeddings.word_embeddings.weight.data)

    both = ReplacedTokenDetection(generator, model, sharing)
    nobody = torch.zeros(len(step.batch.ids), dtype=torch.bool)
    losses = both(step.batch, step.rows, step.targets, nobody, torch.Generator().manual_seed(5))
    loss = both.total(losses, len(step.rows), len(nobody))

    assert 0 < losses.replaced.sum() <= len(step.rows)
    read = step.padded | {"input_ids": step.pad(losses.ids, PAD), "labels": step.pad(losses.replaced.float(), 0)}
    masked, found = their_generator(**step.padded).loss, theirs(**read).loss
    expected = masked + 50 * found
    assert_close(losses.generator / len(step.rows), masked, atol=1e-5, rtol=0)
    assert_close(losses.discriminator / len(nobody), found, atol=1e-5, rtol=0)
    # Fifty times the second: each is held to 1e-5 above, and their sum to what it is of them.
    assert_close(loss, losses.generator / len(step.rows) + 50 * losses.discriminator / len(nobody), atol=0, rtol=1e-6)
    expected.backward()
    loss.backward()

    check_gradients(their_generator, generator, generator_plan)
    check_gradients(theirs, model, plan)
    if sharing == "gdes":
        words = generator.encoder.embeddings.words
        assert_close(both.trained().encoder.embeddings.words.weight, words.weight, atol=0, rtol=0)


def test_special_tokens_are_not_predicted() -> None:
    theirs = build("electra", "ForPreTraining", seed=1)
    generator, model = ours(build("electra", "ForMaskedLM"))[0], ours(theirs)[0]
    step = Step(theirs, seed=4)
    special = torch.rand(len(step.batch.ids), generator=torch.Generator().manual_seed(0)) < 0.3
    special[step.rows] = False
    both = ReplacedTokenDetection(generator, model, "none")
    losses = both(step.batch, step.rows, step.targets, special)
    logits = theirs(**step.padded | {"input_ids": step.pad(losses.ids, PAD), "labels": None}).logits[step.real]
    plain = [F.softplus(-x if y else x) for x, y, no in zip(logits, losses.replaced, special, strict=True) if not no]
    assert_close(losses.discriminator, torch.stack(plain).sum(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["deberta-v2", "deberta-v3"])
def test_enhanced_decoder(name: str) -> None:
    """transformers' layers take queries of their own, as DeBERTa's training code has it; the rest is written out."""
    theirs = build(name, "ForMaskedLM")
    model, plan = ours(theirs)
    step = Step(theirs, pairs=False)
    decoder = EnhancedMaskDecoder(model.config)
    assert decoder.times == 2

    inner = theirs.deberta
    states = inner(step.padded["input_ids"], step.padded["attention_mask"], output_hidden_states=True).hidden_states[-2]
    table = decoder.positions.weight.detach().clone().requires_grad_()
    asking = states + table[: states.shape[1]]
    mask = inner.encoder.get_attention_mask(step.padded["attention_mask"])
    relative = inner.encoder.get_rel_pos(states, None)
    for _ in range(2):
        asking = inner.encoder.layer[-1](
            states, mask, query_states=asking, relative_pos=relative, rel_embeddings=inner.encoder.get_rel_embedding()
        )
        asking = asking[0]
    logits = theirs.cls(asking)
    expected = F.cross_entropy(logits.flatten(0, 1), step.padded["labels"].flatten(), reduction="mean")

    hidden = decoder(model.encoder, step.batch)
    assert_close(hidden, asking[step.real], atol=1e-5, rtol=0)
    loss = MaskedLMLoss().loss(model, step.batch, step.rows, step.targets, hidden) / len(step.rows)
    assert_close(loss, expected, atol=1e-5, rtol=0)
    expected.backward()
    loss.backward()
    check_gradients(theirs, model, plan)
    assert_close(decoder.positions.weight.grad, table.grad, atol=1e-4, rtol=0)
