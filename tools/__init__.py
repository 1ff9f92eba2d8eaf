"""Building, checking and releasing wheels: see docs/packaging.md."""
