"""Fine-tuning on labelled data: reading it, one training adapter per task, runs over several seeds, reports."""

from bertie.training.finetune.base import TaskTraining, fit, fit_labelled, score, training_for

__all__ = ["TaskTraining", "fit", "fit_labelled", "score", "training_for"]
