"""Training curves as CSV, HTML and TensorBoard event files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bertie.data.atomic import atomic_write
from bertie.errors import MissingPackageError
from bertie.evaluation.pages import Header, Plot, Section, Table, Tile, to_html
from bertie.evaluation.plots import Line, lines
from bertie.training.callbacks import LogRow

Points = list[tuple[float, float]]

Z = 1.96  # standard errors of a 95% interval
_MAX_POINTS = 300  # per line
_UNITS = ((1e9, "billions of tokens"), (1e6, "millions of tokens"), (1e3, "thousands of tokens"), (1.0, "tokens"))


class Curves:
    """The curves of a run: `curve.csv`, `evaluations.csv`, and `curve.html` with plots of both.

    Rows hold step, epoch, loss, lr, tokens and, where known, tokens_per_second and mfu. A resumed
    run starts with the rows of its checkpoint; the files depend on the rows alone. With
    `tensorboard` each row is an event too, and events after the last checkpoint of an interrupted
    run are purged. Call `write` before each checkpoint, so that the files have every row of the
    checkpoint.

    >>> import tempfile
    >>> curves = Curves(Path(tempfile.mkdtemp()))
    >>> curves.log({"step": 10, "epoch": 0.1, "loss": 9.5, "lr": 1e-4, "tokens": 40960})
    >>> curves.log_evaluation({"step": 10, "epoch": 0.1, "loss": 9.25, "accuracy": 0.125})
    >>> curves.write()
    >>> print((curves.folder / "evaluations.csv").read_text(), end="")
    step,epoch,loss,accuracy
    10,0.1,9.25,0.125
    """

    def __init__(
        self,
        folder: Path,
        rows: Sequence[LogRow] = (),
        evaluations: Sequence[LogRow] = (),
        *,
        tensorboard: bool = False,
    ) -> None:
        self.folder, self.rows, self.evaluations = folder, list(rows), list(evaluations)
        folder.mkdir(parents=True, exist_ok=True)
        done = max((int(row["step"]) for row in (*rows, *evaluations)), default=-1)
        self._events = _events(folder / "tensorboard", done + 1) if tensorboard else None

    def log(self, row: LogRow) -> None:
        """Add a row of the log."""
        self.rows.append(row)
        self._event("train", row)

    def log_evaluation(self, row: LogRow) -> None:
        """Add the scores of an evaluation, with its step."""
        self.evaluations.append(row)
        self._event("held_out", row)

    def write(self) -> None:
        """Write the files atomically."""
        atomic_write(self.folder / "curve.csv", _csv(self.rows))
        atomic_write(self.folder / "evaluations.csv", _csv(self.evaluations))
        atomic_write(self.folder / "curve.html", _page(self.rows, self.evaluations).encode("utf-8"))
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Write and close the files."""
        self.write()
        if self._events is not None:
            self._events.close()

    def _event(self, where: str, row: LogRow) -> None:
        if self._events is not None:
            for name in row.keys() - {"step"}:
                self._events.add_scalar(f"{where}/{name}", row[name], int(row["step"]))


