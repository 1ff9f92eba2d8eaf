"""Recipes and example data that come with the package.

Recipes of fine-tuning are in this folder, those of pretraining in pretrain/ and bertie-small/, example data in
examples/. A command finds them by name: `bertie train --recipe sst2`, `bertie pretrain tiny`.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from bertie.errors import NotFoundError

FOLDER = Path(__file__).parent
FINE_TUNING, PRETRAINING = ("",), ("pretrain", "bertie-small")  # folders of each kind


def names(folders: tuple[str, ...] = (*FINE_TUNING, *PRETRAINING)) -> list[str]:
    """The names of recipes.

    >>> "tiny" in names(PRETRAINING), "sst2" in names(PRETRAINING)
    (True, False)
    """
    return [_name(file) for folder in folders for file in sorted((FOLDER / folder).glob("*.toml"))]


def find(name: str, folders: tuple[str, ...]) -> Path:
    """The file of a recipe: a path, or the name of one that comes with the package."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    for folder in folders:
        file = FOLDER / folder / f"{name.removesuffix('.toml')}.toml"
        if file.is_file():
            return file
    if is_packaged(name, folders):
        return FOLDER / f"{name}.toml"
    known = names(folders)
    close = get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]}?" if close else f"the recipes are {', '.join(known)}"
    raise NotFoundError(f"there is no recipe {name!r:.80}, neither a file nor one that comes with Bertie; {hint}")


def is_packaged(name: str, folders: tuple[str, ...]) -> bool:
    """Whether a name is that of a recipe in the package, and not of a file."""
    return not Path(name).expanduser().is_file() and name in names(folders)


def _name(file: Path) -> str:
    """The name of a recipe: its file's, with the folder where that is needed to tell what it is."""
    return file.stem if file.parent in (FOLDER, FOLDER / "pretrain") else f"{file.parent.name}/{file.stem}"
