"""Heads beside those that a family's checkpoints hold: made afresh, named by their users, kept with the checkpoint.

What transformers has no place for stands in config.json under one key of our own, which it ignores:

    "bertie": {
      "calibration": {"classify": {"temperature": 1.3, …}},             of the family's own heads
      "heads": {"topics": {"kind": "classify", "labels": {…}, …}},      of named heads, with their shapes
      "weights": "int8"                                                 how matrices are kept, if not as they are
    }

The weights of named heads lie in heads.safetensors, as `<head>.<parameter>`. Where weights are int8, there as in
model.int8.safetensors, a matrix `X` (R, …) is int8 and stands beside its `X.scale` (R,) in float32: row r of the
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

from bertie.checkpoints import storage as store
from bertie.checkpoints.convert import WeightMap, same
from bertie.config import Calibration, HeadConfig, HeadInfo, HeadName
from bertie.errors import CheckpointError, ConfigError
from bertie.nn.heads import Head
from bertie.nn.model import Model, Unfilled, with_memory

KEY, FILE = "bertie", "heads.safetensors"

Facts = TypeVar("Facts")


# --- making ---


def empty(cfg: HeadConfig, model: Model) -> Head:
    """A head for this model, with shapes but without memory."""
    try:
        with torch.device("meta"), Unfilled():
            return Head(cfg, model.config, torch.empty_like(model.encoder.embeddings.words.weight, device="meta"))
    except RuntimeError as error:
        raise ConfigError(f"{cfg} describes a head that no machine can hold: {error}") from None


@torch.no_grad()
def fresh(cfg: HeadConfig, model: Model, seed: int) -> Head:
    """A head with fresh weights: matrices normal with the config's deviation, biases zero, norms one.

    They come from `seed` alone: the global generator is left as it was, and every device gets the same numbers.
    """
    head = with_memory(empty(cfg, model).to(model.dtype), model.device)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.empty(parameter.shape).normal_(std=model.config.init_std, generator=draw))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return head


@torch.no_grad()
def take_over(head: Head, weight_map: WeightMap, model: Model, held: WeightMap) -> None:
    """Copy into a fresh head what the model holds under the same names of tensors, all but the outputs.

    So does transformers: a classifier that stands on a pooler begins with the one that was pretrained. `weight_map` is that
    of a model with this head alone, `held` that of the model.
    """
    have = dict(model.named_parameters())
    ours = {rule.theirs: have[rule.ours] for rule in held.rules}
    mine = dict(head.named_parameters())
    for rule in weight_map.rules:
        part = rule.ours.split(".", 2)[2] if rule.ours.startswith("heads.") else ""
        source = ours.get(rule.theirs)
        if part and not part.startswith("out.") and source is not None and source.shape == mine[part].shape:
            mine[part].copy_(source)


def check_name(name: str, info: HeadInfo, model: Model) -> None:
    """Refuse a name that a head of this model cannot have."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ConfigError(f"head {name!r:.80}: a head's name is made of letters, digits, - and _")
    if name in model.heads:
        raise ConfigError(f"head {name!r}: there is one of this name already; choose another")
    if hasattr(model.heads, name):
        raise ConfigError(f"head {name!r}: torch keeps this name for itself; choose another")
    if name in get_args(HeadName) and name != info.kind:
        raise ConfigError(f"head {name!r} of kind {info.kind!r}: the name of a kind is for heads of that kind")


# --- weights of named heads ---


def tensors(model: Model, names: list[str]) -> dict[str, torch.Tensor]:
    """The weights of named heads, as heads.safetensors holds them."""
    found = {f"{name}.{part}": p.detach() for name in names for part, p in model.head(name).named_parameters()}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def load(model: Model, named: Mapping[str, HeadConfig], folder: Path, *, packed: bool = False) -> None:
    """Add the named heads of a folder to a model, with their weights unless the model has none either.

    `packed`: the weights are int8.
    """
    path = folder / FILE
    if store.is_file(path) and not named:
        raise CheckpointError(f"{FILE} is there, and config.json describes no heads under {KEY!r}")
    if not named:
        return
    if not store.is_file(path):
        raise CheckpointError(f"config.json describes the heads {', '.join(named)}, and {FILE} is not there")
    file = store.SafetensorsSource({path: None})
    added = nn.ModuleDict()
    for name, cfg in named.items():
        try:
            added[name] = empty(cfg, model)
        except ConfigError as error:
            raise ConfigError(f"config.json: {KEY}.heads.{name}.head: {error}") from None
    weight_map = WeightMap([same(name, name) for name, _ in added.named_parameters()], rename=str)
    try:
        source = store.Int8Source(file) if packed else file
        weight_map.check(added, source.shapes(), ())
        if model.device.type != "meta":
            added = with_memory(added.to(model.dtype), model.device)
            weight_map.load(added, source)
    except CheckpointError as error:
        raise CheckpointError(f"{FILE}: {error}") from None
    for name, head in added.items():
        model.heads[name] = head.train(model.training)


