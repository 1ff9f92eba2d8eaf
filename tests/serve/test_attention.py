"""Attention weights equal to transformers', under a causal mask equal to a loop over the formula's text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import InputError
from bertie.serve.attention import MAX_TOKENS, all_attention, attention
from bertie.tasks.attention import attention_scores
from bertie.text.batch import Batch
from tests.parity.test_transformers import ours
from tests.parity.tiny import build
from tests.tasks import tiny

# Every kind of position and pattern: learned, shared layers, rotary with windows, buckets, disentangled, causal.
FAMILIES = (
    *("bert", "albert", "modernbert", "mpnet", "deberta", "deberta-v2", "eurobert", "nomic_bert"),
    *("mistral", "qwen3", "gemma3_text", "gemma3_text-bidirectional", "t5"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_equal_transformers(name: str) -> None:
    theirs = build(name, "EncoderModel" if name == "t5" else "Model").eval()
    theirs.set_attn_implementation("eager") if name not in ("deberta", "deberta-v2", "mpnet") else None
    model, _ = ours(theirs)
    ids = torch.randint(5, 60, (23,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        found = theirs(torch.tensor([ids]), attention_mask=torch.ones(1, 23), output_attentions=True).attentions
        layers = range(model.config.depth)
        for layer, scores in zip(layers, attention_scores(model, Batch.from_ids([ids]), layers), strict=True):
            assert_close(scores.softmax(-1), found[layer][0], atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.load(
        tiny.save(tmp_path_factory.mktemp("models") / "m", "wordpiece", "ForMaskedLM", max_length=160)
    )


TEXT = "Emma walked quickly to London."


def test_one_head_the_mean_and_the_causal_mask(checkpoint: Checkpoint) -> None:
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    (scores,) = attention_scores(checkpoint.model, Batch.from_encodings([tokenizer.encode(TEXT)]), [1])
    n, heads = scores.shape[-1], len(scores)
    found = [attention(checkpoint, TEXT, layer=1, head=head) for head in range(heads)]
    for head, one in enumerate(found):
        for i in range(n):
            row = scores[head, i].double().exp()
            assert_close(torch.tensor(one.weights[i]).double(), row / row.sum(), atol=2e-5, rtol=0)
            assert_close(
                torch.tensor(one.causal[i][: i + 1]).double(), row[: i + 1] / row[: i + 1].sum(), atol=2e-5, rtol=0
            )
            assert not any(one.causal[i][i + 1 :])
    mean = attention(checkpoint, TEXT)
    assert (mean.layer, mean.head, mean.layers, mean.heads) == (1, None, 2, heads)
    assert_close(
        torch.tensor(mean.weights), torch.stack([torch.tensor(one.weights) for one in found]).mean(0), atol=2e-5, rtol=0
    )
    assert found[0].weights != found[1].weights


def test_all_layers_and_heads(checkpoint: Checkpoint) -> None:
    found = all_attention(checkpoint, TEXT)
    assert (found.layers, found.heads) == (2, 2)
    for layer in range(found.layers):
        for head in range(found.heads):
            weights = torch.tensor(attention(checkpoint, TEXT, layer=layer, head=head).weights)
            assert_close(torch.tensor(found.weights[layer][head]), weights, atol=6e-4, rtol=0)
    assert found.tokens == attention(checkpoint, TEXT).tokens
    with pytest.raises(InputError, match="attention is shown for at most"):
        all_attention(checkpoint, "the " * 130)


def test_tokens_have_their_places(checkpoint: Checkpoint) -> None:
    found = attention(checkpoint, TEXT)
    assert [one.text for one in found.tokens if one.special] == ["[CLS]", "[SEP]"]
    assert "".join(TEXT[one.start : one.end] for one in found.tokens if not one.special) == TEXT.replace(" ", "")
    assert (found.tokens_total, found.tokens_read, found.windows) == (len(found.tokens) - 2, len(found.tokens) - 2, 1)


def test_what_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(InputError, match=f"text has 262 tokens, and attention is shown for at most {MAX_TOKENS}"):
        attention(checkpoint, "the " * 130)
    with pytest.raises(InputError, match="layer=2 must lie between 0 and 1"):
        attention(checkpoint, TEXT, layer=2)
    with pytest.raises(InputError, match="head=-1 must lie between 0 and 1"):
        attention(checkpoint, TEXT, head=-1)


def test_a_short_reach_is_the_limit(tmp_path: Path) -> None:
    short = Checkpoint.load(tiny.save(tmp_path / "m", "wordpiece", "", max_length=16))
    with pytest.raises(InputError, match="at most 16"):
        attention(short, "the " * 20)
