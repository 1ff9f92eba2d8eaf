"""From a name to a checkpoint and back: a folder, a built-in model or a hub id in; a folder of safetensors out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from bertie import store
from bertie.config import HeadName
from bertie.errors import CheckpointError, ConfigError, NotFoundError
from bertie.families import Blueprint, blueprint, recipe_for
from bertie.model import Model
from bertie.sentence import CrossEncoderConfig, SentenceModules
from bertie.text.tokenizer import Tokenizer

BUILT_IN = Path(__file__).parent / "models"
# What a checkpoint is made of, by name: a repository may also hold training states, and the same weights in formats of
# other tools. Modules of sentence-transformers lie in numbered folders (1_Pooling, 2_Dense).
_NAMES = (
    *("config.json", "model.safetensors", "model-*-of-*.safetensors", "*model.*.index.json", "checksums.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spm.model", "spiece.model", "sentencepiece.bpe.model"),
    *("modules.json", "config_sentence_transformers.json", "sentence_*_config.json"),
)
_PATTERNS = [*_NAMES, *(f"[0-9]*_*/{name}" for name in _NAMES)]
_PICKLES = "pytorch_model*.bin"  # wanted only where there are no safetensors
VOCABULARIES = ("vocab.txt", "vocab.json", "spm.model", "spiece.model", "sentencepiece.bpe.model")


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
        elif self.cross_encoder is not None and self.cross_encoder.max_length is not None:
            limits.append(self.cross_encoder.max_length)
        elif self.tokenizer is not None and self.tokenizer.model_max_length is not None:
            limits.append(self.tokenizer.model_max_length)
        return min(limits)

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        head: HeadName | Literal["none"] | None = None,
        ignore: Iterable[str] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Checkpoint:
        """Read a checkpoint, in evaluation mode. Whatever does not fit is an error that names it.

        `head` says what the head is where config.json does not; `ignore` lists config keys, and tensors or their
        leading names, known not to matter.
        """
        return _read(name, revision, head, ignore, device, dtype)

    @classmethod
    def inspect(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        head: HeadName | Literal["none"] | None = None,
        ignore: Iterable[str] = (),
    ) -> Checkpoint:
        """As `load`, checking every name and shape, but without reading the weights: the model stays empty."""
        return _read(name, revision, head, ignore, None, torch.float32)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder that Bertie, transformers and, where it applies, sentence-transformers load."""
        if self.model.device.type == "meta":
            raise CheckpointError(f"{self.source} was inspected, not loaded: there are no weights to save")
        config = dict(self.config)
        named = next((key for key in ("dtype", "torch_dtype") if key in config), None)
        if named:  # others load in the precision named here, whatever that of the weights is
            config[named] = str(self.model.dtype).removeprefix("torch.")
        if self.cross_encoder is not None:
            config |= self.cross_encoder.config_entries()
        # Both parts behind a transformer know where it lies, and give their files by paths from the top.
        parts = [part for part in (self.sentence, self.cross_encoder) if part is not None]
        at = PurePosixPath(next((part.transformer_path for part in parts), ""))
        inner = {"config.json": store.to_json(config)} | ({} if self.tokenizer is None else self.tokenizer.files())
        files = {str(at / name): data for name, data in inner.items()}
        for part in parts:
            files |= part.files()
        tensors = self.blueprint.plan.store(self.model)
        store.save_folder(Path(folder), files, tensors, weights=str(at / store.SAFETENSORS), overwrite=overwrite)


def resolve(name: str | Path, revision: str | None = None) -> Path:
    """The folder behind a path, a built-in name or a hub id."""
    text = str(name)
    try:
        folder = Path(name).expanduser()
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError) as error:  # no permission, too long a name, no such user's home
        reason = getattr(error, "strerror", None) or str(error)
        raise NotFoundError(f"{text[:200]!r} cannot be looked up: {reason}") from None
    if not text.strip():
        raise NotFoundError(f"name={name!r} is empty; pass a folder, a built-in model ({_known()}) or a hub id")
    if is_folder:
        if revision is not None:
            raise NotFoundError(f"revision={revision!r} was asked of the folder {name}; only hub ids have revisions")
        return folder
    if is_file:
        raise NotFoundError(f"{name} is a file; a model is a folder")
    if text in built_in():
        if revision is not None:
            raise NotFoundError(f"revision={revision!r} was asked of the built-in {name}; only hub ids have revisions")
        return BUILT_IN / text
    return _download(text, revision)