def _events(folder: Path, purge: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingPackageError(
            "TensorBoard event files need the package tensorboard: pip install 'bertie[tensorboard]'"
        ) from None
    make: Any = SummaryWriter
    return make(str(folder), purge_step=purge)


def _csv(rows: Sequence[LogRow]) -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["step"]
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(names)
    table.writerows([_cell(row[name]) if name in row else "" for name in names] for row in rows)
    return file.getvalue().encode("utf-8")


def _cell(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.9g}"


def _page(rows: Sequence[LogRow], evaluations: Sequence[LogRow]) -> str:
    steps, tokens = ([0.0, *(row[name] for row in rows)] for name in ("step", "tokens"))
    size, unit = next((unit for unit in _UNITS if unit[0] <= tokens[-1]), _UNITS[-1])

    def points(name: str, of: Sequence[LogRow], times: float = 1.0) -> Points:
        """Against the tokens read so far; the `tokens` of an evaluation are those that it predicts."""
        of = [row for row in of if name in row]
        read = np.interp([row["step"] for row in of], steps, tokens) / size
        return [(x, times * row[name]) for x, row in zip(read.tolist(), of, strict=True)]

    def training_line(name: str, times: float = 1.0) -> Line:
        return Line("training", _downsample(points(name, rows, times)))

    def held_out_line(name: str) -> Line:
        of = [row for row in evaluations if name in row]
        band = [
            (row[name] - Z * row[f"{name}_se"], row[name] + Z * row[f"{name}_se"]) for row in of if f"{name}_se" in row
        ]
        return Line("held-out text", points(name, of), "b", dots=True, band=band if len(band) == len(of) else ())

    def second_half(line: Line) -> Line:
        kept = [i for i, point in enumerate(line.points) if point[0] * size >= tokens[-1] / 2]
        band = [line.band[i] for i in kept] if line.band else ()
        return replace(line, points=[line.points[i] for i in kept], band=band)

    losses = [training_line("loss"), held_out_line("loss")]
    sections = [Section("Summary", [Table(["name", "value"], _facts(rows, evaluations))])]
    for title, y, series, from_zero in (
        ("Loss", "loss", losses, True),
        ("Loss in the second half", "loss", [second_half(line) for line in losses], False),
        ("Accuracy on masked tokens", "accuracy", [held_out_line("accuracy")], True),
        ("Learning rate", "learning rate", [training_line("lr")], True),
        ("Throughput", "thousands of tokens per second", [training_line("tokens_per_second", 1e-3)], True),
        ("Model FLOPs utilization", "share of the measured peak", [training_line("mfu")], True),
    ):
        alt = f"{title} by {unit}"
        caption = alt + ("" if from_zero else "; the axis does not begin at 0")
        if any(line.band for line in series):
            caption += "; the band is the 95% interval over held-out documents"
        if svg := lines(alt, [line for line in series if line.points], unit, y, from_zero=from_zero):
            sections.append(Section(title, [Plot(svg, caption)]))
    return to_html("Pretraining", sections, _header(rows, evaluations))


def _header(rows: Sequence[LogRow], evaluations: Sequence[LogRow]) -> Header:
    """The headline figures: the last held-out scores, tokens read, and throughput."""
    tiles = []
    last: LogRow = evaluations[-1] if evaluations else {}
    for name in ("accuracy", "loss"):
        if name in last:
            note = f"± {Z * last[f'{name}_se']:.4f} (95%)" if f"{name}_se" in last else ""
            tiles.append(Tile(f"held-out {name}", f"{last[name]:.3f}", note))
    if rows:
        tiles.append(Tile("tokens read", f"{rows[-1]['tokens']:,.0f}", f"{rows[-1]['step']:,.0f} steps"))
    if speeds := [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]:
        tiles.append(Tile("tokens per second", f"{median(speeds):,.0f}", "median"))
    return Header(tiles=tiles)


def _facts(rows: Sequence[LogRow], evaluations: Sequence[LogRow]) -> list[list[str]]:
    """The rows of the summary."""
    facts = []
    if rows:
        last = rows[-1]
        facts += [["steps", f"{last['step']:,.0f}"], ["epochs", f"{last['epoch']:.3g}"]]
        facts += [["tokens read", f"{last['tokens']:,.0f}"], ["training loss", f"{last['loss']:.4f}"]]
    for name, shown in (("tokens_per_second", ",.0f"), ("mfu", ".1%")):
        if values := [row[name] for row in rows if name in row]:
            facts.append([f"{name.replace('_', ' ')}, median", f"{median(values):{shown}}"])
    if evaluations:
        last = evaluations[-1]
        facts.append(["last evaluation after step", f"{last['step']:,.0f}"])
        for name, value in last.items():
            if name not in ("step", "epoch") and not name.endswith("_se"):
                interval = f" ± {Z * last[f'{name}_se']:.3g}" if f"{name}_se" in last else ""
                facts.append([f"held-out {name}", f"{value:,.6g}{interval}"])
    return facts


def _downsample(points: Points) -> Points:
    """Average neighbouring points."""
    if len(points) <= _MAX_POINTS:
        return points
    return [(float(x), float(y)) for x, y in (part.mean(0) for part in np.array_split(np.array(points), _MAX_POINTS))]
