"""Checkpoint families: one table each, read in both directions. `blueprint` is what the rest of Bertie calls."""

from bertie.families.blueprint import FAMILIES, LABELLED, Blueprint, blueprint, headed, recipe_for

__all__ = ["FAMILIES", "LABELLED", "Blueprint", "blueprint", "headed", "recipe_for"]
