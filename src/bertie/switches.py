"""Which optional backends are turned off, by `disable` or by the environment variable BERTIE_DISABLE.

A leaf module, so that every package can import it. `bertie.ops.dispatch` documents what each backend computes.
"""

from __future__ import annotations

import os
from collections import Counter

from bertie.errors import ConfigError

VARIABLE = "BERTIE_DISABLE"
BACKENDS = (
    "native.wordpiece",  # the compiled WordPiece tokenizer
    "native.encoder",  # the compiled encoder on a CPU
    "native.training.attention",
    "native.training.rotary",
    "native.training.norm",
    "native.training.activation",
    "native.training.optimizer",  # AdamW and sparse gradients of embeddings on a CPU
    "cuda_graphs",  # replay of recorded forward passes and training steps
    "triton.attention.short",
    "triton.attention.short_rotary",
    "triton.attention.disentangled",
    "triton.rotary",
    "triton.fused.norm",
    "triton.fused.activation",
    "triton.fused.embedding",
    "triton.fused.cross_entropy",
    "triton.fused.pooling",
    "triton.fused.fp8",
    "torch.attention.varlen",
    "torch.attention.bucketed",
)

_counts: Counter[str] = Counter()
_names: frozenset[str] | None = None  # cached; None: to be computed


def disabled() -> frozenset[str]:
    """The names that are turned off. The name of a group turns off all its backends: "triton" all Triton kernels."""
    global _names
    if _names is None:
        listed = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
        _names = frozenset(_check(name, VARIABLE) for name in listed if name) | frozenset(_counts)
    return _names


def is_disabled(backend: str) -> bool:
    """Whether a backend, or a group that it belongs to, is turned off.

    >>> with disable("triton.attention"):
    ...     is_disabled("triton.attention.short"), is_disabled("triton.rotary")
    (True, False)
    """
    names = disabled()
    return bool(names) and any(backend == name or backend.startswith(f"{name}.") for name in names)


class disable:
    """Turn off backends from now on; as a context manager, until the end of the block.

    >>> disable("triton.atention")
    Traceback (most recent call last):
        ...
    bertie.errors.ConfigError: disable='triton.atention' must be one of cuda_graphs, native, ...
    """

    def __init__(self, *names: str) -> None:
        self.names = tuple(_check(name, "disable") for name in names)
        _counts.update(self.names)
        _changed()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            _counts[name] -= 1
            if not _counts[name]:
                del _counts[name]
        _changed()


def _changed() -> None:
    global _names
    _names = None


def _check(name: str, field: str) -> str:
    parts = [backend.split(".") for backend in BACKENDS]
    known = {".".join(part[: depth + 1]) for part in parts for depth in range(len(part))}
    if name not in known:
        raise ConfigError(f"{field}={name!r} must be one of {', '.join(sorted(known))}")
    return name
