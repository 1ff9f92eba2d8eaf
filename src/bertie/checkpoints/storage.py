"""Files of a model folder: tensors read one at a time, JSON read with care, folders written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from bertie.checkpoints.convert import Shape, TensorSource
from bertie.errors import CheckpointError, ExistsError

CHECKSUMS = "checksums.json"
SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"
# Under a name of its own: others do not look for it. From model.safetensors they would take the codes for the weights.
INT8 = "model.int8.safetensors"

StoredPrecision = Literal["fp16", "int8"]  # of weight files that are smaller than the weights in memory


def is_file(path: Path) -> bool:
    """Whether there is such a file; one that cannot be asked about (no permission, no possible name) is an error."""
    try:
        return path.is_file()
    except OSError as error:
        raise CheckpointError(f"{path.name:.80} cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read as JSON: {error}") from None
    if not _shallow(value, 64):  # errors show values, and showing a tower of brackets overflows the stack
        raise CheckpointError(f"{path.name} is nested more than 64 deep")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds {type(value).__name__}; it must hold an object")
    return value


def _shallow(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_shallow(one, depth - 1) for one in inner)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of which each key is there once: of two, no reader can know which one was meant."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r:.80} is there twice")
    return value


def to_json(value: Mapping[str, Any]) -> bytes:
    """As the field writes it: two spaces, keys in order."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


# --- reading tensors ---


class SafetensorsSource:
    """Tensors of one or more safetensors files.

    A file is opened anew for each tensor, so that the pages of the last one are let go: the peak stays near one copy
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
                raise CheckpointError(f"{path.name} is not a whole safetensors file: {error}") from None
            if listed is not None and sorted(listed) != sorted(names):
                odd = sorted(set(listed) ^ set(names))
                raise CheckpointError(f"{path.name} and the index disagree on {', '.join(odd[:8])}")
            self._file |= dict.fromkeys(names, path)

    def shapes(self) -> Mapping[str, Shape]:
        """Every name with its shape."""
        return self._shapes

    def dtypes(self) -> Mapping[str, str]:
        """Every name with its type, as safetensors spells it: F32, I8, …"""
        return self._dtypes

    def get(self, name: str) -> Tensor:
        """One tensor."""
        path = self._file[name]
        try:
            with safe_open(path, framework="pt") as f:
                tensor: Tensor = f.get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{path.name}: {name} cannot be read: {error}") from None
        return tensor


class Int8Source:
    """Tensors that `to_int8` packed, unpacked one at a time."""

    def __init__(self, packed: SafetensorsSource) -> None:
        held, dtypes = packed.shapes(), packed.dtypes()
        self._packed = packed
        self._scales = {name: _scale_of(name) for name, dtype in dtypes.items() if dtype == "I8"}
        for name, scale in self._scales.items():
            if scale not in held:
                raise CheckpointError(f"{name} is int8, and {scale} is missing")
            if dtypes[scale] != "F32" or held[scale] != held[name][:1]:
                raise CheckpointError(
                    f"{scale} holds {dtypes[scale]} of shape {held[scale]}; {name} needs F32 of shape {held[name][:1]}"
                )
        scales = set(self._scales.values())
        self._shapes = {name: shape for name, shape in held.items() if name not in scales}
        for name, shape in self._shapes.items():
            if (len(shape) > 1) != (name in self._scales):
                raise CheckpointError(
                    f"{name} holds {dtypes[name]} of shape {shape}; where weights are int8, every matrix is, and "
                    "nothing else"
                )

    def shapes(self) -> Mapping[str, Shape]:
        """Every name with its shape, without the scales."""
        return self._shapes

    def get(self, name: str) -> Tensor:
        """One tensor; a matrix in float32, where a code times its scale is exact."""
        x = self._packed.get(name)
        if name not in self._scales:
            return x
        scale = self._packed.get(self._scales[name])
        if not all(0 < end < float("inf") for end in map(float, torch.aminmax(scale))):  # neither is nan
            raise CheckpointError(f"{self._scales[name]} holds numbers that are not positive and finite")
        return dequantize(x, scale)


class PickleSource:
    """Tensors of .bin files, through the unpickler that knows tensors and nothing else."""

    def __init__(self, files: Mapping[Path, list[str] | None]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path, listed in files.items():
            try:
                part = torch.load(path, map_location="cpu", weights_only=True, mmap=_check_zip(path))
            except Exception as error:  # whatever an unpickler meets in a broken file
                raise CheckpointError(f"{path.name} cannot be read as plain tensors: {str(error)[:300]}") from None
            if not isinstance(part, dict) or not all(isinstance(k, str) and _is_plain(v) for k, v in part.items()):
                raise CheckpointError(f"{path.name} must hold tensors by name and nothing else")
            if listed is not None and sorted(listed) != sorted(part):
                raise CheckpointError(f"{path.name} and the index disagree on which tensors it holds")
            self._tensors |= part

    def shapes(self) -> Mapping[str, Shape]:
        """Every name with its shape."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def get(self, name: str) -> Tensor:
        """One tensor."""
        return self._tensors[name]


