"""The curves of a run as files, for people, for programs and for TensorBoard."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bertie.data.atomic import atomic_write
from bertie.errors import MissingPackageError
from bertie.evaluation.pages import Plot, Section, Table, to_html
from bertie.evaluation.plots import Line, lines

Row = Mapping[str, float]
Points = list[tuple[float, float]]

_POINTS = 300  # of a line
_UNITS = ((1e9, "billions of tokens"), (1e6, "millions of tokens"), (1e3, "thousands of tokens"), (1.0, "tokens"))


class Curves:
    """The curves of a run as files: `curve.csv`, `evaluations.csv`, and `curve.html` that draws both.

    Rows hold step, epoch, loss, lr, tokens and, where they are known, tokens_per_second and share_of_ceiling. A run
    that goes on begins with those that its state holds; the files follow from the rows alone. With `tensorboard` each
    row is an event too, in a folder of that name, and what a killed run wrote there after its last state is taken
    back. `write` before a state is saved: then nothing that the state holds is missing there.

    >>> import tempfile
    >>> curves = Curves(Path(tempfile.mkdtemp()))
    >>> curves.log({"step": 10, "epoch": 0.1, "loss": 9.5, "lr": 1e-4, "tokens": 40960})
    >>> curves.evaluated({"step": 10, "epoch": 0.1, "loss": 9.25, "accuracy": 0.125})
    >>> curves.write()
    >>> print((curves.folder / "evaluations.csv").read_text(), end="")
    step,epoch,loss,accuracy
    10,0.1,9.25,0.125
    """

    def __init__(
        self,
        folder: Path,
        rows: Sequence[Row] = (),
        evaluations: Sequence[Row] = (),
        *,
        tensorboard: bool = False,
    ) -> None:
        self.folder, self.rows, self.evaluations = folder, list(rows), list(evaluations)
        folder.mkdir(parents=True, exist_ok=True)
        done = max((int(row["step"]) for row in (*rows, *evaluations)), default=-1)
        self._events = _events(folder / "tensorboard", done + 1) if tensorboard else None

    def log(self, row: Row) -> None:
        """A row of the log."""
        self.rows.append(row)
        self._event("train", row)

    def evaluated(self, row: Row) -> None:
        """What an evaluation found, with its step."""
        self.evaluations.append(row)
        self._event("held_out", row)

    def write(self) -> None:
        """Write the files, each whole or not at all."""
        atomic_write(self.folder / "curve.csv", _csv(self.rows))
        atomic_write(self.folder / "evaluations.csv", _csv(self.evaluations))
        atomic_write(self.folder / "curve.html", _page(self.rows, self.evaluations).encode("utf-8"))
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Write the files for the last time."""
        self.write()
        if self._events is not None:
            self._events.close()

    def _event(self, where: str, row: Row) -> None:
        if self._events is not None:
            for name in row.keys() - {"step"}:
                self._events.add_scalar(f"{where}/{name}", row[name], int(row["step"]))


def _events(folder: Path, purge: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingPackageError(
            "event files for TensorBoard need the package tensorboard: pip install 'bertie[tensorboard]'"
        ) from None
    make: Any = SummaryWriter
    return make(str(folder), purge_step=purge)


def _csv(rows: Sequence[Row]) -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["step"]
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(names)
    table.writerows([_cell(row[name]) if name in row else "" for name in names] for row in rows)
    return file.getvalue().encode("utf-8")


def _cell(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.9g}"


def _page(rows: Sequence[Row], evaluations: Sequence[Row]) -> str:
    """A function of the rows alone, in however many processes they were made."""
    steps, tokens = ([0.0, *(row[name] for row in rows)] for name in ("step", "tokens"))
    size, unit = next((one for one in _UNITS if one[0] <= tokens[-1]), _UNITS[-1])

    def points(name: str, of: Sequence[Row], times: float = 1.0) -> Points:
        """Against what was read by then. An evaluation's own tokens are those that it predictions."""
        of = [row for row in of if name in row]
        read = np.interp([row["step"] for row in of], steps, tokens) / size
        return [(x, times * row[name]) for x, row in zip(read.tolist(), of, strict=True)]

    def trained(name: str, times: float = 1.0) -> Line:
        return Line("training", _thinned(points(name, rows, times)))

    def held_out(name: str) -> Line:
        return Line("held-out text", points(name, evaluations), "b", dots=True)

    def late(line: Line) -> Line:
        return replace(line, points=[point for point in line.points if point[0] * size >= tokens[-1] / 2])

    losses = [trained("loss"), held_out("loss")]
    sections = [Section("So far", [Table(["name", "value"], _facts(rows, evaluations))])]
    for title, y, series in (
        ("Loss", "loss", losses),
        ("Loss in the second half", "loss", [late(line) for line in losses]),  # whose scale the beginning would hide
        ("Hidden tokens that are found", "share", [held_out("accuracy")]),
        ("Learning rate", "millionths", [trained("lr", 1e6)]),
        ("Throughput", "thousands of tokens a second", [trained("tokens_per_second", 1e-3)]),
        ("Share of what the chip can do", "share", [trained("share_of_ceiling")]),
    ):
        alt = f"{title} by {unit} read"
        if svg := lines(alt, [line for line in series if line.points], unit, y):
            sections.append(Section(title, [Plot(svg, alt)]))
    return to_html("Pretraining", sections)


def _facts(rows: Sequence[Row], evaluations: Sequence[Row]) -> list[list[str]]:
    """Where the run stands."""
    facts = []
    if rows:
        last = rows[-1]
        facts += [["steps", f"{last['step']:,.0f}"], ["epochs", f"{last['epoch']:.3g}"]]
        facts += [["tokens read", f"{last['tokens']:,.0f}"], ["training loss", f"{last['loss']:.4f}"]]
    for name, shown in (("tokens_per_second", ",.0f"), ("share_of_ceiling", ".1%")):
        if values := [row[name] for row in rows if name in row]:
            facts.append([f"{name.replace('_', ' ')}, median", f"{median(values):{shown}}"])
    if evaluations:
        found = {name: value for name, value in evaluations[-1].items() if name not in ("step", "epoch")}
        facts.append(["last evaluated after step", f"{evaluations[-1]['step']:,.0f}"])
        facts += [[f"held-out {name}", f"{value:,.6g}"] for name, value in found.items()]
    return facts


def _thinned(points: Points) -> Points:
    """Means of neighbours, so that few points are left."""
    if len(points) <= _POINTS:
        return points
    return [(float(x), float(y)) for x, y in (part.mean(0) for part in np.array_split(np.array(points), _POINTS))]
