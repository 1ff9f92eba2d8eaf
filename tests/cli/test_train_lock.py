"""Two runs of `bertie train` to the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bertie.cli import main
from bertie.training.state import StateFolder
from tests.cli.toys import write_toys


def test_the_second_run_to_a_folder_is_refused(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started while the first one saves its state; the first one is not disturbed."""
    argv = ["train", *write_toys(here, "classify"), "-m", models["embed"], "--batch-size", "8", "--epochs", "1", "-o"]
    save, flags, codes = StateFolder.save, ["--resume", "--overwrite"], []

    def save_and_start_another(*args: Any) -> None:
        save(*args)
        if flags:
            codes.append(main([*argv, "out", flags.pop()]))

    with monkeypatch.context() as patch:
        patch.setattr(StateFolder, "save", save_and_start_another)
        assert main([*argv, "out", "--save-steps", "1"]) == 0
    assert codes == [1, 1]
    assert capsys.readouterr().err.count("bertie: out is being written by another process\n") == 2
    assert main([*argv, "other"]) == 0
    assert Path("out/model.safetensors").read_bytes() == Path("other/model.safetensors").read_bytes()
    assert sorted(path.name for path in here.iterdir()) == ["dev.jsonl", "other", "out", "test.jsonl", "train.jsonl"]
