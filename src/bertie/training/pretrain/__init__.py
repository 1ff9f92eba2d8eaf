"""Pretraining: corpora, packing, masking, objectives, distillation, recipes."""
