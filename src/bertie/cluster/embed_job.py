"""Embed on a cluster."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie._version import __version__
from bertie.cluster import connection, ray_job
from bertie.cluster.shard_folder import PART, ShardedEmbeddings, ShardFolder
from bertie.cluster.text_shards import ROWS_PER_SHARD, EmbedJobConfig, ShardReport, TextShard, read_shards
from bertie.data.atomic import atomic_rename
from bertie.data.readers import Format, Row, chunk_rows
from bertie.errors import InputError

if TYPE_CHECKING:
    from bertie.tasks.embed import Embedding


def embed(
    texts: Iterable[Path] | Iterable[str],
    out: str | Path,
    model: str | Path | None = None,
    *,
    address: str | None = None,
    column: str | None = None,
    format: Format | None = None,
    prompt: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    rows: int = ROWS_PER_SHARD,
    device: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    **options: Any,
) -> ShardedEmbeddings:
    """Embed files, or texts, on a Ray cluster: into a folder of Parquet files of about `rows` rows each.

    >>> done = embed([Path("a.jsonl"), Path("b.csv.gz")], "vectors", column="review")       # doctest: +SKIP
    >>> polars.scan_parquet(done.folder / "*.parquet")                                      # doctest: +SKIP

    A `Path` is a file, a `str` is a text. The files, `out` and the model's folder must have the same names on every
    machine of the cluster. `options` are those of `Embedder.load` but for the device; vectors are the same as there.

    `address`: "local" or None starts a cluster of this machine alone; `host:port` or `auto` joins one that this machine
    belongs to; one that this process is connected to already is taken as it is. `workers`: one for each GPU of the
    cluster; if it has none, or `device` is "cpu", as many as its cores allow with `threads` each.

    `resume` goes on with a folder that was begun with the same settings: what is there is not made again.
    """
    from bertie.tasks.base import CHARACTERS_AT_ONCE, ITEMS_AT_ONCE

    connection.check(device, rows=rows, workers=workers, threads=threads)
    model, dimension = _checked(model, prompt, options)
    with ShardFolder(Path(out), resume=resume, overwrite=overwrite) as folder:
        sources = folder.sources(texts, column, format)
        asked = {"bertie": __version__, "model": model, "model_files": _digest(model), "prompt": prompt, "rows": rows}
        asked |= options | {"dimension": dimension}
        if (done := folder.agree(asked | {"input": [asdict(source) for source in sources]})) is not None:
            return done
        with connection.connected(address) as ray:
            workers, threads = connection.devices(ray, device, workers, threads)
            folder.begin()
            plan = EmbedJobConfig(
                model=model,
                options=options,
                threads=threads,
                prompt=prompt,
                folder=str(folder.path),
                rows=rows,
                chunk=(ITEMS_AT_ONCE, CHARACTERS_AT_ONCE),
            )
            reports = ray_job.run(ray, sources, read_shards, EmbedActor, plan, workers)
            return folder.end(reports, [source.size for source in sources])


class EmbedActor(ray_job.EmbedderActor[EmbedJobConfig]):
    """A shard in, a Parquet file on the disk and a report out."""

    def work(self, one: TextShard) -> ShardReport:
        """Nothing, of a shard whose file is there."""
        if one.texts:
            self._write(one)
        return ShardReport(one.source.number, one.rows, one.read)

    def _write(self, shard: TextShard) -> None:
        import numpy as np
        import pyarrow as pa
        from pyarrow import parquet

        found: list[Embedding] = []
        for chunk in chunk_rows(((i, {}, text) for i, text in enumerate(shard.texts, shard.first)), *self.plan.chunk):
            try:
                found += self.task.embed_each([text for _, _, text in chunk], prompt=self.plan.prompt)
            except InputError as error:
                raise self._blamed(shard, chunk, error) from None
        vectors = pa.array(np.concatenate([one.vector for one in found]))  # (rows, dimension) -> flat
        columns = {
            "file": pa.array([shard.source.name] * shard.rows),
            "row": pa.array(range(shard.first, shard.first + shard.rows), pa.int64()),
            "id": _ids(shard),
            "vector": pa.FixedSizeListArray.from_arrays(vectors, self.task.dimension),
            "tokens_total": pa.array([one.tokens_total for one in found], pa.int64()),
            "tokens_read": pa.array([one.tokens_read for one in found], pa.int64()),
            "windows": pa.array([one.windows for one in found], pa.int64()),
        }
        table = pa.table({name: column for name, column in columns.items() if column is not None})
        final = Path(self.plan.folder, shard.name)
        part = final.with_name(f"{shard.name}.{uuid.uuid4().hex}{PART}")
        # Numbers of vectors hardly ever repeat: neither compression nor a dictionary pays.
        parquet.write_table(table, part, compression="none", use_dictionary=["file"])
        atomic_rename(part, final)

    def _blamed(self, shard: TextShard, chunk: Sequence[tuple[int, Row, str]], error: InputError) -> InputError:
        """The same error with the row that it comes from."""
        for number, _, text in chunk:
            try:
                list(self.task.embed_each([text], prompt=self.plan.prompt))
            except InputError as own:
                return InputError(f"{shard.source.name}, row {number}: {str(own).replace('text 0', 'the text', 1)}")
        return error


def _ids(shard: TextShard) -> Any:
    import pyarrow as pa

    kind = shard.source.id
    if kind is None:
        return None
    for number, value in enumerate(shard.ids, shard.first):
        if not isinstance(value, str | int | None) or (kind == "int" and isinstance(value, str)):
            wanted = "a whole number, as the first one" if kind == "int" else "text or a whole number"
            raise InputError(f"{shard.source.name}, row {number}: id {value!r:.40} must be {wanted}")
    if kind == "int":
        return pa.array(shard.ids, pa.int64())
    return pa.array([None if value is None else str(value) for value in shard.ids], pa.string())


def _checked(model: str | Path | None, prompt: str | None, options: dict[str, Any]) -> tuple[str, int]:
    """The model's name on all machines, and the length of its vectors; what is wrong with the options is said now."""
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.checkpoints.hub import default_model
    from bertie.tasks import Embedder

    name = ray_job.everywhere(default_model() if model is None else model)
    mine = {key: value for key, value in options.items() if key in ("overflow", "pooling", "normalize", "dimensions")}
    rest = {key: value for key, value in options.items() if key not in mine}
    task = Embedder(Checkpoint.inspect(name, **rest), **mine)
    list(task.embed_each([], prompt=prompt))
    return name, task.dimension


def _digest(model: str) -> str | None:
    """Of a folder: another one if what is in it changes."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".safetensors", ".bin", ".json", ".txt", ".model"):
            with open(file, "rb") as data:
                digest.update(
                    f"{file.relative_to(folder)} {hashlib.file_digest(data, 'sha256').hexdigest()}\n".encode()
                )
    return digest.hexdigest()[:16]
