"""The folder that shards are written to."""

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
from bertie.data.atomic import atomic_rename, lock_file
from bertie.data.journal import check_same_settings
from bertie.data.progress import Progress
from bertie.data.readers import Format, is_data_file
from bertie.errors import BertieError, ExistsError, InputError

MANIFEST, TEXTS, PART = "manifest.json", "texts.jsonl", ".part"
SHARD = re.compile(r"\d{5}-\d{6}\.parquet")
BEGUN = re.compile(rf"({MANIFEST}|{TEXTS}|{SHARD.pattern}\.[0-9a-f]{{32}}){PART}")


@dataclass(frozen=True, slots=True)
class ShardedEmbeddings:
    """A folder of Parquet files, whose names are in the order of the input."""

    folder: Path
    rows: int
    shards: int


class ShardFolder:
    """Shards, and a manifest that says what was asked and, at the end, that all are there. One process at a time."""

    def __init__(self, path: Path, *, resume: bool, overwrite: bool) -> None:
        self.path, self._resume, self._overwrite = path.absolute(), resume, overwrite
        self._manifest = self.path / MANIFEST
        self._before: dict[str, Any] | None = None
        self._asked: dict[str, Any] = {}
        self._lock = -1
        self._new = not self.path.exists()

    def __enter__(self) -> Self:
        if self.path.exists() and not self.path.is_dir():
            raise ExistsError(f"{self.path} is a file; name a folder")
        try:
            self.path.mkdir(exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"{self.path} cannot be made: {error.strerror}") from None
        try:
            lock_file(self._lock, self.path)
        except InputError:
            os.close(self._lock)
            raise
        try:
            self._check()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tidy()
        if self._new:
            with suppress(OSError):  # there is something in it
                self.path.rmdir()
        os.close(self._lock)

    def _check(self) -> None:
        try:
            self._before = json.loads(self._manifest.read_text("utf-8"))
            _ = self._before["asked"], self._before["shards"]
        except FileNotFoundError:
            names = [name for name in os.listdir(self.path) if name != TEXTS and not BEGUN.fullmatch(name)]
            if not all(map(SHARD.fullmatch, names)):
                raise ExistsError(f"{self.path} holds other files; name a new folder") from None
            if names and not self._overwrite:
                raise ExistsError(
                    f"{self.path} holds shards of no known run; pass overwrite=True, or another name"
                ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self._manifest} is damaged ({error}); delete the folder to begin anew") from None
        if self._before is not None and not self._resume and not self._overwrite:
            if self._before["shards"] is not None:
                raise ExistsError(f"{self.path} is there already; pass overwrite=True, or another name")
            raise ExistsError(
                f"{self.path} holds a run that was stopped; pass resume=True to go on with it, or overwrite=True to "
                "begin anew"
            )

    def sources(
        self, texts: Iterable[Path] | Iterable[str], column: str | None, kind: Format | None
    ) -> list[InputFile]:
        """The files to read, each looked into; texts are put into one."""
        if isinstance(texts, str | bytes | Path):
            raise InputError(f"embed takes a list of files or of texts, not {type(texts).__name__}; put it into a list")
        given: list[Path] | list[str] = list(texts)  # type: ignore[assignment]
        if not given:
            raise InputError("no file and no text was given: there is nothing to do")
        if all(isinstance(one, Path) for one in given):
            return inspect_files([str(Path(one).resolve()) for one in given], column, kind)
        for one in given:
            if not isinstance(one, str):
                raise InputError(f"{one!r:.60} is neither a text nor a Path; give only texts, or only files as Path")
            if len(one) < 4096 and is_data_file(one) and os.path.exists(one):
                raise InputError(f"{one!r} is a text here, and there is a file of this name; give it as Path({one!r})")
        part = self.path / f"{TEXTS}{PART}"
        digest = hashlib.sha256()
        with open(part, "w", encoding="utf-8") as file:
            for one in given:
                line = json.dumps({"text": one}) + "\n"
                digest.update(line.encode())
                file.write(line)
        size = part.stat().st_size
        return [InputFile(0, str(self.path / TEXTS), size, digest.hexdigest()[:16], "jsonl", "text", None)]

    def agree(self, asked: dict[str, Any]) -> ShardedEmbeddings | None:
        """Check that what is there, if it is gone on with, is what is asked for; and return it, if it is all of it."""
        self._asked = asked
        if self._before is None or not self._resume:
            return None
        check_same_settings(self.path, self._before["asked"], asked, "name another folder")
        if self._before["shards"] is None:
            return None
        return ShardedEmbeddings(self.path, self._before["rows"], self._before["shards"])

    def begin(self) -> None:
        """From here on it is the folder of what is asked."""
        if self._before is None or not self._resume:
            self._manifest.unlink(missing_ok=True)  # first: without it, what is left over belongs to no one
            for name in os.listdir(self.path):
                if SHARD.fullmatch(name):
                    (self.path / name).unlink()
        texts = self.path / f"{TEXTS}{PART}"
        if texts.exists():
            atomic_rename(texts, self.path / TEXTS)
        self._tidy()
        self._enter(None, None)

    def _tidy(self) -> None:
        """Away with what was begun and not ended."""
        for name in os.listdir(self.path):
            if BEGUN.fullmatch(name):
                (self.path / name).unlink(missing_ok=True)

    def end(self, reports: Iterable[ShardReport], sizes: Sequence[int]) -> ShardedEmbeddings:
        """Wait until all is there."""
        read = [0.0] * len(sizes)
        rows = shards = 0
        try:
            with Progress("embed", lambda: sum(map(float.__mul__, read, map(float, sizes))) / sum(sizes)) as progress:
                for report in reports:
                    rows, shards = rows + report.rows, shards + 1
                    read[report.source] = max(read[report.source], report.read or 0.0)
                    progress.update(report.rows)
        except BaseException as error:
            if safe := self._count():
                error.add_note(f"{safe:,} shards are safe in {self.path}, resume=True goes on after them")
            raise
        if shards != self._count():
            raise BertieError(
                f"{shards} shards were made and {self._count()} are in {self.path}; do all machines see it?"
            )
        self._enter(rows, shards)
        return ShardedEmbeddings(self.path, rows, shards)

    def _count(self) -> int:
        return sum(SHARD.fullmatch(name) is not None for name in os.listdir(self.path))

    def _enter(self, rows: int | None, shards: int | None) -> None:
        part = self._manifest.with_name(MANIFEST + PART)
        part.write_text(json.dumps({"asked": self._asked, "rows": rows, "shards": shards}, indent=1), "utf-8")
        atomic_rename(part, self._manifest)
