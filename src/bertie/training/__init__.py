"""Training: data, objectives, the optimizer and the loop."""
