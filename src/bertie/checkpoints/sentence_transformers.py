"""The JSON files of a sentence-transformers folder, read and written.

    modules.json                         the modules in order, each with a type and a subfolder
    config_sentence_transformers.json    prompts, similarity function, versions
    sentence_bert_config.json            in the transformer's folder: maximum length and lower-casing
    1_Pooling/config.json, 2_Dense/…     one config per module, and its weights if it has any

A missing file or invalid JSON is a CheckpointError, an unknown key or value a ConfigError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.storage import to_json
from bertie.errors import CheckpointError, ConfigError
from bertie.nn.sentence_layers import ACTIVATIONS

Json = dict[str, Any]
# ColBERT is PyLate's type, MultiVectorEncoder that of sentence-transformers 6.
ModelType = Literal["SentenceTransformer", "CrossEncoder", "SparseEncoder", "ColBERT", "MultiVectorEncoder"]

MODULES_FILE = "modules.json"
MODEL_FILE = "config_sentence_transformers.json"
# Every version since 1.0 writes the first; the others come from models of 2019.
TEXT_FILES = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "xlm-roberta", "camembert", "albert")
)
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")

KINDS = ("Transformer", "WordWeights", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize")
# `models.X` is what versions up to 5.3 write, the longer names come from 5.4 and later (Normalize moved in 6.0).
TYPES = {
    f"sentence_transformers.{package}.{tail}": kind
    for kind in KINDS
    for package in ("models", "sentence_transformer.modules", "base.modules", "cross_encoder.modules")
    for tail in (kind, f"{kind}.{kind}", f"{re.sub('(?<=.)(?=[A-Z])', '_', kind).lower()}.{kind}")
}
TYPES |= {
    f"sentence_transformers.sparse_encoder.{name}": kind
    for name, kind in {
        "models.MLMTransformer": "Transformer",
        "models.SpladePooling": "SpladePooling",
        "modules.splade_pooling.SpladePooling": "SpladePooling",
    }.items()
}

TYPES |= {
    "pylate.models.Dense.Dense": "Dense",
    "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask": "MultiVectorMask",
}
# PyLate's keys of config_sentence_transformers.json, and the keys of sentence_bert_config.json that say the same since
# 6.0; `bertie.checkpoints.late_interaction` reads both.
COLBERT_KEYS = (
    *("query_prefix", "document_prefix", "query_length", "document_length", "skiplist_words"),
    *("do_query_expansion", "attend_to_expansion_tokens"),
)
MULTI_VECTOR_KEYS = ("query_length", "document_length", "query_expansion")

# Activations are looked up here and never imported by name: a config must not be able to run code.
# Their dotted names in configs: the public one, which Bertie writes, and the one of the defining module.
ACTIVATION_PATHS = {f"torch.nn.{name}": name for name in ACTIVATIONS} | {
    f"torch.nn.modules.{'linear' if name == 'Identity' else 'activation'}.{name}": name for name in ACTIVATIONS
}

# Since 5.4 sentence_bert_config.json names the transformer's task and its outputs.
TASKS: dict[ModelType, tuple[str, str, str]] = {
    "SentenceTransformer": ("feature-extraction", "last_hidden_state", "token_embeddings"),
    "CrossEncoder": ("sequence-classification", "logits", "scores"),
    "SparseEncoder": ("fill-mask", "logits", "token_embeddings"),
    "ColBERT": ("feature-extraction", "last_hidden_state", "token_embeddings"),
    "MultiVectorEncoder": ("feature-extraction", "last_hidden_state", "token_embeddings"),
}
# How the transformer is run and stored, not what it computes. sentence-transformers ignores trust_remote_code, too:
# a config must not be able to ask for it.
_MODEL_ARGS = ("trust_remote_code", "add_pooling_layer", "attn_implementation", "dtype", "torch_dtype")
ARGS = dict.fromkeys(("model_args", "model_kwargs"), _MODEL_ARGS) | dict.fromkeys(
    ("tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"), ("trust_remote_code",)
)


@dataclass(frozen=True)
class ModuleEntry:
    """One entry of modules.json."""

    kind: str
    path: str  # relative, "" is the folder itself

    def inside(self, name: str) -> str:
        """The relative path of a file of this module."""
        return str(PurePosixPath(self.path, name))


@dataclass(frozen=True)
class SentenceSettings:
    """The settings besides the modules. Fields are named after the keys."""

    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    truncate_dim: int | None = None
    activation_fn: str | None = None  # a cross-encoder's


@dataclass(frozen=True)
class SentenceFolder:
    """The files of a folder as they were read, and their settings."""

    model_type: ModelType
    entries: Sequence[ModuleEntry]  # the transformer first
    json: Json  # each file's value by relative path
    text_file: str  # which of them is sentence_bert_config.json
    settings: SentenceSettings

    @classmethod
    def read(cls, root: Path, model_type: ModelType) -> SentenceFolder | None:
        """Read everything but the weights; None if there is no modules.json or the model is of another type."""
        if model_type_of(read_json(root, MODEL_FILE) or {}) != model_type:
            return None
        entries = read_entries(root)
        if not entries:
            return None
        texts = [entries[0].inside(name) for name in TEXT_FILES]
        configs = [entry.inside("config.json") for entry in entries[1:]]
        values = {file: read_json(root, file) for file in (MODEL_FILE, *texts, *configs)}
        files = {file: value for file, value in values.items() if value is not None}
        files[MODULES_FILE] = read_json(root, MODULES_FILE, list)
        # sentence-transformers ignores empty files.
        text_file = next((file for file in texts if files.get(file)), texts[0])
        settings = _settings(files, text_file, model_type)
        limit = settings.max_seq_length or tokenizer_limit(root, entries[0])
        return cls(model_type, entries, files, text_file, replace(settings, max_seq_length=limit))

    @classmethod
    def create(cls, model_type: ModelType, kinds: Sequence[str], settings: SentenceSettings) -> SentenceFolder:
        """Create files in the layout of version 2, which all later versions read; without the modules' configs."""
        entries = [ModuleEntry(kind, f"{index}_{kind}" if index else "") for index, kind in enumerate(kinds)]
        files: Json = {
            MODULES_FILE: [
                {"idx": i, "name": str(i), "path": entry.path, "type": f"sentence_transformers.models.{entry.kind}"}
                for i, entry in enumerate(entries)
            ],
            MODEL_FILE: {"model_type": model_type},
            # Versions before 5.4 reject a task, but write no such file for cross-encoders.
            TEXT_FILES[0]: _task(model_type) if model_type == "CrossEncoder" else {"do_lower_case": False},
        }
        blank = cls(model_type, entries, files, TEXT_FILES[0], SentenceSettings())
        return replace(blank, json=blank.merged(settings), settings=settings)

    def keys(self, entry: ModuleEntry) -> ConfigKeys:
        """The config keys of a module."""
        file = entry.inside("config.json")
        # Normalize writes no config, and in some folders not even a folder, before 6.0.
        if file not in self.json and entry.kind != "Normalize":
            raise CheckpointError(f"{file} is missing; {MODULES_FILE} lists a {entry.kind} there")
        return ConfigKeys(self.json.get(file, {}), file=file, common=())

    def merged(self, settings: SentenceSettings) -> Json:
        """The files with changed settings put in."""
        old, files = asdict(self.settings), dict(self.json)
        for key, value in asdict(settings).items():
            if value != old[key]:
                file = self.text_file if key in ("max_seq_length", "do_lower_case") else MODEL_FILE
                files[file] = files.get(file, {}) | {key: value}
        _settings(files, self.text_file, self.model_type)  # raises an error for what could not be read again
        return files

    def files(self, settings: SentenceSettings) -> dict[str, bytes]:
        """The contents to write, by relative path."""
        return {file: to_json(value) for file, value in self.merged(settings).items()}


