"""Model cards: a README.md with the metadata that the Hugging Face hub indexes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bertie.evaluation.intervals import finite_or_none
from bertie.evaluation.model_report import Evaluation, ModelReport, selective_predictions
from bertie.evaluation.pages import Table, clean, markdown_table
from bertie.evaluation.pages import escape_markdown as md
from bertie.evaluation.report_sections import KINDS

# The hub's task types and metric names.
_TASKS = {
    "classify": ("text-classification", "Text Classification"),
    "multi_label": ("text-classification", "Text Classification"),
    "regress": ("text-classification", "Text Regression"),
    "tag": ("token-classification", "Token Classification"),
    "answer": ("question-answering", "Question Answering"),
    "rerank": ("text-ranking", "Text Ranking"),
    "choose": ("multiple-choice", "Multiple Choice"),
    "similarity": ("sentence-similarity", "Semantic Similarity"),
    "retrieval": ("sentence-similarity", "Information Retrieval"),
}
_METRICS = {
    "macro_f1": "f1",
    "micro_f1": "f1",
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "ndcg_10": "ndcg",
}
# transformers' auto class, Bertie's class, and an example call.
_USES = {
    "classify": ("SequenceClassification", "Classifier", 'classify(["A text."])[0]'),
    "multi_label": ("SequenceClassification", "Classifier", 'classify(["A text."])[0]'),
    "regress": ("SequenceClassification", "Regressor", 'predict(["A text."])[0]'),
    "tag": ("TokenClassification", "Tagger", 'tag(["A text."])[0]'),
    "answer": ("QuestionAnswering", "Reader", 'answer([("A question?", "The text that answers it.")])[0]'),
    "rerank": ("SequenceClassification", "Reranker", 'rerank("a query", ["a text", "another text"])'),
    "choose": ("MultipleChoice", "Chooser", 'choose("A context.", ["a choice", "another choice"])'),
    "similarity": ("", "Embedder", 'embed(["A text."])'),
    "retrieval": ("", "Embedder", 'embed(["A text."])'),
    "SparseEmbedder": ("", "SparseEmbedder", 'embed(["A text."])'),
    "LateInteraction": ("", "LateInteraction", 'rerank("a query", ["a text", "another text"])'),
}

# sentence-transformers' class for Bertie's, and its method.
_SENTENCE_CLASSES = {
    "Embedder": ("SentenceTransformer", "encode"),
    "SparseEmbedder": ("SparseEncoder", "encode"),
    "LateInteraction": ("MultiVectorEncoder", "encode_document"),
}

_GLINER = (
    "Bertie reads texts of any length in windows. The package gliner loads the same folder, and truncates long texts:"
    "\n\n```python\nfrom gliner import GLiNER\n\n"
    'model = GLiNER.from_pretrained("path/to/this/folder")\n'
    'print(model.predict_entities("A text.", ["person", "place"]))\n```'
)


def _names_labels(report: ModelReport) -> bool:
    """Whether a call names the labels to find (zero-shot entities)."""
    return report.task_class == "ZeroShotTagger"


def model_card(report: ModelReport) -> str:
    """Render a model card: YAML front matter, then Markdown.

    >>> from bertie.evaluation.intervals import Score
    >>> test = Evaluation(scores={"accuracy": Score(0.9, 0.8, 1.0)}, gold=["a"], predicted=["a"], labels=["a", "b"])
    >>> card = model_card(ModelReport(title="Reviews", kind="classify", model="x", evaluations={"test": test}))
    >>> card.splitlines()[:2]
    ['---', 'library_name: "bertie"']
    """
    parts = [f"---\n{_yaml(_front(report))}---", f"# {md(report.title)}"]
    for title, body in _sections(report):
        parts += [f"## {title}", body]
    return clean("\n\n".join(parts) + "\n")


def _front(report: ModelReport) -> dict[str, Any]:
    """The metadata that the hub indexes."""
    tag, task = _TASKS[report.kind]
    front: dict[str, Any] = {}
    if report.language is not None:
        front["language"] = report.language if isinstance(report.language, str) else list(report.language)
    other = "transformers" if _USES[report.kind][0] else "sentence-transformers"
    other = "gliner" if _names_labels(report) else other
    front |= {"library_name": "bertie", "tags": ["bertie", other, report.kind], "pipeline_tag": tag}
    if report.base is not None:
        front["base_model"] = report.base
    names = [name for evaluation in report.evaluations.values() for name in evaluation.scores]
    front["metrics"] = list(dict.fromkeys(_METRICS.get(name, name) for name in names))
    results = [
        {
            "task": {"type": tag, "name": task},
            "dataset": {"type": _dataset(report, split), "name": f"{report.title} ({split})", "split": split},
            "metrics": [
                {"type": _METRICS.get(name, name), "value": finite_or_none(score.value), "name": name}
                for name, score in evaluation.scores.items()
                if finite_or_none(score.value) is not None
            ],
        }
        for split, evaluation in report.evaluations.items()
    ]
    return front | {"model-index": [{"name": report.title, "results": results}]}


def _dataset(report: ModelReport, split: str) -> str:
    return next((data.files[0] for data in report.data if data.split == split and data.files), report.title)


def _sections(report: ModelReport) -> list[tuple[str, str]]:
    final = report.evaluations[report.final]
    head, name, call = _USES[report.task_class or ""] if report.task_class in _USES else _USES[report.kind]
    if _names_labels(report):
        name, call = "ZeroShotTagger", 'tag("A text.", labels=["person", "place"])'
    sections = [
        (
            "Model description",
            f"{md(report.model)}, fine-tuned for {KINDS[report.kind]}. On {md(report.final)} ({len(final.gold):,} "
            f"rows) its {md(report.main)} is {md(str(final.scores[report.main]))}.{_label_list(final)}",
        ),
        (
            "Usage",
            f'```python\nimport bertie\n\nmodel = bertie.{name}.load("path/to/this/folder")\n'
            f"print(model.{call})\n```\n\n" + (_GLINER if _names_labels(report) else _other_libraries(head, name)),
        ),
    ]
    if report.data:
        rows = [[data.split, ", ".join(data.files), f"{data.rows:,}"] for data in report.data]
        sections.append(("Training data", _table(["split", "files", "rows"], rows)))
    if report.recipe:
        rows = [[key, str(value)] for key, value in report.recipe.items()]
        sections.append(("Recipe", _table(["setting", "value"], rows)))
    sections.append(("Results", _results(report)))
    if report.calibration is not None:
        fit = report.calibration
        text = f"Logits are divided by a temperature of {fit.temperature:.3f}, fitted on {md(fit.fitted_on)}."
        rows = [["before", str(fit.before)], ["after", str(fit.after)]]
        error = _table(["", f"expected calibration error on {fit.measured_on}"], rows)
        sections.append(("Calibration", f"{text}\n\n{error}"))
    return [*sections, ("Limitations", _limitations(report))]


def _other_libraries(head: str, name: str) -> str:
    """How other packages load the model: sentence-transformers if it has no head."""
    if not head:
        theirs, call = _SENTENCE_CLASSES[name]
        return (
            "Bertie reads texts of any length in windows. sentence-transformers loads the same folder, and truncates "
            "long texts:\n\n"
            f"```python\nfrom sentence_transformers import {theirs}\n\n"
            f'model = {theirs}("path/to/this/folder")\nprint(model.{call}(["A text."]))\n```'
        )
    return (
        "Bertie reads texts of any length in windows and uses the temperature and thresholds below. transformers "
        "loads the same weights without them:\n\n"
        f"```python\nfrom transformers import AutoModelFor{head}, AutoTokenizer\n\n"
        f'model = AutoModelFor{head}.from_pretrained("path/to/this/folder")\n'
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")\n```'
    )


def _label_list(evaluation: Evaluation) -> str:
    if not evaluation.labels:
        return ""
    shown = ", ".join(map(md, evaluation.labels[:30]))
    more = f" and {len(evaluation.labels) - 30} more" if len(evaluation.labels) > 30 else ""
    return f" Its labels: {shown}{more}."


def _results(report: ModelReport) -> str:
    names = list(dict.fromkeys(name for evaluation in report.evaluations.values() for name in evaluation.scores))
    columns = [evaluation.scores for evaluation in report.evaluations.values()]
    rows = [[name, *(str(scores[name]) if name in scores else "–" for scores in columns)] for name in names]
    return f"With 95% confidence intervals.\n\n{_table(['metric', *report.evaluations], rows)}"


def _limitations(report: ModelReport) -> str:
    """Known problems, and what was not measured."""
    lines = [
        "The scores are valid for texts like those of the splits above, and for these labels only. Other domains, "
        "languages and time periods were not measured."
    ]
    for split, check in (report.leaks or {}).items():
        fraction = len(check.leaks) / check.rows if check.rows else 0.0
        lines.append(
            f"{len(check.leaks):,} of {check.rows:,} rows of {md(split)} ({fraction:.2%}) also occur in the training "
            "data, as exact or near-duplicates."
        )
    for split, result in selective_predictions(report).items():
        assert report.abstention is not None
        lines.append(
            f"On {md(split)}, predictions with a confidence of at least {report.abstention.threshold:.4f} have a "
            f"precision of {md(str(result.precision))}, and cover {result.coverage:.1%} of texts."
        )
    for split, coverage in (report.token_coverage or {}).items():
        if coverage.tokens_read < coverage.tokens_total:
            lines.append(f"Of the {coverage.tokens_total:,} tokens of {md(split)}, {coverage.tokens_read:,} were read.")
    return "\n".join(f"- {line}" for line in lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(Table(head, rows))


def _yaml(value: Mapping[str, Any], indent: str = "") -> str:
    """Render block-style YAML with JSON scalars, which are valid YAML."""
    lines = []
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            lines.append(f"{indent}{name}:\n{_yaml(entry, indent + '  ')}")
        elif isinstance(entry, list):
            lines.append(f"{indent}{name}:{'' if entry else ' []'}\n")
            for item in entry:
                # The dash replaces the first two spaces of the item's indentation.
                body = _yaml(item, indent + "  ") if isinstance(item, Mapping) else f"{indent}  {_scalar(item)}\n"
                lines.append(f"{indent}- {body[len(indent) + 2 :]}")
        else:
            lines.append(f"{indent}{name}: {_scalar(entry)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    text = json.dumps(clean(value) if isinstance(value, str) else value, ensure_ascii=False)
    # YAML 1.1 parses 1e-05 as a string: its floats need a decimal point.
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text
