"""`bertie quantize`: the folder it writes, and a report that says what others would measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.cli import main
from bertie.compress import quantization_report
from bertie.compress.quantization_report import differences
from bertie.config import HeadInfo
from tests.checkpoints.test_roundtrip import sentence_folder
from tests.parity.tiny import build

WORDS = ["a", "the", "cat", "dog", "sat", "ran", "on", "mat", "query", ":", "find"]
AUTO = {
    "fill": transformers.AutoModelForMaskedLM,
    "classify": transformers.AutoModelForSequenceClassification,
    "rerank": transformers.AutoModelForSequenceClassification,
    "tag": transformers.AutoModelForTokenClassification,
}


def some_texts(count: int = 40) -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS, draw.integers(1, 30))) for _ in range(count)]


def texts_file(folder: Path, texts: list[str]) -> str:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"n": 1, "text": text}) + "\n" for text in texts))
    return "texts.jsonl"


def report_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["quantize", *argv, "--json"]) == 0, capsys.readouterr()
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def cosines(pairs: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Cosines, row by row."""
    values = []
    for a, b in ((x, y) for left, right in pairs for x, y in zip(left, right, strict=True)):
        u, v = a.detach().numpy().astype(np.float64), b.detach().numpy().astype(np.float64)
        values.append(float(u @ v / np.sqrt((u @ u) * (v @ v))))
    return {"mean_cosine": pytest.approx(np.mean(values), abs=1e-6), "min_cosine": pytest.approx(min(values), abs=1e-6)}


