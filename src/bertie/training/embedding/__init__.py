"""Training of embedding models: losses, hard-negative mining, token weighting."""
