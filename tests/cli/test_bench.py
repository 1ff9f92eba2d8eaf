from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertie import Embedder, bench
from bertie.bench import measure, mixed_lengths, padded_tokens, random_ids, random_model, time_interleaved
from bertie.cli import main
from bertie.errors import InputError

CPU = torch.device("cpu")


def test_a_model(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "-m", models["embed"], "--device", "cpu", "--seconds", "0.2", "--price", "3.6"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["precision"], found["device"]) == (models["embed"], "fp32", "cpu")
    for way in ("from_ids", "from_text"):
        rate = found[way]
        assert 0 < rate["texts_per_s"] < rate["tokens_per_s"]
        assert 0 < rate["share_of_ceiling"] < 1
    # 3.6 an hour is a thousandth a second.
    assert found["per_million_tokens"] == pytest.approx(1e3 / found["from_text"]["tokens_per_s"])
    assert found["peak_bytes"] > 1 << 20
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert [line.split("  ")[0] for line in shown.splitlines()] == [
        *("model", "texts", "ceiling", "from ids", "from text", "padding", "peak memory", "cost"),
        *(
            f"dispatch: {name}"
            for name in ("replay", "encoder", "attention", "norm", "activation", "embedding", "pooling")
        ),
    ]
    assert {"operation": "attention", "backend": "torch.attention.grouped", "condition": ""} in found["dispatch"]


def test_texts_of_a_file(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["the cat sat", "a dog", "a " * 60] * 22
    Path("texts.jsonl").write_text("".join(json.dumps({"said": row}) + "\n" for row in rows))
    assert main([*"bench --texts texts.jsonl --seconds 0.1 --json --device cpu -m".split(), models["embed"]]) == 0
    found = json.loads(capsys.readouterr().out)
    lengths = [5, 4, 40] * 22  # the long one is cut at the max_length, as there is no other way from ids
    assert (found["texts"], found["tokens"]) == (66, sum(lengths))
    assert found["padding"] == pytest.approx(padded_tokens(lengths, 32) / sum(lengths) - 1)
    assert found["padding_sorted"] < found["padding"]


def test_a_shape(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "roberta", "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3}
    config |= {"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 66}
    Path("config.json").write_text(json.dumps(config))
    for shape in ("2x64", "config.json"):
        assert main(["bench", "--shape", shape, "--seconds", "0.1", "--json", "--device", "cpu"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["model"], found["from_text"], found["per_million_tokens"]) == (shape, None, None)
        assert found["precision"] == "fp32"
    assert random_model("config.json").config.depth == 3
    assert random_model("2x128").config.heads == 2


def test_wrong_use(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, status, said in (
        (["--shape", "2x64", "-m", models["embed"]], 2, "--shape has no tokenizer"),
        (["--shape", "small"], 1, "'small' must be layers x width"),
        (["-m", models["embed"], "--seconds", "0"], 1, "seconds=0.0 must be greater than 0"),
    ):
        assert main(["bench", "--device", "cpu", *wrong]) == status
        assert said in capsys.readouterr().err
    with pytest.raises(InputError, match="no texts"):
        measure(random_model("1x16"), texts=[])


def test_throughput_follows_the_clock(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = Embedder.load(models["embed"])
    times = {2048: [0.5, 0.25, 0.125], 8192: [1.0] * 3, "text": [2.0] * 3}
    monkeypatch.setattr(bench, "_time_with_ceiling", lambda *_: (times, [1e9, 0.5e9, 1e9]))
    found = measure(embedder.model, embedder=embedder, texts=["the cat"] * 3)
    assert (found.from_ids.texts_per_s, found.from_ids.tokens_per_s, found.budget) == (12, 48, 2048)
    blocks = sum(p.numel() for p in embedder.model.encoder.blocks.parameters() if p.ndim == 2)
    assert found.from_ids.share_of_ceiling == pytest.approx(2 * blocks * 48 / 1e9)
    assert (found.ceiling, found.machine_busy) == (1e9, False)


def test_a_busy_machine_is_reported(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """When matrix multiplication slowed down, or was slower than the model: no share is above 100%."""
    model = random_model("1x64")
    times = {2048: [1e-9], 8192: [1e-9]}
    monkeypatch.setattr(bench, "_time_with_ceiling", lambda *_: (times, [1e9]))
    found = measure(model, seconds=0.1)
    assert (found.from_ids.share_of_ceiling, found.machine_busy) == (1.0, True)
    monkeypatch.setattr(bench, "_time_with_ceiling", lambda *_: ({2048: [1e9], 8192: [1e9]}, [1e9, 0.8e9, 0.8e9]))
    assert measure(model, seconds=0.1).machine_busy


def test_the_ceiling_is_measured_between_the_passes() -> None:
    order: list[str] = []

    class Gemm:
        def flops_per_s(self) -> float:
            order.append("gemm")
            return 1.0

    calls: dict[int | str, Any] = {1: lambda: order.append("a"), 2: lambda: order.append("b")}
    times, ceilings = bench._time_with_ceiling(calls, Gemm(), CPU, 0.0)  # type: ignore[arg-type]
    assert order == ["a", "b", *["gemm", "a", "gemm", "b"] * 2]
    assert ([len(values) for values in times.values()], len(ceilings)) == ([2, 2], 4)


def test_lengths_and_ids() -> None:
    lengths = mixed_lengths(4096)
    assert (round(lengths.mean()), np.median(lengths), lengths.max()) == (117, 87, 512)
    assert abs(np.percentile(lengths, 95) - 324) < 2
    ids = random_ids([3, 1], vocab=7)
    assert [len(one) for one in ids] == [3, 1]
    assert set(np.concatenate(ids).tolist()) <= {5, 6}


def test_padded_tokens() -> None:
    assert padded_tokens([1, 5, 2, 2, 3], batch_size=2) == 10 + 4 + 3


def test_time_interleaved() -> None:
    said: list[str] = []
    times = time_interleaved({"a": lambda: said.append("a"), "b": lambda: said.append("b")}, CPU, repeats=3)
    assert said == ["a", "b"] * 3
    assert [len(some) for some in times.values()] == [3, 3]
    assert len(time_interleaved({"a": int}, CPU, repeats=3, until=0.0)["a"]) == 1


def test_bytes(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--device", "cpu", "--seconds", "0.2", "--precision", "int8", "--json"]
    for model in (["-m", models["embed"]], ["--shape", "2x64"]):
        assert main([*command, *model]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["precision"] == "int8"
        assert found["from_ids"]["tokens_per_s"] > 0
        assert ("quantization_report" in found) == ("-m" in model)  # of random weights nobody wants to know
    assert main([*command[:-1], "-m", models["embed"]]) == 0
    shown = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown if "dispatch" not in line][-4:] == [
        "peak memory",
        "quantization",
        "hidden",
        "head pooler",
    ]


def test_a_receipt_of_texts(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spread over the file, of what is no blank."""
    Path("texts.txt").write_text("the cat sat\n" * 700 + "a dog\n" * 3)
    command = ["bench", "--device", "cpu", "--seconds", "0.2", "--precision", "int8", "--json", "--texts", "texts.txt"]
    assert main([*command, "-m", models["embed"]]) == 0
    report = json.loads(capsys.readouterr().out)["quantization_report"]
    assert (report["against"], report["texts"], report["heads"]["pooler"]["count"]) == ("fp32", "texts.txt", 235)
    assert 0.99 < report["hidden"]["min_cosine"] < 1
    assert 0 < report["hidden"]["max_error"] < 0.1
