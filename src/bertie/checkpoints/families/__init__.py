"""Checkpoint families: one table per family, read in both directions."""
