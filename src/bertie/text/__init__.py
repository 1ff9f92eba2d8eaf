"""From text to flat batches of tokens."""