def noisy(folder: str, out: Path, noise: float) -> tuple[Checkpoint, Checkpoint]:
    """A model, and another one with clearly different weights."""
    before, after = Checkpoint.load(folder), Checkpoint.load(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in after.model.parameters():
            p.add_(torch.randn_like(p) * noise)
    after.save(out)
    return before, after


@pytest.mark.parametrize("kind", list(AUTO))
def test_measures_against_transformers(kind: str, models: dict[str, str], tmp_path: Path) -> None:
    """One text at a time, with the tokenizer and models of transformers."""
    folder, texts = models[kind], some_texts()
    before, after = noisy(folder, tmp_path / "after", 0.02)
    report = differences(before, after, texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    both = [AUTO[kind].from_pretrained(path).eval() for path in (folder, tmp_path / "after")]
    hidden, equal, apart = [], [], []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt")
        a, b = (model(**inputs, output_hidden_states=True) for model in both)
        hidden.append((a.hidden_states[-1][0], b.hidden_states[-1][0]))
        if kind == "fill":
            ids, length = inputs["input_ids"].clone(), inputs["input_ids"].shape[1]
            masked = list(range(1, length - 1, 7))
            ids[0, masked] = tokenizer.mask_token_id
            a, b = (model(**{**inputs, "input_ids": ids}).logits[0, masked] for model in both)
        else:
            a, b = a.logits.reshape(-1, a.logits.shape[-1]), b.logits.reshape(-1, b.logits.shape[-1])
        equal += (a.argmax(-1) == b.argmax(-1)).tolist()
        apart += (a - b).abs().max(-1).values.tolist()
    states = sum(len(a) for a, _ in hidden)
    error = max(float(((x - y).norm() / x.norm()).detach()) for a, b in hidden for x, y in zip(a, b, strict=True))
    expected = {"count": states, "max_error": pytest.approx(error, abs=1e-5)}
    assert report["hidden"] == cosines(hidden) | expected
    assert report["hidden"]["min_cosine"] < 0.9999
    ((name, facts),) = report["heads"].items()
    assert name == ("mlm" if kind == "fill" else "classify" if kind == "rerank" else kind)
    if kind == "rerank":
        assert facts == {"max_difference": pytest.approx(max(apart), abs=1e-5), "count": len(texts)}
        assert max(apart) > 1e-3
    else:
        assert facts == {"top1_agreement": pytest.approx(np.mean(equal)), "count": len(equal)}
        assert facts["top1_agreement"] < 1
    assert report["sentence"] is None


def test_answers(models: dict[str, str], tmp_path: Path) -> None:
    texts = [text[:40].strip() for text in some_texts()]
    before, after = noisy(models["answer"], tmp_path / "after", 0.02)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models["answer"])
    both = [
        transformers.AutoModelForQuestionAnswering.from_pretrained(path).eval()
        for path in (models["answer"], tmp_path / "after")
    ]
    equal = []
    for text, following in zip(texts, [*texts[1:], texts[0]], strict=True):
        inputs = tokenizer(text, following, return_tensors="pt")
        assert inputs["input_ids"].shape[1] <= 40
        a, b = (model(**inputs) for model in both)
        equal += [int(a.start_logits.argmax()) == int(b.start_logits.argmax())]
        equal += [int(a.end_logits.argmax()) == int(b.end_logits.argmax())]
    facts = differences(before, after, texts)["heads"]["answer"]
    assert facts == {"top1_agreement": pytest.approx(np.mean(equal)), "count": 2 * len(texts)}
    assert 0 < np.mean(equal) < 1


def test_embeddings_and_named_heads(tmp_path: Path) -> None:
    import sentence_transformers

    texts = ["the cat sat on the mat.", "a mat", "b cats", "the " * 60]
    sentence_folder(tmp_path / "m", "")
    before, after = noisy(str(tmp_path / "m"), tmp_path / "after", 0.02)
    for checkpoint in (before, after):
        checkpoint.add_head("topics", HeadInfo("classify", {0: "x", 1: "y"}))
    report = differences(before, after, texts)
    a, b = (
        sentence_transformers.SentenceTransformer(str(tmp_path / name), device="cpu").encode(texts[:3])
        for name in ("m", "after")
    )
    short = differences(before, after, texts[:3])["sentence"]
    assert short == cosines([(torch.from_numpy(a), torch.from_numpy(b))]) | {"count": 3}
    assert report["sentence"]["count"] == 4
    assert list(report["heads"]) == ["pooler", "topics"]
    assert list(report["heads"]["pooler"]) == ["mean_cosine", "min_cosine", "count"]
    assert report["heads"]["topics"]["count"] > 4  # what is long is read whole, in windows


@pytest.mark.parametrize("to", ["int8", "fp16"])
def test_folder_and_report(to: str, models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(capsys, models["fill"], "-o", "out/small", "--precision", to)
    assert json.loads((here / "out/small/quantization.json").read_text()) == report
    assert sorted(p.name for p in (here / "out").iterdir()) == ["small"]  # nothing is left of the draft
    file = here / "out/small" / ("model.int8.safetensors" if to == "int8" else "model.safetensors")
    assert report["bytes"] == {
        "weights_before": (Path(models["fill"]) / "model.safetensors").stat().st_size,
        "weights_after": file.stat().st_size,
        "folder_after": sum(p.stat().st_size for p in (here / "out/small").iterdir() if p.name != "quantization.json"),
    }
    assert (report["model"], report["precision"], report["texts"]) == ("fill", to, "built-in")
    assert report["heads"]["mlm"]["count"] >= 48

    old, new = load_file(Path(models["fill"]) / "model.safetensors"), load_file(file)
    scale = {name: new.get(f"{name}.scale", torch.ones(1)).double() for name in old}
    moved = {n: (new[n].double() * scale[n].view(-1, *[1] * (x.ndim - 1)) - x).norm() for n, x in old.items()}
    total = sum(float(x.double().norm()) ** 2 for x in old.values()) ** 0.5
    error = sum(float(x) ** 2 for x in moved.values()) ** 0.5 / total
    assert report["weights"]["relative_error"] == pytest.approx(error, rel=1e-3)
    assert report["weights"]["parameters"] == sum(x.numel() for x in old.values())
    worst, value = next(iter(report["weights"]["worst_tensors"].items()))
    each = {name: float(moved[name] / x.double().norm()) for name, x in old.items() if x.any()}
    assert value == pytest.approx(max(each.values()), rel=1e-3)
    assert each[worst] == max(each.values())

    # It loads and is quantized again: to the same weights, at no further cost; not in place.
    again = report_of(capsys, "out/small", "-o", "out/again", "--precision", to)
    assert (here / "out/again" / file.name).read_bytes() == file.read_bytes()
    assert main(["quantize", "out/small", "-o", "out/small", "--precision", to, "--overwrite"]) == 2
    assert "out/small is the input" in capsys.readouterr().err
    assert again["weights"]["relative_error"] == 0
    assert again["bytes"]["weights_before"] == again["bytes"]["weights_after"]
    assert again["heads"]["mlm"]["top1_agreement"] == 1
    assert main(["inspect", "out/small"]) == 0
    assert main(["fill", "the [MASK] sat", "-m", "out/small"]) == 0


def test_text_output(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = texts_file(here, [*some_texts(5), " ", "cat " * 300])
    assert main(["quantize", models["classify"], "-o", "small", "--precision", "int8", "--texts", file]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == ["weights", "error", "hidden", "head", "report"]
    assert "top-1 agreement" in out
    assert json.loads((here / "small/quantization.json").read_text())["texts"] == "texts.jsonl"


def test_a_model_without_tokenizer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("bert", "ForMaskedLM").save_pretrained(here / "m")
    report = report_of(capsys, "m", "-o", "small", "--precision", "int8")
    assert set(report) == {"model", "precision", "bertie", "bytes", "weights"}
    assert main(["quantize", "m", "-o", "other", "--precision", "fp16"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["weights", "error", "report"]
    assert main(["quantize", "m", "-o", "no", "--precision", "int8", "--texts", texts_file(here, ["a"])]) == 1
    assert "no tokenizer" in capsys.readouterr().err
    assert not (here / "no").exists()


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--precision", "int4", "-o", "x"], 2, "int4"),
        (["--precision", "int8"], 2, "-o"),
        (["--precision", "int8", "-o", "x", "--column", "text"], 2, "--texts"),
        (["--precision", "int8", "-o", "x", "--texts", "none.txt"], 1, "no such file: none.txt"),
        (["--precision", "int8", "-o", "x", "--texts", "blank.txt"], 1, "has no text"),
        (["--precision", "int8", "-o", "x", "--texts", "texts.jsonl", "--column", "no"], 1, "no column 'no'"),
        (["--precision", "int8", "-o", "full"], 1, "pass --overwrite"),
        (["--precision", "int8", "-o", "blank.txt", "--overwrite"], 1, "already exists; pass --overwrite"),
    ],
)
def test_wrong_use(
    argv: list[str], status: int, message: str, models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "blank.txt").write_text(" \n\t\n")
    (here / "full").mkdir()
    (here / "full" / "kept").touch()
    texts_file(here, ["a cat"])
    before = sorted(here.rglob("*"))
    try:
        code: Any = main(["quantize", models["fill"], *argv])
    except SystemExit as error:
        code = error.code
    assert code == status
    assert message in capsys.readouterr().err
    assert sorted(here.rglob("*")) == before


def test_a_failure_leaves_nothing(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing folder stays until the new one is complete."""
    (here / "out").mkdir()
    (here / "out" / "kept").touch()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "quantization.json")

    monkeypatch.setattr(quantization_report, "differences", fail)
    assert main(["quantize", models["fill"], "-o", "out", "--precision", "int8", "--overwrite"]) == 1
    assert "No space left" in capsys.readouterr().err
    assert [p.name for p in here.rglob("*")] == ["out", "kept"]
