"""Errors that end a training run, with advice in their messages."""

from __future__ import annotations

from bertie.errors import TrainingError


def out_of_memory(step: int, micro_tokens: int) -> TrainingError:
    """The device ran out of memory in a step, counted from 1."""
    return TrainingError(
        f"out of memory at step {step}, with micro_tokens={micro_tokens}; pass a smaller micro_tokens, "
        "gradient_checkpointing=True or a smaller max_length. The last checkpoint is intact"
    )


def diverged(reason: str, lr: float) -> TrainingError:
    """The loss or the weights are not finite, or the loss is far too high."""
    return TrainingError(
        f"{reason}: the learning rate ({lr:g}) may be too high for this data, or half precision too coarse "
        "(mixed_precision='fp32'). The last checkpoint is intact"
    )


def interrupted(step: int, total: int) -> KeyboardInterrupt:
    """The run was interrupted after its state was saved."""
    error = KeyboardInterrupt()
    error.add_note(f"saved at step {step} of {total}; continue with resume")
    return error
