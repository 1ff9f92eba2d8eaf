"""Attention weights and hidden states of all layers, for a text that fits into the model's maximum length.

Attention weights are computed separately from the model, because the fused attention kernels never materialize them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import Rotary
from bertie.errors import InputError, NotFoundError
from bertie.nn.attention import PassContext
from bertie.nn.blocks import Block
from bertie.nn.encoder import Encoder
from bertie.nn.model import Model
from bertie.ops.contracts import additive_mask
from bertie.ops.torch.eager import rotate
from bertie.tasks.display import Displayed
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text

MAX_ATTENTION_TOKENS = 4096  # the attention weights of one layer must fit into memory


@dataclass(frozen=True, slots=True)
class Token:
    """A token at `text[start:end]`."""

    text: str  # as in the vocabulary
    start: int
    end: int
    special: bool  # added by the template


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AttentionResult(Displayed):
    """How much each token (row) attends to each token (column). Every row sums to 1."""

    tokens: tuple[Token, ...]
    weights: NDArray[np.float32]  # (n, n)
    layers: int
    heads: int
    layer: int  # counted from 0
    head: int | None  # counted from 0; None: the mean over heads
    tokens_total: int
    tokens_read: int
    windows: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class HiddenStatesResult(Displayed):
    """The hidden states of every token after every layer."""

    tokens: tuple[Token, ...]
    states: NDArray[np.float32]  # (layers + 1, n, D): the input embeddings, then the output of each layer
    tokens_total: int
    tokens_read: int
    windows: int


@torch.inference_mode()
def attention_weights(
    checkpoint: Checkpoint, text: str, *, layer: int | None = None, head: int | None = None
) -> AttentionResult:
    """The attention weights of one layer (by default the last), of one head or averaged over all.

    >>> result = attention_weights(Checkpoint.load("bertie-small"), "A cat sat.", layer=0, head=1)
    >>> [token.text for token in result.tokens], result.weights.shape
    (['[CLS]', 'a', 'cat', 'sat', '.', '[SEP]'], (6, 6))
    """
    cfg = checkpoint.model.config
    layer = check_layer(checkpoint, layer, head)
    batch, tokens = encode_text(checkpoint, text, MAX_ATTENTION_TOKENS)
    (scores,) = attention_scores(checkpoint.model, batch, [layer])  # (H, n, n)
    weights = (scores if head is None else scores[head : head + 1]).softmax(-1).mean(0)
    count = sum(not token.special for token in tokens)
    return AttentionResult(tokens, weights.cpu().numpy(), cfg.depth, cfg.heads, layer, head, count, count, 1)


@torch.inference_mode()
def hidden_states(checkpoint: Checkpoint, text: str) -> HiddenStatesResult:
    """The hidden states of every layer, like `output_hidden_states=True` in transformers.

    >>> result = hidden_states(Checkpoint.load("bertie-small"), "A cat sat.")
    >>> len(result.states) == Checkpoint.load("bertie-small").model.config.depth + 1
    True
    """
    batch, tokens = encode_text(checkpoint, text, what="hidden states are")
    states = torch.stack([state.float() for state in checkpoint.model.encoder.hidden_states(batch)])
    count = sum(not token.special for token in tokens)
    return HiddenStatesResult(tokens, states.cpu().numpy(), count, count, 1)


def check_layer(checkpoint: Checkpoint, layer: int | None, head: int | None) -> int:
    """The index of a layer, by default the last; refuse layers and heads that the model does not have."""
    cfg = checkpoint.model.config
    layer = cfg.depth - 1 if layer is None else layer
    for name, value, count in (("layer", layer, cfg.depth), ("head", head, cfg.heads)):
        if value is not None and not 0 <= value < count:
            raise InputError(f"{name}={value} must lie between 0 and {count - 1}")
    return layer


def encode_text(
    checkpoint: Checkpoint, text: str, limit: int | None = None, what: str = "attention is"
) -> tuple[Batch, tuple[Token, ...]]:
    """Encode a text as a batch of one, with its tokens; refuse texts beyond `limit` or the maximum length."""
    if (tokenizer := checkpoint.tokenizer) is None:
        raise NotFoundError(f"{checkpoint.source} has no tokenizer, which is needed to read texts")
    most = checkpoint.max_length if limit is None else min(limit, checkpoint.max_length)
    encodings = tokenizer.encode_flat([checked_text(text, "text")])
    if (length := int(encodings.lengths[0])) > most:
        raise InputError(f"text has {length} tokens, and {what} shown for at most {most}; shorten it")
    encoding = encodings[0]
    tokens = tuple(
        Token(tokenizer.token(i), start, end, special)
        for i, (start, end), special in zip(
            encoding.ids.tolist(), encoding.offsets.tolist(), encoding.special.tolist(), strict=True
        )
    )
    return Batch.from_encodings([encoding]).to(checkpoint.model.device), tokens


def attention_scores(model: Model, batch: Batch, layers: Iterable[int]) -> Iterator[Tensor]:
    """(H, n, n) the attention scores of a single text in each of some layers, in ascending order, before the softmax.

    Pairs that the layer's pattern masks are −inf. No token is global, as for embeddings.
    """
    encoder, wanted = model.encoder, set(layers)
    context = encoder.pass_context(batch)
    for layer, x in enumerate(islice(encoder.hidden_states(batch), max(wanted, default=-1) + 1)):
        if layer in wanted:
            yield _layer_scores(encoder, context, x, layer, batch.max_len)


def _layer_scores(encoder: Encoder, context: PassContext, x: Tensor, layer: int, n: int) -> Tensor:
    """(H, n, n) the attention scores of a layer whose input is x (n, D)."""
    block = encoder.blocks[encoder.cfg.layer_map[layer]]
    assert isinstance(block, Block)
    module = block.attention
    q, k, _ = module.project(block.pre_attention(x))
    for position in encoder.cfg.positions:
        if isinstance(position, Rotary):
            cos, sin = context.rotations[position.key(layer)]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    q, k = q.float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (n, G, d) -> (n, H, d)
    scores: Tensor = torch.einsum("ihd,jhd->hij", q, k)
    relative = module.relative_terms(context)
    at = torch.arange(n, device=x.device)
    row = None if relative is None else relative.rows[at[:, None] - at[None, :] + len(relative.rows) // 2]  # (n, n)
    if relative is not None and relative.keys is not None:
        scores = scores + torch.einsum("ihd,ijhd->hij", q, relative.keys.float()[row])
    if relative is not None and relative.queries is not None:
        scores = scores + torch.einsum("jhd,ijhd->hij", k, relative.queries.float()[row])
    scores = scores * module.scale
    if relative is not None and relative.scores is not None:
        scores = scores + relative.scores.float()[row].permute(2, 0, 1)
    mask = additive_mask(encoder.cfg.patterns[layer], range(n), range(n), n, None, scores)
    return scores if mask is None else scores + mask
