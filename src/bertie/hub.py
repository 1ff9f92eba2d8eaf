"""From a name to a checkpoint and back: a folder, a built-in model or a hub id in; a folder of safetensors out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bertie import store
from bertie.config import HeadName
from bertie.cross_encoder import CrossEncoderConfig
from bertie.errors import CheckpointError, ConfigError, NotFoundError
from bertie.families import FAMILIES, Blueprint, blueprint
from bertie.model import Model
from bertie.sentence import SentenceModules
from bertie.text.tokenizer import Tokenizer

BUILT_IN = Path(__file__).parent / "models"
# What a checkpoint is made of. Weights in .bin come only where there are no safetensors.
_PATTERNS = ["*.json", "*.txt", "*.model", "*/*.json", "*.safetensors", "*/*.safetensors"]
_PICKLES = ["*.bin", "*/*.bin"]


@dataclass(slots=True)
class Checkpoint:
    """A model with all that came along with it.

    >>> checkpoint = Checkpoint.load("path/to/folder")                  # doctest: +SKIP
    >>> batch = Batch.from_encodings(checkpoint.tokenizer.encode_batch(["Paris is the [MASK] of France."]))
    ...                                                                 # doctest: +SKIP
    >>> checkpoint.model(batch, "mlm").shape                            # doctest: +SKIP
    torch.Size([9, 30522])
    """

    model: Model
    config: dict[str, Any]  # config.json as it was read
    blueprint: Blueprint
    tokenizer: Tokenizer | None = None
    sentence: SentenceModules | None = None
    cross_encoder: CrossEncoderConfig | None = None
    source: str = ""

    @property
    def labels(self) -> dict[int, str]:
        """The names of the classes."""
        return self.blueprint.labels

    @property
    def reach(self) -> int:
        """How many tokens the model reads at once, its special tokens included."""
        limits = [self.model.config.reach]
        if self.sentence is not None and self.sentence.max_seq_length is not None:
            limits.append(self.sentence.max_seq_length)
        elif self.tokenizer is not None and self.tokenizer.model_max_length is not None:
            limits.append(self.tokenizer.model_max_length)
        return min(limits)

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        head: HeadName | None = None,
        ignore: Iterable[str] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Checkpoint:
        """Read a checkpoint, in evaluation mode. Whatever does not fit is an error that names it.

        `head` says what the head is where config.json does not; `ignore` lists config keys known not to matter.
        """
        return _read(name, revision, head, ignore, device, dtype)

    @classmethod
    def inspect(
        cls, name: str | Path, *, revision: str | None = None, head: HeadName | None = None, ignore: Iterable[str] = ()
    ) -> Checkpoint:
        """As `load`, checking every name and shape, but without reading the weights: the model stays empty."""
        return _read(name, revision, head, ignore, None, torch.float32)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder that Bertie, transformers and, where it applies, sentence-transformers load."""
        prefix = "" if self.sentence is None else self.sentence.transformer_path
        if prefix not in ("", "."):
            raise ConfigError(f"a transformer in a folder of its own ({prefix!r}) cannot be written yet")
        files = {"config.json": store.to_json(self.config)}
        for part in (self.tokenizer, self.sentence, self.cross_encoder):
            if part is not None:
                files |= part.files()
        store.save_folder(Path(folder), files, self.blueprint.plan.store(self.model), overwrite=overwrite)


def resolve(name: str | Path, revision: str | None = None) -> Path:
    """The folder behind a path, a built-in name or a hub id."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise NotFoundError(f"revision={revision!r} was asked of the folder {name}; only hub ids have revisions")
        return folder
    if folder.is_file():
        raise NotFoundError(f"{name} is a file; a model is a folder")
    text = str(name)
    if (BUILT_IN / text / "config.json").is_file() and Path(text).name == text:
        return BUILT_IN / text
    return _download(text, revision)


def built_in() -> list[str]:
    """The names of the models that come with the package."""
    return sorted(p.parent.name for p in BUILT_IN.glob("*/config.json"))


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HfHubHTTPError, LocalEntryNotFoundError

    known = ", ".join(built_in()) or "none"
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
        if not any(folder.glob("*.safetensors*")):
            snapshot_download(name, revision=revision, allow_patterns=_PICKLES)
        return folder
    except HFValidationError:
        raise NotFoundError(
            f"{name!r} is no folder, no built-in model ({known}) and no hub id (owner/name)"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise NotFoundError(
            f"{name!r} is no folder and no built-in model ({known}), and the hub did not give it{at}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        ) from None


def _read(
    name: str | Path,
    revision: str | None,
    head: HeadName | None,
    ignore: Iterable[str],
    device: torch.device | str | None,
    dtype: torch.dtype,
) -> Checkpoint:
    folder = resolve(name, revision)
    if device is not None:
        store.verify(folder)
    at = folder
    if (folder / "modules.json").is_file():
        at = folder / SentenceModules.transformer_folder(folder)
    if not (at / "config.json").is_file():
        raise NotFoundError(f"{name} holds no config.json; a model folder does")
    config = store.read_json(at / "config.json")
    weights = store.open_weights(at)
    shapes = weights.shapes()
    plan = blueprint(config, shapes, head=head, ignore=[*ignore, *CrossEncoderConfig.CONFIG_KEYS])
    model = build(plan)
    plan.plan.check(model, shapes, plan.family.dropped)
    if device is not None:
        model = model.to(dtype).to_empty(device=device)
        plan.plan.load(model, weights)
    return Checkpoint(
        model=model.eval(),
        config=config,
        blueprint=plan,
        tokenizer=_tokenizer(at, plan),
        sentence=SentenceModules.from_folder(folder, plan.encoder.width),
        cross_encoder=CrossEncoderConfig.from_folder(folder, config),
        source=str(name),
    )


def build(plan: Blueprint) -> Model:
    """The model of a blueprint, with shapes but without memory."""
    try:
        with torch.device("meta"):
            return Model(plan.encoder, plan.heads)
    except RuntimeError as error:
        raise ConfigError(f"config.json describes a model that no machine can hold: {error}") from None