# --- the key in config.json ---


def to_key(
    infos: Mapping[str, HeadInfo], named: Mapping[str, HeadConfig], weights: store.StoredPrecision | None = None
) -> dict[str, Any]:
    """What goes under the key; nothing where there is nothing to say."""
    own = {name: info.calibration for name, info in infos.items() if name not in named}
    said = {name: asdict(one) for name, one in own.items() if one != Calibration()}
    described = {name: asdict(infos[name]) | {"head": asdict(cfg)} for name, cfg in named.items()}
    packed = "int8" if weights == "int8" else None
    parts = (("calibration", said), ("heads", described), ("weights", packed))
    return {part: value for part, value in parts if value}


def is_packed(raw: Any) -> bool:
    """Whether the key says that the weights are int8; any other word for them is an error."""
    if not isinstance(raw, dict) or "weights" not in raw:
        return False
    if raw["weights"] != "int8":
        raise CheckpointError(f"config.json: {KEY}.weights={raw['weights']!r:.80} is not supported; allowed: int8")
    return True


def read_key(raw: Any) -> tuple[dict[str, Calibration], dict[str, tuple[HeadInfo, HeadConfig]]]:
    """The calibrations of the family's own heads, and the named heads. Whatever is not known is an error."""
    where = f"config.json: {KEY}"
    given = {name: part for name, part in _object(raw, where).items() if name != "weights"}  # see `is_packed`
    parts = {name: _object(part, f"{where}.{name:.80}") for name, part in given.items()}
    if unknown := sorted(set(parts) - {"calibration", "heads"}):
        raise ConfigError(f"{where}: {', '.join(unknown):.80} is not supported; allowed: calibration, heads, weights")
    calibrations = {
        name: _facts(Calibration, one, f"{where}.calibration.{name:.80}")
        for name, one in parts.get("calibration", {}).items()
    }
    named = {}
    for name, one in parts.get("heads", {}).items():
        at = f"{where}.heads.{name:.80}"
        described = _object(one, at)
        if "head" not in described:
            raise ConfigError(f"{at}: head is missing")
        info = _facts(HeadInfo, {key: value for key, value in described.items() if key != "head"}, at)
        named[name] = (info, _facts(HeadConfig, described["head"], f"{at}.head"))
    return calibrations, named


def _object(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}={raw!r:.80} must be an object")
    return raw


def _facts(kind: type[Facts], raw: Any, where: str) -> Facts:
    """A dataclass from JSON: each key is a field and of its type; a field left out takes its default, if it has one."""
    assert is_dataclass(kind)
    found = _object(raw, where)
    hints = get_type_hints(kind)
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    for what, names in (("is not known", set(found) - set(hints)), ("is missing", needed - set(found))):
        if names:
            raise ConfigError(f"{where}: {', '.join(sorted(names)):.80} {what}; allowed: {', '.join(hints)}")
    values = {name: _value(hints[name], value, f"{where}.{name}") for name, value in found.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _value(hint: Any, value: Any, where: str) -> Any:
    """A field's value from JSON, by the field's type."""
    if get_origin(hint) is UnionType:
        if value is None and NoneType in get_args(hint):
            return None
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    if isinstance(hint, type) and is_dataclass(hint):
        return _facts(hint, value, where)
    if hint == dict[int, str]:  # JSON's keys are strings, in the order of strings
        numbers = {str(i): i for i in range(len(_object(value, where)))}
        if value.keys() == numbers.keys() and all(isinstance(name, str) for name in value.values()):
            return {i: value[number] for number, i in numbers.items()}
        raise ConfigError(f"{where}={value!r:.80} must be names for the numbers from 0 up")
    if get_origin(hint) is Literal:
        allowed, sound = ", ".join(get_args(hint)), value in get_args(hint)
    elif hint is float:
        allowed = "a number"
        sound = type(value) in (int, float) and abs(value) <= sys.float_info.max
    else:
        allowed = {int: "a whole number", bool: "true, false", str: "a string"}[hint]
        sound = type(value) is hint and (hint is not int or 0 <= value < 2**31)
    if not sound:
        raise ConfigError(f"{where}={value!r:.80} is not supported; allowed: {allowed}")
    return float(value) if hint is float else value
