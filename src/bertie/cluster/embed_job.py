"""Embed texts on a Ray cluster."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie._version import __version__
from bertie.cluster import connection, ray_job
from bertie.cluster.connection import RayResources
from bertie.cluster.shard_folder import PART, ShardedEmbeddings, ShardFolder
from bertie.cluster.text_shards import ROWS_PER_SHARD, EmbedJobConfig, ShardReport, TextShard, read_shards
from bertie.data.atomic import atomic_rename
from bertie.data.readers import Format, Row, chunk_rows
from bertie.errors import InputError
from bertie.pipeline.read_counts import READ_COUNTS

if TYPE_CHECKING:
    from bertie.tasks.results import EmbeddingResult

RESOURCES = ("address", "device", "workers", "threads")
EMBEDDER_OPTIONS = ("overflow", "pooling", "normalize", "dimension")
MODEL_SUFFIXES = (".safetensors", ".bin", ".json", ".txt", ".model")


def embed(
    texts: Iterable[Path] | Iterable[str],
    output: str | Path,
    model: str | Path | None = None,
    *,
    column: str | None = None,
    format: Format | None = None,
    prompt: str | None = None,
    rows: int = ROWS_PER_SHARD,
    resume: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> ShardedEmbeddings:
    """Embed files or texts on a Ray cluster into Parquet files of about `rows` rows.

    >>> result = embed([Path("a.jsonl"), Path("b.csv.gz")], "embeddings", column="review")   # doctest: +SKIP
    >>> polars.scan_parquet(result.folder / "*.parquet")                                     # doctest: +SKIP

    A `Path` is a file, a `str` is a text. The files, `output` and the model folder must have the
    same paths on every node. `options` are `address`, `device`, `workers` and `threads` of
    `RayResources`, `prompt_name`, and the arguments of `Embedder.load`; embeddings are the same as
    there.

    `resume` continues an interrupted job with the same settings: complete shards are kept.
    """
    from bertie.pipeline.pipeline import CHUNK_CHARACTERS, CHUNK_ITEMS

    resources = RayResources(**{name: options.pop(name) for name in RESOURCES if name in options})
    resources.check(rows=rows)
    prompts = {"prompt": prompt, "prompt_name": options.pop("prompt_name", None)}
    model, dimension, prompt = _check_options(model, prompts, options)
    with ShardFolder(Path(output), resume=resume, overwrite=overwrite) as folder:
        files = folder.list_inputs(texts, column, format)
        settings: dict[str, Any] = {
            "bertie": __version__,
            "model": model,
            "model_files": _hash_files(model),
            "prompt": prompt,
        }
        settings |= {"rows": rows, **options, "dimension": dimension, "input": [asdict(file) for file in files]}
        if (completed := folder.check_settings(settings)) is not None:
            return completed
        with connection.connect(resources.address) as ray:
            actors, threads = resources.allocate(ray)
            folder.begin()
            config = EmbedJobConfig(
                model=model,
                options=options,
                threads=threads,
                prompt=prompt,
                folder=str(folder.path),
                rows=rows,
                chunk=(CHUNK_ITEMS, CHUNK_CHARACTERS),
            )
            reports = ray_job.run_job(ray, files, read_shards, EmbedActor, config, actors)
            return folder.finish(reports, [file.size for file in files])


class EmbedActor(ray_job.EmbedderActor[EmbedJobConfig]):
    """Writes the embeddings of a shard to a Parquet file."""

    def process(self, item: TextShard) -> ShardReport:
        """Embed a shard, unless its file already exists."""
        if item.texts:
            self._write(item)
        return ShardReport(item.file.number, item.rows, item.progress)

    def _write(self, shard: TextShard) -> None:
        import numpy as np
        import pyarrow as pa
        from pyarrow import parquet

        results: list[EmbeddingResult] = []
        rows: Iterator[tuple[int, Row, str]] = (
            (number, {}, text) for number, text in enumerate(shard.texts, shard.first)
        )
        for chunk in chunk_rows(rows, *self.config.chunk):
            try:
                results += self.embedder.embed_each([text for _, _, text in chunk], prompt=self.config.prompt)
            except InputError as error:
                raise self._locate_error(shard, chunk, error) from None
        embeddings = pa.array(np.concatenate([result.vector for result in results]))  # (rows, dimension) -> flat
        columns = {
            "file": pa.array([shard.file.name] * shard.rows),
            "row": pa.array(range(shard.first, shard.first + shard.rows), pa.int64()),
            "id": _id_column(shard),
            "vector": pa.FixedSizeListArray.from_arrays(embeddings, self.embedder.dimension),
            **{name: pa.array([getattr(result, name) for result in results], pa.int64()) for name in READ_COUNTS},
        }
        table = pa.table({name: column for name, column in columns.items() if column is not None})
        final = Path(self.config.folder, shard.name)
        part = final.with_name(f"{shard.name}.{uuid.uuid4().hex}{PART}")
        # The values of embeddings hardly ever repeat: neither compression nor a dictionary pays
        # off.
        parquet.write_table(table, part, compression="none", use_dictionary=["file"])
        atomic_rename(part, final)

    def _locate_error(self, shard: TextShard, chunk: Sequence[tuple[int, Row, str]], error: InputError) -> InputError:
        """Return the error with the row that caused it, found by embedding each row separately."""
        for number, _, text in chunk:
            try:
                list(self.embedder.embed_each([text], prompt=self.config.prompt))
            except InputError as cause:
                return InputError(f"{shard.file.name}, row {number}: {str(cause).replace('text 0', 'the text', 1)}")
        return error


def _id_column(shard: TextShard) -> Any:
    import pyarrow as pa

    id_type = shard.file.id_type
    if id_type is None:
        return None
    for number, id in enumerate(shard.ids, shard.first):
        if not isinstance(id, str | int | None) or (id_type == "int" and isinstance(id, str)):
            allowed = "an integer, as in the first row" if id_type == "int" else "text or an integer"
            raise InputError(f"{shard.file.name}, row {number}: id {id!r:.40} must be {allowed}")
    if id_type == "int":
        return pa.array(shard.ids, pa.int64())
    return pa.array([None if id is None else str(id) for id in shard.ids], pa.string())


def _check_options(
    model: str | Path | None, prompts: dict[str, str | None], options: dict[str, Any]
) -> tuple[str, int, str]:
    """Return the model's name, its dimension and the text of the prompt; reject invalid options before connecting."""
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.checkpoints.hub import default_model
    from bertie.tasks import Embedder

    name = ray_job.resolve_model(default_model() if model is None else model)
    embedder_options = {key: value for key, value in options.items() if key in EMBEDDER_OPTIONS}
    load_options = {key: value for key, value in options.items() if key not in (*EMBEDDER_OPTIONS, "precision")}
    embedder = Embedder(Checkpoint.inspect(name, **load_options), **embedder_options)
    return name, embedder.dimension, embedder.prompt_text(**prompts)


def _hash_files(model: str) -> str | None:
    """Hash the files of a model folder, so that a resumed job detects changes."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.suffix in MODEL_SUFFIXES:
            with open(file, "rb") as data:
                file_digest = hashlib.file_digest(data, "sha256").hexdigest()
            digest.update(f"{file.relative_to(folder)} {file_digest}\n".encode())
    return digest.hexdigest()[:16]