def built_in() -> list[str]:
    """The names of the models that come with the package."""
    return sorted(p.parent.name for p in BUILT_IN.glob("*/config.json"))


def _known() -> str:
    return ", ".join(built_in()) or "none"


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
        bare = [file.parent for file in folder.rglob("config.json") if not any(file.parent.glob("*.safetensors"))]
        if bare:
            pickles = [(at.relative_to(folder) / _PICKLES).as_posix() for at in bare]
            snapshot_download(name, revision=revision, allow_patterns=pickles)
        return folder
    except HFValidationError:
        raise NotFoundError(
            f"{name[:200]!r} is no folder, no built-in model ({_known()}) and no hub id (owner/name)"
        ) from None
    except Exception as error:  # of the hub, of the net, of the disk: a class of its own for each
        at = "" if revision is None else f" at revision {revision!r}"
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise NotFoundError(
            f"{name[:200]!r} is no folder and no built-in model ({_known()}), and the hub did not give it{at}: "
            f"{reason[0]}"
        ) from None


def _read(
    name: str | Path,
    revision: str | None,
    head: HeadName | Literal["none"] | None,
    ignore: Iterable[str],
    device: torch.device | str | None,
    dtype: torch.dtype,
) -> Checkpoint:
    if isinstance(ignore, str):
        raise ConfigError(f"ignore={ignore!r} must be a list of names")
    ignore = list(ignore)
    folder = resolve(name, revision)
    if device is not None:
        store.verify(folder)
    at = folder
    is_sentence = store.is_file(folder / "modules.json")
    if is_sentence:
        at = folder / SentenceModules.transformer_folder(folder)
    if not store.is_file(at / "config.json"):
        raise NotFoundError(f"{name} holds no config.json; a model folder does")
    config = store.read_json(at / "config.json")
    weights = store.open_weights(at)
    shapes = weights.shapes()
    cross_encoder = CrossEncoderConfig.from_folder(folder, config)
    if head is None and cross_encoder is None and is_sentence:
        # Sentence models often name the class they were made from, whose head they left behind.
        head = "none"
    plan = blueprint(config, shapes, head=head, ignore=[*ignore, *CrossEncoderConfig.CONFIG_KEYS])
    model = build(plan)
    asked = [rf"^{re.escape(one)}(\.|$)" for one in ignore]
    plan.plan.check(model, shapes, [*plan.family.dropped, *asked])
    if device is not None:
        try:
            model = model.to(dtype).to_empty(device=device)
        except RuntimeError as error:
            raise CheckpointError(f"there is no room for the model on {device}: {error}") from None
        plan.plan.load(model, weights)
    return Checkpoint(
        model=model.eval(),
        config=config,
        blueprint=plan,
        tokenizer=_tokenizer(at, plan),
        sentence=SentenceModules.from_folder(folder, plan.encoder.width),
        cross_encoder=cross_encoder,
        source=str(name),
    )


class _Unfilled(TorchFunctionMode):
    """Leaves out the first filling of weights: there is no memory to fill, and torch would load its compiler for it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_", "zeros_", "ones_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def build(plan: Blueprint) -> Model:
    """The model of a blueprint, with shapes but without memory."""
    try:
        with torch.device("meta"), _Unfilled():
            return Model(plan.encoder, plan.heads)
    except RuntimeError as error:
        raise ConfigError(f"config.json describes a model that no machine can hold: {error}") from None


def _tokenizer(folder: Path, plan: Blueprint) -> Tokenizer | None:
    """The folder's tokenizer; None if it has no vocabulary at all, as some encoders of proteins or genes."""
    settings = folder / "tokenizer_config.json"
    named = store.read_json(settings).get("tokenizer_class") if store.is_file(settings) else None
    if not isinstance(named, str | None):
        raise CheckpointError(f"tokenizer_config.json: tokenizer_class={named!r:.80} must be a name")
    recipe = recipe_for(plan.family.model_type, named)
    if not any(store.is_file(folder / file) for file in ("tokenizer.json", *VOCABULARIES)):
        return None
    tokenizer = Tokenizer.from_folder(folder, recipe)
    if tokenizer.vocab_size > plan.encoder.vocab:
        raise CheckpointError(
            f"the tokenizer knows {tokenizer.vocab_size} tokens, the model only {plan.encoder.vocab}: they do not "
            "belong together"
        )
    return tokenizer
