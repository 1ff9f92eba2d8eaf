"""The reference of recipes, from the dataclasses that check them."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from typing import Any

from bertie.recipe import Recipe


def render() -> str:
    """Markdown: a row per field of `[training]`, with its type, default and comment, and the keys of objectives."""
    from bertie.training.pretrain.pretrain_recipe import COMMON_KEYS, FINE_TUNING_KEYS, RUN_KEYS, objective_keys

    comments = field_comments(Recipe)
    rows = [
        f"| `{item.name}` | {_cell(item.type)} | `{_default(item)}` | {_cell(comments.get(item.name, ''))}"
        f"{' *(not in pretraining)*' if item.name in FINE_TUNING_KEYS else ''} |"
        for item in fields(Recipe)
    ]
    lines = [
        "## Fields of `[training]`\n",
        "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows]),
        "\nPretraining also has " + ", ".join(f"`{name}`" for name in RUN_KEYS) + ".\n",
        "## Keys of `[[objective]]`\n",
        "Of every kind: " + ", ".join(f"`{name}`" for name in COMMON_KEYS) + ".\n",
        "| kind | required | other keys |\n|---|---|---|",
    ]
    for kind, keys in objective_keys().items():
        optional = [name for name in keys.allowed if name not in keys.required]
        lines.append(f"| `{kind}` | {_names(keys.required)} | {_names(optional)} |")
    return "\n".join(lines)


def field_comments(cls: type) -> dict[str, str]:
    """The comment after each field of a dataclass, from its source."""
    pattern = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)
    return dict(pattern.findall(inspect.getsource(cls)))


def _default(item: Any) -> str:
    return "required" if item.default is MISSING else repr(item.default)


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: Any) -> str:
    return re.sub(r"([<>*_])(?![^`]*`)", r"\\\1", str(text).replace("|", "\\|"))
