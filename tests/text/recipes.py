"""The recipes of all families that have old vocabulary files."""

from bertie.checkpoints.model_spec import FAMILIES

RECIPES = {name: family.tokenizer for name, family in FAMILIES.items() if family.tokenizer is not None}
