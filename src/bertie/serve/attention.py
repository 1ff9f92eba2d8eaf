"""The attention weights of one layer for a short text, for the playground.

They are computed separately from the model, because the fused attention kernels never materialize them. The same scores
under a causal mask show what a left-to-right model could attend to.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import Rotary
from bertie.errors import InputError, NotFoundError
from bertie.nn.blocks import Block
from bertie.nn.model import Model
from bertie.ops.contracts import additive_mask
from bertie.ops.torch.eager import rotate
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text

MAX_TOKENS = 128  # that can still be drawn legibly
DIGITS = 5  # of the weights in the response

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Token:
    """A token at `text[start:end]`."""

    text: str  # as in the vocabulary
    start: int
    end: int
    special: bool  # added by the template


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


@torch.inference_mode()
def attention(checkpoint: Checkpoint, text: str, *, layer: int | None = None, head: int | None = None) -> Attention:
    """The attention weights of one layer (by default the last), of one head or averaged over all.

    >>> result = attention(Checkpoint.load("bertie-small"), "A cat sat.", layer=0, head=1)             # doctest: +SKIP
    >>> [token.text for token in result.tokens], sum(result.weights[0])                               # doctest: +SKIP
    (['[CLS]', 'a', 'cat', 'sat', '.', '[SEP]'], 1.0)
    """
    cfg, tokenizer = checkpoint.model.config, checkpoint.tokenizer
    if tokenizer is None:
        raise NotFoundError(f"{checkpoint.source} has no tokenizer, and reading texts needs one")
    layer = cfg.depth - 1 if layer is None else layer
    for name, value, count in (("layer", layer, cfg.depth), ("head", head, cfg.heads)):
        if value is not None and not 0 <= value < count:
            raise InputError(f"{name}={value} must lie between 0 and {count - 1}")
    encodings = tokenizer.encode_flat([checked_text(text, "text")])
    limit, length = min(MAX_TOKENS, checkpoint.max_length), int(encodings.lengths[0])
    if length > limit:
        raise InputError(f"text has {length} tokens, and attention is shown for at most {limit}; shorten it")
    encoding = encodings[0]
    batch = Batch.from_encodings([encoding]).to(checkpoint.model.device)
    scores = attention_scores(checkpoint.model, batch, layer)  # (H, n, n)
    later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    tables = []
    for visible in (scores, scores.masked_fill(later, -torch.inf)):
        weights = visible.softmax(-1)
        tables.append(_table(weights.mean(0) if head is None else weights[head]))
    tokens = tuple(
        Token(tokenizer.token(i), start, end, special)
        for i, (start, end), special in zip(
            encoding.ids.tolist(), encoding.offsets.tolist(), encoding.special.tolist(), strict=True
        )
    )
    count = sum(not token.special for token in tokens)
    return Attention(tokens, cfg.depth, cfg.heads, layer, head, tables[0], tables[1], count, count, 1)


def attention_scores(model: Model, batch: Batch, layer: int) -> Tensor:
    """(H, n, n) the attention scores of a single text in one layer, before the softmax.

    Pairs that the layer's pattern masks are −inf. No token is global, as for embeddings.
    """
    encoder, n = model.encoder, batch.max_len
    x = next(islice(encoder.hidden_states(batch), layer, None))  # (n, D) the input of the layer
    context = encoder.pass_context(batch)
    block = encoder.blocks[encoder.cfg.layer_map[layer]]
    assert isinstance(block, Block)
    module = block.attention
    q, k, _ = module.qkv(block.pre_attention(x))
    for position in encoder.cfg.positions:
        if isinstance(position, Rotary):
            cos, sin = context.rotations[position.bases[layer]]
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


def _table(weights: Tensor) -> Table:
    return tuple(tuple(round(weight, DIGITS) for weight in row) for row in weights.tolist())
