"""Model folders: strict JSON, checksums, and atomic writes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bertie.data.draft_folder import draft_folder
from bertie.errors import CheckpointError, ExistsError

CHECKSUMS = "checksums.json"


def is_file(path: Path) -> bool:
    """Whether a file exists; a path that cannot be checked (permissions, invalid name) is an error."""
    try:
        return path.is_file()
    except OSError as error:
        raise CheckpointError(f"{path.name:.80} cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file, rejecting duplicate keys."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read as JSON: {error}") from None
    if not _shallow(
        value, 64
    ):  # error messages show values, and the repr of deeply nested brackets overflows the stack
        raise CheckpointError(f"{path.name} is nested more than 64 deep")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} contains {type(value).__name__}; it must contain an object")
    return value


def _shallow(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_shallow(child, depth - 1) for child in inner)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate keys: readers differ in which one they take."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r:.80} occurs twice")
    return value


def to_json(value: Mapping[str, Any]) -> bytes:
    """Serialize as transformers does: two spaces, sorted keys."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


# --- checksums ---

# Files that Bertie reads. Others (a model card, a training log) may be added to a folder or changed in it.
_READ = re.compile(
    r"(config|gliner_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|modules|sentence_\S+_config"
    r"|config_sentence_transformers|.*\.index)\.json|(model.*|heads)\.safetensors|pytorch_model.*\.bin|.*\.model"
    r"|vocab\.txt|merges\.txt"
)


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def verify(folder: Path) -> None:
    """Verify the checksums of a folder, if it has any."""
    path = folder / CHECKSUMS
    if not is_file(path):
        return
    listed = read_json(path)
    try:
        # The file has one canonical form, so that damage to itself is detected, too.
        if path.read_bytes() != to_json(listed):
            raise CheckpointError(f"{CHECKSUMS} has been changed; delete it if you changed the folder yourself")
        for name, digest in listed.items():
            if not isinstance(digest, str) or ".." in Path(name).parts or Path(name).is_absolute() or "\0" in name:
                raise CheckpointError(f"{CHECKSUMS}: the entry {name!r:.80} is not a file's checksum")
            if not is_file(folder / name):
                raise CheckpointError(f"{CHECKSUMS} names {name!r:.80}, which is missing")
            if _digest(folder / name) != digest:
                raise CheckpointError(
                    f"{name} has changed since the folder was saved. If you changed it on purpose, delete {CHECKSUMS}"
                )
        for inside in sorted({Path(name).parent for name in ("config.json", *listed)}):
            for file in sorted((folder / inside).iterdir()):
                if _READ.fullmatch(file.name) and (inside / file.name).as_posix() not in listed:
                    raise CheckpointError(
                        f"{inside / file.name} was added since the folder was saved. If you did so on purpose, delete "
                        f"{CHECKSUMS}"
                    )
    except (OSError, ValueError) as error:  # ValueError: an impossible file name
        raise CheckpointError(f"{CHECKSUMS} cannot be verified: {error}") from None


def update_checksum(folder: Path, name: str) -> None:
    """Set the checksum of a file that was changed on purpose, if the folder has checksums."""
    path = folder / CHECKSUMS
    if is_file(path):
        path.write_bytes(to_json(read_json(path) | {name: _digest(folder / name)}))


# --- writing ---


def save_folder(
    folder: Path,
    files: Mapping[str, bytes],
    tensors: Mapping[str, Tensor],
    *,
    weights: str = "model.safetensors",
    overwrite: bool = False,
) -> None:
    """Write a folder with checksums atomically: under a temporary name, then renamed.

    `weights` is the relative path of the weight file; there is none if `tensors` is empty.
    """
    folder = Path(os.path.abspath(folder))
    if folder.exists() and not folder.is_dir():
        raise ExistsError(f"{folder} is a file; a model is saved as a folder")
    if folder.exists() and not overwrite and any(folder.iterdir()):
        raise ExistsError(f"{folder} already exists; pass overwrite=True to replace it")
    with draft_folder(folder) as draft:
        for name, data in files.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_bytes(data)
        if tensors:
            (draft / weights).parent.mkdir(parents=True, exist_ok=True)
            write_safetensors(draft / weights, tensors)
        names = sorted(p.relative_to(draft).as_posix() for p in draft.rglob("*") if p.is_file())
        (draft / CHECKSUMS).write_bytes(to_json({name: _digest(draft / name) for name in names}))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        # transformers checks this metadata.
        save_file({name: t.cpu() for name, t in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # such as a full disk
        raise CheckpointError(f"{path.name} cannot be written: {error}") from None
    path.chmod(0o644)  # safetensors creates it with mode 600
