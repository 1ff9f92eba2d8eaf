"""Export a model to the formats of other runtimes; files that differ from the source are rejected."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch

from bertie._version import __version__
from bertie.arguments import explain_arguments
from bertie.checkpoints import storage
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.compress import graph_formats
from bertie.compress.export_check import ExportCheck, ExportSource
from bertie.compress.export_folder import folder_files, readme
from bertie.compress.export_report import MAX_ERROR, ExportedFile, ExportReport
from bertie.compress.graph_formats import FILES, GraphFormat, GraphPrecision
from bertie.compress.padded_model import PaddedModel
from bertie.compress.quantization_report import PAIRED, TEXTS
from bertie.config import Full
from bertie.data.draft_folder import draft_folder
from bertie.data.progress import Progress
from bertie.errors import ConfigError, ExistsError, ExportError, InputError
from bertie.nn.sentence_layers import Normalize
from bertie.tasks import registry
from bertie.tasks.base import Task
from bertie.tasks.embed import Embedder
from bertie.tasks.loading import load, load_checkpoint

REPORT, README = "export.json", "README.md"
EXTERNAL = ("onnx", "onnxruntime", "onnxscript", "openvino", "torch")


@explain_arguments
def export(
    model: str | Path | Checkpoint | Task[Any, Any, Any] | None,
    folder: str | Path,
    *,
    to: GraphFormat | Sequence[GraphFormat] = "onnx",
    precision: GraphPrecision | Sequence[GraphPrecision] = "fp32",
    task: str | None = None,
    head: str | None = None,
    texts: Sequence[str] | None = None,
    max_error: float | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> ExportReport:
    """Export a model with one head, or with its pooling, as an ONNX or OpenVINO graph.

    >>> report = export("path/to/folder", "exported", to="onnx", precision=["fp32", "int8"])    # doctest: +SKIP
    >>> report.files[0].outputs["sentence_embedding"].min_cosine > 0.9999                       # doctest: +SKIP
    True

    `model` is a folder, built-in name or hub id, a `Checkpoint`, or a task such as an `Embedder`, whose pooling and
    head are then exported. For a model with several heads, `task` or `head` selects one. Several formats and precisions
    may be listed; their files are side by side in `folder`, with tokenizer and configs, as other libraries expect them.

    Each file is run on `texts` (built-in ones by default) and compared with the source. If an output's relative error
    exceeds `max_error` (by default 1e-4 in fp32, 0.01 in fp16, 0.25 in int8), an `ExportError` is raised and nothing is
    written. The report is returned, and saved as export.json and README.md.
    """
    formats, precisions = _listed("to", to, GraphFormat), _listed("precision", precision, GraphPrecision)
    out = Path(os.path.abspath(folder))
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not overwrite)):
        raise ExistsError(f"{folder} already exists; pass overwrite=True to replace a folder")
    if max_error is not None and not max_error > 0:
        raise ConfigError(f"max_error={max_error} must be greater than 0")
    texts = _checked_texts(TEXTS if texts is None else texts)
    graph_formats.require("onnx", "onnxscript", "onnxruntime", *(["openvino"] if "openvino" in formats else []))
    source, chosen = _source(_task(model, task, head))
    _check_distinct(out, source.checkpoint.source)
    wanted = [(kind, value) for kind in formats for value in precisions]
    with _steps(len(wanted) + 2, progress) as step, draft_folder(out) as draft:
        checkpoint, sentence = source.checkpoint, source.padded.sentence
        for name, data in folder_files(checkpoint, chosen, source.head, sentence).items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_bytes(data)
        check = ExportCheck(source, texts)
        step("graph")
        files = _write(source, draft, wanted, check, max_error, step)
        report = _report(source, chosen, str(folder), check, files)
        (draft / REPORT).write_bytes(storage.to_json(report.to_dict()))
        (draft / README).write_text(readme(report, sentence), encoding="utf-8")
    return report


def _write(
    source: ExportSource,
    draft: Path,
    wanted: Sequence[tuple[GraphFormat, GraphPrecision]],
    check: ExportCheck,
    max_error: float | None,
    step: Any,
) -> list[ExportedFile]:
    """Write and check the files."""
    proto = graph_formats.to_onnx(source.padded)
    step("files")
    plain = draft / FILES["onnx", "fp32"]
    temporary = ("onnx", "fp32") not in wanted and any(kind == "openvino" for kind, _ in wanted)
    if temporary:  # OpenVINO converts it
        graph_formats.write_onnx(proto, plain, "fp32")
    files = []
    # The ONNX file in fp32 comes first: OpenVINO's are made from it.
    for kind, precision in sorted(wanted, key=lambda pair: pair != ("onnx", "fp32")):
        path = draft / FILES[kind, precision]
        if kind == "onnx":
            graph_formats.write_onnx(proto, path, precision)
        else:
            graph_formats.write_openvino(plain, path, precision)
        run = graph_formats.open_graph(path)
        size = sum(file.stat().st_size for file in graph_formats.parts(path))
        file = ExportedFile(FILES[kind, precision], kind, precision, size, check.compare(run), *check.speed(run))
        if problem := file.problem(MAX_ERROR[precision] if max_error is None else max_error):
            raise ExportError(f"the export differs from {source.checkpoint.source}: {problem}; nothing was written")
        files.append(file)
        step(f"{kind} {precision}")
    if temporary:
        for file_path in graph_formats.parts(plain):
            file_path.unlink()
        if not any(plain.parent.iterdir()):
            plain.parent.rmdir()
    return files


def _listed(name: str, value: Any, allowed: Any) -> list[Any]:
    values = [value] if isinstance(value, str) else list(value)
    for item in values:
        if item not in get_args(allowed):
            raise ConfigError(f"{name}={item!r} must be one of {', '.join(get_args(allowed))}")
    if not values:
        raise ConfigError(f"{name}=[] must list one or more of {', '.join(get_args(allowed))}")
    return list(dict.fromkeys(values))


def _check_distinct(out: Path, source: str) -> None:
    """Refuse a folder that holds the source, which it would replace."""
    path, out = Path(source).expanduser(), out.resolve()
    if path.exists() and out in (path.resolve(), *path.resolve().parents):
        raise ExistsError(f"the model {source} is in the folder {out}, which would be replaced; pass another one")


def _checked_texts(texts: Sequence[str]) -> list[str]:
    listed = [texts] if isinstance(texts, str) else list(texts)
    kept = [text for text in listed if isinstance(text, str) and text.strip()]
    if not kept or len(kept) < len(listed):
        raise InputError("texts= must be one or more texts, none of them empty")
    return kept


# --- what to export ---


def _task(
    model: str | Path | Checkpoint | Task[Any, Any, Any] | None, task: str | None, head: str | None
) -> Task[Any, Any, Any]:
    """The task object whose graph is exported, on the CPU in fp32."""
    if isinstance(model, Task):
        if task is not None or head is not None:
            raise ConfigError(f"task={task!r}, head={head!r}: a {type(model).__name__} has its own; leave both out")
        return model
    if task is not None and task not in registry.TASKS:
        raise ConfigError(f"task={task!r} must be one of {', '.join(registry.TASKS)}")
    if task is None:
        return load_checkpoint(model, head) if isinstance(model, Checkpoint) else load(model, head=head, device="cpu")
    kind = registry.TASKS[task].task_class
    options: dict[str, Any] = {} if head is None else {"head": head}
    return kind(model, **options) if isinstance(model, Checkpoint) else kind.load(model, device="cpu", **options)


def _source(task: Task[Any, Any, Any]) -> tuple[ExportSource, str]:
    """What is exported of a task, and the task's name."""
    name = registry.row_of(task).name
    checkpoint = task.checkpoint
    if checkpoint.device.type != "cpu" or checkpoint.precision != "fp32":
        raise ConfigError(
            f"{checkpoint.source} is in {checkpoint.precision} on {checkpoint.device}; load it with precision='fp32' "
            "and device='cpu' to export it"
        )
    if isinstance(task, Embedder):
        if task.truncate_dim is not None:
            raise ConfigError(f"dimension={task.truncate_dim} cannot be exported: truncate the embeddings afterwards")
        modules = task.modules
        if task.normalize and not any(isinstance(layer, Normalize) for layer in modules.layers):
            modules = modules.with_layers(Normalize())
        padded = PaddedModel(task.model, sentence=modules)
        return ExportSource(checkpoint, padded, None, paired=False), name
    if task.head is None:
        raise ConfigError(f"a {type(task).__name__} has no head or pooling of its own to export")
    info = task.info
    # Where Bertie applies it to logits itself.
    temperature = info.calibration.temperature if info.kind == "classify" and len(info.labels) > 1 else 1.0
    padded = PaddedModel(task.model, task.head, spans=info.kind == "answer", temperature=temperature)
    return ExportSource(checkpoint, padded, task.head, paired=info.kind in PAIRED or name == "rerank"), name