def model_type_of(config: Json) -> ModelType:
    """The type of model that config_sentence_transformers.json describes. PyLate wrote none before 1.3."""
    key = config.get("model_type")
    if key in TASKS:
        known: ModelType = key
        return known
    return "ColBERT" if key is None and "query_prefix" in config else "SentenceTransformer"


def read_json(root: Path, file: str, kind: type = dict) -> Any:
    """Read the object or list in a file; None if there is no such file."""
    try:
        if not (root / file).is_file():
            return None
        value = json.loads((root / file).read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(value, kind):
        expected = "a list" if kind is list else "an object"
        raise CheckpointError(f"{file} contains {type(value).__name__}; it must contain {expected}")
    return value


def read_entries(root: Path) -> list[ModuleEntry]:
    """Read modules.json, transformer first; empty if there is no such file."""
    listed = read_json(root, MODULES_FILE, list)
    if listed == []:
        raise CheckpointError(f"{MODULES_FILE} must list at least one module")
    entries: dict[str, ModuleEntry] = {}  # by name
    for index, raw in enumerate(listed or []):
        file = f"{MODULES_FILE}[{index}]"
        if not isinstance(raw, dict):
            raise CheckpointError(f"{file} must be an object, not {type(raw).__name__}")
        keys = ConfigKeys(raw, file=file, common=())
        keys.must("kwargs", [])  # arguments of encode() for this module: not supported
        if keys.integer("idx", least=0) != index:
            raise ConfigError(f"{file}: idx={raw['idx']} must be {index}, the module's place in the list")
        name, kind, path = keys.text("name"), TYPES.get(keys.text("type")), keys.text("path")
        keys.finish()
        if kind is None or (kind == "Transformer") != (index == 0):
            raise ConfigError(
                f"{file}: type={raw['type']!r} is not supported here; the first module must be "
                f"sentence_transformers.models.Transformer, each other one of {', '.join(KINDS[1:])}"
            )
        entry = ModuleEntry(kind, _inside(root, path, file))
        if name in entries:
            raise ConfigError(f"{file}: name={name!r} is the name of another module")
        if entry.path in [other.path for other in entries.values()]:
            raise ConfigError(f"{file}: path={path!r} is the folder of another module")
        entries[name] = entry
    return list(entries.values())


def _inside(root: Path, path: str, file: str) -> str:
    windows = PureWindowsPath(path)  # understands the separators of both systems
    if windows.anchor or ".." in windows.parts or "\0" in path or "\\" in path:
        raise ConfigError(f"{file}: path={path!r} must be relative, inside the folder and without '..'")
    # Folders only: in the hub's cache every file is a symbolic link to a blob.
    if not (root / path).resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"{file}: path={path!r} is a symbolic link out of the folder")
    plain = PurePosixPath(path).as_posix()
    return "" if plain == "." else plain


