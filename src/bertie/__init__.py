"""Bertie: one toolkit for encoder-only transformers.

>>> import bertie
>>> checkpoint = bertie.Checkpoint.load("path, built-in name or hub id")    # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

from bertie._version import __version__
from bertie.errors import (
    BertieError,
    CheckpointError,
    ConfigError,
    InputError,
    MissingPackageError,
    NotFoundError,
)

if TYPE_CHECKING:
    from bertie.config import EncoderConfig
    from bertie.hub import Checkpoint
    from bertie.tasks.embed import Embedder
    from bertie.text.batch import Batch
    from bertie.text.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "BertieError",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Embedder",
    "EncoderConfig",
    "InputError",
    "MissingPackageError",
    "NotFoundError",
    "Tokenizer",
    "__version__",
]

# Where each public name lives. They are imported when first used, so that `import bertie` costs no torch.
_HOME = {
    "Batch": "bertie.text.batch",
    "Checkpoint": "bertie.hub",
    "Embedder": "bertie.tasks.embed",
    "EncoderConfig": "bertie.config",
    "Tokenizer": "bertie.text.tokenizer",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bertie' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
