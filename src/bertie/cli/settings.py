"""Defaults of flags, from the environment and a configuration file.

Flags take precedence over environment variables, and these over the configuration file. The file is
`~/.config/bertie/config.toml` (`$XDG_CONFIG_HOME/bertie/config.toml`), or the path in BERTIE_CONFIG:

    model = "sentence-transformers/all-MiniLM-L6-v2"
    device = "cuda:1"
    precision = "bf16"
    color = "never"
    quiet = true
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertie.config import PRECISIONS
from bertie.data.terminal import COLOR_MODES, ColorMode
from bertie.errors import ConfigError
from bertie.recipe import refuse_unknown

KEYS = ("model", "device", "precision", "color", "quiet")
ENVIRONMENT = {"model": "BERTIE_MODEL", "device": "BERTIE_DEVICE", "precision": "BERTIE_PRECISION"}
CHOICES = {"precision": PRECISIONS, "color": COLOR_MODES}


@dataclass(frozen=True, slots=True)
class Settings:
    """Defaults of flags; None: not set."""

    model: str | None = None
    device: str | None = None
    precision: str | None = None
    color: ColorMode = "auto"
    quiet: bool = False
    sources: dict[str, str] = field(default_factory=dict)  # where each setting comes from: a variable or a file


def config_path(environment: Mapping[str, str] = os.environ) -> Path:
    """The path of the configuration file, whether or not it exists."""
    if named := environment.get("BERTIE_CONFIG"):
        return Path(named).expanduser()
    folder = environment.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "bertie" / "config.toml"


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read the environment and the configuration file."""
    path = config_path(environment)
    values = _read_file(path, must_exist=bool(environment.get("BERTIE_CONFIG")))
    sources = dict.fromkeys(values, str(path))
    for name, variable in ENVIRONMENT.items():
        if value := environment.get(variable):
            values[name], sources[name] = _check(name, value, variable), variable
    return Settings(**values, sources=sources)


def _read_file(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"BERTIE_CONFIG={path}: no such file") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    refuse_unknown(str(path), values, KEYS)
    values = {name: _check(name, value, f"{path}: {name}") for name, value in values.items()}
    if str(values.get("model", "")).startswith(
        (".", "~")
    ):  # relative to the configuration file, not to the current folder
        values["model"] = os.path.abspath(path.parent / os.path.expanduser(values["model"]))
    return values


def _check(name: str, value: Any, where: str) -> Any:
    if name == "quiet":
        if not isinstance(value, bool):
            raise ConfigError(f"{where}={value!r} must be true or false")
        return value
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}={value!r} must be a string")
    if name in CHOICES and value not in CHOICES[name]:
        raise ConfigError(f"{where}={value!r} must be one of {', '.join(CHOICES[name])}")
    return value
