"""Interpolate the weights of two encoders: python interpolate.py MODEL OUT --towards OTHER [--weight 0.85]

MODEL and OTHER are folders or names of checkpoints of the same shape and vocabulary, such as a
fine-tuned model and the one that it was fine-tuned from. Each weight of OUT is `weight` times that
of MODEL plus 1 − `weight` times that of OTHER (WiSE-FT, Wortsman et al. 2022): of the encoder, and of
the heads that both have. Everything else is MODEL's.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import InputError


def interpolate(model: Checkpoint, other: Checkpoint, weight: float) -> None:
    """Move the weights of `model` towards those of `other`, in place."""
    ours, theirs = model.model.state_dict(), other.model.state_dict()
    shared = [name for name in ours if name.startswith("encoder.") or name in theirs]
    different = [name for name in shared if name not in theirs or ours[name].shape != theirs[name].shape]
    if different:
        raise InputError(f"{model.source} and {other.source} differ in shape: {different[0]}")
    for name in shared:
        if ours[name].is_floating_point():
            ours[name].lerp_(theirs[name].to(ours[name].dtype), 1 - weight)


def main(arguments: Sequence[str] | None = None) -> None:
    """Load both, and save the result."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--towards", metavar="OTHER", required=True)
    parser.add_argument("--weight", type=float, default=0.85, help="of MODEL, from 0 to 1 (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not 0 <= options.weight <= 1:
        parser.error(f"--weight {options.weight} must be a number from 0 to 1")
    model, other = (Checkpoint.load(name, device="cpu") for name in (options.model, options.towards))
    interpolate(model, other, options.weight)
    model.save(options.out)


if __name__ == "__main__":
    main()
