"""List the files of a folder without leaving it: symbolic links are followed on request only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

OnSkip = Callable[[str, str], None]

LINK = "it is a symbolic link, which may lead out of the folder; --follow-symlinks (follow_symlinks=True) reads it"


def list_files(folder: str | Path, *, follow_symlinks: bool = False, on_skip: OnSkip | None = None) -> list[Path]:
    """List the files below a folder in sorted order, without hidden ones.

    `on_skip` is called with the path of each symbolic link that is not followed, and the reason. The
    folder itself may be a link. A cycle of links is read once.

    >>> list_files("/nowhere")
    []
    """
    files: list[Path] = []
    visited: set[tuple[int, int]] = set()
    stack = [Path(folder)]
    while stack:
        path = stack.pop()
        if not path.is_dir():
            files += [path] if path.is_file() else []
            continue
        status = path.stat()
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        for name in sorted(os.listdir(path)):
            if name.startswith("."):
                continue
            if not follow_symlinks and (path / name).is_symlink():
                if on_skip is not None:
                    on_skip(str(path / name), LINK)
            else:
                stack.append(path / name)
    return sorted(files)
