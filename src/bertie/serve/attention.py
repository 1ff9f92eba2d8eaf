"""The attention weights of one layer, or of all layers and heads, for a short text, for the playground.

The scores are those of `bertie.tasks.attention`. Under a causal mask they show what a left-to-right model could attend
to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.serve.tickets import current_ticket
from bertie.tasks.attention import Token, attention_scores, check_layer, encode_text

MAX_TOKENS = 128  # that can still be drawn legibly
MAX_WEIGHTS = 1 << 20  # of all layers and heads together
DIGITS, DIGITS_ALL = 5, 3  # of the weights in the response

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """How much each token (row) attends to each token (column). Every row sums to 1."""

    tokens: tuple[Token, ...]
    layers: int
    heads: int
    layer: int  # counted from 0
    head: int | None  # counted from 0; None: the mean over heads
    weights: Table
    causal: Table  # the same under a causal mask
    tokens_total: int
    tokens_read: int
    windows: int


@dataclass(frozen=True, slots=True)
class AllAttention:
    """The attention weights of every head: `weights[layer][head][query][key]`."""

    tokens: tuple[Token, ...]
    layers: int
    heads: int
    weights: tuple[tuple[Table, ...], ...]
    tokens_total: int
    tokens_read: int
    windows: int


@torch.inference_mode()
def attention(checkpoint: Checkpoint, text: str, *, layer: int | None = None, head: int | None = None) -> Attention:
    """The attention weights of one layer (by default the last), of one head or averaged over all.

    >>> result = attention(Checkpoint.load("bertie-small"), "A cat sat.", layer=0, head=1)             # doctest: +SKIP
    >>> [token.text for token in result.tokens], sum(result.weights[0])                               # doctest: +SKIP
    (['[CLS]', 'a', 'cat', 'sat', '.', '[SEP]'], 1.0)
    """
    cfg = checkpoint.model.config
    layer = check_layer(checkpoint, layer, head)
    batch, tokens = encode_text(checkpoint, text, MAX_TOKENS)
    (scores,) = attention_scores(checkpoint.model, batch, [layer])  # (H, n, n)
    later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    tables = []
    for visible in (scores, scores.masked_fill(later, -torch.inf)):
        weights = visible.softmax(-1)
        tables.append(_table(weights.mean(0) if head is None else weights[head]))
    count = sum(not token.special for token in tokens)
    return Attention(tokens, cfg.depth, cfg.heads, layer, head, tables[0], tables[1], count, count, 1)


@torch.inference_mode()
def all_attention(checkpoint: Checkpoint, text: str) -> AllAttention:
    """The attention weights of all layers and heads, unless nobody waits for them any more.

    >>> result = all_attention(Checkpoint.load("bertie-small"), "A cat sat.")
    >>> len(result.weights) == result.layers, len(result.weights[0]) == result.heads
    (True, True)
    """
    cfg = checkpoint.model.config
    limit = min(MAX_TOKENS, int((MAX_WEIGHTS / (cfg.depth * cfg.heads)) ** 0.5))
    batch, tokens = encode_text(checkpoint, text, limit)
    ticket = current_ticket.get()
    layers = []
    for scores in attention_scores(checkpoint.model, batch, range(cfg.depth)):
        if ticket is not None:
            ticket.check()
        layers.append(tuple(_table(weights, DIGITS_ALL) for weights in scores.softmax(-1)))
    count = sum(not token.special for token in tokens)
    return AllAttention(tokens, cfg.depth, cfg.heads, tuple(layers), count, count, 1)


def _table(weights: Tensor, digits: int = DIGITS) -> Table:
    return tuple(tuple(round(weight, digits) for weight in row) for row in weights.tolist())
