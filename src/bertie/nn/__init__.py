"""The parts of an encoder: one config-driven encoder over flat tokens, its heads and its pooling."""
