"""Named heads: any number of additional heads over one encoder, and the calibration of all heads.

What transformers has no place for is stored in config.json under Bertie's own key, which transformers ignores:

    "bertie": {
      "calibration": {"classify": {"temperature": 1.3, …}},             for the family's own heads
      "heads": {"topics": {"kind": "classify", "labels": {…}, …}},      for named heads, with their shapes
      "weights": "int8"                                                 if the weight matrices are quantized
    }

The weights of named heads are stored in heads.safetensors, as `<head>.<parameter>`. If weights are int8, there as in
model.int8.safetensors, a matrix `X` (R, …) is int8 and is accompanied by `X.scale` (R,) in float32: row r of the
weights is `X[r] * X.scale[r]`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import nn

from bertie.checkpoints import storage, weight_files
from bertie.checkpoints.convert import WeightMap, same
from bertie.config import Calibration, HeadConfig, HeadInfo, HeadName
from bertie.errors import CheckpointError, ConfigError
from bertie.nn.heads import Head
from bertie.nn.model import Model, SkipInit, allocate
from bertie.nn.span_head import build_head

KEY, FILE = "bertie", "heads.safetensors"

Parsed = TypeVar("Parsed")


# --- new heads ---


def empty(cfg: HeadConfig, model: Model) -> Head:
    """Build a head for this model on the meta device, without allocating weights."""
    try:
        with torch.device("meta"), SkipInit():
            words = torch.empty_like(model.encoder.embeddings.words.weight, device="meta")
            return build_head(cfg, model.config, words)
    except RuntimeError as error:
        raise ConfigError(f"{cfg} describes a head that is too large to build: {error}") from None


@torch.no_grad()
def initialize(cfg: HeadConfig, model: Model, seed: int) -> Head:
    """Build a head with initial weights: matrices from a normal distribution, biases zero, norm weights one.

    They depend on `seed` alone: the global generator is not used, and every device gets the same numbers.
    """
    head = allocate(empty(cfg, model).to(model.dtype), model.device)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.empty(parameter.shape).normal_(std=model.config.init_std, generator=generator))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return head


@torch.no_grad()
def copy_shared_layers(head: Head, weight_map: WeightMap, model: Model, model_map: WeightMap) -> None:
    """Copy tensors of the same name from the model into a new head, except for the output layer.

    transformers does the same: a classifier over a pooler starts from the pretrained pooler. `weight_map` is that of a
    model with only this head, `model_map` that of the model.
    """
    parameters = dict(model.named_parameters())
    by_name = {rule.theirs: parameters[rule.ours] for rule in model_map.rules}
    targets = dict(head.named_parameters())
    for rule in weight_map.rules:
        part = rule.ours.split(".", 2)[2] if rule.ours.startswith("heads.") else ""
        source = by_name.get(rule.theirs)
        if part and not part.startswith("out.") and source is not None and source.shape == targets[part].shape:
            targets[part].copy_(source)


def check_name(name: str, info: HeadInfo, model: Model) -> None:
    """Reject a name that a head of this model cannot have."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ConfigError(f"head {name!r:.80}: a head's name may have letters, digits, - and _")
    if name in model.heads:
        raise ConfigError(f"head {name!r}: a head of this name already exists; choose another")
    if hasattr(model.heads, name):
        raise ConfigError(f"head {name!r}: torch reserves this name; choose another")
    if name in get_args(HeadName) and name != info.kind:
        raise ConfigError(
            f"head {name!r} of kind {info.kind!r}: the name of a head kind is reserved for heads of that kind"
        )


# --- weights of named heads ---


def tensors(model: Model, names: list[str]) -> dict[str, torch.Tensor]:
    """The weights of named heads, as stored in heads.safetensors."""
    parameters = {f"{name}.{part}": p.detach() for name in names for part, p in model.head(name).named_parameters()}
    return {name: tensor.contiguous() for name, tensor in parameters.items()}


def load(model: Model, named: Mapping[str, HeadConfig], folder: Path, *, int8: bool = False) -> None:
    """Add the named heads of a folder to a model, with their weights unless the model is on the meta device."""
    path = folder / FILE
    if storage.is_file(path) and not named:
        raise CheckpointError(f"{FILE} exists, but config.json describes no heads under {KEY!r}")
    if not named:
        return
    if not storage.is_file(path):
        raise CheckpointError(f"config.json describes the heads {', '.join(named)}, but {FILE} is missing")
    file = weight_files.SafetensorsSource({path: None})
    added = nn.ModuleDict()
    for name, cfg in named.items():
        try:
            added[name] = empty(cfg, model)
        except ConfigError as error:
            raise ConfigError(f"config.json: {KEY}.heads.{name}.head: {error}") from None
    weight_map = WeightMap([same(name, name) for name, _ in added.named_parameters()], rename=str)
    try:
        source = weight_files.Int8Source(file) if int8 else file
        weight_map.check(added, source.shapes(), ())
        if model.device.type != "meta":
            added = allocate(added.to(model.dtype), model.device)
            weight_map.load(added, source)
    except CheckpointError as error:
        raise CheckpointError(f"{FILE}: {error}") from None
    for name, head in added.items():
        model.heads[name] = head.train(model.training)


