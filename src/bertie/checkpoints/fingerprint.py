"""Fingerprints of model weights, independent of the precision that they are loaded in.

A fingerprint is a SHA-256 hash of the encoder's weights in fp32. Hashing takes longer than a query, so fingerprints are
cached on disk by the path, size, modification time and inode of the weight files: in $BERTIE_CACHE, else in
$XDG_CACHE_HOME/bertie, else in ~/.cache/bertie.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.data.atomic import atomic_write

if TYPE_CHECKING:
    from torch import nn

    from bertie.checkpoints.checkpoint import Checkpoint

CACHE_FILE = "fingerprints.json"
MAX_ENTRIES = 1000
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.json")


@dataclass(frozen=True, slots=True)
class WeightsOrigin:
    """Where the weights of a model were loaded from, and how to load them again in fp32.

    `versions` are PyTorch's version counters of the encoder's tensors: in-place changes such as training increment them.
    """

    folder: Path
    versions: tuple[int, ...]
    reload: Callable[[], nn.Module]

    @classmethod
    def of(cls, folder: Path, encoder: nn.Module, reload: Callable[[], nn.Module]) -> WeightsOrigin:
        """Record the origin of weights that were just loaded."""
        return cls(folder, _versions(encoder), reload)

    def is_current(self, encoder: nn.Module) -> bool:
        """Whether an encoder in fp32, bf16 or fp16 still has the weights of the files."""
        return _versions(encoder) == self.versions

    def cache_key(self) -> str:
        """Identify the files and their contents without reading them."""
        files = sorted(file for pattern in WEIGHT_PATTERNS for file in self.folder.glob(pattern))
        stats = [(file.name, status.st_size, status.st_mtime_ns, status.st_ino) for file in files if (status := file.stat())]
        return hashlib.sha256(repr((str(self.folder.resolve()), stats)).encode()).hexdigest()


def weights_fingerprint(checkpoint: Checkpoint) -> str:
    """Return the fingerprint of a checkpoint's encoder, which is the same for all precisions it may be loaded in."""
    encoder, origin, precision = checkpoint.model.encoder, checkpoint.origin, checkpoint.precision
    # int8 and fp8 models cannot be trained: their weights are those of the files.
    if origin is None or (precision not in ("int8", "fp8") and not origin.is_current(encoder)):
        return _hash(encoder)
    key = origin.cache_key()
    fingerprints = _read_cache()
    if key not in fingerprints:
        fingerprints[key] = _hash(encoder if precision == "fp32" else origin.reload())
        _write_cache(fingerprints)
    return fingerprints[key]


def _versions(encoder: nn.Module) -> tuple[int, ...]:
    try:
        return tuple(map(attrgetter("_version"), encoder.parameters()))
    except RuntimeError:  # tensors created in inference mode have no version counter
        return ()


def _hash(encoder: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
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
