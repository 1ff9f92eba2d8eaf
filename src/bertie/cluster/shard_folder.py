"""The output folder of an embedding job: shards and a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bertie.cluster.text_shards import InputFile, ShardReport, inspect_files
from bertie.data.atomic import atomic_rename, is_at, lock_file
from bertie.data.journal import check_same_settings
from bertie.data.progress import Progress
from bertie.data.readers import Format, is_data_file
from bertie.errors import BertieError, ExistsError, InputError

MANIFEST, TEXTS, PART = "manifest.json", "texts.jsonl", ".part"
SHARD = re.compile(r"\d{5}-\d{6}\.parquet")
TEMPORARY = re.compile(rf"({MANIFEST}|{TEXTS}|{SHARD.pattern}\.[0-9a-f]{{32}}){PART}")


@dataclass(frozen=True, slots=True)
class ShardedEmbeddings:
    """A folder of Parquet files, whose names are in the order of the input."""

    folder: Path
    rows: int
    shards: int


class ShardFolder:
    """Shards and a manifest with the job's settings; one process writes at a time."""

    def __init__(self, path: Path, *, resume: bool, overwrite: bool) -> None:
        self.path, self._resume, self._overwrite = path.absolute(), resume, overwrite
        self._manifest = self.path / MANIFEST
        self._previous: dict[str, Any] | None = None  # manifest of an earlier run
        self._settings: dict[str, Any] = {}
        self._lock = -1
        self._created = not self.path.exists()

    def __enter__(self) -> Self:
        if self.path.exists() and not self.path.is_dir():
            raise ExistsError(f"{self.path} is a file; pass a folder")
        while not self._acquire():  # another process removed the folder
            pass
        try:
            self._check()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _acquire(self) -> bool:
        try:
            self.path.mkdir(exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"{self.path} cannot be created: {error.strerror}") from None
        try:
            lock_file(self._lock, self.path)
        except InputError:
            os.close(self._lock)
            raise
        if is_at(self._lock, self.path):
            return True
        os.close(self._lock)
        return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove_temporary()
        if self._created:
            with suppress(OSError):  # it is not empty
                self.path.rmdir()
        os.close(self._lock)

    def _check(self) -> None:
        try:
            self._previous = json.loads(self._manifest.read_text("utf-8"))
            _ = self._previous["settings"], self._previous["shards"]
        except FileNotFoundError:
            names = [name for name in os.listdir(self.path) if name != TEXTS and not TEMPORARY.fullmatch(name)]
            if not all(map(SHARD.fullmatch, names)):
                raise ExistsError(f"{self.path} contains other files; pass a new folder") from None
            if names and not self._overwrite:
                raise ExistsError(
                    f"{self.path} contains shards of an unknown run; pass overwrite=True, or another name"
                ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self._manifest} is corrupt ({error}); delete the folder to start over") from None
        if self._previous is not None and not self._resume and not self._overwrite:
            if self._previous["shards"] is not None:
                raise ExistsError(f"{self.path} already exists; pass overwrite=True, or another name")
            raise ExistsError(
                f"{self.path} contains an interrupted run; pass resume=True to resume it, or overwrite=True to start "
                "over"
            )

    def list_inputs(
        self, texts: Iterable[Path] | Iterable[str], column: str | None, format: Format | None
    ) -> list[InputFile]:
        """Inspect the input files; texts are written to a single file first."""
        if isinstance(texts, str | bytes | Path):
            raise InputError(f"embed takes a list of files or of texts, not {type(texts).__name__}; put it into a list")
        items: list[Path] | list[str] = list(texts)  # type: ignore[assignment]
        if not items:
            raise InputError("the list of files or texts is empty")
        if all(isinstance(item, Path) for item in items):
            return inspect_files([str(Path(item).resolve()) for item in items], column, format)
        for item in items:
            if not isinstance(item, str):
                raise InputError(f"{item!r:.60} is neither a text nor a Path; pass only texts, or only files as Path")
            if len(item) < 4096 and is_data_file(item) and os.path.exists(item):
                raise InputError(f"{item!r} is passed as a text, but is the name of a file; pass it as Path({item!r})")
        part = self.path / f"{TEXTS}{PART}"
        digest = hashlib.sha256()
        with open(part, "w", encoding="utf-8") as file:
            for item in items:
                line = json.dumps({"text": item}) + "\n"
                digest.update(line.encode())
                file.write(line)
        size = part.stat().st_size
        return [InputFile(0, str(self.path / TEXTS), size, digest.hexdigest()[:16], "jsonl", "text", None)]

    def check_settings(self, settings: dict[str, Any]) -> ShardedEmbeddings | None:
        """Check the settings of a resumed run, and return its result if it is complete."""
        self._settings = settings
        if self._previous is None or not self._resume:
            return None
        check_same_settings(self.path, self._previous["settings"], settings, "pass another folder")
        if self._previous["shards"] is None:
            return None
        return ShardedEmbeddings(self.path, self._previous["rows"], self._previous["shards"])

    def begin(self) -> None:
        """Write the manifest, after deleting an earlier run that is not resumed."""
        if self._previous is None or not self._resume:
            self._manifest.unlink(missing_ok=True)  # first: without it, the remaining shards belong to no run
            for name in os.listdir(self.path):
                if SHARD.fullmatch(name):
                    (self.path / name).unlink()
        texts = self.path / f"{TEXTS}{PART}"
        if texts.exists():
            atomic_rename(texts, self.path / TEXTS)
        self._remove_temporary()
        self._write_manifest(None, None)

    def _remove_temporary(self) -> None:
        for name in os.listdir(self.path):
            if TEMPORARY.fullmatch(name):
                (self.path / name).unlink(missing_ok=True)

    def finish(self, reports: Iterable[ShardReport], sizes: Sequence[int]) -> ShardedEmbeddings:
        """Wait for all shards, and write the final manifest."""
        read = [0.0] * len(sizes)
        rows = shards = 0
        try:
            with Progress("embed", lambda: sum(map(float.__mul__, read, map(float, sizes))) / sum(sizes)) as progress:
                for report in reports:
                    rows, shards = rows + report.rows, shards + 1
                    read[report.file] = max(read[report.file], report.progress or 0.0)
                    progress.update(report.rows)
        except BaseException as error:
            if count := self._count():
                error.add_note(f"{count:,} shards are complete in {self.path}; resume=True continues after them")
            raise
        if shards != self._count():
            raise BertieError(
                f"{shards} shards were written, but {self._count()} are in {self.path}; is it shared by all nodes?"
            )
        self._write_manifest(rows, shards)
        return ShardedEmbeddings(self.path, rows, shards)

    def _count(self) -> int:
        return sum(SHARD.fullmatch(name) is not None for name in os.listdir(self.path))

    def _write_manifest(self, rows: int | None, shards: int | None) -> None:
        part = self._manifest.with_name(MANIFEST + PART)
        part.write_text(json.dumps({"settings": self._settings, "rows": rows, "shards": shards}, indent=1), "utf-8")
        atomic_rename(part, self._manifest)
