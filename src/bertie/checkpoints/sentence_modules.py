"""The modules of a sentence-transformers folder: pooling, then Dense, LayerNorm and Normalize layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.sentence_transformers import (
    ACTIVATION_PATHS,
    MODULES_FILE,
    Json,
    ModuleEntry,
    SentenceFolder,
    SentenceSettings,
    read_entries,
)
from bertie.checkpoints.storage import to_json
from bertie.checkpoints.weight_files import open_weights, tensor_bytes
from bertie.config import Causal, EncoderConfig
from bertie.errors import CheckpointError, ConfigError
from bertie.nn.pooling import MODES, Pooling
from bertie.nn.sentence_layers import Dense, EmbeddingLayerNorm, Normalize
from bertie.text.batch import Batch

# How configs before 5.4 name the modes.
_TAILS = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
MAX_WEIGHT = torch.finfo(torch.float32).max  # of a token
WORD_WEIGHTS = "WordWeights"  # sentence-transformers' module for token weights, which comes before the pooling
FLAGS = {mode: f"pooling_mode_{tail}" for mode, tail in zip(MODES, _TAILS, strict=True)}


class SentenceModules(nn.Module):
    """The modules after the transformer in a sentence-transformers folder, with prompts and maximum length.

    >>> modules = SentenceModules.create(width=2, pooling="mean", normalize=True)
    >>> modules(torch.tensor([[3.0, 0.0], [3.0, 8.0]]), Batch.from_ids([[101, 102]])).round(decimals=3).tolist()
    [[0.6000000238418579, 0.800000011920929]]
    """

    def __init__(self, pooling: Pooling, layers: Sequence[nn.Module], width: int, folder: SentenceFolder) -> None:
        super().__init__()
        self.pooling = pooling
        self.layers = nn.ModuleList(layers)
        self.width = width  # of the hidden states
        self.max_seq_length = folder.settings.max_seq_length  # tokens a text may have, special tokens included
        self.lower_case = folder.settings.do_lower_case  # texts and prompts are lower-cased before they are tokenized
        self.prompts = dict(folder.settings.prompts)
        self.default_prompt = folder.settings.default_prompt_name  # the prompt prepended to every text
        self.similarity = folder.settings.similarity_fn_name  # None leaves it to the reader, which means cosine
        self.truncate_dim = folder.settings.truncate_dim  # vectors are cut to so many numbers at the very end
        self.transformer_path = folder.entries[0].path  # inside the model's folder, "" when they are the same
        self._folder = folder

    @property
    def dimension(self) -> int:
        """The dimension of an embedding."""
        dense = [layer.linear.out_features for layer in self.layers if isinstance(layer, Dense)]
        out = dense[-1] if dense else self.width * len(self.pooling.modes)
        return out if self.truncate_dim is None else min(out, self.truncate_dim)

    def forward(self, hidden: Tensor, batch: Batch, prompt_lengths: Sequence[int] | None = None) -> Tensor:
        """(T, D) -> (B, dimension). See `Pooling.forward` for how prompt_lengths are counted."""
        return self.project(self.pooling(hidden, batch, prompt_lengths))

    @property
    def plain(self) -> bool:
        """Whether the modules are mean pooling and nothing but normalization after it."""
        usual = self.pooling.modes == ("mean",) and self.truncate_dim is None
        return usual and all(isinstance(layer, Normalize) for layer in self.layers)

    def project(self, vectors: Tensor) -> Tensor:
        """(B, pooled width) -> (B, dimension): apply the layers after the pooling."""
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors if self.truncate_dim is None else vectors[:, : self.truncate_dim]

    @staticmethod
    def transformer_folder(path: str | Path) -> str:
        """The transformer's subfolder according to modules.json; "" if there is none."""
        entries = read_entries(Path(path))
        return entries[0].path if entries else ""

    @classmethod
    def from_folder(cls, path: str | Path, width: int, vocabulary: int | None = None) -> SentenceModules | None:
        """Read the modules after a transformer of the given width and, if known, vocabulary size.

        None if there is no modules.json, or for a cross-encoder, which `CrossEncoderConfig` reads.
        """
        folder = SentenceFolder.read(Path(path), "SentenceTransformer")
        if folder is None:
            return None
        kinds = [entry.kind for entry in folder.entries[1:]]
        weighted = kinds[:1] == [WORD_WEIGHTS]
        entries, rest = folder.entries[1 + weighted :], kinds[1 + weighted :]
        if kinds[weighted : weighted + 1] != ["Pooling"] or "Pooling" in rest or WORD_WEIGHTS in rest:
            raise ConfigError(
                f"{MODULES_FILE}: after the Transformer it lists {', '.join(kinds) or 'nothing'}; it must list one "
                f"Pooling first (or {WORD_WEIGHTS} before it), then any of Dense, LayerNorm, Dropout, Normalize"
            )
        weights = _read_word_weights(folder.keys(folder.entries[1]), vocabulary) if weighted else None
        pooling = _read_pooling(folder.keys(entries[0]), width, weights)
        out = width * len(pooling.modes)
        layers: list[nn.Module] = []
        for entry in entries[1:]:
            with torch.device("meta"):  # allocate nothing until the weights are known to be there
                layer = read_layer(entry.kind, folder.keys(entry), out)
            load_layer_weights(layer, Path(path), entry)
            layers.append(layer)
            out = layer.linear.out_features if isinstance(layer, Dense) else out
        return cls(pooling, layers, width, folder)

    @classmethod
    def create(
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
        """Create modules: pooling, then an optional Dense layer, then optional normalization to unit length.

        >>> SentenceModules.create(384, dense=Dense(384, 128)).dimension
        128
        """
        pool = Pooling(pooling, include_prompt)
        if dense is not None and dense.linear.in_features != width * len(pool.modes):
            raise ConfigError(
                f"dense takes vectors of {dense.linear.in_features} but pooling gives {width * len(pool.modes)}"
            )
        layers: list[nn.Module] = [*([dense] if dense else []), *([Normalize()] if normalize else [])]
        settings = SentenceSettings(max_seq_length, False, dict(prompts or {}), default_prompt, similarity)
        kinds = ["Transformer", "Pooling", *(type(layer).__name__ for layer in layers)]
        folder = SentenceFolder.create("SentenceTransformer", kinds, settings)
        folder.json["1_Pooling/config.json"] = _pooling_config(pool, width)
        if dense is not None:
            folder.json["2_Dense/config.json"] = dense_config(dense)
        return cls(pool, layers, width, folder)

    @classmethod
    def default(cls, cfg: EncoderConfig, normalize: bool = True) -> SentenceModules:
        """The modules for an encoder without any: mean pooling, or the last token if that alone sees the whole text."""
        causal = all(isinstance(pattern, Causal) for pattern in cfg.patterns)
        return cls.create(cfg.width, "lasttoken" if causal else "mean", normalize)

    def with_layers(self, *layers: nn.Module) -> SentenceModules:
        """Return a copy with more layers at the end. All layers must be `Dense` or `Normalize`.

        >>> SentenceModules.create(384, normalize=False).with_layers(Dense(384, 64), Normalize()).dimension
        64
        """
        every = [*self.layers, *layers]
        for layer in every:
            if not isinstance(layer, Dense | Normalize):
                raise ConfigError(f"layers has a {type(layer).__name__}; allowed: Dense, Normalize")
        kinds = ["Transformer", "Pooling", *(type(layer).__name__ for layer in every)]
        folder = SentenceFolder.create("SentenceTransformer", kinds, self._settings())
        folder.json["1_Pooling/config.json"] = _pooling_config(self.pooling, self.width)
        for entry, layer in zip(folder.entries[2:], every, strict=True):
            if isinstance(layer, Dense):
                folder.json[entry.inside("config.json")] = dense_config(layer)
        modules = SentenceModules(self.pooling, every, self.width, folder)
        if self.pooling.token_weights is None:
            return modules
        vocabulary = self._folder.json[self._folder.entries[1].inside("config.json")]["vocab"]
        return modules.with_token_weights(self.pooling.token_weights, vocabulary)

    def with_token_weights(self, weights: Tensor, vocabulary: Sequence[str]) -> SentenceModules:
        """Return a copy with one weight per token of the vocabulary, (V,), replacing any it had.

        >>> modules = SentenceModules.create(2, normalize=False)
        >>> modules = modules.with_token_weights(torch.tensor([1.0, 3.0]), ["the", "cat"])
        >>> modules(torch.tensor([[4.0, 0.0], [0.0, 4.0]]), Batch.from_ids([[0, 1]])).tolist()
        [[1.0, 3.0]]
        """
        if weights.shape != (len(vocabulary),):
            raise ConfigError(
                f"token weights have shape {tuple(weights.shape)}; the vocabulary needs ({len(vocabulary)},)"
            )
        if not weights.isfinite().all():
            raise ConfigError("token weights must be finite numbers")
        folder = self._folder
        if folder.entries[1].kind != WORD_WEIGHTS:
            listed = list(folder.json[MODULES_FILE])
            listed.insert(1, {"path": f"1_{WORD_WEIGHTS}", "type": f"sentence_transformers.models.{WORD_WEIGHTS}"})
            numbered = [entry | {"idx": i, "name": str(i)} for i, entry in enumerate(listed)]
            entries = [folder.entries[0], ModuleEntry(WORD_WEIGHTS, f"1_{WORD_WEIGHTS}"), *folder.entries[1:]]
            folder = replace(folder, entries=entries, json=folder.json | {MODULES_FILE: numbered})
        config = folder.entries[1].inside("config.json")
        folder = replace(folder, json=folder.json | {config: _word_weights_config(weights, vocabulary)})
        pooling = Pooling(self.pooling.modes, self.pooling.include_prompt, weights.detach().float().clone())
        modules = SentenceModules(pooling, list(self.layers), self.width, folder)
        for name in ("max_seq_length", "lower_case", "prompts", "default_prompt", "similarity", "truncate_dim"):
            setattr(modules, name, getattr(self, name))  # they may have been set since the folder was read
        return modules

    def files(self) -> dict[str, bytes]:
        """The files to write next to the transformer, by relative path, in the layout of sentence-transformers."""
        files, behind = self._folder.files(self._settings()), self._folder.entries[1:]
        if (token_weights := self.pooling.token_weights) is not None:
            keys = self._folder.keys(behind[0])
            if not torch.equal(token_weights.detach().cpu(), _read_word_weights(keys, None)):  # they were trained
                files[behind[0].inside("config.json")] = to_json(_word_weights_config(token_weights, keys.raw["vocab"]))
            behind = behind[1:]
        for entry, layer in zip(behind[1:], self.layers, strict=True):
            weights = {name: tensor.detach().cpu().contiguous() for name, tensor in layer.state_dict().items()}
            if weights:
                files[entry.inside("model.safetensors")] = tensor_bytes(weights)
        return files

    def _settings(self) -> SentenceSettings:
        return SentenceSettings(
            self.max_seq_length, self.lower_case, self.prompts, self.default_prompt, self.similarity, self.truncate_dim
        )


# --- configs of modules ---


def _same_width(keys: ConfigKeys, key: str, width: int) -> None:
    value = keys.integer(key)
    if value != width:
        raise ConfigError(f"{keys.file}: {key}={value} must be {width}, the width of its input")


def _read_word_weights(keys: ConfigKeys, vocabulary: int | None) -> Tensor:
    """(V,) token weights. sentence-transformers also writes them to a file, which it does not read."""
    vocab, by_word = keys.array("vocab"), keys.mapping("word_weights")
    default = keys.number("unknown_word_weight", 1.0)
    keys.finish()
    wrong = next((word for word in vocab if not isinstance(word, str)), None)
    if wrong is not None or (vocabulary is not None and len(vocab) < vocabulary):
        contents = f"{wrong!r:.40} in it" if wrong is not None else f"{len(vocab)} words"
        least = "" if vocabulary is None else f", at least the {vocabulary} of the model"
        raise ConfigError(f"{keys.file}: vocab has {contents}; it must list words{least}")
    weights = [by_word.get(word, by_word.get(word.lower(), default)) for word in vocab]
    for word, weight in zip(vocab, weights, strict=True):
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 <= weight <= MAX_WEIGHT:
            raise ConfigError(
                f"{keys.file}: word_weights has {weight!r:.40} for {word!r:.40}; it must be at least 0, and finite in "
                "float32"
            )
    return torch.tensor(weights, dtype=torch.float32)


def _word_weights_config(token_weights: Tensor, vocabulary: Sequence[str]) -> Json:
    # As short as float32 can be written.
    weights = [float(str(weight)) for weight in token_weights.detach().clamp(min=0).float().cpu().numpy()]
    return {
        "vocab": list(vocabulary),
        "word_weights": dict(zip(vocabulary, weights, strict=True)),
        "unknown_word_weight": 1.0,
    }


def _read_pooling(keys: ConfigKeys, width: int, token_weights: Tensor | None = None) -> Pooling:
    raw = keys.raw
    named = [key for key in ("embedding_dimension", "word_embedding_dimension") if key in raw]  # since 5.4, and before
    for key in named or ["embedding_dimension"]:
        _same_width(keys, key, width)
    flags = {mode: keys.boolean(flag) for mode, flag in FLAGS.items() if flag in raw}
    flagged = [mode for mode in MODES if flags.get(mode)]
    if isinstance(raw.get("pooling_mode"), str):
        modes = [keys.text("pooling_mode")]
    else:
        modes = keys.array("pooling_mode", flagged if flags else ["mean"])
    include_prompt = keys.boolean("include_prompt") if "include_prompt" in raw else True
    keys.finish()
    if not modes or any(mode not in MODES for mode in modes):
        raise ConfigError(f"{keys.file}: pooling_mode={modes!r} must be one or more of {', '.join(MODES)}")
    if flags and "mean" not in flags:
        # Left out, it means true up to 5.3 and false since.
        raise ConfigError(f"{keys.file}: {FLAGS['mean']} is missing; it must be true or false")
    if flags and sorted(modes) != sorted(flagged):
        raise ConfigError(f"{keys.file}: pooling_mode={modes!r} must agree with the flags, {flagged}")
    return Pooling(modes, include_prompt, token_weights)


def _pooling_config(pooling: Pooling, width: int) -> Json:
    config: Json = {"word_embedding_dimension": width}
    if list(pooling.modes) == [mode for mode in MODES if mode in pooling.modes]:
        config |= {flag: mode in pooling.modes for mode, flag in FLAGS.items()}
    else:  # flags have one order; any other needs the list, which 5.4 and later read
        config["pooling_mode"] = list(pooling.modes)
    return config if pooling.include_prompt else config | {"include_prompt": False}


def read_layer(kind: str, keys: ConfigKeys, width: int, over: str = "sentence_embedding") -> nn.Module:
    """Read a layer whose input has the given width; `over` is what it is applied to."""
    layer: nn.Module
    if kind in ("Dense", "Normalize"):
        keys.must("module_input_name", over)
        keys.must("module_output_name", over)
    if kind == "Dense":
        _same_width(keys, "in_features", width)
        # Left out it means tanh; null does not load in sentence-transformers either.
        dotted = keys.choice("activation_function", ACTIVATION_PATHS) if "activation_function" in keys.raw else None
        layer = Dense(
            width,
            keys.integer("out_features"),
            keys.boolean("bias", True),
            ACTIVATION_PATHS[dotted] if dotted else "Tanh",
            keys.boolean("use_residual", False),
        )
    elif kind == "LayerNorm":
        _same_width(keys, "dimension", width)
        layer = EmbeddingLayerNorm(width)
    elif kind == "Dropout":
        layer = nn.Dropout(keys.number("dropout", 0.2, most=1.0))
    else:
        layer = Normalize()
    keys.finish()
    return layer


def dense_config(dense: Dense) -> Json:
    """The config of a dense layer."""
    config: Json = {
        "in_features": dense.linear.in_features,
        "out_features": dense.linear.out_features,
        "bias": dense.linear.bias is not None,
        "activation_function": f"torch.nn.{type(dense.activation).__name__}",
    }
    return config | {"use_residual": True} if dense.add_input else config


def load_layer_weights(layer: nn.Module, root: Path, entry: ModuleEntry) -> None:
    """Load the weights of a module on the meta device, requiring exactly its tensors."""
    expected = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    if not expected:
        return
    try:
        source = open_weights(root / entry.path)
        if (shapes := dict(source.shapes())) != expected:
            raise CheckpointError(f"the weights are {shapes}; a {entry.kind} of this config has {expected}")
        weights = {name: source.get(name) for name in expected}
        for name, value in weights.items():
            if not value.is_floating_point():
                raise CheckpointError(f"{name} has dtype {value.dtype}; it must be floating point")
            if not all(x.isfinite() for x in torch.aminmax(value.float())):
                raise CheckpointError(f"{name} has values that are not finite in {torch.float32}")
    except CheckpointError as error:
        raise CheckpointError(f"{entry.path}: {error}") from None
    # Cloned, so that a memory-mapped file may be replaced while the model is in use.
    layer.load_state_dict({name: value.float().clone() for name, value in weights.items()}, assign=True)
