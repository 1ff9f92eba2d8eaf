"""The files beside an exported graph: config, tokenizer, sentence-transformers files and a README.

They are laid out as sentence-transformers, optimum, transformers.js and fastembed expect them, with the transformer in
the folder itself.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from bertie.checkpoints import named_heads, storage
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.cross_encoder import CrossEncoderConfig
from bertie.checkpoints.model_spec import LABELLED, config_with_head
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.checkpoints.sentence_transformers import MODULES_FILE
from bertie.checkpoints.splade import Splade
from bertie.compress.export_report import ExportReport
from bertie.nn.sentence_layers import Normalize

# The name of a task among transformers' pipelines.
PIPELINES = {
    "embed": "feature-extraction",
    "classify": "text-classification",
    "regress": "text-classification",
    "rerank": "text-classification",
    "tag": "token-classification",
    "answer": "question-answering",
    "fill": "fill-mask",
}


def folder_files(
    checkpoint: Checkpoint, task: str, head: str | None, sentence: SentenceModules | None
) -> dict[str, bytes]:
    """The files of an export without its graphs and report, by relative path."""
    cross_encoder = checkpoint.cross_encoder
    if task == "rerank" and cross_encoder is None:
        cross_encoder = CrossEncoderConfig.create(1)
    config = _config(checkpoint, head)
    files: dict[str, bytes] = {}
    part: SentenceModules | CrossEncoderConfig | Splade | None = sentence
    if task == "rerank" and cross_encoder is not None:
        config |= cross_encoder.config_entries()
        part = cross_encoder
    elif task == "fill":
        part = checkpoint.splade
    if part is not None:
        files |= _at_top(part.files(), part.transformer_path)
    return files | {"config.json": storage.to_json(config)} | _tokenizer_files(checkpoint)


def _config(checkpoint: Checkpoint, head: str | None) -> dict[str, Any]:
    """config.json for the one head that the graph has, or for none."""
    dropped = (named_heads.KEY, *CrossEncoderConfig.CONFIG_KEYS)
    config = {key: value for key, value in checkpoint.config.items() if key not in dropped}
    if head is None:
        classes = checkpoint.spec.family.architectures.items()
        return config | {"architectures": [name for name, heads in classes if not heads][:1]}
    info = checkpoint.heads[head]
    if (info.kind,) not in checkpoint.spec.family.architectures.values():
        return config  # a head of a class with several
    labels = list(info.labels.values()) if info.kind in LABELLED else None
    return config_with_head(config, info.kind, labels, info.problem)


def _at_top(files: dict[str, bytes], path: str) -> dict[str, bytes]:
    """Files with those of the transformer's subfolder moved to the top."""
    if not path:
        return files
    out = {}
    for name, data in files.items():
        inside = PurePosixPath(name).is_relative_to(path)
        out[PurePosixPath(name).relative_to(path).as_posix() if inside else name] = data
    first, *others = json.loads(out[MODULES_FILE])
    modules: Any = [{**first, "path": ""}, *others]
    return out | {MODULES_FILE: storage.to_json(modules)}


def _tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The tokenizer's files, with the maximum length: these runtimes truncate longer texts."""
    assert checkpoint.tokenizer is not None
    files = checkpoint.tokenizer.files()
    name = "tokenizer_config.json"
    files[name] = storage.to_json(json.loads(files[name]) | {"model_max_length": checkpoint.max_length})
    return files


# --- README ---


def readme(report: ExportReport, sentence: SentenceModules | None) -> str:
    """A model card: what is in the folder, how to load it, and the comparison."""
    pipeline = PIPELINES.get(report.task)
    lines = ["---", "tags:", "- bertie", *(f"- {kind}" for kind in dict.fromkeys(f.format for f in report.files))]
    lines += [f"pipeline_tag: {pipeline}"] if pipeline else []
    lines += ["---", "", f"# {report.model}, exported", ""]
    lines += [
        f"Exported by Bertie {report.versions['bertie']} for the task {report.task}. One graph has the encoder and "
        + ("its pooling." if report.head is None else f"its head {report.head}."),
        "",
        f"- inputs: {', '.join(f'`{name}`' for name in report.inputs)}, int64 (batch, sequence); at most "
        f"{report.max_length} tokens. Texts are padded (`attention_mask` 0) and must be truncated by the caller.",
        f"- outputs: {', '.join(f'`{name}`' for name in report.outputs)}",
        *(f"- {note}" for note in report.notes),
        "",
        "## Compared with the source",
        "",
        f"{report.texts} texts with {report.tokens:,} tokens in ragged, padded batches; speed of the forward pass with "
        f"{report.threads} threads, as a multiple of Bertie's in fp32, measured alternately.",
        "",
        *report.table(),
        "",
        "## Use",
        "",
        *_examples(report, sentence),
    ]
    return "\n".join(lines) + "\n"


