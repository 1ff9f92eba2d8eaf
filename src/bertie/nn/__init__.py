"""Model parts: one config-driven encoder over flat batches, heads and pooling."""
