"""The sentence-transformers part of a model folder: what turns hidden states into text vectors, read and written.

A folder of sentence-transformers holds, beside the transformer itself:

    modules.json                         the modules in their order, each with a type and a sub-folder
    config_sentence_transformers.json    prompts, the similarity, versions
    sentence_bert_config.json            in the transformer's folder: how texts are cut and cased
    1_Pooling/config.json, 2_Dense/…     a config, and weights where the module has any

Every key of these files is taken, required to have one value, or ignored by name; the tables below say which.
Everything else is an error, since a model that loads wrongly without a word is worse than one that does not load.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.errors import CheckpointError, ConfigError
from bertie.nn.pooling import MODES, Pooling
from bertie.text.batch import Batch

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
MODULES_FILE = "modules.json"
MODEL_FILE = "config_sentence_transformers.json"
# The first is what every version since 1.0 writes; the others come from models of 2019.
TEXT_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)

# Classes are looked up here and never imported by name: a config must not be able to run code.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "CELU": nn.CELU,
    "ELU": nn.ELU,
    "GELU": nn.GELU,
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardswish": nn.Hardswish,
    "Hardtanh": nn.Hardtanh,
    "Identity": nn.Identity,
    "LeakyReLU": nn.LeakyReLU,
    "LogSigmoid": nn.LogSigmoid,
    "Mish": nn.Mish,
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "SELU": nn.SELU,
    "Sigmoid": nn.Sigmoid,
    "SiLU": nn.SiLU,
    "Softplus": nn.Softplus,
    "Softsign": nn.Softsign,
    "Tanh": nn.Tanh,
}

KINDS = ("Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize")
_FILE_OF_KIND = {"LayerNorm": "layer_norm"}
# `models.X` is what versions up to 5.3 write, the longer names come from 5.4 and later (Normalize moved in 6.0).
TYPES: dict[str, str] = {
    f"sentence_transformers.{package}.{tail}": kind
    for kind in KINDS
    for package in ("models", "sentence_transformer.modules", "base.modules", "cross_encoder.modules")
    for tail in (kind, f"{kind}.{kind}", f"{_FILE_OF_KIND.get(kind, kind.lower())}.{kind}")
}

Json = dict[str, Any]


# ---------------------------------------------------------------------------------------------- keys and files


@dataclass(frozen=True)
class Rules:
    """What becomes of each key of one kind of JSON file."""

    taken: frozenset[str]
    required: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def check(self, config: Json, file: str) -> None:
        """Raise for a key that is not known or does not have its one value."""
        for key, value in config.items():
            if key in self.required:
                if not any(type(value) is type(one) and value == one for one in self.required[key]):
                    allowed = " or ".join(json.dumps(one) for one in self.required[key])
                    raise CheckpointError(f"{file}: {key}={json.dumps(value)} is not supported; it must be {allowed}")
            elif key not in self.taken and key not in self.ignored:
                known = ", ".join(sorted(self.taken | set(self.required) | self.ignored))
                raise CheckpointError(f"{file}: unknown key {key}={json.dumps(value)}; known keys are {known}")


ENTRY_RULES = Rules(
    taken=frozenset({"idx", "name", "path", "type"}),
    required={"kwargs": ([],)},  # arguments of encode() that go to this module: none of ours has any
)
MODEL_RULES = Rules(
    taken=frozenset({"prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim"}),
    required={"model_type": ("SentenceTransformer",)},
    # Versions of the packages that wrote the folder, and those that sentence-transformers itself should have.
    ignored=frozenset({"__version__", "requirements"}),
)
# How the transformer is run and stored, not what it computes. sentence-transformers ignores trust_remote_code, too:
# a config must not be able to ask for it.
_MODEL_ARGS = Rules(
    frozenset(),
    ignored=frozenset({"trust_remote_code", "add_pooling_layer", "attn_implementation", "dtype", "torch_dtype"}),
)
_OTHER_ARGS = Rules(frozenset(), ignored=frozenset({"trust_remote_code"}))
ARGS_RULES = {
    "model_args": _MODEL_ARGS,
    "model_kwargs": _MODEL_ARGS,
    "tokenizer_args": _OTHER_ARGS,
    "processor_kwargs": _OTHER_ARGS,
    "config_args": _OTHER_ARGS,
    "config_kwargs": _OTHER_ARGS,
}


def _text_rules(task: str, method_output: str, module_output: str) -> Rules:
    return Rules(
        taken=frozenset({"max_seq_length", "do_lower_case", *ARGS_RULES}),
        required={
            "transformer_task": (task,),
            "modality_config": ({"text": {"method": "forward", "method_output_name": method_output}},),
            "module_output_name": (module_output,),
            "processing_kwargs": ({},),
            "query_length": (None,),
            "document_length": (None,),
            "query_expansion": (None,),
            "tokenizer_name_or_path": (None,),
        },
        ignored=frozenset({"unpad_inputs"}),  # how sentence-transformers runs the batch; here it is always flat
    )


EMBED_TEXT_RULES = _text_rules("feature-extraction", "last_hidden_state", "token_embeddings")
SCORE_TEXT_RULES = _text_rules("sequence-classification", "logits", "scores")

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SAME_VECTOR: dict[str, tuple[object, ...]] = {
    "module_input_name": ("sentence_embedding",),
    "module_output_name": ("sentence_embedding", None),
}
MODULE_RULES = {
    "Pooling": Rules(
        frozenset({"embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt", *_FLAGS})
    ),
    "Dense": Rules(
        frozenset({"in_features", "out_features", "bias", "activation_function", "use_residual"}), _SAME_VECTOR
    ),
    "LayerNorm": Rules(frozenset({"dimension"})),
    "Dropout": Rules(frozenset({"dropout"})),
    "Normalize": Rules(frozenset(), _SAME_VECTOR),
}


def parse_json(raw: bytes, file: str) -> Any:
    """The value of a JSON file; an error names the file."""
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(f"{file} is not JSON in UTF-8: {error}") from error


def parse_object(raw: bytes, file: str) -> Json:
    """The value of a JSON file that must hold an object."""
    value = parse_json(raw, file)
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def read_bytes(path: Path, file: str) -> bytes | None:
    """A file's contents, None where there is none."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def take(config: Json, file: str, key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
    """A key's value, of one of the given JSON types (a bool is no int)."""
    value = config.get(key, default)
    if type(value) not in kinds:
        allowed = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        missing = "" if key in config else " (the key is missing)"
        raise CheckpointError(f"{file}: {key}={json.dumps(value)}{missing} must be {allowed}")
    return value