def _check_zip(path: Path) -> bool:
    """Compare the parts of a .bin with the checksums inside it, which torch itself does not; old ones have none.

    Whether it has any, which also means that it can be read in place.
    """
    with path.open("rb") as f:
        is_zip = f.read(4) == b"PK\x03\x04"
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            # torch stores and never packs. What is packed might unpack to more than any machine holds.
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("its parts are compressed")
            if (broken := archive.testzip()) is not None:
                raise ValueError(f"the part {broken} is damaged")
    return is_zip


def _is_plain(value: object) -> bool:
    """A dense tensor on the CPU whose numbers are all there: a few bytes can claim to be stretched over terabytes."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def weight_files(folder: Path, *, packed: bool = False) -> dict[Path, list[str] | None]:
    """The files that hold a folder's weights, with the names that an index lists for each.

    Safetensors before .bin, one file before several; `packed` to int8 there is one.
    """
    for single in (INT8,) if packed else (SAFETENSORS, BIN):
        if is_file(folder / single):
            return {folder / single: None}
        index = folder / f"{single}.index.json"
        if not packed and is_file(index):
            return _shards(folder, index, Path(single).suffix)
    if packed:
        raise CheckpointError(f"config.json says that the weights are int8, and {INT8} is not there")
    if is_file(folder / INT8):
        raise CheckpointError(f"{folder.name} holds {INT8}, and config.json does not say that the weights are int8")
    raise CheckpointError(f"{folder.name} holds no weights: neither {SAFETENSORS} nor {BIN}, nor an index of either")


def open_weights(folder: Path, *, packed: bool = False) -> TensorSource:
    """The weights of a folder. `packed`: they are int8, which the folder itself does not say for sure."""
    files = weight_files(folder, packed=packed)
    if any(path.suffix == ".bin" for path in files):
        return PickleSource(files)
    return Int8Source(SafetensorsSource(files)) if packed else SafetensorsSource(files)


def _shards(folder: Path, index: Path, suffix: str) -> dict[Path, list[str] | None]:
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{index.name}: weight_map={where!r:.80} must name a file for each tensor")
    files: dict[Path, list[str] | None] = {}
    for name, file in where.items():
        # A shard is a plain name in the same folder: anything else could reach files that are none of ours.
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(suffix):
            raise CheckpointError(f"{index.name}: {name} names the file {file!r:.80}; allowed: plain {suffix} names")
        path = folder / file
        if path not in files:
            if "\0" in file or not is_file(path):
                raise CheckpointError(f"{index.name} names {file!r:.80}, which is not there")
            files[path] = []
        listed = files[path]
        assert listed is not None
        listed.append(name)
    return files


# --- smaller weights ---

_LEVELS = 127  # on each side of zero
_AT_ONCE = 1 << 18  # numbers


def smaller(tensors: Mapping[str, Tensor], to: StoredPrecision | None) -> dict[str, Tensor]:
    """The same tensors in fewer bytes; what cannot be held so is an error that names it."""
    if to is None:
        return dict(tensors)
    if to == "int8":
        return to_int8(tensors)
    cast = {name: x.half() for name, x in tensors.items()}
    for name, x in cast.items():
        _finite(x, name, "fp16")
    return cast


def to_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every matrix `X` (R, …) as int8, with `X.scale` (R,) in float32; everything else as it is.

    >>> packed = to_int8({"w": torch.tensor([[127.0, -2.2], [0.0, 0.0]]), "b": torch.zeros(2)})
    >>> {name: x.tolist() for name, x in packed.items()}["w"], packed["w.scale"][0].item(), list(packed)
    ([[127, -2], [0, 0]], 1.0, ['w', 'w.scale', 'b'])
    """
    packed: dict[str, Tensor] = {}
    for name, x in tensors.items():
        _finite(x, name, "int8")
        packed[name] = x
        if x.ndim > 1:
            packed[name], packed[_scale_of(name)] = quantize(x)
    return packed


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(R, …) -> int8 (R, …) and float32 (R,): codes times their row's scale are the row, to within half the scale.

    A scale has 16 bits, so that its products with codes are exact in float32: quantized again, they come out the same.
    The largest number of a row sets it. The scale of least squared error, which may clip, is no better for rows of a
    few hundred weights.
    """
    rows = x.detach().cpu().flatten(1)  # (R, n)
    codes, scales = torch.empty(rows.shape, dtype=torch.int8), torch.empty(len(rows))
    for part, code, scale in _blocks(rows, codes, scales):
        exact = part.double()
        mantissa, exponent = torch.frexp(exact.abs().amax(dim=1) / _LEVELS)
        steps = torch.ldexp((mantissa * 2**16).ceil() / 2**16, exponent)
        steps.clamp_(min=2.0**-100)  # rows of zeros, and of what is as good as zero
        code.copy_((exact / steps[:, None]).round_())
        scale.copy_(steps)
    return codes.view(x.shape), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """(R, …) and (R,) -> float32 (R, …), exactly.

    >>> dequantize(*quantize(torch.tensor([[127.0, -2.2]]))).tolist()
    [[127.0, -2.0]]
    """
    rows = torch.empty(codes.shape).flatten(1)
    for part, code, scale in _blocks(rows, codes.flatten(1), scales):
        torch.mul(code.float(), scale[:, None], out=part)
    return rows.view(codes.shape)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each, a few at a time: what is worked out for them stays small, and in the cache."""
    size = max(1, _AT_ONCE // tensors[0].shape[1])
    return zip(*(torch.split(one, size) for one in tensors), strict=True)


def _scale_of(name: str) -> str:
    return f"{name}.scale"


def _finite(x: Tensor, name: str, to: StoredPrecision) -> None:
    # Below the largest of float32, so that a scale that is rounded up does not leave it.
    if not all(abs(float(end)) <= 2.0**127 for end in torch.aminmax(x)):  # nor is it nan
        raise CheckpointError(f"{name} holds numbers that are not finite in {to}; it cannot be saved so")


# --- checksums ---

# What any reader here opens. Other files (a model card, a training log) may be added to a folder and changed in it.
_READ = re.compile(
    r"(config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|modules|sentence_\S+_config"
    r"|config_sentence_transformers|.*\.index)\.json|(model.*|heads)\.safetensors|pytorch_model.*\.bin|.*\.model"
    r"|vocab\.txt|merges\.txt"
)


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def verify(folder: Path) -> None:
    """Compare a folder that carries checksums with them; one that carries none passes."""
    path = folder / CHECKSUMS
    if not is_file(path):
        return
    listed = read_json(path)
    try:
        # It is written in one way only, so that a damage to itself is seen as well.
        if path.read_bytes() != to_json(listed):
            raise CheckpointError(f"{CHECKSUMS} is not as it was written; delete it if you changed the folder yourself")
        for name, digest in listed.items():
            if not isinstance(digest, str) or ".." in Path(name).parts or Path(name).is_absolute() or "\0" in name:
                raise CheckpointError(f"{CHECKSUMS}: the entry {name!r:.80} is not a file's checksum")
            if not is_file(folder / name):
                raise CheckpointError(f"{CHECKSUMS} names {name!r:.80}, which is not there")
            if _digest(folder / name) != digest:
                raise CheckpointError(
                    f"{name} has changed since the folder was saved. If you changed it on purpose, delete {CHECKSUMS}"
                )
        for inside in sorted({Path(name).parent for name in ("config.json", *listed)}):
            for file in sorted((folder / inside).iterdir()):
                if _READ.fullmatch(file.name) and (inside / file.name).as_posix() not in listed:
                    raise CheckpointError(
                        f"{inside / file.name} was added since the folder was saved. If you did so on purpose, delete "
                        f"{CHECKSUMS}"
                    )
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise CheckpointError(f"{CHECKSUMS} cannot be compared with the folder: {error}") from None


# --- writing ---


def save_folder(
    folder: Path,
    files: Mapping[str, bytes],
    tensors: Mapping[str, Tensor],
    *,
    weights: str = SAFETENSORS,
    overwrite: bool = False,
) -> None:
    """Write a folder under a temporary name with checksums, then rename it: it is there whole, or not at all.

    `weights` is where in it the tensors go.
    """
    folder = Path(os.path.abspath(folder))
    if folder.exists() and not folder.is_dir():
        raise ExistsError(f"{folder} is a file; a model is saved as a folder")
    if folder.exists() and not overwrite and any(folder.iterdir()):
        raise ExistsError(f"{folder} is there already; pass overwrite=True to replace it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, data in files.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_bytes(data)
        (draft / weights).parent.mkdir(parents=True, exist_ok=True)
        _write_safetensors(draft / weights, tensors)
        names = sorted(p.relative_to(draft).as_posix() for p in draft.rglob("*") if p.is_file())
        (draft / CHECKSUMS).write_bytes(to_json({name: _digest(draft / name) for name in names}))
        draft.chmod(0o755)  # a temporary folder is closed to others
        put(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def put(draft: Path, folder: Path) -> None:
    """Rename a draft to its place. What stands there is set aside, and comes back if the renaming fails."""
    if not folder.exists():
        os.rename(draft, folder)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        os.rename(folder, aside / folder.name)
        try:
            os.rename(draft, folder)
        except BaseException:
            os.rename(aside / folder.name, folder)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    # The field's readers look for this mark.
    save_file({name: t.cpu() for name, t in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library makes it unreadable for others


def tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A small safetensors file in memory."""
    return to_safetensors(dict(tensors), metadata={"format": "pt"})
