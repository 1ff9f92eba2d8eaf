"""The sentence-transformers part of a model folder: text vectors and cross-encoders, read and written."""

from bertie.sentence.cross_encoder import CrossEncoderConfig
from bertie.sentence.modules import Dense, SentenceModules

__all__ = ["CrossEncoderConfig", "Dense", "SentenceModules"]
