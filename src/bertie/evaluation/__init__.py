"""Evaluation of models: scores with confidence intervals, calibration, leaks, label noise, reports."""
