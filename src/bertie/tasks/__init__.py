"""Inference, one module per task. `load` finds the task of a checkpoint."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertie.tasks.answer import Reader
    from bertie.tasks.choose import Chooser
    from bertie.tasks.classify import Classifier, Regressor
    from bertie.tasks.embed import Embedder
    from bertie.tasks.fill_mask import MaskedLM
    from bertie.tasks.late_interaction import LateInteraction
    from bertie.tasks.loading import load
    from bertie.tasks.multi_task import MultiTask
    from bertie.tasks.replaced_tokens import ReplacedTokenDetector
    from bertie.tasks.rerank import Reranker
    from bertie.tasks.sparse import SparseEmbedder
    from bertie.tasks.tag import Tagger
    from bertie.tasks.zero_shot import ZeroShot
    from bertie.tasks.zero_shot_tag import ZeroShotTagger

__all__ = [
    "Chooser",
    "Classifier",
    "Embedder",
    "LateInteraction",
    "MaskedLM",
    "MultiTask",
    "Reader",
    "Regressor",
    "ReplacedTokenDetector",
    "Reranker",
    "SparseEmbedder",
    "Tagger",
    "ZeroShot",
    "ZeroShotTagger",
    "load",
]

# Imported on first use, so that reading the registry does not import torch.
_MODULES = {
    "Chooser": "choose",
    "Classifier": "classify",
    "Embedder": "embed",
    "LateInteraction": "late_interaction",
    "MaskedLM": "fill_mask",
    "MultiTask": "multi_task",
    "Reader": "answer",
    "Regressor": "classify",
    "ReplacedTokenDetector": "replaced_tokens",
    "Reranker": "rerank",
    "SparseEmbedder": "sparse",
    "Tagger": "tag",
    "ZeroShot": "zero_shot",
    "ZeroShotTagger": "zero_shot_tag",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"bertie.tasks.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'bertie.tasks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
