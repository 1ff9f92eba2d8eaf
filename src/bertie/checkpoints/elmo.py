"""ELMo's files, as bilm-tf writes and AllenNLP reads them: options.json and weights.hdf5.

Every option is used, required to have a value, or one that only concerns training. Every dataset of the weight file is
read; what is missing and what is left over is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.checkpoints import storage
from bertie.checkpoints.config_keys import MOST_LAYERS, ConfigKeys
from bertie.checkpoints.elmo_folder import MOST_NAMED, OPTIONS, WEIGHTS, find_files
from bertie.errors import CheckpointError, ConfigError, MissingPackageError
from bertie.nn.elmo import DIRECTIONS, GATES, ElmoConfig, ElmoModel
from bertie.text.characters import CHARACTERS

# Options of bilm-tf's training, which its own files still carry.
TRAINING_OPTIONS = (
    *("all_clip_norm_val", "batch_size", "dropout", "learning_rate", "n_epochs", "n_negative_samples_batch"),
    *("n_tokens_vocab", "n_train_tokens", "sample_softmax", "share_embedding_softmax", "unroll_steps"),
)
MOST_FILTERS, MOST_WIDTH, MOST_CHARACTERS = 64, 2**20, 2**12
# What h5py raises for damaged files.
HDF5_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, SystemError, MemoryError)
MOST_COMPRESSED = 1100  # bytes that a byte of deflate can stand for, and a few more
MOST_DEPTH = 8  # of groups; those of ELMo are four deep


@dataclass(frozen=True, slots=True)
class _Dataset:
    """A dataset of the weight file, and the parameter that it is: the whole, or one direction of it."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    direction: int | None = None
    transposed: bool = False  # TensorFlow multiplies from the other side


# --- options ---


def read_options(path: Path) -> ElmoConfig:
    """Read options.json."""
    top = ConfigKeys(storage.read_json(path), TRAINING_OPTIONS, file=path.name, common=())
    top.must("bidirectional", True)
    lstm = ConfigKeys(top.mapping("lstm"), file=f"{path.name}: lstm", common=())
    if "char_cnn" not in top.raw:
        raise ConfigError(
            f"{path.name}: char_cnn is missing; models that read words instead of characters are not ELMo"
        )
    cnn = ConfigKeys(top.mapping("char_cnn"), file=f"{path.name}: char_cnn", common=())
    embedding = ConfigKeys(cnn.mapping("embedding"), file=f"{path.name}: char_cnn.embedding", common=())
    cnn.must("n_characters", CHARACTERS + 1, CHARACTERS)  # bilm-tf counts id 0 for using a model, but not in training
    values = {
        "filters": _filters(cnn),
        "character_width": embedding.integer("dim", most=MOST_WIDTH),
        "max_characters": cnn.integer("max_characters_per_token", least=3, most=MOST_CHARACTERS),
        "activation": cast(Literal["relu", "tanh"], cnn.choice("activation", ("relu", "tanh"))),
        "highways": cnn.integer("n_highway", 0, least=0, most=MOST_LAYERS),
        "width": lstm.integer("projection_dim", most=MOST_WIDTH),
        "cell_width": lstm.integer("dim", most=MOST_WIDTH),
        "layers": lstm.layers("n_layers"),
        "cell_clip": lstm.number("cell_clip", 0.0),
        "projection_clip": lstm.number("proj_clip", 0.0),
        "skip_connections": lstm.boolean("use_skip_connections", False),
    }
    for keys in (embedding, cnn, lstm, top):
        keys.finish()
    return ElmoConfig(**values)  # type: ignore[arg-type]


def _filters(keys: ConfigKeys) -> tuple[tuple[int, int], ...]:
    rows = keys.array("filters")
    valid = 0 < len(rows) <= MOST_FILTERS and all(
        isinstance(row, list) and len(row) == 2 and all(type(n) is int and 1 <= n <= MOST_WIDTH for n in row)
        for row in rows
    )
    if not valid:
        raise ConfigError(
            f"{keys.file}: filters={rows!r:.80} is not supported; allowed: a list of 1 to {MOST_FILTERS} pairs "
            "[size, number]"
        )
    return tuple((size, count) for size, count in rows)


