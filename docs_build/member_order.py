"""The order of members in the Python reference: those that a class defines itself come before inherited ones."""

from __future__ import annotations

from typing import Any

from mkdocstrings_handlers.python._internal import rendering


def own_members_first(item: Any) -> tuple[int, float]:
    """Sort by the class that defines a member, then by line. (Aliases have no lines.)"""
    owner = item.parent.final_target if item.parent.is_alias else item.parent
    target = item.final_target if item.is_alias else item
    ancestors = [owner, *owner.mro()] if owner.is_class else [owner]
    rank = next((i for i, ancestor in enumerate(ancestors) if ancestor is target.parent), len(ancestors))
    return rank, target.lineno or float("inf")


def use() -> None:
    """Replace mkdocstrings' order by source, which puts inherited members first."""
    rendering._order_map["source"] = own_members_first