def _task(model_type: ModelType) -> Json:
    task, method_output, module_output = TASKS[model_type]
    modality = {"text": {"method": "forward", "method_output_name": method_output}}
    return {"transformer_task": task, "modality_config": modality, "module_output_name": module_output}


def _settings(files: Json, text_file: str, model_type: ModelType) -> SentenceSettings:
    # Package versions.
    model = ConfigKeys(files.get(MODEL_FILE, {}), ("__version__", "requirements"), file=MODEL_FILE, common=())
    model.must("model_type", model_type)
    prompts = model.mapping("prompts", {})
    for name in prompts:
        ConfigKeys(prompts, file=f"{MODEL_FILE}: prompts", common=()).text(name)
    model.must("default_prompt_name", *prompts)
    truncate_dim = None
    if model_type == "CrossEncoder":
        model.must("activation_fn", *ACTIVATION_PATHS)
        model.ignore("keep_in_fp32_modules")  # concerns autocast; Bertie's heads run in the model's precision
    elif model_type in ("ColBERT", "MultiVectorEncoder"):
        model.must("similarity_fn_name", "MaxSim", "maxsim", "cosine")  # cosines of tokens, before PyLate 1.0
        model.ignore(*COLBERT_KEYS)
    else:
        model.must("similarity_fn_name", *SIMILARITIES)
        truncate_dim = model.optional_integer("truncate_dim", least=1)
    model.finish()

    text = ConfigKeys(files.get(text_file, {}), file=text_file, common=())
    for name, value in _task(model_type).items():
        text.must(name, value)
    text.must("processing_kwargs", {})
    for name in (*MULTI_VECTOR_KEYS, "tokenizer_name_or_path"):
        text.ignore(name) if model_type == "MultiVectorEncoder" and name in MULTI_VECTOR_KEYS else text.must(name)
    text.ignore("unpad_inputs")  # concerns batching; Bertie's batches are always flat
    for name, ignored in ARGS.items():
        ConfigKeys(text.mapping(name, {}), ignored, file=f"{text_file}: {name}", common=()).finish()
    max_seq_length = text.optional_integer("max_seq_length", least=1)
    do_lower_case = text.boolean("do_lower_case", False)
    text.finish()

    return SentenceSettings(
        max_seq_length=max_seq_length,
        do_lower_case=do_lower_case,
        prompts=prompts,
        default_prompt_name=model.raw.get("default_prompt_name"),
        similarity_fn_name=model.raw.get("similarity_fn_name"),
        truncate_dim=truncate_dim,
        activation_fn=model.raw.get("activation_fn"),
    )


def tokenizer_limit(root: Path, transformer: ModuleEntry) -> int | None:
    """The maximum length in the tokenizer's config; the tokenizer checks the other keys of that file."""
    # Since 5.4 max_seq_length is written only there. transformers writes int(1e30) for "no limit".
    value = (read_json(root, transformer.inside("tokenizer_config.json")) or {}).get("model_max_length")
    return value if type(value) is int and 0 < value < 10**9 else None
