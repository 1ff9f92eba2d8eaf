"""The calibration of a saved folder's head, changed without touching its weights."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

from bertie.checkpoints import named_heads, storage
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.config import Calibration
from bertie.data.draft_folder import draft_folder


def copy_with_calibration(source: Path, output: Path, head: str, calibration: Calibration) -> None:
    """Copy a model folder, with another calibration of a head.

    All other files stay as they are, byte for byte, whatever the precision of the weights.
    """
    with draft_folder(output) as draft:
        shutil.copytree(source, draft, dirs_exist_ok=True)
        file = Path(SentenceModules.transformer_folder(draft)) / "config.json"
        config = storage.read_json(draft / file)
        parts = config.setdefault(named_heads.KEY, {})
        if head in parts.get("heads", {}):
            parts["heads"][head]["calibration"] = asdict(calibration)
        else:
            parts.setdefault("calibration", {})[head] = asdict(calibration)
        (draft / file).write_bytes(storage.to_json(config))
        storage.update_checksum(draft, file.as_posix())
