"""Bertie: one toolkit for encoder-only transformers.

>>> import bertie
>>> model = bertie.load("path or hub id")    # the right task object                     # doctest: +SKIP
>>> bertie.load(head="ner")                  # a head of the built-in model               # doctest: +SKIP
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
    from bertie.nn.elmo import ElmoConfig
    from bertie.recipe import Recipe
    from bertie.search.index import Index
    from bertie.tasks import (
        Chooser,
        Classifier,
        Embedder,
        LateInteraction,
        MaskedLM,
        MultiTask,
        Reader,
        Regressor,
        ReplacedTokenDetector,
        Reranker,
        SparseEmbedder,
        Tagger,
        ZeroShot,
        ZeroShotTagger,
        load,
    )
    from bertie.tasks.clusters import Clustering, TextCluster, cluster_texts
    from bertie.tasks.deduplicate import Deduplication, DuplicateGroup, DuplicateText, deduplicate
    from bertie.tasks.drift import DriftResult, DriftText, detect_drift
    from bertie.tasks.elmo import Elmo, ElmoResult
    from bertie.tasks.elmo_tag import ElmoTagger
    from bertie.tasks.outliers import Outliers, OutlierText, find_outliers
    from bertie.tasks.paraphrases import ParaphrasePair, paraphrase_pairs
    from bertie.tasks.results import (
        AnswerResult,
        AnswerSpan,
        AttributedPiece,
        AttributionResult,
        ChoiceResult,
        ClassificationResult,
        EmbeddingResult,
        FillMaskResult,
        MaskPrediction,
        PseudoLikelihood,
        RankedDocument,
        RegressionResult,
        RelevanceResult,
        ReplacedToken,
        ReplacedTokenResult,
        SparseEmbeddingResult,
        TaggedSpan,
        TaggingResult,
        TokenCandidate,
        TokenPrediction,
        TokenPredictionResult,
        TokenVectorsResult,
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
    "ChoiceResult",
    "Chooser",
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
    "Elmo",
    "ElmoConfig",
    "ElmoResult",
    "ElmoTagger",
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
    "LateInteraction",
    "MaskPrediction",
    "MaskedLM",
    "MissingPackageError",
    "MultiTask",
    "NotFoundError",
    "OutlierText",
    "Outliers",
    "OutputComparison",
    "ParaphrasePair",
    "PseudoLikelihood",
    "RankedDocument",
    "Reader",
    "Recipe",
    "RegressionResult",
    "Regressor",
    "RelevanceResult",
    "ReplacedToken",
    "ReplacedTokenDetector",
    "ReplacedTokenResult",
    "Reranker",
    "ServerError",
    "SparseEmbedder",
    "SparseEmbeddingResult",
    "Suggestion",
    "TaggedSpan",
    "Tagger",
    "TextCluster",
    "TextMap",
    "TaggingResult",
    "TokenCandidate",
    "TokenPrediction",
    "TokenPredictionResult",
    "TokenVectorsResult",
    "Tokenizer",
    "Trainer",
    "TrainingError",
    "ZeroShot",
    "ZeroShotResult",
    "ZeroShotTagger",
    "__version__",
    "cluster_texts",
    "deduplicate",
    "detect_drift",
    "find_outliers",
    "export",
    "load",
    "map_texts",
    "paraphrase_pairs",
    "suggest",
]

_threads.set_defaults()  # at import: torch reads these variables when it is loaded

# The module of each public name. Names are imported on first use, so that `import bertie` does not import torch.
_HOME = {
    **dict.fromkeys(("Clustering", "TextCluster", "cluster_texts"), "bertie.tasks.clusters"),
    "Batch": "bertie.text.batch",
    "Checkpoint": "bertie.checkpoints.checkpoint",
    **dict.fromkeys(("Elmo", "ElmoResult"), "bertie.tasks.elmo"),
    "ElmoConfig": "bertie.nn.elmo",
    "ElmoTagger": "bertie.tasks.elmo_tag",
    "EncoderConfig": "bertie.config",
    "export": "bertie.compress.export",
    **dict.fromkeys(("ExportReport", "ExportedFile", "OutputComparison"), "bertie.compress.export_report"),
    "Index": "bertie.search.index",
    **dict.fromkeys(("DriftResult", "DriftText", "detect_drift"), "bertie.tasks.drift"),
    **dict.fromkeys(("OutlierText", "Outliers", "find_outliers"), "bertie.tasks.outliers"),
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
            "Chooser",
            "Classifier",
            "Embedder",
            "LateInteraction",
            "MultiTask",
            "MaskedLM",
            "Reader",
            "Regressor",
            "ReplacedTokenDetector",
            "Reranker",
            "SparseEmbedder",
            "Tagger",
            "ZeroShot",
            "ZeroShotTagger",
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
            "ChoiceResult",
            "ClassificationResult",
            "EmbeddingResult",
            "FillMaskResult",
            "MaskPrediction",
            "PseudoLikelihood",
            "RankedDocument",
            "RegressionResult",
            "RelevanceResult",
            "ReplacedToken",
            "ReplacedTokenResult",
            "SparseEmbeddingResult",
            "TaggedSpan",
            "TaggingResult",
            "TokenCandidate",
            "TokenPrediction",
            "TokenPredictionResult",
            "TokenVectorsResult",
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
