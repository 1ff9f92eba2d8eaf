"""Bertie: one toolkit for encoder-only transformers.

>>> import bertie
>>> model = bertie.load("path or hub id")    # the right task object                     # doctest: +SKIP
>>> bertie.load(head="ner")                  # of the built-in model, which comes along   # doctest: +SKIP
>>> bertie.Tagger.load()                     # the same: each task finds its head         # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

from bertie import threads as _threads
from bertie._version import __version__
from bertie.errors import (
    BertieError,
    CheckpointError,
    ConfigError,
    ExistsError,
    ExportError,
    InputError,
    MissingPackageError,
    NotFoundError,
    TrainingError,
)

if TYPE_CHECKING:
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.client import AsyncClient, Client, ServerError
    from bertie.compress.export import export
    from bertie.compress.export_report import ExportedFile, ExportReport, OutputComparison
    from bertie.config import EncoderConfig
    from bertie.recipe import Recipe
    from bertie.search.index import Index
    from bertie.tasks import (
        Classifier,
        Embedder,
        MaskedLM,
        MultiTask,
        Reader,
        Regressor,
        Reranker,
        Tagger,
        ZeroShot,
        load,
    )
    from bertie.tasks.clusters import Clustering, TextCluster, cluster_texts
    from bertie.tasks.deduplicate import Deduplication, DuplicateGroup, DuplicateText, deduplicate
    from bertie.tasks.drift import DriftResult, DriftText, detect_drift
    from bertie.tasks.paraphrases import ParaphrasePair, paraphrase_pairs
    from bertie.tasks.results import (
        AnswerResult,
        AnswerSpan,
        AttributedPiece,
        AttributionResult,
        ClassificationResult,
        EmbeddingResult,
        FillMaskResult,
        MaskPrediction,
        PseudoLikelihood,
        RankedDocument,
        RegressionResult,
        RelevanceResult,
        TaggedSpan,
        TaggingResult,
        TokenCandidate,
        TokenPrediction,
        TokenPredictionResult,
        ZeroShotResult,
    )
    from bertie.tasks.suggest import Suggestion, suggest
    from bertie.tasks.text_map import TextMap, map_texts
    from bertie.text.batch import Batch
    from bertie.text.tokenizer import Tokenizer
    from bertie.training.loop import Trainer

__all__ = [
    "AnswerResult",
    "AnswerSpan",
    "AttributedPiece",
    "AttributionResult",
    "AsyncClient",
    "Batch",
    "BertieError",
    "Checkpoint",
    "CheckpointError",
    "ClassificationResult",
    "Classifier",
    "Client",
    "Clustering",
    "ConfigError",
    "Deduplication",
    "DriftResult",
    "DriftText",
    "DuplicateGroup",
    "DuplicateText",
    "Embedder",
    "EmbeddingResult",
    "EncoderConfig",
    "ExistsError",
    "ExportError",
    "ExportReport",
    "ExportedFile",
    "FillMaskResult",
    "Index",
    "InputError",
    "MaskPrediction",
    "MaskedLM",
    "MissingPackageError",
    "MultiTask",
    "NotFoundError",
    "OutputComparison",
    "ParaphrasePair",
    "PseudoLikelihood",
    "RankedDocument",
    "Reader",
    "Recipe",
    "RegressionResult",
    "Regressor",
    "RelevanceResult",
    "Reranker",
    "ServerError",
    "Suggestion",
    "TaggedSpan",
    "Tagger",
    "TextCluster",
    "TextMap",
    "TaggingResult",
    "TokenCandidate",
    "TokenPrediction",
    "TokenPredictionResult",
    "Tokenizer",
    "Trainer",
    "TrainingError",
    "ZeroShot",
    "ZeroShotResult",
    "__version__",
    "cluster_texts",
    "deduplicate",
    "detect_drift",
    "export",
    "load",
    "map_texts",
    "paraphrase_pairs",
    "suggest",
]

_threads.set_defaults()  # now, because torch reads these variables when it is loaded

# Where each public name lives. They are imported when first used, so that `import bertie` costs no torch.
_HOME = {
    **dict.fromkeys(("Clustering", "TextCluster", "cluster_texts"), "bertie.tasks.clusters"),
    "Batch": "bertie.text.batch",
    "Checkpoint": "bertie.checkpoints.checkpoint",
    "EncoderConfig": "bertie.config",
    "export": "bertie.compress.export",
    **dict.fromkeys(("ExportReport", "ExportedFile", "OutputComparison"), "bertie.compress.export_report"),
    "Index": "bertie.search.index",
    **dict.fromkeys(("DriftResult", "DriftText", "detect_drift"), "bertie.tasks.drift"),
    **dict.fromkeys(("ParaphrasePair", "paraphrase_pairs"), "bertie.tasks.paraphrases"),
    "Recipe": "bertie.recipe",
    **dict.fromkeys(("Deduplication", "DuplicateGroup", "DuplicateText", "deduplicate"), "bertie.tasks.deduplicate"),
    **dict.fromkeys(("Suggestion", "suggest"), "bertie.tasks.suggest"),
    **dict.fromkeys(("TextMap", "map_texts"), "bertie.tasks.text_map"),
    "Tokenizer": "bertie.text.tokenizer",
    "Trainer": "bertie.training.loop",
    **dict.fromkeys(("AsyncClient", "Client", "ServerError"), "bertie.client"),
    **dict.fromkeys(
        (
            "Classifier",
            "Embedder",
            "MultiTask",
            "MaskedLM",
            "Reader",
            "Regressor",
            "Reranker",
            "Tagger",
            "ZeroShot",
            "load",
        ),
        "bertie.tasks",
    ),
    **dict.fromkeys(
        (
            "AnswerResult",
            "AnswerSpan",
            "AttributedPiece",
            "AttributionResult",
            "ClassificationResult",
            "EmbeddingResult",
            "FillMaskResult",
            "MaskPrediction",
            "PseudoLikelihood",
            "RankedDocument",
            "RegressionResult",
            "RelevanceResult",
            "TaggedSpan",
            "TaggingResult",
            "TokenCandidate",
            "TokenPrediction",
            "TokenPredictionResult",
            "ZeroShotResult",
        ),
        "bertie.tasks.results",
    ),
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    from bertie.arguments import missing_attribute

    raise missing_attribute("module 'bertie'", name, __all__)


def __dir__() -> list[str]:
    return __all__
