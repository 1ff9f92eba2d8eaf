"""Weight files: safetensors and .bin, single or sharded, read one tensor at a time; int8 and fp16 on disk."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from bertie.checkpoints.convert import Shape, TensorSource
from bertie.checkpoints.storage import is_file, read_json
from bertie.errors import CheckpointError
from bertie.ops.quantization import dequantize, quantize

SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
# Not model.safetensors, from which other libraries would load the int8 codes as weights.
INT8 = "model.int8.safetensors"

StoredPrecision = Literal["fp16", "int8"]  # of weight files that are smaller than the weights in memory


class SafetensorsSource:
    """Tensors of one or more safetensors files.

    The file is reopened for each tensor, which releases the pages of the previous one: peak memory stays near one copy
    of the weights instead of two.
    """

    def __init__(self, files: Mapping[Path, list[str] | None]) -> None:
        self._file: dict[str, Path] = {}
        self._shapes: dict[str, Shape] = {}
        self._dtypes: dict[str, str] = {}
        for path, listed in files.items():
            try:
                with safe_open(path, framework="pt") as f:
                    names = list(f.keys())
                    self._shapes |= {name: tuple(f.get_slice(name).get_shape()) for name in names}
                    self._dtypes |= {name: f.get_slice(name).get_dtype() for name in names}
            except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
                raise CheckpointError(f"{path.name} is not a valid safetensors file: {error}") from None
            if listed is not None and sorted(listed) != sorted(names):
                differing = sorted(set(listed) ^ set(names))
                raise CheckpointError(f"{path.name} and the index disagree on {', '.join(differing[:8])}")
            self._file |= dict.fromkeys(names, path)

    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor."""
        return self._shapes

    def dtypes(self) -> Mapping[str, str]:
        """The dtype of every tensor, as safetensors spells it: F32, I8, …"""
        return self._dtypes

    def get(self, name: str) -> Tensor:
        """Read one tensor."""
        path = self._file[name]
        try:
            with safe_open(path, framework="pt") as f:
                tensor: Tensor = f.get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{path.name}: {name} cannot be read: {error}") from None
        return tensor


