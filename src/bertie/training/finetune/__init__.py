"""Fine-tuning on labelled data: reading it, one training adapter per task, runs over several seeds, reports."""
