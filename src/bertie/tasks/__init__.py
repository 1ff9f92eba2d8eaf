"""One file a task: texts in, results out."""