class Int8Source:
    """Tensors that `to_int8` quantized, dequantized one at a time."""

    def __init__(self, packed: SafetensorsSource) -> None:
        shapes, dtypes = packed.shapes(), packed.dtypes()
        self._packed = packed
        self._scales = {name: _scale_of(name) for name, dtype in dtypes.items() if dtype == "I8"}
        for name, scale in self._scales.items():
            if scale not in shapes:
                raise CheckpointError(f"{name} is int8, but {scale} is missing")
            if dtypes[scale] != "F32" or shapes[scale] != shapes[name][:1]:
                raise CheckpointError(
                    f"{scale} has dtype {dtypes[scale]} and shape {shapes[scale]}; "
                    f"{name} needs F32 of shape {shapes[name][:1]}"
                )
        scales = set(self._scales.values())
        self._shapes = {name: shape for name, shape in shapes.items() if name not in scales}
        for name, shape in self._shapes.items():
            if (len(shape) > 1) != (name in self._scales):
                raise CheckpointError(
                    f"{name} has dtype {dtypes[name]} and shape {shape}; in an int8 file every matrix is int8, and "
                    "nothing else is"
                )

    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor, without the scales."""
        return self._shapes

    def get(self, name: str) -> Tensor:
        """Read one tensor; matrices are dequantized to float32, which is exact."""
        x = self._packed.get(name)
        if name not in self._scales:
            return x
        scale = self._packed.get(self._scales[name])
        if not all(0 < end < float("inf") for end in map(float, torch.aminmax(scale))):  # also true for nan
            raise CheckpointError(f"{self._scales[name]} has values that are not positive and finite")
        return dequantize(x, scale)


class PickleSource:
    """Tensors of .bin files, through torch's restricted unpickler, which runs no code."""

    def __init__(self, files: Mapping[Path, list[str] | None]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path, listed in files.items():
            try:
                part = torch.load(path, map_location="cpu", weights_only=True, mmap=_check_zip(path))
            except Exception as error:  # a broken pickle can raise anything
                raise CheckpointError(f"{path.name} cannot be read as plain tensors: {str(error)[:300]}") from None
            if not isinstance(part, dict) or not all(isinstance(k, str) and _is_plain(v) for k, v in part.items()):
                raise CheckpointError(f"{path.name} must contain only named tensors")
            if listed is not None and sorted(listed) != sorted(part):
                raise CheckpointError(f"{path.name} and the index disagree on which tensors it holds")
            self._tensors |= part

    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def get(self, name: str) -> Tensor:
        """Read one tensor."""
        return self._tensors[name]


def _check_zip(path: Path) -> bool:
    """Verify the CRCs of a zip-format .bin file, which torch does not; return False for the older format without them.

    Zip-format files can also be memory-mapped.
    """
    with path.open("rb") as f:
        is_zip = f.read(4) == b"PK\x03\x04"
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            # torch never compresses. A compressed member might expand beyond any memory.
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("its members are compressed")
            if (broken := archive.testzip()) is not None:
                raise ValueError(f"the member {broken} is damaged")
    return is_zip


def _is_plain(value: object) -> bool:
    """A dense CPU tensor whose storage holds all elements: a stride of 0 can make a few bytes look like terabytes."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def find_weight_files(folder: Path, *, int8: bool = False) -> dict[Path, list[str] | None]:
    """The weight files of a folder, with the tensor names that an index lists for each.

    safetensors take precedence over .bin, a single file over shards; int8 weights are always a single file.
    """
    for single in (INT8,) if int8 else (SAFETENSORS, BIN):
        if is_file(folder / single):
            return {folder / single: None}
        index = folder / f"{single}.index.json"
        if not int8 and is_file(index):
            return _shards(folder, index, Path(single).suffix)
    if int8:
        raise CheckpointError(f"config.json says that the weights are int8, but {INT8} is missing")
    if is_file(folder / INT8):
        raise CheckpointError(f"{folder.name} has {INT8}, but config.json does not say that the weights are int8")
    raise CheckpointError(f"{folder.name} has no weights: neither {SAFETENSORS} nor {BIN}, nor an index of either")


def open_weights(folder: Path, *, int8: bool = False) -> TensorSource:
    """Open the weights of a folder."""
    files = find_weight_files(folder, int8=int8)
    if any(path.suffix == ".bin" for path in files):
        return PickleSource(files)
    return Int8Source(SafetensorsSource(files)) if int8 else SafetensorsSource(files)


def _shards(folder: Path, index: Path, suffix: str) -> dict[Path, list[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index.name}: weight_map={weight_map!r:.80} must name a file for each tensor")
    files: dict[Path, list[str] | None] = {}
    for name, file in weight_map.items():
        # A shard is a plain name in the same folder: anything else could read files outside of it.
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(suffix):
            raise CheckpointError(f"{index.name}: {name} names the file {file!r:.80}; allowed: plain {suffix} names")
        path = folder / file
        if path not in files:
            if "\0" in file or not is_file(path):
                raise CheckpointError(f"{index.name} names {file!r:.80}, which is missing")
            files[path] = []
        listed = files[path]
        assert listed is not None
        listed.append(name)
    return files


# --- casting and quantization ---


def cast(tensors: Mapping[str, Tensor], precision: StoredPrecision | None) -> dict[str, Tensor]:
    """Cast or quantize tensors; a tensor that overflows raises an error that names it."""
    if precision is None:
        return dict(tensors)
    if precision == "int8":
        return to_int8(tensors)
    halves = {name: x.half() for name, x in tensors.items()}
    for name, x in halves.items():
        _check_finite(x, name, "fp16")
    return halves


def to_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Quantize every matrix `X` (R, …) to int8, with `X.scale` (R,) in float32; leave everything else unchanged.

    >>> packed = to_int8({"w": torch.tensor([[127.0, -2.2], [0.0, 0.0]]), "b": torch.zeros(2)})
    >>> {name: x.tolist() for name, x in packed.items()}["w"], packed["w.scale"][0].item(), list(packed)
    ([[127, -2], [0, 0]], 1.0, ['w', 'w.scale', 'b'])
    """
    packed: dict[str, Tensor] = {}
    for name, x in tensors.items():
        _check_finite(x, name, "int8")
        packed[name] = x
        if x.ndim > 1:
            packed[name], packed[_scale_of(name)] = quantize(x)
    return packed


def _scale_of(name: str) -> str:
    return f"{name}.scale"


def _check_finite(x: Tensor, name: str, precision: StoredPrecision) -> None:
    # Below the largest float32, so that a scale that is rounded up does not overflow.
    if not all(abs(float(end)) <= 2.0**127 for end in torch.aminmax(x)):  # also true for nan
        raise CheckpointError(f"{name} has values that are not finite in {precision}; it cannot be saved so")


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialize tensors as safetensors."""
    return to_safetensors(dict(tensors), metadata={"format": "pt"})
