"""The report of an export: how far each file's outputs are from the source's, its size and its speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bertie.compress.graph_formats import GraphPrecision

# The largest relative error of an output that is accepted: ‖exported − source‖ / ‖source‖.
MAX_ERROR: dict[GraphPrecision, float] = {"fp32": 1e-4, "fp16": 1e-2, "int8": 0.25}
MAX_FP32_DIFFERENCE = 1e-3  # of any single value, as a share of the largest absolute value of the output


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """An output of the exported graph compared with the source's, over all texts (padding left out)."""

    max_difference: float  # of any value
    largest: float  # the source's largest absolute value
    relative_error: float  # ‖exported − source‖ / ‖source‖
    min_cosine: float  # over rows: tokens, or texts
    mean_cosine: float
    rows: int
    # Share of equal first choices: the best class or token of a row, the best start or end of an answer, the nearest
    # other text of a sentence embedding. None: the output has none.
    agreement: float | None = None


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file of the export, and how it compares with the source."""

    file: str  # relative to the folder
    format: str
    precision: str
    bytes: int
    outputs: dict[str, OutputComparison]
    texts_per_second: float  # forward passes only, over the short texts in padded batches
    source_texts_per_second: float  # Bertie's own in fp32, measured alternately

    @property
    def speedup(self) -> float:
        """The speed as a multiple of Bertie's in fp32."""
        return self.texts_per_second / self.source_texts_per_second

    def problem(self, max_error: float) -> str | None:
        """Why the file is rejected; None if it is accurate enough."""
        for name, output in self.outputs.items():
            if not output.relative_error <= max_error:  # so written because it may be NaN
                return (
                    f"{self.file}: {name} has a relative error of {output.relative_error:.2g}; allowed: {max_error:g}"
                )
            share = output.max_difference / max(output.largest, 1e-30)
            if self.precision == "fp32" and not share <= max(max_error, MAX_FP32_DIFFERENCE):
                return f"{self.file}: a value of {name} differs by {output.max_difference:.2g}"
        return None


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What `bertie.export` wrote, and how it compares with the source on the same texts.

    `files` has one entry per graph. `notes` are sentences about differences from Bertie.
    """

    model: str
    task: str
    head: str | None
    folder: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_length: int
    texts: int
    tokens: int
    threads: int
    source_bytes: int  # of its weights in fp32
    files: tuple[ExportedFile, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, as in export.json."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield f"task     {self.task}" + (f", head {self.head}" if self.head else "")
        yield f"inputs   {', '.join(self.inputs)}; at most {self.max_length:,} tokens"
        yield f"outputs  {', '.join(self.outputs)}"
        yield (
            f"source   {self.source_bytes / 1e6:,.1f} MB in fp32; compared on {self.texts} texts with {self.tokens:,} "
            f"tokens, threads: {self.threads}"
        )
        for file in self.files:
            speed = f"{file.texts_per_second:,.0f} texts/s ({file.speedup:.2f}× Bertie in fp32)"
            yield f"{file.file}: {file.bytes / 1e6:,.1f} MB, {speed}"
            for name, output in file.outputs.items():
                yield f"  {name:<18} {_comparison(output)}"
        yield from (f"note     {note}" for note in self.notes)

    def table(self) -> Iterator[str]:
        """The comparison as a Markdown table."""
        yield "| file | size | output | largest difference | lowest cosine | same first choice | texts/s | × Bertie |"
        yield "|---|--:|---|--:|--:|--:|--:|--:|"
        for file in self.files:
            for name, output in file.outputs.items():
                agreement = "" if output.agreement is None else f"{output.agreement:.1%}"
                yield (
                    f"| {file.file} | {file.bytes / 1e6:,.1f} MB | {name} | {output.max_difference:.2g} | "
                    f"{output.min_cosine:.6f} | {agreement} | {file.texts_per_second:,.0f} | {file.speedup:.2f} |"
                )


def _comparison(output: OutputComparison) -> str:
    text = (
        f"largest difference {output.max_difference:.2g} of {output.largest:.3g}, relative error "
        f"{output.relative_error:.2g}, cosine at least {output.min_cosine:.6f}"
    )
    return text if output.agreement is None else f"{text}, first choice equal in {output.agreement:.1%}"
