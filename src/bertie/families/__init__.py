"""Checkpoint families: one table each, read in both directions. `blueprint` is what the rest of Bertie calls."""

from bertie.families.blueprint import FAMILIES, Blueprint, blueprint, recipe_for

__all__ = ["FAMILIES", "Blueprint", "blueprint", "recipe_for"]