def _examples(report: ExportReport, sentence: SentenceModules | None) -> list[str]:
    """How to load the folder: one example per library, with the first file of its format."""
    out: list[str] = []
    first = {file.format: file for file in reversed(report.files)}
    wrapper = {"embed": "SentenceTransformer", "rerank": "CrossEncoder"}.get(report.task)
    for kind, file in sorted(first.items()):
        name = PurePosixPath(file.file).name
        if wrapper:
            plain = file.precision == "fp32"
            kwargs = "" if plain else f', model_kwargs={{"file_name": "{name}"}}'
            loaded = f'model = {wrapper}("path/to/this/folder", backend="{kind}"{kwargs})'
            out += _code("python", f"from sentence_transformers import {wrapper}", "", loaded)
        if kind == "onnx":
            out += _onnx_examples(report, file.precision, name, sentence)
        else:
            compiled = f'model = openvino.Core().compile_model("{file.file}", "CPU")'
            out += _code("python", "import openvino", "", compiled)
    others = [file.file for file in report.files if file is not first[file.format]]
    if others:
        out += [f"The other files load in the same way by their names: {', '.join(others)}.", ""]
    return out[:-1]


def _code(language: str, *lines: str) -> list[str]:
    return [f"```{language}", *lines, "```", ""]


def _onnx_examples(report: ExportReport, precision: str, name: str, sentence: SentenceModules | None) -> list[str]:
    feed = ", ".join(f'"{name}": {name}' for name in report.inputs)
    out = _code(
        "python",
        "import onnxruntime",
        "",
        f'session = onnxruntime.InferenceSession("onnx/{name}")',
        f"inputs = {{{feed}}}  # int64 (batch, sequence)",
        "outputs = session.run(None, inputs)",
    )
    pipeline = PIPELINES.get(report.task)
    if pipeline and report.task != "rerank":
        dtype = {"fp32": "fp32", "fp16": "fp16", "int8": "q8"}[precision]
        pooling = _js_pooling(sentence)
        out += _code(
            "js",
            'import { env, pipeline } from "@huggingface/transformers";',
            "",
            'env.localModelPath = "path/to/the/folder/above/";',
            f'const model = await pipeline("{pipeline}", "name-of-this-folder", {{ dtype: "{dtype}" }});',
            *([f'const output = await model("A text.", {pooling});'] if pooling else []),
        )
    if sentence is not None and _js_pooling(sentence) is not None:
        mode = sentence.pooling.modes[0].upper()
        normalize = any(isinstance(layer, Normalize) for layer in sentence.layers)
        out += _code(
            "python",
            "from fastembed import TextEmbedding",
            "from fastembed.common.model_description import ModelSource, PoolingType",
            "",
            f'TextEmbedding.add_custom_model("local", pooling=PoolingType.{mode}, normalization={normalize},',
            f'    sources=ModelSource(hf="local"), dim={sentence.dimension}, model_file="onnx/{name}")',
            'model = TextEmbedding("local", specific_model_path="path/to/this/folder")',
        )
    return out


def _js_pooling(sentence: SentenceModules | None) -> str | None:
    """The options of transformers.js that compute the same embedding; None if there are none."""
    if sentence is None or sentence.pooling.modes not in (("mean",), ("cls",)):
        return None
    kinds = [type(layer).__name__ for layer in sentence.layers]
    if any(kind not in ("Normalize", "Dropout") for kind in kinds) or sentence.pooling.token_weights is not None:
        return None
    return f'{{ pooling: "{sentence.pooling.modes[0]}", normalize: {str("Normalize" in kinds).lower()} }}'
