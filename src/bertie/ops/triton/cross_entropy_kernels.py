# mypy: ignore-errors
"""Triton kernel of `cross_entropy.py`: loss and gradient of each row of logits."""

from __future__ import annotations

from bertie.ops.triton.kernel_utils import jit, tl


@jit
def cross_entropy_forward_backward(
    logits_ptr, bias_ptr, targets_ptr, weights_ptr, losses_ptr, VOCAB: tl.constexpr, STRIDE: tl.constexpr,
    STORE_GRADIENT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a row. STORE_GRADIENT: overwrite the logits with their gradient, zero beyond the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * STRIDE
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    weight = tl.load(weights_ptr + row)
    target_logit = tl.load(logits_ptr + target).to(tl.float32)  # before it is overwritten below
    if HAS_BIAS:
        target_logit += tl.load(bias_ptr + target).to(tl.float32)
    running_max = tl.full((BLOCK,), -1e30, tl.float32)  # online log-sum-exp, per column of a block
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        column = start + columns
        x = tl.load(logits_ptr + column, mask=column < STRIDE, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + column, mask=column < VOCAB, other=0.0).to(tl.float32)
        x = tl.where(column < VOCAB, x, -1e30)
        new_max = tl.maximum(running_max, x)
        total = total * tl.exp(running_max - new_max) + tl.exp(x - new_max)
        running_max = new_max
    row_max = tl.max(running_max, 0)
    logsumexp = row_max + tl.log(tl.sum(total * tl.exp(running_max - row_max), 0))
    tl.store(losses_ptr + row, tl.where(weight > 0.0, (logsumexp - target_logit) * weight, 0.0))
    if STORE_GRADIENT:
        for start in range(0, STRIDE, BLOCK):
            column = start + columns
            x = tl.load(logits_ptr + column, mask=column < STRIDE, other=0.0).to(tl.float32)
            if HAS_BIAS:
                x += tl.load(bias_ptr + column, mask=column < VOCAB, other=0.0).to(tl.float32)
            x = tl.where(column < VOCAB, x, -1e30)
            gradient = (tl.exp(x - logsumexp) - tl.where(column == target, 1.0, 0.0)) * weight
            tl.store(logits_ptr + column, tl.where(weight > 0.0, gradient, 0.0), mask=column < STRIDE)