def _report(
    source: ExportSource, task: str, folder: str, check: ExportCheck, files: Sequence[ExportedFile]
) -> ExportReport:
    checkpoint, padded = source.checkpoint, source.padded
    used = {"bertie": __version__}
    for package in EXTERNAL:
        if package != "openvino" or any(file.format == "openvino" for file in files):
            used[package] = version(package)
    return ExportReport(
        model=Path(checkpoint.source).name or checkpoint.source,
        task=task,
        head=source.head,
        folder=folder,
        inputs=tuple(padded.input_names),
        outputs=tuple(padded.output_names),
        max_length=checkpoint.max_length,
        texts=check.texts,
        tokens=check.tokens,
        threads=torch.get_num_threads(),
        source_bytes=4 * sum(weight.numel() for weight in padded.parameters()),
        files=tuple(files),
        notes=tuple(_notes(source, files)),
        versions=used,
    )


def _notes(source: ExportSource, files: Sequence[ExportedFile]) -> Iterator[str]:
    padded = source.padded
    yield (
        "texts are padded inside the graph and truncated at the maximum length by these runtimes; Bertie does neither"
    )
    if padded.temperature != 1.0:
        yield f"the logits are divided by the head's temperature, {padded.temperature:.4g}"
    if padded.sentence is not None and not padded.pools:
        yield (
            "sentence_embedding is left out: pooling leaves out the prompt, whose length a graph cannot know; "
            "sentence-transformers pools last_hidden_state accordingly"
        )
    if any(not isinstance(pattern, Full) for pattern in padded.encoder.cfg.patterns):
        yield "sliding and block-sparse attention are masks over full attention in the graph: equivalent, but quadratic"
    done = {(file.format, file.precision) for file in files}
    if ("onnx", "int8") in done:
        yield "onnx int8: weights with one scale per output, activations with one per token, embedding tables in int8"
    if ("openvino", "int8") in done:
        yield "openvino int8: weights in int8 with one scale per output or row; activations as OpenVINO chooses"
    if ("onnx", "fp16") in done:
        yield "onnx fp16: weights stored in half precision, computed in fp32"


@contextmanager
def _steps(total: int, progress: bool | None) -> Iterator[Any]:
    """A progress bar over the steps of an export."""
    done = 0

    def share() -> float:
        return done / total

    with Progress("export", share, unit="steps", show=progress) as bar:

        def step(what: str) -> None:
            nonlocal done
            done += 1
            bar.update(1, what)

        yield step