def options_of(cfg: ElmoConfig) -> dict[str, Any]:
    """The content of options.json."""
    return {
        "lstm": {
            "use_skip_connections": cfg.skip_connections,
            "projection_dim": cfg.width,
            "cell_clip": cfg.cell_clip,
            "proj_clip": cfg.projection_clip,
            "dim": cfg.cell_width,
            "n_layers": cfg.layers,
        },
        "char_cnn": {
            "activation": cfg.activation,
            "filters": [list(row) for row in cfg.filters],
            "n_highway": cfg.highways,
            "embedding": {"dim": cfg.character_width},
            "n_characters": CHARACTERS + 1,
            "max_characters_per_token": cfg.max_characters,
        },
    }


# --- weights ---


def _datasets(cfg: ElmoConfig) -> Iterator[_Dataset]:
    """All datasets of a weight file."""
    width, cell, filters = cfg.width, cfg.cell_width, cfg.filter_width
    yield _Dataset("char_embed", (cfg.characters, cfg.character_width), "characters.embedding")
    for i, (size, count) in enumerate(cfg.filters):
        convolution = f"characters.convolutions.{i}"
        shape = (1, size, cfg.character_width, count)
        yield _Dataset(f"CNN/W_cnn_{i}", shape, f"{convolution}.weight", transposed=True)
        yield _Dataset(f"CNN/b_cnn_{i}", (count,), f"{convolution}.bias")
    for k in range(cfg.highways):
        for name in ("transform", "carry"):
            linear = f"characters.highways.{k}.{name}"
            yield _Dataset(f"CNN_high_{k}/W_{name}", (filters, filters), f"{linear}.weight", transposed=True)
            yield _Dataset(f"CNN_high_{k}/b_{name}", (filters,), f"{linear}.bias")
    if cfg.project_characters:
        yield _Dataset("CNN_proj/W_proj", (filters, width), "characters.projection.weight", transposed=True)
        yield _Dataset("CNN_proj/b_proj", (width,), "characters.projection.bias")
    for direction in range(DIRECTIONS):
        for i in range(cfg.layers):
            group, layer = f"RNN_{direction}/RNN/MultiRNNCell/Cell{i}/LSTMCell", f"layers.{i}"
            yield _Dataset(f"{group}/W_0", (2 * width, GATES * cell), f"{layer}.weight", direction)
            yield _Dataset(f"{group}/B", (GATES * cell,), f"{layer}.bias", direction)
            yield _Dataset(f"{group}/W_P_0", (cell, width), f"{layer}.projection", direction)


def read_elmo(source: str | Path, weights: str | Path | None = None, *, only_check: bool = False) -> ElmoModel:
    """Read a model; `only_check` checks names and shapes, and leaves the weights on the meta device."""
    options_file, weight_file = find_files(source, weights)
    if weights is None and not only_check:
        storage.verify(options_file.parent)
    cfg = read_options(options_file)
    h5py = _import_h5py(weight_file.name)
    try:
        with h5py.File(weight_file, "r") as file:
            found = _list_datasets(file, weight_file.name)
            if (
                "CNN_proj/W_proj" not in found and cfg.filter_width == cfg.width
            ):  # bilm-tf has none where none is needed
                cfg = ElmoConfig(**{name: getattr(cfg, name) for name in cfg.__slots__} | {"project_characters": False})
            model = _build(cfg, options_file.name)
            _check(list(_datasets(cfg)), found, weight_file.name)
            if not only_check:
                model.load_state_dict(_read_state(cfg, found, weight_file.name), assign=True)
    except HDF5_ERRORS as error:
        if isinstance(error, ConfigError):
            raise
        raise CheckpointError(f"{weight_file.name} cannot be read as HDF5: {error!s:.200}") from None
    return model.requires_grad_(False).eval()


def _import_h5py(name: str) -> Any:
    try:
        import h5py
    except ImportError:
        raise MissingPackageError(f"{name}: HDF5 needs the package h5py: pip install 'bertie[elmo]'") from None
    return h5py


def _build(cfg: ElmoConfig, file: str) -> ElmoModel:
    try:
        with torch.device("meta"):
            return ElmoModel(cfg)
    except (RuntimeError, OverflowError) as error:
        raise ConfigError(f"{file} describes a model that is too large to build: {error!s:.120}") from None


def _list_datasets(group: Any, file: str, prefix: str = "") -> dict[str, Any]:
    """All datasets by name. Links are refused: those of HDF5 may lead to other files of the machine."""
    h5py = _import_h5py(file)
    found: dict[str, Any] = {}
    for key in group:
        name = f"{prefix}{key}"
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            raise CheckpointError(f"{file}: {name!r:.80} is a link; the file must hold the weights themselves")
        value = group[key]
        if isinstance(value, h5py.Group):
            if name.count("/") >= MOST_DEPTH:  # a group may contain itself
                raise CheckpointError(f"{file}: {name!r:.80} is nested more than {MOST_DEPTH} deep")
            found |= _list_datasets(value, file, f"{name}/")
        elif not isinstance(value, h5py.Dataset):
            raise CheckpointError(f"{file}: {name!r:.80} is neither a group nor a dataset")
        elif value.external or value.is_virtual:
            raise CheckpointError(f"{file}: {name!r:.80} is stored in another file, which is not read")
        else:
            found[name] = value
    return found


