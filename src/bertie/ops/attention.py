"""`attend`: softmax attention within each text of a flat batch.

The score of query i and key j of a text is

    scale · (qᵢ·kⱼ + qᵢ·keys[r] + kⱼ·queries[r]) + scores[r],      r = rows[i − j]

The three terms in r exist only in models with relative positions. The softmax is over the keys that the pattern
lets query i see. Rotary embeddings are applied to q and k first.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bertie.config import Pattern
from bertie.ops import dispatch
from bertie.ops.contracts import AttentionInputs, Relative


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    cu_seqlens: Tensor,
    *,
    scale: float,
    pattern: Pattern,
    relative: Relative | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
    global_tokens: Tensor | None = None,
    dropout: float = 0.0,
    cache: dict[Any, Tensor] | None = None,
    backends: dispatch.AttentionBackends | None = None,
) -> Tensor:
    """(T, H, d), (T, G, d), (T, G, d) -> (T, H, d); G key heads serve H query heads, G divides H.

    Args:
        q: Queries. May be overwritten when no gradient is recorded and there is a `rotation`.
        k: Keys, likewise.
        v: Values.
        lengths: Tokens per text. If they sum to more than T, they are upper bounds (a batch with spare room) and
            only `cu_seqlens` is exact.
        cu_seqlens: (B + 1,) where the texts start and end.
        scale: Factor of the scores.
        pattern: Which keys a query sees.
        relative: Score terms that depend on distance.
        rotation: cos and sin (T, d) of rotary embeddings.
        global_tokens: (T,) bool, the keys that every query of their text sees. Their own queries are computed
            elsewhere (nn/attention.py).
        dropout: Dropout probability of the attention weights.
        cache: Tensors derived from the batch that the layers of one forward pass share; new for each pass.
        backends: The resolved backends, in order of preference; resolved from the tensors when None.
    """
    if backends is None:
        backends = dispatch.attention_backends(q, k, v, pattern, relative)
    call = AttentionInputs(
        q, k, v, lengths, cu_seqlens, scale, pattern, relative, rotation, global_tokens, dropout, cache
    )
    row = backends.choose(call)
    if rotation is not None and not backends.rotates(row, call):
        call.q, call.k = backends.rotate(q, k, *rotation)
        call.rotation = None
    assert row.run is not None
    out: Tensor = row.run(call)
    return out
