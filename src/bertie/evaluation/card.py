"""The card of a model: a README.md that the Hugging Face hub reads, with what a user has to know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bertie.evaluation.intervals import number
from bertie.evaluation.pages import Table, clean, markdown_table, plain
from bertie.evaluation.report import KINDS
from bertie.evaluation.study import Evaluation, Study, abstentions

# What the hub calls a task, and the names of our metrics there.
_TASKS = {
    "classify": ("text-classification", "Text Classification"),
    "multi": ("text-classification", "Text Classification"),
    "regress": ("text-classification", "Text Regression"),
    "tag": ("token-classification", "Token Classification"),
    "answer": ("question-answering", "Question Answering"),
    "rerank": ("text-ranking", "Text Ranking"),
    "alike": ("sentence-similarity", "Semantic Similarity"),
    "find": ("sentence-similarity", "Information Retrieval"),
}
_METRICS = {
    "macro_f1": "f1",
    "micro_f1": "f1",
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "ndcg_10": "ndcg",
}
# The class of transformers, what Bertie calls such a model, and one use of it.
_USES = {
    "classify": ("SequenceClassification", "Classifier", 'classify(["A text."])[0]'),
    "multi": ("SequenceClassification", "Classifier", 'classify(["A text."])[0]'),
    "regress": ("SequenceClassification", "Regressor", 'predict(["A text."])[0]'),
    "tag": ("TokenClassification", "Tagger", 'tag(["A text."])[0]'),
    "answer": ("QuestionAnswering", "Reader", 'answer([("A question?", "The text that answers it.")])[0]'),
    "rerank": ("SequenceClassification", "Reranker", 'rerank("a query", ["a text", "another text"])'),
    "alike": ("", "Embedder", 'embed(["A text."])'),
    "find": ("", "Embedder", 'embed(["A text."])'),
}


def model_card(study: Study) -> str:
    """A card in the hub's format: YAML between lines of dashes, then Markdown.

    >>> from bertie.evaluation.intervals import Score
    >>> tested = Evaluation(scores={"accuracy": Score(0.9, 0.8, 1.0)}, gold=["a"], predicted=["a"], labels=["a", "b"])
    >>> card = model_card(Study(title="Reviews", kind="classify", model="x", evaluations={"test": tested}))
    >>> card.splitlines()[:2]
    ['---', 'library_name: "bertie"']
    """
    parts = [f"---\n{_yaml(_front(study))}---", f"# {plain(study.title)}"]
    for title, body in _chapters(study):
        parts += [f"## {title}", body]
    return clean("\n\n".join(parts) + "\n")


def _front(study: Study) -> dict[str, Any]:
    """The facts that the hub indexes."""
    tag, task = _TASKS[study.kind]
    front: dict[str, Any] = {}
    if study.language is not None:
        front["language"] = study.language if isinstance(study.language, str) else list(study.language)
    other = "transformers" if _USES[study.kind][0] else "sentence-transformers"
    front |= {"library_name": "bertie", "tags": ["bertie", other, study.kind], "pipeline_tag": tag}
    if study.base is not None:
        front["base_model"] = study.base
    named = [name for one in study.evaluations.values() for name in one.scores]
    front["metrics"] = list(dict.fromkeys(_METRICS.get(name, name) for name in named))
    results = [
        {
            "task": {"type": tag, "name": task},
            "dataset": {"type": _dataset(study, split), "name": f"{study.title} ({split})", "split": split},
            "metrics": [
                {"type": _METRICS.get(name, name), "value": number(score.value), "name": name}
                for name, score in one.scores.items()
                if number(score.value) is not None
            ],
        }
        for split, one in study.evaluations.items()
    ]
    return front | {"model-index": [{"name": study.title, "results": results}]}


def _dataset(study: Study, split: str) -> str:
    return next((one.files[0] for one in study.data if one.split == split and one.files), study.title)


def _chapters(study: Study) -> list[tuple[str, str]]:
    final = study.evaluations[study.final]
    head, name, call = _USES[study.kind]
    chapters = [
        (
            "What it is",
            f"{plain(study.model)}, fine-tuned for {KINDS[study.kind]}. On {plain(study.final)} ({len(final.gold):,} "
            f"rows) its {plain(study.main)} is {plain(str(final.scores[study.main]))}.{_label_list(final)}",
        ),
        (
            "How to use it",
            f'```python\nimport bertie\n\nmodel = bertie.{name}.load("path/to/this/folder")\n'
            f"print(model.{call})\n```\n\n" + _others(head),
        ),
    ]
    if study.data:
        rows = [[one.split, ", ".join(one.files), f"{one.rows:,}"] for one in study.data]
        chapters.append(("Training data", _table(["split", "files", "rows"], rows)))
    if study.recipe:
        rows = [[key, str(value)] for key, value in study.recipe.items()]
        chapters.append(("Recipe", _table(["setting", "value"], rows)))
    chapters.append(("Results", _results(study)))
    if study.calibration is not None:
        one = study.calibration
        said = f"Logits are divided by a temperature of {one.temperature:.3f}, fitted on {plain(one.fitted_on)}."
        rows = [["before", str(one.before)], ["after", str(one.after)]]
        error = _table(["", f"expected calibration error on {one.measured_on}"], rows)
        chapters.append(("Calibration", f"{said}\n\n{error}"))
    return [*chapters, ("Limits", _limits(study))]


def _others(head: str) -> str:
    """How other packages load it; without a head it is one for sentence-transformers."""
    if not head:
        return (
            "Bertie reads texts of any length in windows. sentence-transformers loads the same folder, and reads the "
            "beginning of each text:\n\n"
            "```python\nfrom sentence_transformers import SentenceTransformer\n\n"
            'model = SentenceTransformer("path/to/this/folder")\nprint(model.encode(["A text."]))\n```'
        )
    return (
        "Bertie reads texts of any length in windows and uses the temperature and thresholds below. transformers "
        "loads the same weights, without these:\n\n"
        f"```python\nfrom transformers import AutoModelFor{head}, AutoTokenizer\n\n"
        f'model = AutoModelFor{head}.from_pretrained("path/to/this/folder")\n'
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")\n```'
    )


def _label_list(one: Evaluation) -> str:
    if not one.labels:
        return ""
    shown = ", ".join(map(plain, one.labels[:30]))
    more = f" and {len(one.labels) - 30} more" if len(one.labels) > 30 else ""
    return f" Its labels: {shown}{more}."


def _results(study: Study) -> str:
    names = list(dict.fromkeys(name for one in study.evaluations.values() for name in one.scores))
    rows = [
        [name, *("–" if name not in one.scores else str(one.scores[name]) for one in study.evaluations.values())]
        for name in names
    ]
    return f"With 95% intervals by bootstrap.\n\n{_table(['metric', *study.evaluations], rows)}"


def _limits(study: Study) -> str:
    """What is known to go wrong, and what nobody measured."""
    said = [
        "The scores hold for texts like those of the splits above, and for these labels alone. Other domains, "
        "languages and times were not measured."
    ]
    for split, check in (study.leaks or {}).items():
        share = len(check.found) / check.rows if check.rows else 0.0
        said.append(
            f"{len(check.found):,} of {check.rows:,} rows of {plain(split)} ({share:.2%}) are in the training data as "
            "well, as they are or lightly edited."
        )
    for split, held in abstentions(study).items():
        assert study.abstention is not None
        said.append(
            f"From a confidence of {study.abstention.threshold:.4f} on, {plain(str(held.precision))} of its answers on "
            f"{plain(split)} are right; that is {held.coverage:.1%} of texts."
        )
    for split, one in (study.reading or {}).items():
        if one.tokens_read < one.tokens_total:
            said.append(f"Of the {one.tokens_total:,} tokens of {plain(split)}, {one.tokens_read:,} were read.")
    return "\n".join(f"- {line}" for line in said)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(Table(head, rows))


def _yaml(value: Mapping[str, Any], indent: str = "") -> str:
    """Block style, each scalar as JSON, which is YAML as well."""
    lines = []
    for name, one in value.items():
        if isinstance(one, Mapping):
            lines.append(f"{indent}{name}:\n{_yaml(one, indent + '  ')}")
        elif isinstance(one, list):
            lines.append(f"{indent}{name}:{'' if one else ' []'}\n")
            for item in one:
                # The dash takes the place of the first two spaces of what it stands before.
                body = _yaml(item, indent + "  ") if isinstance(item, Mapping) else f"{indent}  {_scalar(item)}\n"
                lines.append(f"{indent}- {body[len(indent) + 2 :]}")
        else:
            lines.append(f"{indent}{name}: {_scalar(one)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    text = json.dumps(clean(value) if isinstance(value, str) else value, ensure_ascii=False)
    # YAML 1.1 takes 1e-05 for a text: its numbers have a point.
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text