def take_size(config: Json, file: str, key: str) -> int:
    """A key's value, a whole number of at least 1."""
    value = take(config, file, key, (int,))
    if value < 1:
        raise CheckpointError(f"{file}: {key}={value} must be at least 1")
    return int(value)


def activation_name(dotted: object, file: str, key: str) -> str:
    """The torch class behind a dotted name, by the list of those we allow.

    >>> activation_name("torch.nn.modules.activation.Tanh", "config.json", "activation_function")
    'Tanh'
    """
    name = dotted.rpartition(".")[2] if isinstance(dotted, str) else ""
    if name not in ACTIVATIONS or dotted not in (activation_path(name), f"torch.nn.{name}"):
        raise CheckpointError(
            f"{file}: {key}={json.dumps(dotted)} is not supported; it must be torch.nn.modules.activation.X "
            f"(torch.nn.modules.linear.Identity) or torch.nn.X with X one of {', '.join(ACTIVATIONS)}"
        )
    return name


def activation_path(name: str) -> str:
    """The dotted name that sentence-transformers writes for an activation.

    >>> activation_path("Identity"), activation_path("Tanh")
    ('torch.nn.modules.linear.Identity', 'torch.nn.modules.activation.Tanh')
    """
    return f"torch.nn.modules.{'linear' if name == 'Identity' else 'activation'}.{name}"


@dataclass(frozen=True)
class Entry:
    """One entry of modules.json."""

    kind: str
    path: str  # relative, "" is the folder itself

    def inside(self, name: str) -> str:
        """The relative path of a file of this module."""
        return f"{self.path}/{name}" if self.path else name


