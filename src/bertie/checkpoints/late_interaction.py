"""Late-interaction (ColBERT) checkpoints: one projected embedding per token, compared by MaxSim.

Three layouts are read: PyLate's folders (Transformer, Dense), those of sentence-transformers 6 (MultiVectorEncoder),
and Stanford's, whose weights have the projection as `linear.weight` beside `artifact.metadata`. The last is written in
PyLate's layout, which sentence-transformers reads as well; the others as they were.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.sentence_modules import dense_config, load_layer_weights, read_layer
from bertie.checkpoints.sentence_transformers import (
    COLBERT_KEYS,
    MODEL_FILE,
    MODULES_FILE,
    MULTI_VECTOR_KEYS,
    Json,
    SentenceFolder,
    SentenceSettings,
    read_json,
)
from bertie.checkpoints.storage import to_json
from bertie.checkpoints.weight_files import tensor_bytes
from bertie.errors import CheckpointError, ConfigError
from bertie.nn.row_blocks import TOKEN_ROWS, in_row_blocks
from bertie.nn.sentence_layers import Dense

STANFORD, STANFORD_FILE, STANFORD_WEIGHT = "HF_ColBERT", "artifact.metadata", "linear.weight"
DIMENSION = 128  # of ColBERT's token embeddings
PUNCTUATION = tuple(string.punctuation)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateInteractionSettings:
    """How queries and documents are read."""

    query_prefix: str = ""  # a token of the vocabulary that is inserted after the first token; "": none
    document_prefix: str = ""
    query_prompt: str = ""  # prepended to each query
    document_prompt: str = ""
    query_length: int | None = 32  # tokens that queries are expanded to, with mask tokens
    document_length: int | None = 180  # tokens that documents are read in at once
    query_expansion: bool = True
    attend_to_expansion: bool = False  # whether other tokens attend to the mask tokens
    skiplist_words: tuple[str, ...] = PUNCTUATION  # tokens of documents that are read, but not compared
    lower_case: bool = False

    def __post_init__(self) -> None:
        if self.query_expansion and self.query_length is None:
            raise ConfigError("query_length=None must be a number of tokens where queries are expanded")


class LateInteractionModules(nn.Module):
    """The layers over hidden states, and how queries and documents are read.

    >>> modules = LateInteractionModules.create(width=4, dimension=2)
    >>> modules(torch.randn(3, 4)).norm(dim=1).round().tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(self, layers: Sequence[nn.Module], settings: LateInteractionSettings, folder: SentenceFolder) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.settings = settings
        self.transformer_path = folder.entries[0].path
        self._folder = folder

    @property
    def dimension(self) -> int:
        """The dimension of a token embedding."""
        last = [layer for layer in self.layers if isinstance(layer, Dense)][-1]
        return last.linear.out_features

    @property
    def max_length(self) -> int | None:
        """Tokens of a document that are read at once."""
        return self.settings.document_length

    def forward(self, hidden: Tensor) -> Tensor:
        """(T, D) -> (T, dimension), each row of unit length."""
        return in_row_blocks(self._project, hidden, TOKEN_ROWS)

    def _project(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer._project(rows) if isinstance(layer, Dense) else layer(rows)
        return nn.functional.normalize(rows, dim=-1)

    # --- reading ---

    @classmethod
    def from_folder(cls, path: Path, config: Json, weights: Any, width: int) -> LateInteractionModules | None:
        """Read a folder with a transformer of the given width; None if it is another kind of model."""
        if STANFORD in (config.get("architectures") or ()):
            return cls._from_stanford(path, weights, width)
        for model_type in ("ColBERT", "MultiVectorEncoder"):
            folder = SentenceFolder.read(path, model_type)
            if folder is not None:
                read = _read_pylate if model_type == "ColBERT" else _read_multi_vector
                settings, dense = read(folder)
                return cls(_read_layers(path, folder, dense, width), settings, folder)
        return None

    @classmethod
    def _from_stanford(cls, path: Path, weights: Any, width: int) -> LateInteractionModules:
        if STANFORD_WEIGHT not in weights.shapes():
            raise CheckpointError(f"{STANFORD_WEIGHT} is missing; a {STANFORD} model has it")
        weight = weights.get(STANFORD_WEIGHT).float().clone()
        if weight.ndim != 2 or weight.shape[1] != width:
            raise CheckpointError(f"{STANFORD_WEIGHT} has shape {tuple(weight.shape)}; it must be (dimension, {width})")
        metadata = read_json(path, STANFORD_FILE) or {}  # all settings of its training
        keys = ConfigKeys(metadata, metadata, file=STANFORD_FILE, common=())
        keys.must("similarity", "cosine")
        settings = LateInteractionSettings(
            query_prefix=keys.text("query_token_id", "[unused0]"),
            document_prefix=keys.text("doc_token_id", "[unused1]"),
            query_length=keys.integer("query_maxlen", 32),
            document_length=keys.integer("doc_maxlen", 180),
            attend_to_expansion=keys.boolean("attend_to_mask_tokens", False),
            skiplist_words=PUNCTUATION if keys.boolean("mask_punctuation", True) else (),
        )
        modules = cls.create(width, len(weight), settings)
        with torch.no_grad():
            modules.layers[0].linear.weight.copy_(weight)  # type: ignore[union-attr,operator]
        return modules

    # --- creating and writing ---

    @classmethod
    def create(
        cls,
        width: int,
        dimension: int = DIMENSION,
        settings: LateInteractionSettings | None = None,
        *,
        init_std: float = 0.02,
        seed: int = 0,
    ) -> LateInteractionModules:
        """A new projection without bias, in PyLate's layout."""
        settings = LateInteractionSettings() if settings is None else settings
        dense = Dense(width, dimension, bias=False, activation="Identity")
        nn.init.normal_(dense.linear.weight, std=init_std, generator=torch.Generator().manual_seed(seed))
        folder = SentenceFolder.create("ColBERT", ["Transformer", "Dense"], SentenceSettings())
        folder.json[MODULES_FILE][1]["type"] = "pylate.models.Dense.Dense"
        folder.json["1_Dense/config.json"] = dense_config(dense)
        folder.json[MODEL_FILE] |= {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "MaxSim"}
        folder.json[folder.text_file] |= {"max_seq_length": settings.document_length}
        return cls([dense], settings, folder)

    def with_settings(self, **changes: Any) -> LateInteractionModules:
        """The same layers with other settings."""
        return LateInteractionModules(list(self.layers), replace(self.settings, **changes), self._folder)

    def files(self) -> dict[str, bytes]:
        """The files to write, by relative path."""
        folder, settings = self._folder, self.settings
        files = folder.files(folder.settings)
        values: Mapping[str, Any] = {
            "query_prefix": settings.query_prefix,
            "document_prefix": settings.document_prefix,
            "query_length": settings.query_length,
            "document_length": settings.document_length,
            "skiplist_words": list(settings.skiplist_words),
            "do_query_expansion": settings.query_expansion,
            "attend_to_expansion_tokens": settings.attend_to_expansion,
        }
        if folder.model_type == "ColBERT":
            own = {key: values[key] for key in COLBERT_KEYS}
            files[MODEL_FILE] = to_json(folder.json[MODEL_FILE] | own | {"model_type": "ColBERT"})
        else:
            text = folder.json.get(folder.text_file, {})
            changed = {"document_length": settings.document_length}
            files[folder.text_file] = to_json(text | changed)
        dense = [entry for entry in folder.entries[1:] if entry.kind == "Dense"]
        for entry, layer in zip(dense, self.layers, strict=True):
            weights = {name: tensor.detach().cpu().contiguous() for name, tensor in layer.state_dict().items()}
            files[entry.inside("model.safetensors")] = tensor_bytes(weights)
        return files


def _read_pylate(folder: SentenceFolder) -> tuple[LateInteractionSettings, Sequence[int]]:
    """The settings of a folder of PyLate, and the indices of its dense layers."""
    kinds = [entry.kind for entry in folder.entries[1:]]
    if not kinds or set(kinds) != {"Dense"}:
        raise ConfigError(f"{MODULES_FILE}: a ColBERT model must have a Transformer, then Dense layers, not {kinds}")
    raw = {key: value for key, value in folder.json[MODEL_FILE].items() if value is not None}
    keys = ConfigKeys(raw, raw, file=MODEL_FILE, common=())
    prompt = folder.settings.prompts.get(folder.settings.default_prompt_name or "", "")
    settings = LateInteractionSettings(
        query_prefix=keys.text("query_prefix", "[Q] "),
        document_prefix=keys.text("document_prefix", "[D] "),
        query_prompt=prompt,
        document_prompt=prompt,
        query_length=keys.integer("query_length", 32),
        document_length=keys.integer("document_length", 180),
        query_expansion=keys.boolean("do_query_expansion", True),
        attend_to_expansion=keys.boolean("attend_to_expansion_tokens", False),
        skiplist_words=_words(keys, "skiplist_words", PUNCTUATION),
        lower_case=folder.settings.do_lower_case,
    )
    return settings, range(1, len(folder.entries))


def _read_multi_vector(folder: SentenceFolder) -> tuple[LateInteractionSettings, Sequence[int]]:
    """The settings of a folder of sentence-transformers' MultiVectorEncoder, and the indices of its dense layers."""
    kinds = [entry.kind for entry in folder.entries]
    dense = [i for i, kind in enumerate(kinds) if kind == "Dense"]
    if not dense or kinds != ["Transformer", *["Dense"] * len(dense), "MultiVectorMask", "Normalize"]:
        raise ConfigError(
            f"{MODULES_FILE}: a late-interaction model of {', '.join(kinds)} is not supported; it must have a "
            "Transformer, Dense layers, a MultiVectorMask and a Normalize"
        )
    mask = folder.keys(folder.entries[-2])
    words = _words(mask, "skiplist_words", ())
    mask.must("skiplist_tasks", ["document"])
    mask.must("keep_only_token_ids")
    mask.finish()
    read_layer("Normalize", folder.keys(folder.entries[-1]), 1, "token_embeddings")
    raw = folder.json.get(folder.text_file, {})
    text = ConfigKeys(raw, [key for key in raw if key not in MULTI_VECTOR_KEYS], file=folder.text_file, common=())
    raw_expansion = text.mapping("query_expansion", {}) if raw.get("query_expansion") is not None else None
    attend, length = False, text.optional_integer("query_length", least=1)
    if raw_expansion is not None:
        expansion = ConfigKeys(raw_expansion, file=f"{folder.text_file}: query_expansion", common=())
        expansion.must("strategy", "fixed", "min")
        expansion.must("token", "[MASK]", "<mask>")
        attend, length = expansion.boolean("attend", False), expansion.integer("length")
        expansion.finish()
    prompts = folder.settings.prompts
    settings = LateInteractionSettings(
        query_prompt=prompts.get("query", ""),
        document_prompt=prompts.get("document", ""),
        query_length=length,
        document_length=text.optional_integer("document_length", least=1) or folder.settings.max_seq_length,
        query_expansion=raw_expansion is not None,
        attend_to_expansion=attend,
        skiplist_words=words,
        lower_case=folder.settings.do_lower_case,
    )
    return settings, dense


def _words(keys: ConfigKeys, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
    words = keys.array(name, list(default))
    if not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{keys.file}: {name} must be a list of tokens")
    return tuple(words)


def _read_layers(path: Path, folder: SentenceFolder, dense: Sequence[int], width: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for i in dense:
        entry = folder.entries[i]
        with torch.device("meta"):
            layer = read_layer("Dense", folder.keys(entry), width, "token_embeddings")
        load_layer_weights(layer, path, entry)
        assert isinstance(layer, Dense)
        layers.append(layer)
        width = layer.linear.out_features
    return layers
