"""Detect which files were added, modified or deleted since they were indexed."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from typing import Unpack

from bertie.errors import InputError
from bertie.search.document_reader import DocumentReader, Paths, ReadOptions, list_paths
from bertie.search.records import Document


class FileChanges:
    """Differences between files and their documents in a store.

    `known` is the output of `VectorStore.documents`. Iterating yields new and modified documents;
    files with an unchanged stamp are not read. After that, `deleted` has the ids of documents that
    no longer exist, or are reachable only through a symbolic link that is not followed. Documents
    of files that could not be read are kept, and so are documents from outside `paths`.

    >>> import pathlib, tempfile
    >>> from bertie.search.document_reader import read_documents
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("one"), (folder / "b.txt").write_text("two")
    >>> known = [(document.id, document.source, document.version) for document in read_documents(folder)]
    >>> (folder / "a.txt").unlink()
    >>> _ = (folder / "c.txt").write_text("three")
    >>> changes = FileChanges(folder, known)
    >>> [document.id for document in changes], changes.deleted, changes.unchanged
    (['c.txt'], ['a.txt'], 1)
    """

    def __init__(
        self, paths: Paths, known: Iterable[tuple[str, str | None, str]], **options: Unpack[ReadOptions]
    ) -> None:
        self.added = self.changed = self.unchanged = 0
        self.deleted: list[str] = []
        roots = [os.path.abspath(root) for root in list_paths(paths)]
        self._known: dict[str, tuple[str, str]] = {}  # id -> source and version
        self._outside: dict[str, str | None] = {}  # id -> source, of documents from outside `paths`
        self._stamps: dict[str, list[str]] = {}  # source -> stamps of all its documents
        for id, source, version in known:
            if source is None or not _is_below(source, roots):
                self._outside[id] = source
                continue
            self._known[id] = (source, version)
            self._stamps.setdefault(source, []).append(version.partition("@")[2])
        self._unchanged_files: set[str] = set()
        self._reader = DocumentReader(roots, **options, is_unchanged=self._is_unchanged)

    def _is_unchanged(self, path: str, stamp: str) -> bool:
        unchanged = {known for known in self._stamps.get(path, ()) if known} == {stamp}
        if unchanged:
            self._unchanged_files.add(path)
        return unchanged

    def __iter__(self) -> Iterator[Document]:
        seen: set[str] = set()
        for document in self._reader.documents():
            seen.add(document.id)
            if document.id in self._outside:
                self._check_conflict(document)
            _, version = self._known.get(document.id, ("", None))
            if version is not None and self._has_same_content(document, version):
                self.unchanged += 1
                continue
            self.added, self.changed = self.added + (version is None), self.changed + (version is not None)
            yield document
        for id, (source, _) in self._known.items():
            if id in seen:
                continue
            if source in self._unchanged_files:
                self.unchanged += 1
            elif source in self._reader.read or _is_below(source, self._reader.links) or not self._may_exist(source):
                self.deleted.append(id)

    def _may_exist(self, source: str) -> bool:
        return _is_below(source, self._reader.failed) or os.path.lexists(source)

    def _has_same_content(self, document: Document, version: str) -> bool:
        if document.version == version:
            return True
        # A file that was only touched is not embedded again. In a table with several rows, the row
        # with the stamp is, because with an outdated stamp the whole file would be read each time.
        is_table = len(self._stamps.get(document.source or "", ())) > 1
        return not is_table and document.version.partition("@")[0] == version.partition("@")[0]

    def _check_conflict(self, document: Document) -> None:
        """Reject a document whose id belongs to another source, unless that file has moved."""
        other = self._outside[document.id]
        if other is None or os.path.lexists(other):
            origin = "added as a text" if other is None else f"from {other}"
            raise InputError(
                f"{document.source} would get the document id {document.id!r}, which already exists ({origin}); pass a "
                "folder that contains both files, or use another index"
            )


def _is_below(path: str, roots: Collection[str]) -> bool:
    while path not in roots:
        path, child = os.path.dirname(path), path
        if path == child:
            return False
    return True
