"""Backends in plain torch."""
