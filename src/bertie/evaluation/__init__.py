"""How good a model is, and how far that can be trusted: scores with intervals, calibration, leaks, noise, reports."""
