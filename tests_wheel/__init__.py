"""The commands of the README and the documentation, run from an installed wheel: make test-wheel."""
