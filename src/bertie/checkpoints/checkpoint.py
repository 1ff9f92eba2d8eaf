"""Checkpoints: a model with its heads, tokenizer and sentence-transformers modules, read from and saved to folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import torch

from bertie.arguments import explain_arguments
from bertie.checkpoints import gliner, named_heads, storage, weight_files
from bertie.checkpoints.cross_encoder import CrossEncoderConfig
from bertie.checkpoints.fingerprint import WeightsOrigin, has_original_weights
from bertie.checkpoints.folder_tokenizer import check_vocabulary, folder_tokenizer
from bertie.checkpoints.hub import default_model, resolve, to_string
from bertie.checkpoints.late_interaction import STANFORD, STANFORD_WEIGHT, LateInteractionModules
from bertie.checkpoints.meta_model import build
from bertie.checkpoints.model_spec import ModelSpec, bare_architecture, config_with_head, model_spec
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.checkpoints.splade import Splade
from bertie.config import PRECISIONS, Calibration, HeadInfo, HeadName, Precision
from bertie.errors import CheckpointError, ConfigError, NotFoundError
from bertie.nn.heads import Head
from bertie.nn.linear import check_fp8, precision_of, to_fp8, to_int8
from bertie.nn.model import Model, allocate
from bertie.text.tokenizer import Tokenizer

# The dtype of the weights that are not quantized.
_DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.float32,
    "fp8": torch.bfloat16,
}


@dataclass(slots=True, repr=False)
class Checkpoint:
    """A model with everything its folder holds.

    >>> checkpoint = Checkpoint.load("path/to/folder")                  # doctest: +SKIP
    >>> batch = Batch.from_encodings(checkpoint.tokenizer.encode_batch(["Paris is the [MASK] of France."]))
    ...                                                                 # doctest: +SKIP
    >>> checkpoint.model(batch, "mlm").shape                            # doctest: +SKIP
    torch.Size([9, 30522])
    """

    model: Model
    config: dict[str, Any]  # config.json as it was read, without Bertie's own key
    spec: ModelSpec
    tokenizer: Tokenizer | None = None
    sentence: SentenceModules | None = None
    cross_encoder: CrossEncoderConfig | None = None
    splade: Splade | None = None
    gliner: gliner.GlinerConfig | None = None
    late_interaction: LateInteractionModules | None = None
    source: str = ""
    origin: WeightsOrigin | None = None  # the files that the weights were loaded from
    limit: int | None = None  # a lower maximum length, set by `with_max_length`
    heads: dict[str, HeadInfo] = field(default_factory=dict)  # by the name of the head

    def __post_init__(self) -> None:
        for name in self.spec.heads:
            if name not in self.heads:
                problem = self.spec.problem if name == "classify" else None
                self.heads[name] = HeadInfo(name, self.spec.labels_of(name), problem)

    def __getstate__(self) -> dict[str, Any]:
        """All fields, for `copy` and `pickle`."""
        origin = self.origin if has_original_weights(self) else None
        state = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return state | {"origin": None if origin is None else (origin, origin.cache_key())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        origin = state["origin"]
        for name, value in (state | {"origin": None}).items():
            setattr(self, name, value)
        if origin is not None and origin[0].cache_key() == origin[1]:  # the files are there, and as they were
            self.origin = WeightsOrigin.of(origin[0].folder, origin[0].head, origin[0].ignore, self.model.encoder)

    @property
    def labels(self) -> dict[int, str]:
        """The label names by class index."""
        return self.spec.labels

    @property
    def max_length(self) -> int:
        """The maximum length of a sequence in tokens, special tokens included."""
        limits = [self.model.config.max_length]
        if self.sentence is not None and self.sentence.max_seq_length is not None:
            limits.append(self.sentence.max_seq_length)
        elif self.cross_encoder is not None and self.cross_encoder.max_length is not None:
            limits.append(self.cross_encoder.max_length)
        elif self.splade is not None and self.splade.max_length is not None:
            limits.append(self.splade.max_length)
        elif self.late_interaction is not None and self.late_interaction.max_length is not None:
            limits.append(self.late_interaction.max_length)
        elif self.tokenizer is not None and self.tokenizer.model_max_length is not None:
            limits.append(self.tokenizer.model_max_length)
        return min(limits if self.limit is None else [*limits, self.limit])

    @property
    def precision(self) -> Precision:
        """The precision that the encoder computes in."""
        precision: Precision = precision_of(self.model.encoder)
        return precision

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    def to(self, device: torch.device | str) -> Checkpoint:
        """Move the weights to a device, in place."""
        device = usable_device(device)
        if self.precision == "int8" and device.type != "cpu":
            raise ConfigError(f"device={str(device)!r}: {self.source} is in int8, which runs on a CPU only")
        if self.precision == "fp8" and device != self.device:
            check_fp8(device)
        self.model.to(device)
        for modules in (self.sentence, self.late_interaction):
            if modules is not None:
                modules.to(device)
        return self

    def facts(self) -> dict[str, object]:
        """What to know about a model at a glance, for `repr`."""
        return {"device": str(self.device), "precision": self.precision, "max_length": self.max_length}

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        heads = ", ".join(self.heads) or "none"
        facts = ", ".join(f"{name}={value}" for name, value in self.facts().items())
        return f"Checkpoint({self.source!r}, {parameters / 1e6:.3g}M parameters, heads: {heads}, {facts})"

    @classmethod
    @explain_arguments
    def load(
        cls,
        name: str | Path | None = None,
        *,
        revision: str | None = None,
        head: HeadName | Literal["none"] | None = None,
        ignore: Iterable[str] = (),
        device: torch.device | str | None = None,
        precision: Precision = "fp32",
    ) -> Checkpoint:
        """Load a checkpoint in evaluation mode, by default the built-in model, onto the GPU if there is one.

        Whatever does not fit raises an error that names it. `head` says which head the checkpoint has where config.json
        does not. `ignore` lists config keys, tensors and tensor name prefixes that are known not to matter.
        `precision="int8"` runs the linear layers in int8, for inference on a CPU; `precision="fp8"` runs them in fp8
        (e4m3), for inference on a GPU.
        """
        if precision not in PRECISIONS:
            raise ConfigError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}")
        if device is None:
            device = "cpu" if precision == "int8" else default_device()
        if precision == "int8" and str(device).partition(":")[0] != "cpu":
            raise ConfigError(f"precision='int8' with device={str(device)!r}: int8 inference runs on a CPU only")
        device = usable_device(device)
        if precision == "fp8":
            check_fp8(device)
        name = default_model() if name is None else name
        if not isinstance(name, str | Path):
            raise ConfigError(f"name={name!r:.80} must be a folder, the name of a built-in model or a hub id")
        checkpoint = _read(name, revision, head, ignore, device, _DTYPES[precision])
        if precision == "int8":
            to_int8(checkpoint.model.encoder)
        if precision == "fp8":
            to_fp8(checkpoint.model.encoder)
        return checkpoint

    @classmethod
    def inspect(
        cls,
        name: str | Path | None = None,
        *,
        revision: str | None = None,
        head: HeadName | Literal["none"] | None = None,
        ignore: Iterable[str] = (),
    ) -> Checkpoint:
        """Check every name and shape as `load` does, without reading weights: the model stays on the meta device."""
        return _read(default_model() if name is None else name, revision, head, ignore, None, torch.float32)

    def with_head(
        self, head: HeadName, labels: Sequence[str] | None = None, *, problem: str | None = None, seed: int = 0
    ) -> Checkpoint:
        """Return the same encoder with a single head in its family's own layout, ready for training.

        >>> checkpoint = Checkpoint.load("path/to/folder")                                  # doctest: +SKIP
        >>> checkpoint = checkpoint.with_head("classify", ["bad", "good"])                  # doctest: +SKIP

        `labels` are the label names of "classify" and "tag"; `problem` is the problem type of "classify"
        (regression, single_label_classification, multi_label_classification). An existing head with the same labels
        and problem is kept, and training continues from it. Any other head is initialized from `seed`, except for
        layers below its output that the checkpoint already has (BERT's pooler). All other heads, the
        sentence-transformers modules and the cross-encoder settings are dropped.

        The encoder is shared, not copied: do not use the old checkpoint once the new one is being trained.
        """
        old = self.heads.get(head) if head in self.spec.heads else None
        if labels is None and old is not None:
            labels, problem = list(old.labels.values()), problem or old.problem
        elif labels is None and problem == "regression":
            labels = ["LABEL_0"]  # transformers' name for a single output
        config = {key: value for key, value in self.config.items() if key not in CrossEncoderConfig.CONFIG_KEYS}
        module = None
        if old is not None and list(labels or ()) == list(old.labels.values()) and _same_problem(old, problem):
            module, problem = self.model.head(head), problem or old.problem
            config |= self.spec.layout(head).config_entries
        config = config_with_head(config, head, labels, problem)
        spec = model_spec(config, None, ignore=self.spec.ignored)
        if module is None:
            module = self._new_head(head, spec, seed)
        model = Model.from_parts(self.model.encoder, {head: module}).eval()
        bare = replace(self, sentence=None, cross_encoder=None, splade=None, gliner=None, late_interaction=None)
        return replace(bare, model=model, config=config, spec=spec, heads={})

    def add_head(self, name: str, info: HeadInfo, *, seed: int = 0) -> None:
        """Add a head under a name of its own, in the family's layout for `info.kind`.

        >>> checkpoint = Checkpoint.load("path/to/folder")                                          # doctest: +SKIP
        >>> checkpoint.add_head("topics", HeadInfo("classify", {0: "sports", 1: "politics"}))       # doctest: +SKIP
        >>> checkpoint.model(batch, "topics").shape                                                 # doctest: +SKIP
        torch.Size([8, 2])

        It is initialized as in `with_head`. Its weights are saved next to the checkpoint's, in heads.safetensors, so
        that other libraries load the folder as before.
        """
        named_heads.check_name(name, info, self.model)
        head = self._new_head(info.kind, self._single_head_spec(info), seed)
        self.model.heads[name] = head.train(self.model.training)
        self.heads[name] = info

    def _single_head_spec(self, info: HeadInfo) -> ModelSpec:
        config = config_with_head(self.config, info.kind, list(info.labels.values()), info.problem)
        return model_spec(config, None, ignore=self.spec.ignored)

    def _new_head(self, kind: HeadName, spec: ModelSpec, seed: int) -> Head:
        """Initialize a head; `spec` describes a model that has only this head."""
        head = named_heads.initialize(spec.heads[kind], self.model, seed)
        named_heads.copy_shared_layers(head, spec.weight_map, self.model, self.spec.weight_map)
        return head

    def _load_named_heads(self, raw: Any, folder: Path) -> None:
        """Read Bertie's own key of config.json, and the weights of named heads."""
        calibrations, named = named_heads.read_key(raw)
        for name, calibration in calibrations.items():
            if name not in self.heads:
                raise ConfigError(
                    f"config.json: {named_heads.KEY}.calibration is for a head {name!r:.80} that the model does not "
                    f"have; it has: {', '.join(self.heads) or 'none'}"
                )
            self.set_calibration(name, calibration)
        for name, (info, cfg) in named.items():
            try:
                named_heads.check_name(name, info, self.model)
                expected = self._single_head_spec(info).heads[info.kind]
            except ConfigError as error:
                raise ConfigError(f"config.json: {named_heads.KEY}.heads: {error}") from None
            if (cfg.kind, cfg.outputs) != (expected.kind, expected.outputs):
                raise ConfigError(
                    f"config.json: {named_heads.KEY}.heads.{name}.head: kind={cfg.kind!r}, outputs={cfg.outputs} do "
                    f"not fit a head of kind {info.kind!r} with these labels; allowed: {expected.kind!r}, "
                    f"{expected.outputs}"
                )
        configs = {name: cfg for name, (_, cfg) in named.items()}
        named_heads.load(self.model, configs, folder, int8=named_heads.is_int8(raw))
        self.heads |= {name: info for name, (info, _) in named.items()}

    def with_max_length(self, max_length: int) -> Checkpoint:
        """Return the same checkpoint with a lower maximum length, which is saved with it."""
        if isinstance(max_length, bool) or not isinstance(max_length, int) or not 1 <= max_length <= self.max_length:
            raise ConfigError(
                f"max_length={max_length!r} must be a whole number from 1 to {self.max_length}: it can only be lowered"
            )
        sentence, pairs, splade = copy(self.sentence), self.cross_encoder, self.splade
        if sentence is not None:
            sentence.max_seq_length = max_length
        if pairs is not None:
            pairs = replace(pairs, max_length=max_length)
        if splade is not None:
            splade = replace(splade, max_length=max_length)
        if (late := self.late_interaction) is not None:
            late = late.with_settings(document_length=max_length)
        lowered: dict[str, Any] = {"sentence": sentence, "cross_encoder": pairs, "splade": splade}
        return replace(self, limit=max_length, late_interaction=late, heads=dict(self.heads), **lowered)

    def set_calibration(self, name: str, calibration: Calibration) -> None:
        """Set the calibration of a head; `save` keeps it."""
        self.model.head(name)
        self.heads[name] = replace(self.heads[name], calibration=calibration)

    def save(
        self, folder: str | Path, *, overwrite: bool = False, precision: weight_files.StoredPrecision | None = None
    ) -> None:
        """Write a folder that Bertie, transformers and, where it applies, sentence-transformers load.

        `precision` makes the weight file smaller. "fp16" casts all weights to half precision, in the usual layout.
        "int8" quantizes each weight matrix with one scale per row, in model.int8.safetensors, which only Bertie
        reads. Loaded in fp32 and saved as int8 again, a folder has the same bytes. Modules after the pooling are not
        quantized.
        """
        if precision not in (None, *get_args(weight_files.StoredPrecision)):
            allowed = ", ".join(get_args(weight_files.StoredPrecision))
            raise ConfigError(f"precision={precision!r} must be one of {allowed}, or None")
        if self.precision in ("int8", "fp8"):
            raise CheckpointError(
                f"{self.source} was loaded with precision={self.precision!r}, for inference; load it with "
                "precision='fp32' to save it (save(precision='int8') writes a small file)"
            )
        if self.model.device.type == "meta":
            raise CheckpointError(f"{self.source} was inspected, not loaded: there are no weights to save")
        named = {name: self.model.head(name).cfg for name in self.heads if name not in self.spec.heads}
        # Each of these knows in which subfolder the transformer is, and gives its files relative to the top.
        kinds = (self.sentence, self.cross_encoder, self.splade, self.late_interaction)
        parts = [part for part in kinds if part is not None]
        subfolder = PurePosixPath(next((part.transformer_path for part in parts), ""))
        config = self._saved_config(precision)
        name = "config.json" if self.gliner is None else gliner.FILE
        content = config if self.gliner is None else self.gliner.to_json(config, self.tokenizer)
        inner = {name: storage.to_json(content)} | self._tokenizer_files()
        if named:
            tensors = weight_files.cast(named_heads.tensors(self.model, list(named)), precision)
            inner[named_heads.FILE] = weight_files.tensor_bytes(tensors)
        files = {str(subfolder / name): data for name, data in inner.items()}
        for part in parts:
            files |= part.files()
        tensors = weight_files.cast(self.spec.weight_map.store(self.model), precision)
        tensors = tensors if self.gliner is None else gliner.folder_names(tensors)
        file = str(subfolder / (weight_files.INT8 if precision == "int8" else weight_files.SAFETENSORS))
        storage.save_folder(Path(folder), files, tensors, weights=file, overwrite=overwrite)

    def _saved_config(self, precision: weight_files.StoredPrecision | None) -> dict[str, Any]:
        config = self.spec.saved_config(self.config)
        dtype_key = next((key for key in ("dtype", "torch_dtype") if key in config), None)
        if dtype_key:  # transformers loads the weights in the dtype named here, whatever the file holds
            dtype = torch.float16 if precision == "fp16" else self.model.dtype
            config[dtype_key] = str(dtype).removeprefix("torch.")
        if self.cross_encoder is not None:
            config |= self.cross_encoder.config_entries()
        named = {name: self.model.head(name).cfg for name in self.heads if name not in self.spec.heads}
        if own := named_heads.to_key(self.heads, named, precision):
            config[named_heads.KEY] = own
        return config

    def _tokenizer_files(self) -> dict[str, bytes]:
        if self.tokenizer is None:
            return {}
        files = self.tokenizer.files()
        if self.limit is not None:
            name = "tokenizer_config.json"
            files[name] = storage.to_json(json.loads(files[name]) | {"model_max_length": self.max_length})
        return files


def default_device() -> str:
    """The GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(device: torch.device | str) -> torch.device:
    """Check that torch can use a device."""
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={str(device)!r} cannot be used on this machine: {reason:.120}") from None


def _same_problem(old: HeadInfo, problem: str | None) -> bool:
    """Whether a head was made for this problem type; an unnamed one with several classes is single-label."""
    default = "single_label_classification" if old.kind == "classify" and len(old.labels) > 1 else None
    have, want = old.problem or default, problem or default
    return have == want or have is None or want is None


def _read(
    name: str | Path,
    revision: str | None,
    head: HeadName | Literal["none"] | None,
    ignore: Iterable[str],
    device: torch.device | str | None,
    dtype: torch.dtype,
) -> Checkpoint:
    """Read a folder; `device=None` checks names and shapes only."""
    if isinstance(ignore, str):
        raise ConfigError(f"ignore={ignore!r} must be a list of names")
    ignore = list(ignore)
    top = resolve(name, revision)
    if device is not None:
        storage.verify(top)
    has_modules = storage.is_file(top / "modules.json")
    folder = top / SentenceModules.transformer_folder(top) if has_modules else top
    spans = gliner.GlinerFolder.open(top)
    if spans is None and not storage.is_file(folder / "config.json"):
        raise NotFoundError(f"{name} has no config.json; a model folder does")
    config = storage.read_json(folder / "config.json") if spans is None else spans.encoder
    own, raw_config = config.pop(named_heads.KEY, {}), config
    weights = weight_files.open_weights(folder, int8=named_heads.is_int8(own))
    weights = weights if spans is None else gliner.EncoderNames(weights)
    shapes = weights.shapes()
    cross_encoder = CrossEncoderConfig.from_folder(top, config)
    splade, stanford = Splade.from_folder(top), STANFORD in (config.get("architectures") or ())
    if stanford:
        config, head = config | {"architectures": bare_architecture(config)}, "none"
    if spans is not None or (head is None and cross_encoder is None and splade is None and has_modules):
        # sentence-transformers folders often name the class that they were made from, but not its head.
        head = "none"
    spec = model_spec(config, shapes, head=head, ignore=[*ignore, *CrossEncoderConfig.CONFIG_KEYS])
    spec = spec if spans is None else spans.config.add_head(spec)
    model = build(spec)
    ignored = [rf"^{re.escape(prefix)}(\.|$)" for prefix in (*ignore, *([STANFORD_WEIGHT] if stanford else []))]
    spec.weight_map.check(model, shapes, [*spec.family.dropped, *ignored])
    if device is not None:
        try:
            model = allocate(model.to(dtype), device)
        except RuntimeError as error:
            raise CheckpointError(f"not enough memory for the model on {device}: {error}") from None
        spec.weight_map.load(model, weights)
    tokenizer = folder_tokenizer(folder, spec.family.model_type) if spans is None else spans.tokenizer
    checkpoint = Checkpoint(
        model=model.eval(),
        config=config,
        spec=spec,
        tokenizer=check_vocabulary(tokenizer, spec.encoder.vocab),
        sentence=SentenceModules.from_folder(top, spec.encoder.width, spec.encoder.vocab),
        cross_encoder=cross_encoder,
        splade=splade,
        gliner=None if spans is None else spans.config,
        late_interaction=LateInteractionModules.from_folder(top, raw_config, weights, spec.encoder.width),
        source=to_string(name),
        origin=None if device is None else WeightsOrigin.of(top, head, ignore, model.encoder),
    )
    if named_heads.KEY not in ignore:
        checkpoint._load_named_heads(own, folder)
    return checkpoint