def parse_entries(raw: bytes, root: Path) -> list[Entry]:
    """modules.json, with the transformer first."""
    listed = parse_json(raw, MODULES_FILE)
    if not isinstance(listed, list) or not listed:
        raise CheckpointError(f"{MODULES_FILE} must hold a list of at least one module")
    entries: list[Entry] = []
    for index, one in enumerate(listed):
        file = f"{MODULES_FILE}[{index}]"
        if not isinstance(one, dict):
            raise CheckpointError(f"{file} must be an object, not {type(one).__name__}")
        ENTRY_RULES.check(one, file)
        if take(one, file, "idx", (int,)) != index:
            raise CheckpointError(f"{file}: idx={one['idx']} must be {index}, the module's place in the list")
        if take(one, file, "name", (str,)) in [other["name"] for other in listed[:index]]:
            raise CheckpointError(f"{file}: name={json.dumps(one['name'])} is the name of another module")
        kind = TYPES.get(take(one, file, "type", (str,)))
        if kind is None or (kind == "Transformer") != (index == 0):
            raise CheckpointError(
                f"{file}: type={json.dumps(one['type'])} is not supported here; the first module must be "
                f"sentence_transformers.models.Transformer, each other one of {', '.join(KINDS[1:])}"
            )
        entries.append(Entry(kind, _inside(root, take(one, file, "path", (str,)), file)))
        if entries[-1].path in [entry.path for entry in entries[:-1]]:
            raise CheckpointError(f"{file}: path={json.dumps(one['path'])} is the folder of another module")
    return entries


def _inside(root: Path, path: str, file: str) -> str:
    windows = PureWindowsPath(path)  # knows the roots and separators of both systems
    if windows.anchor or ".." in windows.parts or "\0" in path or "\\" in path:
        raise CheckpointError(f"{file}: path={json.dumps(path)} must be relative, inside the folder and without '..'")
    # Folders only: in the hub's cache each file is a link into its store of blobs, and that is how it should be.
    if not (root / path).resolve().is_relative_to(root.resolve()):
        raise CheckpointError(f"{file}: path={json.dumps(path)} is a link that leaves the folder")
    plain = PurePosixPath(path).as_posix()
    return "" if plain == "." else plain


@dataclass(frozen=True)
class TextSettings:
    """How texts are cut and cased before the transformer reads them."""

    max_seq_length: int | None
    lower_case: bool


def read_text_settings(root: Path, transformer: Entry, rules: Rules, files: dict[str, bytes]) -> TextSettings:
    """Read sentence_bert_config.json and put its bytes among `files`; the tokenizer's limit stands in for its own."""
    config: Json = {}
    file = transformer.inside(TEXT_FILES[0])
    for name in TEXT_FILES:
        raw = read_bytes(root / transformer.inside(name), transformer.inside(name))
        if raw is not None:
            file = transformer.inside(name)
            config = parse_object(raw, file)
            files[file] = raw
        if config:  # an empty one counts as none: so sentence-transformers reads them
            break
    rules.check(config, file)
    for key, inner in ARGS_RULES.items():
        if key in config:
            inner.check(take(config, file, key, (dict,)), f"{file}: {key}")
    limit = take(config, file, "max_seq_length", (int, type(None)))
    if limit is None:
        limit = tokenizer_limit(root, transformer)
    elif limit < 1:
        raise CheckpointError(f"{file}: max_seq_length={limit} must be at least 1, or null")
    return TextSettings(limit, take(config, file, "do_lower_case", (bool,), False))


def tokenizer_limit(root: Path, transformer: Entry) -> int | None:
    """The most tokens that the tokenizer's own config allows; the tokenizer answers for the other keys of that file."""
    # Since 5.4 max_seq_length is written there and nowhere else. transformers writes int(1e30) for "no limit".
    file = transformer.inside("tokenizer_config.json")
    raw = read_bytes(root / file, file)
    if raw is None:
        return None
    value = parse_object(raw, file).get("model_max_length")
    return value if type(value) is int and 0 < value < 10**9 else None


