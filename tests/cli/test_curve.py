"""`bertie train --curve`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertie.cli import main
from tests.cli.toys import write_toys

QUICK = ["--epochs", "1", "--batch-size", "8", "--lr", "5e-5", "--resamples", "50", "--no-baselines"]


def test_the_curve_is_saved_and_printed(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = write_toys(here, "classify", train=90)
    assert main(["train", *argv, "-m", models["embed"], "-o", "out", *QUICK, "--curve", "--json"]) == 0
    out, err = capsys.readouterr()
    curve = json.loads(out)["learning_curve"]
    assert [point["rows"] for point in curve["points"]] == [9, 27, 90]
    assert curve["points"][-1]["score"]["value"] == json.loads(out)["test"]["accuracy"]["value"]
    assert json.loads(Path("out/learning_curve.json").read_text()) == curve
    assert "learning curve, accuracy on" in err
    assert curve["verdict"] in err


def test_flags(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = write_toys(here, "classify")
    assert main(["train", *argv, "-m", models["embed"], "-o", "out", "--curve-draws", "2"]) == 2
    assert "--curve-draws needs --curve" in capsys.readouterr().err
