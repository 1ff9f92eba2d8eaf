"""The data flow of inference, once: texts -> encodings -> windows -> batches -> forward pass -> decoded results."""
