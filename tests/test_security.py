"""docs/security.md says what the code does: defaults, flags, and tests that exist."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bertie.cli.main import build_parser

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "security.md"


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = PAGE.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def value_of(name: str) -> Any:
    """A default: of a flag of `bertie serve`, or of a name in a module."""
    if name.startswith("--"):
        return getattr(build_parser().parse_args(["serve"]), name[2:].replace("-", "_"))
    parts = name.split(".")
    depth = next(n for n in range(len(parts), 0, -1) if (ROOT / "src" / Path(*parts[:n])).with_suffix(".py").exists())
    owner, *rest = parts[depth:]
    found = getattr(import_module(".".join(parts[:depth])), owner)
    return reduce(getattr, rest, found() if isinstance(found, type) else found)


@pytest.mark.parametrize(("limit", "name", "default"), [tuple(row[:3]) for row in rows("Limits")])
def test_defaults_of_the_table(limit: str, name: str, default: str) -> None:
    if name == "key file":
        return
    assert value_of(name.strip("`")) == float(default.replace(",", "")), limit


def test_every_limit_of_the_server_is_in_the_table() -> None:
    listed = {row[1].strip("`") for row in rows("Limits")}
    serve = build_parser()._subparsers._group_actions[0].choices["serve"]  # type: ignore[index]
    for group in serve._action_groups:
        if "limits" in (group.title or ""):
            flags = {action.option_strings[0] for action in group._group_actions}
            assert flags - listed <= {"--batch-tokens", "--grace"}, "which limit nobody"


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`((?:tests|benchmarks)/[\w/.]+(?:::\w+)?)`", PAGE.read_text("utf-8"))))
)
def test_named_tests_exist(name: str) -> None:
    path, _, function = name.partition("::")
    assert (ROOT / path).is_file(), path
    assert f"def {function}(" in (ROOT / path).read_text("utf-8") if function else True, name


def test_the_policy_names_no_address_of_its_own() -> None:
    policy = (ROOT / "SECURITY.md").read_text("utf-8")
    assert "@" not in policy
    for heading in ("Supported versions", "Reporting a vulnerability", "What to expect"):
        assert f"## {heading}\n" in policy
    for page in (policy, PAGE.read_text("utf-8")):
        assert "security.md" in page.lower()
