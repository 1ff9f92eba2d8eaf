"""`attend`: softmax attention within each text of a flat batch.

The score of query i and key j of a text is

    scale · (qᵢ·kⱼ + qᵢ·keys[r] + kⱼ·queries[r]) + scores[r],      r = rows[i − j]

The three terms in r exist only in models with relative positions. The softmax is over the keys that the pattern
lets query i see. Rotary embeddings are applied to q and k first.
"""

from __future__ import annotations

from torch import Tensor

from bertie.ops import dispatch
from bertie.ops.contracts import AttentionInputs


def attend(inputs: AttentionInputs, backends: dispatch.AttentionBackends | None = None) -> Tensor:
    """The attention outputs (T, H, d).

    Without gradients, rotary embeddings may be applied in place: q and k are then overwritten. `backends` are resolved
    from the tensors when None.
    """
    if backends is None:
        backends = dispatch.attention_backends(inputs)
    row = backends.choose(inputs)
    if inputs.rotation is not None and not backends.rotates(row, inputs):
        inputs.q, inputs.k = backends.rotate(inputs.q, inputs.k, *inputs.rotation)
        inputs.rotation = None
    assert row.run is not None
    out: Tensor = row.run(inputs)
    return out
