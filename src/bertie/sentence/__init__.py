"""The sentence-transformers part of a model folder: text vectors, cross-encoders, sparse vectors; read and written."""

from bertie.sentence.cross_encoder import CrossEncoderConfig
from bertie.sentence.modules import Dense, SentenceModules
from bertie.sentence.splade import Splade

__all__ = ["CrossEncoderConfig", "Dense", "SentenceModules", "Splade"]
