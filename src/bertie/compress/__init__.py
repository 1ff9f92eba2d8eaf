"""Compression of trained models: quantization and its report."""
