"""Fingerprints of model weights, independent of the precision that they are loaded in.

A fingerprint is a SHA-256 hash of the encoder's weights in fp32. Hashing takes longer than a query,
so fingerprints are cached on disk by the path, size, modification time and inode of the weight
files: in $BERTIE_CACHE, else in $XDG_CACHE_HOME/bertie, else in ~/.cache/bertie.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bertie.data.atomic import atomic_write

if TYPE_CHECKING:
    from torch import nn

    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.config import HeadName

CACHE_FILE = "fingerprints.json"
MAX_ENTRIES = 1000
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.index.json", "config.json")


@dataclass(frozen=True, slots=True)
class WeightsOrigin:
    """The files that the weights of a model were loaded from, and the arguments to load them again.

    `versions` are PyTorch's version counters of the encoder's tensors, which in-place changes such
    as training increment.
    """

    folder: Path
    head: HeadName | Literal["none"] | None
    ignore: tuple[str, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(
        cls, folder: Path, head: HeadName | Literal["none"] | None, ignore: Iterable[str], encoder: nn.Module
    ) -> WeightsOrigin:
        """Record the origin of weights that were just loaded."""
        return cls(folder, head, tuple(ignore), _versions(encoder))

    def is_current(self, encoder: nn.Module) -> bool:
        """Whether an encoder in fp32, bf16 or fp16 still has the weights of the files."""
        return _versions(encoder) == self.versions

    def cache_key(self) -> str:
        """Identify the weight files and their contents without reading them."""
        patterns = [*WEIGHT_FILES, *(f"*/{name}" for name in WEIGHT_FILES)]
        files = sorted(file for pattern in patterns for file in self.folder.glob(pattern))
        stats = [(str(file.relative_to(self.folder)), os.stat(file)) for file in files]
        facts = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]
        return hashlib.sha256(repr((str(self.folder.resolve()), facts)).encode()).hexdigest()


def weights_fingerprint(checkpoint: Checkpoint) -> str:
    """Return the fingerprint of a checkpoint's encoder, the same at every precision."""
    encoder, origin = checkpoint.model.encoder, checkpoint.origin
    if origin is None or not has_original_weights(checkpoint):
        return hash_weights(encoder)
    key = origin.cache_key()
    fingerprints = _read_cache()
    if key not in fingerprints:
        fingerprints[key] = hash_weights(encoder if checkpoint.precision == "fp32" else _reload(origin))
        _write_cache(fingerprints)
    return fingerprints[key]


def has_original_weights(checkpoint: Checkpoint) -> bool:
    """Whether the encoder still has the weights that were loaded from files."""
    if checkpoint.origin is None:
        return False
    # int8 and fp8 models cannot be trained.
    return checkpoint.precision in ("int8", "fp8") or checkpoint.origin.is_current(checkpoint.model.encoder)


def _reload(origin: WeightsOrigin) -> nn.Module:
    from bertie.checkpoints.checkpoint import Checkpoint

    return Checkpoint.load(origin.folder, head=origin.head, ignore=origin.ignore, device="cpu").model.encoder


def _versions(encoder: nn.Module) -> tuple[int, ...]:
    try:
        return tuple(map(attrgetter("_version"), encoder.parameters()))
    except RuntimeError:  # tensors created in inference mode have no version counter
        return ()


def hash_weights(module: nn.Module) -> str:
    """Hash the names, shapes and fp32 values of all tensors of a module."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy())
    return digest.hexdigest()[:32]


def _cache_path() -> Path:
    if folder := os.environ.get("BERTIE_CACHE"):
        return Path(folder) / CACHE_FILE
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bertie" / CACHE_FILE


def _read_cache() -> dict[str, str]:
    with suppress(OSError, ValueError, RuntimeError):
        cache: Any = json.loads(_cache_path().read_bytes())
        if isinstance(cache, dict):
            return cache
    return {}


def _write_cache(fingerprints: dict[str, str]) -> None:
    newest = dict(list(fingerprints.items())[-MAX_ENTRIES:])
    with suppress(OSError, RuntimeError):  # read-only or missing home: the fingerprint is computed again next time
        path = _cache_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(newest).encode())
