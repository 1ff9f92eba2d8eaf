"""Local data sets as mteb tasks, evaluated offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertie.search.beir import RetrievalDataset

METRICS = {"Retrieval": ("ndcg_at_10", "map_at_1000", "recall_at_100", "mrr_at_10"), "STS": ("spearman", "pearson")}


def metadata(name: str, kind: str) -> Any:
    from mteb.abstasks.task_metadata import TaskMetadata

    return TaskMetadata(
        name=name, description=name, type=kind, dataset={"path": name, "revision": "1"}, category="t2t",
        eval_splits=["test"], eval_langs=["eng-Latn"], main_score=METRICS.get(kind, METRICS["Retrieval"])[0],
    )  # fmt: skip


def retrieval_task(name: str, dataset: RetrievalDataset, candidates: Mapping[str, Sequence[str]] | None = None) -> Any:
    """An mteb retrieval task; a reranking task if candidates of each query are given."""
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    class Task(AbsTaskRetrieval):
        def load_data(self, *args: Any, **options: Any) -> None:
            queries = [{"id": query, "text": text} for query, text in dataset.queries.items()]
            corpus = [{"id": document, "title": "", "text": text} for document, text in dataset.corpus.items()]
            qrels = {query: dict(documents) for query, documents in dataset.qrels.items()}
            parts = {"queries": Dataset.from_list(queries), "corpus": Dataset.from_list(corpus), "relevant_docs": qrels}
            ranked = None if candidates is None else {query: list(ids) for query, ids in candidates.items()}
            self.dataset = {"default": {"test": {**parts, "top_ranked": ranked}}}
            self.data_loaded = True

    Task.metadata = metadata(name, "Retrieval" if candidates is None else "Reranking")
    return Task()


def sts_task(name: str, pairs: Sequence[Mapping[str, Any]]) -> Any:
    """An mteb STS task of pairs with scores from 0 to 5."""
    from datasets import Dataset
    from mteb.abstasks.sts import AbsTaskSTS

    class Task(AbsTaskSTS):
        def load_data(self, *args: Any, **options: Any) -> None:
            columns = {"sentence1": "text_a", "sentence2": "text_b", "score": "score"}
            read = Dataset.from_dict({new: [row[old] for row in pairs] for new, old in columns.items()})
            self.dataset = {"default": {"test": read}}
            self.data_loaded = True

    Task.metadata = metadata(name, "STS")
    return Task()


def through_mteb(model: Any, task: Any) -> dict[str, float]:
    """Evaluate with mteb."""
    import mteb

    result = mteb.evaluate(model, task, cache=None, co2_tracker=False, encode_kwargs={"show_progress_bar": False})
    (scores,) = result.task_results[0].scores["test"]
    return {name: float(scores[name]) for name in METRICS.get(task.metadata.type, METRICS["Retrieval"])}
