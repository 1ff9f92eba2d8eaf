"""The built-in model reads what no other was named for, each task with its own head: in Python and as verbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertie
from bertie.checkpoints import hub
from bertie.cli import main
from bertie.config import HeadInfo
from bertie.errors import InputError, NotFoundError
from tests.cli.conftest import HEADS, save_small

TASKS = {
    bertie.Classifier: "sentiment",
    bertie.Tagger: "ner",
    bertie.Reader: "qa",
    bertie.Reranker: "rerank",
    bertie.MaskedLM: "mlm",
}
# Each verb's arguments, and the head that they are for.
VERBS: list[tuple[list[str], str | None]] = [
    (["fill", "the [MASK] sat"], "mlm"),
    (["embed", "the cat sat"], None),
    (["classify", "the cat sat"], "sentiment"),
    (["classify", "pairs.csv"], "nli"),
    (["classify", "the cat sat", "--labels", "cat,dog"], None),
    (["classify", "the cat sat", "--labels", "cat,dog", "--method", "entailment"], "nli"),
    (["tag", "the cat sat"], "ner"),
    (["answer", "the cat", "--context", "a dog sat on the mat"], "qa"),
    (["rerank", "find a cat", "the cat sat", "a dog ran"], "rerank"),
    (["similarity", "the cat sat", "a dog ran"], None),
    (["tokenize", "the cat sat"], None),
]


def run(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert main([*argv, "--json"]) == status
    return capsys.readouterr().out


def another(folder: Path, models: dict[str, str], heads: dict[str, HeadInfo], monkeypatch: pytest.MonkeyPatch) -> str:
    """Another built-in model, with these heads."""
    save_small(folder / "models" / hub.DEFAULT, Path(models["embed"]), heads)
    monkeypatch.setattr(hub, "BUILT_IN", folder / "models")
    return str(folder / "models" / hub.DEFAULT)


def test_each_task_uses_its_head(small: str) -> None:
    for task, head in TASKS.items():
        result = task.load()
        assert (result.head, result.checkpoint.source) == (head, small)
        assert type(bertie.load(head=head)) is type(bertie.load(small, head=head)) is task
        assert bertie.load(head=head).head == head
    assert bertie.Classifier.load(head="nli").head == "nli"
    assert type(bertie.load(head="nli")) is bertie.Classifier
    assert type(bertie.load()) is type(bertie.load(small)) is bertie.Embedder
    with pytest.raises(NotFoundError, match="no head 'nonsense'; it has: mlm, ner, nli, qa, rerank, sentiment"):
        bertie.load(head="nonsense")
    with pytest.raises(InputError, match="Tagger needs a head for its task; the head 'qa' of bertie-small"):
        bertie.Tagger.load(head="qa")


def test_embedding_uses_the_pooling(small: str) -> None:
    checkpoint = bertie.Checkpoint.load(small)
    assert checkpoint.tokenizer is not None
    encodings = checkpoint.tokenizer.encode_batch(["the cat sat"])
    mean = checkpoint.model.hidden(bertie.Batch.from_encodings(encodings)).mean(0)  # (5, D) -> (D,)
    result = bertie.Embedder.load().embed(["the cat sat"])[0]
    np.testing.assert_allclose(result, (mean / mean.norm()).detach(), atol=1e-5)


def test_zero_shot_uses_the_nli_head(small: str) -> None:
    pairs = [("the cat sat", "cat"), ("the cat sat", "dog")]
    classes = bertie.Classifier.load(head="nli")
    logits = [np.log([one.scores["entailment"], one.scores["contradiction"]]) for one in classes.classify(pairs)]
    zero_shot = bertie.ZeroShot.load(head="nli")  # by entailment, as it names the head
    result = zero_shot.classify(["the cat sat"], ["cat", "dog"], template="{}", multi_label=True)[0]
    for label, (entails, contradicts) in zip(("cat", "dog"), logits, strict=True):
        assert result.scores[label] == pytest.approx(1 / (1 + np.exp(contradicts - entails)), abs=1e-5)
    assert bertie.ZeroShot.load(head="nli").classify(["a"], ["cat", "dog"])[0].windows == 1
    with pytest.raises(NotFoundError, match=r"label 'entailment'; of the heads .*sentiment\) nli has one"):
        bertie.ZeroShot.load(head="sentiment")


def test_heads_share_a_forward_pass(small: str) -> None:
    heads = bertie.MultiTask.load()
    assert set(heads) == set(HEADS)
    result = heads.read(["the cat sat on a mat"])[0]
    assert set(result) == {"sentiment", "ner"}  # all others read pairs
    assert result["sentiment"].scores == pytest.approx(
        bertie.Classifier.load().classify(["the cat sat on a mat"])[0].scores, abs=1e-6
    )


@pytest.mark.parametrize(("argv", "head"), VERBS, ids=lambda one: " ".join(one[:3]) if isinstance(one, list) else "")
def test_verbs(
    small: str,
    small_folder: Path,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    head: str | None,
) -> None:
    Path("pairs.csv").write_text("text_a,text_b\nthe cat,a dog\n")
    result = run(capsys, *argv)
    named = ["--head", head] if head is not None and argv[0] != "fill" else []
    assert result == run(capsys, *argv, *named, "-m", str(small_folder / small))
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("row  ")
    if argv[0] == "classify":
        first = json.loads(result)["scores"]
        labels = ["cat", "dog"] if "--labels" in argv else [HEADS[str(head)].labels[i] for i in range(3)]
        assert set(first) == set(labels)


def test_inspect(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run(capsys, "inspect"))
    assert facts["model"] == small
    assert {name: one["labels"] for name, one in facts["heads"].items()} == {"mlm": []} | {
        name: list(info.labels.values()) for name, info in HEADS.items()
    }
    assert {name: one["task"] for name, one in facts["heads"].items()}["rerank"] == "rerank"
    assert main(["inspect"]) == 0
    assert "sentiment: negative, neutral, positive" in capsys.readouterr().out


def test_labels_of_a_named_head_are_the_columns(small: str, here: Path) -> None:
    import pyarrow.parquet

    assert main(["classify", "the cat", "-o", "out.parquet"]) == 0
    row = pyarrow.parquet.read_table("out.parquet").to_pylist()[0]
    assert row["scores"] == pytest.approx(bertie.Classifier.load().classify(["the cat"])[0].scores)


def test_it_is_the_default_of_training(small: str) -> None:
    texts, labels = ["the cat sat", "a dog ran"] * 4, ["cat", "dog"] * 4
    fitted = bertie.Classifier(small, epochs=1, dev_fraction=0).fit(texts, labels, progress=False)
    assert set(fitted.classes_) == {"cat", "dog"}
    assert list(fitted.checkpoint.heads) == ["classify"]


def test_the_error_lists_several_heads(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topics = HeadInfo("classify", {0: "sports", 1: "politics"}, "single_label_classification")
    another(tmp_path, models, HEADS | {"topics": topics}, monkeypatch)
    with pytest.raises(InputError, match="several heads for this; pass head= with one of nli, sentiment, topics"):
        bertie.Classifier.load()
    message = json.loads(run(capsys, "classify", "the cat", status=1))["message"]
    assert message == "bertie-small has several heads for this; pass --head with one of nli, sentiment, topics"
    assert set(json.loads(run(capsys, "classify", "the cat", "--head", "topics"))["scores"]) == {"sports", "politics"}


def test_pairs_without_a_head_for_them(
    models: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = another(tmp_path, models, {key: HEADS[key] for key in ("sentiment", "ner")}, monkeypatch)
    Path("pairs.csv").write_text("text_a,text_b\nthe cat,a dog\n")
    message = json.loads(run(capsys, "classify", "pairs.csv", status=1))["message"]
    assert message == "the built-in model classifies single texts, but these are pairs; choose another model with -m"
    result = json.loads(
        run(capsys, "classify", "pairs.csv", "-m", folder)
    )  # whoever names a model knows what it is for
    assert set(result["scores"]) == {"negative", "neutral", "positive"}
    assert bertie.ZeroShot.load().resolve_method("auto") == "embedding"  # without a head for entailment


def test_no_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BUILT_IN", tmp_path)
    calls: list[Any] = [
        bertie.load,
        bertie.Embedder.load,
        bertie.ZeroShot.load,
        bertie.MultiTask.load,
        bertie.Reader.load,
    ]
    for call in calls:
        with pytest.raises(NotFoundError, match="this installation has no built-in model; name a folder or a hub id"):
            call()


def test_a_folder_of_the_same_name_does_not_replace_it(
    small: str, models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run(capsys, "embed", "the cat sat")
    Path(hub.DEFAULT).symlink_to(models["fill"])  # another encoder
    for model in ([], ["-m", hub.DEFAULT]):
        assert main(["embed", "the cat sat", "--json", *model]) == 0
        printed = capsys.readouterr()
        assert printed.out == expected
        assert printed.err.count(f"the folder of that name here is written ./{hub.DEFAULT}") == 1
        assert "Warning" not in printed.err
    assert main(["embed", "the cat sat", "--json", "-m", f"./{hub.DEFAULT}"]) == 0
    printed = capsys.readouterr()
    assert printed.out != expected
    assert "built-in" not in printed.err