def read_prompts(config: Json, file: str) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the name of the one used by default."""
    prompts = take(config, file, "prompts", (dict,), {})
    for name, text in prompts.items():
        if not isinstance(text, str):
            raise CheckpointError(f"{file}: prompts[{json.dumps(name)}]={json.dumps(text)} must be a string")
    default = take(config, file, "default_prompt_name", (str, type(None)))
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"{file}: default_prompt_name={json.dumps(default)} must be null or one of {', '.join(prompts) or 'none'}"
        )
    return dict(prompts), default


def dump(value: object) -> bytes:
    """JSON as sentence-transformers lays it out."""
    return json.dumps(value, indent=2, ensure_ascii=False).encode()


def patch(files: dict[str, bytes], file: str, changes: Json) -> None:
    """Set keys in one of `files`; without changes its bytes stay as they are."""
    if changes:
        files[file] = dump({**(parse_object(files[file], file) if file in files else {}), **changes})


# ------------------------------------------------------------------------------------------------------ modules


class Dense(nn.Module):
    """A linear layer on text vectors with an activation, by default tanh, and with `residual` the input added.

    >>> Dense(4, 2)(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(
        self, width: int, out: int, bias: bool = True, activation: str = "Tanh", residual: bool = False
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")
        # The names of these attributes are the names of the weights in the file.
        self.linear = nn.Linear(width, out, bias=bias)
        self.activation = ACTIVATIONS[activation]()
        self.residual = nn.Linear(width, out, bias=False) if residual and width != out else None
        self.add_input = residual

    def forward(self, vectors: Tensor) -> Tensor:
        """(B, width) -> (B, out)."""
        out: Tensor = self.activation(self.linear(vectors))
        if self.add_input:
            out = out + (vectors if self.residual is None else self.residual(vectors))
        return out


class LayerNorm(nn.Module):
    """torch's LayerNorm under the weight names of sentence-transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, vectors: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        out: Tensor = self.norm(vectors)
        return out


class Normalize(nn.Module):
    """Scale each vector to length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        return F.normalize(vectors, dim=-1)


class SentenceModules(nn.Module):
    """What follows the transformer in a sentence-transformers folder, and how its texts are to be prepared.

    >>> modules = SentenceModules.fresh(width=2, pooling="mean", normalize=True)
    >>> modules(torch.tensor([[3.0, 0.0], [3.0, 8.0]]), Batch.from_ids([[101, 102]])).round(decimals=3).tolist()
    [[0.6000000238418579, 0.800000011920929]]
    """

    max_seq_length: int | None  #: tokens a text may have, special tokens included
    lower_case: bool  #: texts and prompts are lower-cased before they are tokenized
    prompts: dict[str, str]
    default_prompt: str | None  #: the name, among the prompts, of the one that goes before every text
    similarity: str | None  #: one of SIMILARITIES; None leaves it to the reader, which means cosine
    truncate_dim: int | None  #: vectors are cut to so many numbers at the very end
    transformer_path: str  #: the transformer's folder inside the model's, "" when they are the same

    def __init__(
        self,
        pooling: Pooling,
        layers: Sequence[tuple[str, nn.Module]],
        width: int,
        *,
        max_seq_length: int | None = None,
        lower_case: bool = False,
        prompts: Mapping[str, str] | None = None,
        default_prompt: str | None = None,
        similarity: str | None = None,
        truncate_dim: int | None = None,
        transformer_path: str = "",
        files: Mapping[str, bytes],
    ) -> None:
        super().__init__()
        self.pooling = pooling
        self.layers = nn.ModuleList(layer for _, layer in layers)
        self.width = width  # of the hidden states
        self.max_seq_length = max_seq_length
        self.lower_case = lower_case
        self.prompts = dict(prompts or {})
        self.default_prompt = default_prompt
        self.similarity = similarity
        self.truncate_dim = truncate_dim
        self.transformer_path = transformer_path
        self._paths = tuple(path for path, _ in layers)
        self._files = dict(files)
        self._read = self._settings()

    @property
    def dimension(self) -> int:
        """The length of a text's vector."""
        out = self.width * len(self.pooling.modes)
        for layer in self.layers:
            out = _out_width(layer, out)
        return out if self.truncate_dim is None else min(out, self.truncate_dim)

    def forward(self, hidden: Tensor, batch: Batch, prompt_lengths: Sequence[int] | None = None) -> Tensor:
        """(T, D) -> (B, dimension). See `Pooling.forward` for how prompt_lengths are counted."""
        vectors: Tensor = self.pooling(hidden, batch, prompt_lengths)
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors[:, : self.truncate_dim]

    @staticmethod
    def transformer_folder(path: str | Path) -> str:
        """Where modules.json says that the transformer is, relative to the folder; "" without a modules.json."""
        raw = read_bytes(Path(path) / MODULES_FILE, MODULES_FILE)
        return "" if raw is None else parse_entries(raw, Path(path))[0].path

    @classmethod
    def from_folder(cls, path: str | Path, width: int) -> SentenceModules | None:
        """Read the modules behind a transformer of the given width.

        None where there is no modules.json, and for a cross-encoder's, which `CrossEncoderConfig` reads.
        """
        root = Path(path)
        raw = read_bytes(root / MODULES_FILE, MODULES_FILE)
        if raw is None:
            return None
        files = {MODULES_FILE: raw}

        model: Json = {}
        if (raw_model := read_bytes(root / MODEL_FILE, MODEL_FILE)) is not None:
            files[MODEL_FILE] = raw_model
            model = parse_object(raw_model, MODEL_FILE)
        if model.get("model_type") == "CrossEncoder":
            return None
        MODEL_RULES.check(model, MODEL_FILE)
        prompts, default_prompt = read_prompts(model, MODEL_FILE)
        similarity = take(model, MODEL_FILE, "similarity_fn_name", (str, type(None)))
        if similarity is not None and similarity not in SIMILARITIES:
            raise CheckpointError(
                f"{MODEL_FILE}: similarity_fn_name={json.dumps(similarity)} must be null or one of "
                + ", ".join(SIMILARITIES)
            )
        truncate_dim = None if model.get("truncate_dim") is None else take_size(model, MODEL_FILE, "truncate_dim")

        transformer, *rest = parse_entries(raw, root)
        text = read_text_settings(root, transformer, EMBED_TEXT_RULES, files)
        kinds = [entry.kind for entry in rest]
        if kinds[:1] != ["Pooling"] or kinds.count("Pooling") > 1:
            raise CheckpointError(
                f"{MODULES_FILE}: after the Transformer it lists {', '.join(kinds) or 'nothing'}; it must list one "
                "Pooling first, then any of Dense, LayerNorm, Dropout, Normalize"
            )
        pooling = _read_pooling(_module_config(root, rest[0], files), rest[0].inside("config.json"), width)
        out = width * len(pooling.modes)
        layers: list[tuple[str, nn.Module]] = []
        for entry in rest[1:]:
            with torch.device("meta"):  # no memory for what a config merely claims: the weights have to be there first
                layer = _build(entry.kind, _module_config(root, entry, files), entry.inside("config.json"), out)
            _fill(layer, root, entry)
            out = _out_width(layer, out)
            layers.append((entry.path, layer))
        return cls(
            pooling,
            layers,
            width,
            max_seq_length=text.max_seq_length,
            lower_case=text.lower_case,
            prompts=prompts,
            default_prompt=default_prompt,
            similarity=similarity,
            truncate_dim=truncate_dim,
            transformer_path=transformer.path,
            files=files,
        )

    @classmethod
    def fresh(
        cls,
        width: int,
        pooling: str | Sequence[str] = "mean",
        normalize: bool = True,
        dense: Dense | None = None,
        max_seq_length: int | None = None,
        prompts: Mapping[str, str] | None = None,
        *,
        default_prompt: str | None = None,
        similarity: str | None = None,
        include_prompt: bool = True,
    ) -> SentenceModules:
        """New modules: pooling, then the dense layer if there is one, then the scaling to length 1 if it is wanted.

        >>> SentenceModules.fresh(384, dense=Dense(384, 128)).dimension
        128
        """
        pool = Pooling(pooling, include_prompt)
        if dense is not None and dense.linear.in_features != width * len(pool.modes):
            raise ConfigError(
                f"dense takes vectors of {dense.linear.in_features} but pooling gives {width * len(pool.modes)}"
            )
        modules: list[nn.Module] = [pool, *([dense] if dense else []), *([Normalize()] if normalize else [])]
        paths = [f"{index}_{type(module).__name__}" for index, module in enumerate(modules, start=1)]
        # The layout of version 2, which every later one reads.
        listed = [("", "Transformer"), *((path, path.partition("_")[2]) for path in paths)]
        files = {
            MODULES_FILE: dump(
                [
                    {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                    for i, (path, kind) in enumerate(listed)
                ]
            ),
            MODEL_FILE: dump(
                {
                    "model_type": "SentenceTransformer",
                    "prompts": dict(prompts or {}),
                    "default_prompt_name": default_prompt,
                    "similarity_fn_name": similarity,
                }
            ),
            TEXT_FILES[0]: dump({"max_seq_length": max_seq_length, "do_lower_case": False}),
            f"{paths[0]}/config.json": dump(_pooling_config(pool, width)),
        }
        if dense is not None:
            files[f"{paths[1]}/config.json"] = dump(_dense_config(dense))
        fresh = cls(
            pool,
            list(zip(paths[1:], modules[1:], strict=True)),
            width,
            max_seq_length=max_seq_length,
            prompts=prompts,
            default_prompt=default_prompt,
            similarity=similarity,
            files=files,
        )
        fresh._check()
        return fresh

    def files(self) -> dict[str, bytes]:
        """What to write beside the transformer, by relative path, so that sentence-transformers reads the same model.

        JSON that was read comes back byte for byte unless one of the fields was changed since.
        """
        self._check()
        files = dict(self._files)
        now = self._settings()
        changes = {key: value for key, value in now.items() if value != self._read[key]}
        text_keys = ("max_seq_length", "do_lower_case")
        text_files = [Entry("Transformer", self.transformer_path).inside(name) for name in TEXT_FILES]
        text_file = next((file for file in reversed(text_files) if file in files), text_files[0])
        patch(files, text_file, {key: value for key, value in changes.items() if key in text_keys})
        patch(files, MODEL_FILE, {key: value for key, value in changes.items() if key not in text_keys})
        for path, layer in zip(self._paths, self.layers, strict=True):
            weights = {name: one.detach().cpu().contiguous() for name, one in layer.state_dict().items()}
            if weights:
                files[f"{path}/model.safetensors"] = safetensors.torch.save(weights, {"format": "pt"})
        return files

    def _settings(self) -> Json:
        """The fields under their names in the files."""
        return {
            "max_seq_length": self.max_seq_length,
            "do_lower_case": self.lower_case,
            "prompts": dict(self.prompts),
            "default_prompt_name": self.default_prompt,
            "similarity_fn_name": self.similarity,
            "truncate_dim": self.truncate_dim,
        }

    def _check(self) -> None:
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ConfigError(f"default_prompt={self.default_prompt!r} must be None or one of {list(self.prompts)}")
        if self.similarity is not None and self.similarity not in SIMILARITIES:
            raise ConfigError(f"similarity={self.similarity!r} must be None or one of {', '.join(SIMILARITIES)}")
        for name in ("max_seq_length", "truncate_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be None or at least 1")


def _module_config(root: Path, entry: Entry, files: dict[str, bytes]) -> Json:
    file = entry.inside("config.json")
    raw = read_bytes(root / file, file)
    if raw is None:
        if entry.kind == "Normalize":  # writes no config, and in some folders not even a folder, before 6.0
            return {}
        raise CheckpointError(f"{file} is missing; {MODULES_FILE} lists a {entry.kind} there")
    files[file] = raw
    config = parse_object(raw, file)
    MODULE_RULES[entry.kind].check(config, file)
    return config


def _read_pooling(config: Json, file: str, width: int) -> Pooling:
    if "word_embedding_dimension" not in config or "embedding_dimension" in config:  # the name before and since 5.4
        _same_width(config, file, "embedding_dimension", width)
    if "word_embedding_dimension" in config:
        _same_width(config, file, "word_embedding_dimension", width)
    flags = {key: take(config, file, key, (bool,)) for key in _FLAGS if key in config}
    flagged = [mode for key, mode in _FLAGS.items() if flags.get(key)]
    modes = take(config, file, "pooling_mode", (str, list), flagged if flags else "mean")
    modes = [modes] if isinstance(modes, str) else modes
    if not modes or any(mode not in MODES for mode in modes):
        raise CheckpointError(f"{file}: pooling_mode={json.dumps(modes)} must be one or more of {', '.join(MODES)}")
    if flags and "pooling_mode_mean_tokens" not in flags:
        # Left out, it means true up to 5.3 and false since.
        raise CheckpointError(f"{file}: pooling_mode_mean_tokens is missing; it must be true or false")
    if flags and sorted(modes) != sorted(flagged):
        raise CheckpointError(f"{file}: pooling_mode={json.dumps(modes)} must agree with the flags, {flagged}")
    return Pooling(modes, take(config, file, "include_prompt", (bool,), True))


def _pooling_config(pooling: Pooling, width: int) -> Json:
    config: Json = {"word_embedding_dimension": width}
    if list(pooling.modes) == [mode for mode in MODES if mode in pooling.modes]:
        config |= {key: mode in pooling.modes for key, mode in _FLAGS.items()}
    else:  # flags have one order; any other needs the list, which 5.4 and later read
        config["pooling_mode"] = list(pooling.modes)
    return config if pooling.include_prompt else config | {"include_prompt": False}


def _dense_config(dense: Dense) -> Json:
    config: Json = {
        "in_features": dense.linear.in_features,
        "out_features": dense.linear.out_features,
        "bias": dense.linear.bias is not None,
        "activation_function": activation_path(type(dense.activation).__name__),
    }
    return config | {"use_residual": True} if dense.add_input else config


def _build(kind: str, config: Json, file: str, width: int) -> nn.Module:
    """A module that takes vectors of the given width."""
    if kind == "Dense":
        _same_width(config, file, "in_features", width)
        dotted = config.get("activation_function", activation_path("Tanh"))
        return Dense(
            width,
            take_size(config, file, "out_features"),
            take(config, file, "bias", (bool,), True),
            activation_name(dotted, file, "activation_function"),
            take(config, file, "use_residual", (bool,), False),
        )
    if kind == "LayerNorm":
        _same_width(config, file, "dimension", width)
        return LayerNorm(width)
    if kind == "Dropout":
        rate = take(config, file, "dropout", (float, int), 0.2)
        if not 0 <= rate <= 1:
            raise CheckpointError(f"{file}: dropout={rate} must be from 0 to 1")
        return nn.Dropout(rate)
    return Normalize()


def _same_width(config: Json, file: str, key: str, width: int) -> None:
    value = take(config, file, key, (int,))
    if value != width:
        raise CheckpointError(f"{file}: {key}={value} must be {width}, the width of what it is given")


def _out_width(layer: nn.Module, width: int) -> int:
    return layer.linear.out_features if isinstance(layer, Dense) else width


def _fill(layer: nn.Module, root: Path, entry: Entry) -> None:
    """Give a module its weights: all of them, and no others."""
    wanted = layer.state_dict()
    if not wanted:
        return
    weights, file = _read_weights(root, entry)
    if missing := sorted(set(wanted) - set(weights)):
        raise CheckpointError(f"{file}: {', '.join(missing)} missing; it holds {', '.join(sorted(weights))}")
    if extra := sorted(set(weights) - set(wanted)):
        raise CheckpointError(f"{file}: {', '.join(extra)} left over; a {entry.kind} has {', '.join(sorted(wanted))}")
    for name, value in weights.items():
        if value.shape != wanted[name].shape:
            raise CheckpointError(
                f"{file}: {name} has shape {tuple(value.shape)}; {entry.inside('config.json')} asks for "
                f"{tuple(wanted[name].shape)}"
            )
        if not value.is_floating_point():
            raise CheckpointError(f"{file}: {name} holds {value.dtype}; it must hold floating point numbers")
    # Cloned, so that the file under a memory map may be replaced while the model lives.
    layer.load_state_dict({name: value.float().clone() for name, value in weights.items()}, assign=True)


def _read_weights(root: Path, entry: Entry) -> tuple[dict[str, Tensor], str]:
    file = entry.inside("model.safetensors")
    try:
        if (root / file).exists():
            return safetensors.torch.load_file(root / file), file
        file = entry.inside("pytorch_model.bin")
        if not (root / file).exists():
            raise CheckpointError(f"neither {entry.inside('model.safetensors')} nor {file} is there")
        weights = torch.load(root / file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # the readers raise whatever their formats' parsers do
        raise CheckpointError(f"{file} cannot be read as weights: {error}") from error
    if not isinstance(weights, dict) or not all(isinstance(one, Tensor) for one in weights.values()):
        raise CheckpointError(f"{file} must hold a dictionary of tensors")
    return dict(weights), file
