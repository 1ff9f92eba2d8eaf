"""Helpers of the tests of reading documents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bertie.errors import InputError
from bertie.search.document_reader import read_documents
from bertie.search.records import Document


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        os.utime(path, ns=(10**18, 10**18))  # long ago, so that nothing has to be waited for
    return folder


def read(*paths: Path, **options: Any) -> dict[str, Document]:
    found = list(read_documents(paths, **options))
    assert len({one.id for one in found}) == len(found)
    return {one.id: one for one in found}


def refused(path: Path, message: str, **options: Any) -> None:
    """Reading it is an error with these words; or it is skipped with the same words."""
    with pytest.raises(InputError, match=message):
        list(read_documents(path, **options))
    skips: list[tuple[str, str]] = []
    assert not list(read_documents(path, **options, on_error="skip", on_skip=lambda *one: skips.append(one)))
    ((name, reason),) = skips
    assert name == str(path)
    with pytest.raises(InputError, match=message):
        raise InputError(reason)