# --- Bertie's key in config.json ---


def to_key(
    infos: Mapping[str, HeadInfo],
    named: Mapping[str, HeadConfig],
    precision: weight_files.StoredPrecision | None = None,
) -> dict[str, Any]:
    """The value of the key; empty if there is nothing to store."""
    calibrations = {name: info.calibration for name, info in infos.items() if name not in named}
    calibrated = {name: asdict(value) for name, value in calibrations.items() if value != Calibration()}
    described = {name: asdict(infos[name]) | {"head": asdict(cfg)} for name, cfg in named.items()}
    weights = "int8" if precision == "int8" else None
    parts = (("calibration", calibrated), ("heads", described), ("weights", weights))
    return {part: value for part, value in parts if value}


def is_int8(raw: Any) -> bool:
    """Whether the key says that the weights are int8; any other value is an error."""
    if not isinstance(raw, dict) or "weights" not in raw:
        return False
    if raw["weights"] != "int8":
        raise CheckpointError(f"config.json: {KEY}.weights={raw['weights']!r:.80} is not supported; allowed: int8")
    return True


def read_key(raw: Any) -> tuple[dict[str, Calibration], dict[str, tuple[HeadInfo, HeadConfig]]]:
    """Read the calibrations of the family's own heads, and the named heads. Unknown entries are errors."""
    where = f"config.json: {KEY}"
    entries = {name: part for name, part in _object(raw, where).items() if name != "weights"}  # see `is_int8`
    parts = {name: _object(part, f"{where}.{name:.80}") for name, part in entries.items()}
    if unknown := sorted(set(parts) - {"calibration", "heads"}):
        raise ConfigError(f"{where}: {', '.join(unknown):.80} is not supported; allowed: calibration, heads, weights")
    calibrations = {
        name: _parse(Calibration, value, f"{where}.calibration.{name:.80}")
        for name, value in parts.get("calibration", {}).items()
    }
    named = {}
    for name, value in parts.get("heads", {}).items():
        at = f"{where}.heads.{name:.80}"
        described = _object(value, at)
        if "head" not in described:
            raise ConfigError(f"{at}: head is missing")
        info = _parse(HeadInfo, {key: value for key, value in described.items() if key != "head"}, at)
        named[name] = (info, _parse(HeadConfig, described["head"], f"{at}.head"))
    return calibrations, named


def _object(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}={raw!r:.80} must be an object")
    return raw


def _parse(kind: type[Parsed], raw: Any, where: str) -> Parsed:
    """Parse a dataclass from JSON, checking every field's type; missing fields take their defaults, if any."""
    assert is_dataclass(kind)
    entries = _object(raw, where)
    hints = get_type_hints(kind)
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    for what, names in (("is not known", set(entries) - set(hints)), ("is missing", needed - set(entries))):
        if names:
            raise ConfigError(f"{where}: {', '.join(sorted(names)):.80} {what}; allowed: {', '.join(hints)}")
    values = {name: _value(hints[name], value, f"{where}.{name}") for name, value in entries.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _value(hint: Any, value: Any, where: str) -> Any:
    """Parse a field's value from JSON, by the field's type."""
    if get_origin(hint) is UnionType:
        if value is None and NoneType in get_args(hint):
            return None
        (hint,) = (option for option in get_args(hint) if option is not NoneType)
    if isinstance(hint, type) and is_dataclass(hint):
        return _parse(hint, value, where)
    if hint == dict[int, str]:  # JSON's keys are strings, sorted as strings
        numbers = {str(i): i for i in range(len(_object(value, where)))}
        if value.keys() == numbers.keys() and all(isinstance(name, str) for name in value.values()):
            return {i: value[number] for number, i in numbers.items()}
        raise ConfigError(f"{where}={value!r:.80} must map the class indices from 0 up to names")
    if get_origin(hint) is Literal:
        allowed, valid = ", ".join(get_args(hint)), value in get_args(hint)
    elif hint is float:
        allowed = "a number"
        valid = type(value) in (int, float) and abs(value) <= sys.float_info.max
    else:
        allowed = {int: "a whole number", bool: "true, false", str: "a string"}[hint]
        valid = type(value) is hint and (hint is not int or 0 <= value < 2**31)
    if not valid:
        raise ConfigError(f"{where}={value!r:.80} is not supported; allowed: {allowed}")
    return float(value) if hint is float else value
