"""Training curves: CSV files, the page and TensorBoard events are functions of the rows."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from bertie.errors import MissingPackageError
from bertie.training.pretrain import curves
from bertie.training.pretrain.curves import Curves


def rows(count: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    logged: list[dict[str, float]] = [
        {
            "step": 10.0 * i,
            "epoch": i / 50,
            "loss": 2 + 8 / i,
            "lr": 1e-4 * i,
            "tokens": 4_000_003.0 * i,
            "tokens_per_second": 9e5 + i,
            "mfu": 0.41,
        }
        for i in range(1, count + 1)
    ]
    predictions = [
        {"step": row["step"], "epoch": row["epoch"], "loss": row["loss"] + 0.1, "accuracy": 0.5, "accuracy_se": 0.01}
        for row in logged[4::5]
    ]
    return logged, predictions


def fed(folder: Path, count: int, known: int = 0, **options: Any) -> Curves:
    """Curves of a run of `count` rows, of which a state held the first `known`."""
    logged, predictions = rows(count)
    held = [one for one in predictions if one["step"] <= 10 * known]
    found = Curves(folder, logged[:known], held, **options)
    for row in logged[known:]:
        found.log(row)
        for one in predictions:
            if one["step"] == row["step"]:
                found.log_evaluation(one)
    found.close()
    return found


def test_files_are_a_function_of_the_rows(tmp_path: Path) -> None:
    fed(tmp_path / "whole", 40)
    fed(tmp_path / "stopped", 33)
    fed(tmp_path / "stopped", 40, known=22)
    names = ["curve.csv", "curve.html", "evaluations.csv"]
    assert sorted(one.name for one in (tmp_path / "stopped").iterdir()) == names
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()
    Curves(tmp_path / "stopped").write()
    assert (tmp_path / "stopped" / "evaluations.csv").read_text() == "step\n"


def test_csv_files_hold_the_rows(tmp_path: Path) -> None:
    logged, predictions = rows(400)
    del logged[3]["mfu"]
    found = Curves(tmp_path, logged, predictions)
    found.write()
    for name, wanted in (("curve.csv", logged), ("evaluations.csv", predictions)):
        with (tmp_path / name).open() as file:
            read = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
        assert [one.keys() for one in read] == [one.keys() for one in wanted]
        for one, other in zip(read, wanted, strict=True):
            assert one == pytest.approx(other, rel=1e-8)
            assert one.get("tokens") == other.get("tokens")


def test_the_page_plots_losses_against_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}

    def lines(alt: str, series: Any, x: str, y: str, **options: bool) -> str:
        drawn[alt.split(" by ")[0]] = (series, x)
        return real(alt, series, x, y, **options)

    real = curves.lines  # type: ignore[attr-defined]
    monkeypatch.setattr(curves, "lines", lines)
    fed(tmp_path, 1000)
    (training, held), unit = drawn["Loss"]
    assert unit == "billions of tokens"
    assert len(training.points) == 300
    assert training.points[-1] == pytest.approx((4.0, 2.008), abs=0.01)
    assert len(held.points) == 200
    assert held.points[0] == pytest.approx(
        (0.020000015, 2 + 8 / 5 + 0.1)
    )  # by what was read, not by what was predicted
    for line, whole in zip(drawn["Loss in the second half"][0], (training, held), strict=True):
        assert line.points == [point for point in whole.points if point[0] >= 2.0000015]
        assert 100 < len(line.points) < 170
    page = (tmp_path / "curve.html").read_text()
    assert page.count("<svg") == 6
    assert not re.search(r"https?://", page)
    assert page.count("<script") == 1
    accuracy = drawn["Accuracy on masked tokens"][0][0]
    assert accuracy.band[0] == pytest.approx((0.5 - 1.96 * 0.01, 0.5 + 1.96 * 0.01))
    assert "0.5 ± 0.0196" in page
    ticks = re.findall(r'<text class="end"[^>]*>([^<]*)</text>', page[page.index("<h2>Learning rate") :])
    assert ticks[:3] == ["0", "0.02", "0.04"]  # plain numbers, from 0
    assert "Loss in the second half by billions of tokens; the axis does not begin at 0" in page
    for fact in ("10,000", "4,000,003,000", "41.0%", "held-out accuracy"):
        assert fact in page


def test_a_page_with_few_rows(tmp_path: Path) -> None:
    for i, (logged, predictions) in enumerate([([], []), ([], [{"step": 0.0, "loss": 9.0}]), rows(1)]):
        Curves(tmp_path / str(i), logged, predictions).write()
        assert (tmp_path / str(i) / "curve.html").read_text().count("<svg") == 0  # a point is no curve


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fed(tmp_path, 33, tensorboard=True)
    fed(tmp_path, 40, known=22, tensorboard=True)
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    logged, predictions = rows(40)
    for tag, wanted in (("train/loss", logged), ("held_out/loss", predictions)):
        points = found.Scalars(tag)
        assert [one.step for one in points] == [int(one["step"]) for one in wanted]
        assert [one.value for one in points] == pytest.approx([one["loss"] for one in wanted])
    assert "train/mfu" in found.Tags()["scalars"]


def test_tensorboard_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'bertie\[tensorboard\]'"):
        Curves(tmp_path, tensorboard=True)
