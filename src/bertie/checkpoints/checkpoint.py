"""From a name to a checkpoint and back: a folder, a built-in model or a hub id in; a folder of safetensors out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import torch

from bertie.checkpoints import named_heads as heads
from bertie.checkpoints import storage as store
from bertie.checkpoints.cross_encoder import CrossEncoderConfig
from bertie.checkpoints.model_spec import LABELLED, ModelSpec, config_with_head, model_spec, recipe_for
from bertie.checkpoints.splade import Splade
from bertie.config import PRECISIONS, Calibration, HeadInfo, HeadName, Precision
from bertie.errors import CheckpointError, ConfigError, NotFoundError
from bertie.nn.heads import Head
from bertie.nn.linear import check_fp8, precision_of, to_fp8, to_int8
from bertie.nn.model import Model, Unfilled, with_memory
from bertie.nn.sentence_modules import SentenceModules
from bertie.text.tokenizer import Tokenizer

BUILT_IN = Path(__file__).parents[1] / "models"
DEFAULT = "bertie-small"  # of those in it, for users who name none
# What a checkpoint is made of, by name: a repository may also hold training states, and the same weights in formats of
# other tools. Modules of sentence-transformers lie in numbered folders (1_Pooling, 2_Dense).
_NAMES = (
    *("config.json", "model.safetensors", "model-*-of-*.safetensors", "*model.*.index.json", "checksums.json"),
    *(store.INT8, heads.FILE),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spm.model", "spiece.model", "sentencepiece.bpe.model"),
    *("modules.json", "config_sentence_transformers.json", "sentence_*_config.json"),
)
_PATTERNS = [*_NAMES, *(f"[0-9]*_*/{name}" for name in _NAMES)]
_PICKLES = "pytorch_model*.bin"  # wanted only where there are no safetensors
# The dtype of the weights that are not quantized.
_DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.float32,
    "fp8": torch.bfloat16,
}
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
    config: dict[str, Any]  # config.json as it was read, without the key of our own
    spec: ModelSpec
    tokenizer: Tokenizer | None = None
    sentence: SentenceModules | None = None
    cross_encoder: CrossEncoderConfig | None = None
    splade: Splade | None = None
    source: str = ""
    limit: int | None = None  # of tokens read at once; None: what the model and the files allow
    heads: dict[str, HeadInfo] = field(default_factory=dict)  # what each head of the model is for

    def __post_init__(self) -> None:
        for name in self.spec.heads:
            if name not in self.heads:
                problem = self.spec.problem if name == "classify" else None
                self.heads[name] = HeadInfo(name, self.labels if name in LABELLED else {}, problem)

    @property
    def labels(self) -> dict[int, str]:
        """The names of the classes."""
        return self.spec.labels

    @property
    def max_length(self) -> int:
        """How many tokens the model reads at once, its special tokens included."""
        limits = [self.model.config.max_length]
        if self.sentence is not None and self.sentence.max_seq_length is not None:
            limits.append(self.sentence.max_seq_length)
        elif self.cross_encoder is not None and self.cross_encoder.max_length is not None:
            limits.append(self.cross_encoder.max_length)
        elif self.splade is not None and self.splade.max_length is not None:
            limits.append(self.splade.max_length)
        elif self.tokenizer is not None and self.tokenizer.model_max_length is not None:
            limits.append(self.tokenizer.model_max_length)
        return min(limits if self.limit is None else [*limits, self.limit])

    @classmethod
    def load(
        cls,
        name: str | Path | None = None,
        *,
        revision: str | None = None,
        head: HeadName | Literal["none"] | None = None,
        ignore: Iterable[str] = (),
        device: torch.device | str = "cpu",
        precision: Precision = "fp32",
    ) -> Checkpoint:
        """Load a checkpoint in evaluation mode, by default the built-in model.

        Whatever does not fit raises an error that names it. `head` says which head the checkpoint has where config.json
        does not. `ignore` lists config keys, tensors and tensor name prefixes that are known not to matter.
        `precision="int8"` runs the linear layers in int8, for inference on a CPU; `precision="fp8"` runs them in fp8
        (e4m3), for inference on a GPU.
        """
        if precision not in PRECISIONS:
            raise ConfigError(f"precision={precision!r} must be one of {', '.join(PRECISIONS)}")
        if precision == "fp8":
            check_fp8(device)
        if precision == "int8" and torch.device(device).type != "cpu":
            raise ConfigError(f"precision='int8' with device={str(device)!r}: int8 inference runs on a CPU only")
        name = default_model() if name is None else name
        checkpoint = _read(name, revision, head, ignore, device, _DTYPES[precision])
        if precision == "int8":
            to_int8(checkpoint.model.encoder)
        if precision == "fp8":
            to_fp8(checkpoint.model.encoder)
        return checkpoint

    @property
    def precision(self) -> Precision:
        """The precision that the encoder computes in."""
        precision: Precision = precision_of(self.model.encoder)
        return precision

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

    def with_head(
        self, head: HeadName, labels: Sequence[str] | None = None, *, problem: str | None = None, seed: int = 0
    ) -> Checkpoint:
        """The same encoder under one head of its family's own layout, ready for training.

        >>> checkpoint = Checkpoint.load("path/to/folder")                                  # doctest: +SKIP
        >>> checkpoint = checkpoint.with_head("classify", ["bad", "good"])                  # doctest: +SKIP

        `labels` name the classes of "classify" and "tag"; `problem` says what the classes of "classify" mean
        (regression, single_label_classification, multi_label_classification). A head that is there already, with the
        same labels and problem, is kept: training goes on from it. Any other is fresh, from `seed` alone; only layers
        under its outputs that the checkpoint holds (BERT's pooler) are taken over. All other heads are left behind,
        and so is what the checkpoint says of sentence vectors and cross-encoders.

        The encoder is shared, not copied: do not use the old checkpoint once the new one is being trained.
        """
        old = self.heads.get(head) if head in self.spec.heads else None
        if labels is None and old is not None:
            labels, problem = list(old.labels.values()), problem or old.problem
        elif labels is None and problem == "regression":
            labels = ["LABEL_0"]  # as transformers names a lone one
        config = {key: value for key, value in self.config.items() if key not in CrossEncoderConfig.CONFIG_KEYS}
        made = None
        if old is not None and list(labels or ()) == list(old.labels.values()) and _agree(old, problem):
            made, problem = self.model.head(head), problem or old.problem
            config |= self.spec.layout(head).says
        config = config_with_head(config, head, labels, problem)
        spec = model_spec(config, None, ignore=self.spec.ignored)
        if made is None:
            made = self._fresh(head, spec, seed)
        model = Model.over(self.model.encoder, {head: made}).eval()
        bare = replace(self, sentence=None, cross_encoder=None, splade=None)
        return replace(bare, model=model, config=config, spec=spec, heads={})

    def add_head(self, name: str, info: HeadInfo, *, seed: int = 0) -> None:
        """Add one more head, of the family's layout for `info.kind`, under a name of its own.

        >>> checkpoint = Checkpoint.load("path/to/folder")                                          # doctest: +SKIP
        >>> checkpoint.add_head("topics", HeadInfo("classify", {0: "sports", 1: "politics"}))       # doctest: +SKIP
        >>> checkpoint.model(batch, "topics").shape                                                 # doctest: +SKIP
        torch.Size([8, 2])

        It begins as one of `with_head` does. It is saved beside the checkpoint's weights, in heads.safetensors: for
        others the folder stays what it was.
        """
        heads.check_name(name, info, self.model)
        head = self._fresh(info.kind, self._alone(info), seed)
        self.model.heads[name] = head.train(self.model.training)
        self.heads[name] = info

    def _alone(self, info: HeadInfo) -> ModelSpec:
        """The blueprint of a model with such a head alone."""
        config = config_with_head(self.config, info.kind, list(info.labels.values()), info.problem)
        return model_spec(config, None, ignore=self.spec.ignored)

    def _read_ours(self, raw: Any, folder: Path) -> None:
        """What stands under the key of our own in config.json, and the weights of named heads."""
        calibrations, named = heads.read_key(raw)
        for name, calibration in calibrations.items():
            if name not in self.heads:
                raise ConfigError(
                    f"config.json: {heads.KEY}.calibration is for a head {name!r:.80} that the model does not have; "
                    f"it has: {', '.join(self.heads) or 'none'}"
                )
            self.set_calibration(name, calibration)
        for name, (info, cfg) in named.items():
            try:
                heads.check_name(name, info, self.model)
                usual = self._alone(info).heads[info.kind]
            except ConfigError as error:
                raise ConfigError(f"config.json: {heads.KEY}.heads: {error}") from None
            if (cfg.kind, cfg.outputs) != (usual.kind, usual.outputs):
                raise ConfigError(
                    f"config.json: {heads.KEY}.heads.{name}.head: kind={cfg.kind!r}, outputs={cfg.outputs} do not fit "
                    f"a head of kind {info.kind!r} with these labels; allowed: {usual.kind!r}, {usual.outputs}"
                )
        configs = {name: cfg for name, (_, cfg) in named.items()}
        heads.load(self.model, configs, folder, packed=heads.is_packed(raw))
        self.heads |= {name: info for name, (info, _) in named.items()}

    def _fresh(self, kind: HeadName, spec: ModelSpec, seed: int) -> Head:
        """A fresh head; `spec` is that of a model with this head alone."""
        head = heads.fresh(spec.heads[kind], self.model, seed)
        heads.take_over(head, spec.weight_map, self.model, self.spec.weight_map)
        return head

    def with_max_length(self, max_length: int) -> Checkpoint:
        """The same checkpoint reading at most so many tokens at once. What is saved says so."""
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
        held = dict(self.heads)
        return replace(self, limit=max_length, sentence=sentence, cross_encoder=pairs, splade=splade, heads=held)

    def set_calibration(self, name: str, calibration: Calibration) -> None:
        """Set how a head's scores are to be read; `save` keeps it."""
        self.model.head(name)
        self.heads[name] = replace(self.heads[name], calibration=calibration)

    def save(
        self, folder: str | Path, *, overwrite: bool = False, precision: store.StoredPrecision | None = None
    ) -> None:
        """Write a folder that Bertie, transformers and, where it applies, sentence-transformers load.

        `precision` makes the weight file smaller. "fp16" casts all weights to half precision, in the usual layout.
        "int8" quantizes each weight matrix with one scale per row, in model.int8.safetensors, which only Bertie
        reads. Loaded in fp32 and saved as int8 again, a folder has the same bytes. Modules after the pooling are not
        quantized.
        """
        if precision not in (None, *get_args(store.StoredPrecision)):
            allowed = ", ".join(get_args(store.StoredPrecision))
            raise ConfigError(f"precision={precision!r} must be one of {allowed}, or None")
        if self.precision in ("int8", "fp8"):
            raise CheckpointError(
                f"{self.source} was loaded with precision={self.precision!r}, for inference; load it with "
                "precision='fp32' to save it (save(precision='int8') writes a small file)"
            )
        if self.model.device.type == "meta":
            raise CheckpointError(f"{self.source} was inspected, not loaded: there are no weights to save")
        config = dict(self.config)
        dtype_key = next((key for key in ("dtype", "torch_dtype") if key in config), None)
        if dtype_key:  # transformers loads the weights in the dtype named here, whatever the file holds
            dtype = torch.float16 if precision == "fp16" else self.model.dtype
            config[dtype_key] = str(dtype).removeprefix("torch.")
        if self.cross_encoder is not None:
            config |= self.cross_encoder.config_entries()
        named = {name: self.model.head(name).cfg for name in self.heads if name not in self.spec.heads}
        if ours := heads.to_key(self.heads, named, precision):
            config[heads.KEY] = ours
        # The parts behind a transformer know where it lies, and give their files by paths from the top.
        parts = [part for part in (self.sentence, self.cross_encoder, self.splade) if part is not None]
        at = PurePosixPath(next((part.transformer_path for part in parts), ""))
        inner = {"config.json": store.to_json(config)} | self._tokenizer_files()
        if named:
            inner[heads.FILE] = store.tensor_bytes(store.smaller(heads.tensors(self.model, list(named)), precision))
        files = {str(at / name): data for name, data in inner.items()}
        for part in parts:
            files |= part.files()
        tensors = store.smaller(self.spec.weight_map.store(self.model), precision)
        file = str(at / (store.INT8 if precision == "int8" else store.SAFETENSORS))
        store.save_folder(Path(folder), files, tensors, weights=file, overwrite=overwrite)

    def _tokenizer_files(self) -> dict[str, bytes]:
        if self.tokenizer is None:
            return {}
        files = self.tokenizer.files()
        if self.limit is not None:
            name = "tokenizer_config.json"
            files[name] = store.to_json(json.loads(files[name]) | {"model_max_length": self.max_length})
        return files


def _agree(old: HeadInfo, problem: str | None) -> bool:
    """Whether a head was made for this problem; where nobody says, several classes mean one of them."""
    usual = "single_label_classification" if old.kind == "classify" and len(old.labels) > 1 else None
    said, wanted = old.problem or usual, problem or usual
    return said == wanted or said is None or wanted is None


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


def default_model() -> str:
    """The name of the built-in model, the default wherever no model is named."""
    if DEFAULT not in built_in():
        raise NotFoundError("this installation has no built-in model; name a folder or a hub id")
    return DEFAULT


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
        bare = [file.parent for file in folder.rglob("config.json") if not any(file.parent.glob("model*.safetensors"))]
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
    ours = config.pop(heads.KEY, {})
    weights = store.open_weights(at, packed=heads.is_packed(ours))
    shapes = weights.shapes()
    cross_encoder = CrossEncoderConfig.from_folder(folder, config)
    splade = Splade.from_folder(folder)
    if head is None and cross_encoder is None and splade is None and is_sentence:
        # Sentence models often name the class they were made from, whose head they left behind.
        head = "none"
    spec = model_spec(config, shapes, head=head, ignore=[*ignore, *CrossEncoderConfig.CONFIG_KEYS])
    model = build(spec)
    asked = [rf"^{re.escape(one)}(\.|$)" for one in ignore]
    spec.weight_map.check(model, shapes, [*spec.family.dropped, *asked])
    if device is not None:
        try:
            model = with_memory(model.to(dtype), device)
        except RuntimeError as error:
            raise CheckpointError(f"there is no room for the model on {device}: {error}") from None
        spec.weight_map.load(model, weights)
    checkpoint = Checkpoint(
        model=model.eval(),
        config=config,
        spec=spec,
        tokenizer=_tokenizer(at, spec),
        sentence=SentenceModules.from_folder(folder, spec.encoder.width, spec.encoder.vocab),
        cross_encoder=cross_encoder,
        splade=splade,
        source=str(name),
    )
    if heads.KEY not in ignore:
        checkpoint._read_ours(ours, at)
    return checkpoint


def build(spec: ModelSpec) -> Model:
    """The model of a blueprint, with shapes but without memory."""
    try:
        with torch.device("meta"), Unfilled():
            return Model(spec.encoder, spec.heads)
    except RuntimeError as error:
        raise ConfigError(f"config.json describes a model that no machine can hold: {error}") from None


def _tokenizer(folder: Path, spec: ModelSpec) -> Tokenizer | None:
    """The folder's tokenizer; None if it has no vocabulary at all, as some encoders of proteins or genes."""
    settings = folder / "tokenizer_config.json"
    named = store.read_json(settings).get("tokenizer_class") if store.is_file(settings) else None
    if not isinstance(named, str | None):
        raise CheckpointError(f"tokenizer_config.json: tokenizer_class={named!r:.80} must be a name")
    recipe = recipe_for(spec.family.model_type, named)
    if not any(store.is_file(folder / file) for file in ("tokenizer.json", *VOCABULARIES)):
        return None
    tokenizer = Tokenizer.from_folder(folder, recipe)
    if tokenizer.vocab_size > spec.encoder.vocab:
        raise CheckpointError(
            f"the tokenizer knows {tokenizer.vocab_size} tokens, the model only {spec.encoder.vocab}: they do not "
            "belong together"
        )
    return tokenizer
