"""Backends in PyTorch."""