def _check(expected: list[_Dataset], found: dict[str, Any], file: str) -> None:
    """Raise an error that names the datasets that are missing, left over, or of the wrong shape."""
    names = {row.name for row in expected}
    missing, rest = sorted(names - set(found)), sorted(set(found) - names)
    if missing or rest:
        parts = [
            f"{what}: {', '.join(listed[:MOST_NAMED])}"
            + (f" and {len(listed) - MOST_NAMED} more" * (len(listed) > MOST_NAMED))
            for what, listed in (("missing", missing), ("left over", rest))
            if listed
        ]
        raise CheckpointError(f"{file} and the options do not fit: {'; '.join(parts)}")
    for row in expected:
        dataset = found[row.name]
        if tuple(dataset.shape) != row.shape:
            raise CheckpointError(
                f"{file}: {row.name} has the shape {tuple(dataset.shape)}, and the options {row.shape}"
            )
        if dataset.dtype.kind != "f":
            raise CheckpointError(
                f"{file}: {row.name} has the type {dataset.dtype}; weights are floating-point numbers"
            )
        packed = MOST_COMPRESSED if dataset.id.get_create_plist().get_nfilters() else 1
        if dataset.id.get_storage_size() * packed < dataset.nbytes:  # HDF5 would fill in the rest, of any size
            raise CheckpointError(
                f"{file}: {row.name} is declared with {dataset.nbytes:,} bytes, which are not all there"
            )


def _read_state(cfg: ElmoConfig, found: dict[str, Any], file: str) -> dict[str, torch.Tensor]:
    """The parameters by name."""
    parts: dict[str, list[torch.Tensor]] = {}
    for row in _datasets(cfg):
        array: NDArray[np.float32] = found[row.name][...].astype(np.float32)
        if not np.isfinite(array).all():
            raise CheckpointError(f"{file}: {row.name} has values that are not finite")
        if row.transposed:
            array = array.transpose().reshape(_reversed_shape(row))
        parts.setdefault(row.parameter, []).append(torch.from_numpy(np.ascontiguousarray(array)))
    both = {row.parameter for row in _datasets(cfg) if row.direction is not None}
    return {name: torch.stack(tensors) if name in both else tensors[0] for name, tensors in parts.items()}


def _reversed_shape(row: _Dataset) -> tuple[int, ...]:
    """The parameter's shape: a convolution in one dimension has a leading axis of one in the file."""
    shape = tuple(reversed(row.shape))
    return shape[:-1] if len(shape) == 4 else shape


def files_of(model: ElmoModel) -> dict[str, bytes]:
    """The files of a model, by name."""
    h5py = _import_h5py(WEIGHTS)
    state, content = model.state_dict(), BytesIO()
    with h5py.File(content, "w") as file:
        for row in _datasets(model.cfg):
            tensor = state[row.parameter] if row.direction is None else state[row.parameter][row.direction]
            array = tensor.detach().float().cpu().numpy()
            if row.transposed:
                array = array.reshape(tuple(reversed(row.shape))).transpose()
            file.create_dataset(row.name, data=array)
    return {OPTIONS: storage.to_json(options_of(model.cfg)), WEIGHTS: content.getvalue()}


def describe(source: str | Path) -> dict[str, Any]:
    """What `bertie inspect` prints, without reading the weights."""
    model = read_elmo(source, only_check=True)
    cfg = model.cfg
    counts = {name: sum(prod(p.shape) for p in part.parameters()) for name, part in model.named_children()}
    total = sum(counts.values())
    return {
        "model": str(source),
        "family": "elmo",
        "shape": {
            "layers": cfg.layers,
            "width": cfg.width,
            "cell_width": cfg.cell_width,
            "dimension": cfg.dimension,
            "filters": [list(row) for row in cfg.filters],
            "highways": cfg.highways,
            "skip_connections": cfg.skip_connections,
            "cell_clip": cfg.cell_clip,
            "projection_clip": cfg.projection_clip,
            "max_characters": cfg.max_characters,
        },
        "parameters": {"total": total, **counts},
        "memory_bytes": {"fp32": 4 * total},
    }
