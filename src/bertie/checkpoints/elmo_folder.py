"""Where ELMo's files are; without torch, so that the command line can look for them first."""

from __future__ import annotations

from pathlib import Path

from bertie.errors import NotFoundError

OPTIONS, WEIGHTS = "options.json", "weights.hdf5"
WEIGHT_SUFFIXES = (".hdf5", ".h5")
MOST_NAMED = 8  # files or datasets in one error


def is_elmo_folder(folder: str | Path) -> bool:
    """Whether a folder holds ELMo's files, and no other model's config.json."""
    try:
        path = Path(folder).expanduser()
        return (
            path.is_dir()
            and not (path / "config.json").exists()
            and bool(_matching(path, OPTIONS))
            and bool(_matching(path, *WEIGHT_SUFFIXES))
        )
    except (OSError, RuntimeError, ValueError):  # no permission, name too long, unknown home directory
        return False


def find_files(source: str | Path, weights: str | Path | None = None) -> tuple[Path, Path]:
    """The options and the weights: two files, or those of a folder, whose names may have a prefix.

    The files that AllenNLP published have names such as elmo_2x4096_512_2048cnn_2xhighway_options.json.
    """
    path, file = _path(source), None if weights is None else _path(weights)
    if path.is_dir():
        if file is not None:
            raise NotFoundError(f"{path} is a folder; pass the options file together with the weights {weights}")
        return _only(path, OPTIONS), _only(path, *WEIGHT_SUFFIXES)
    if not path.is_file():
        raise NotFoundError(f"{path} is neither a folder nor a file; ELMo is a folder with {OPTIONS} and {WEIGHTS}")
    if file is None:
        raise NotFoundError(f"{path} is a file: pass the weights, too, or a folder with {OPTIONS} and {WEIGHTS}")
    if not file.is_file():
        raise NotFoundError(f"weights={str(weights)!r:.200} is not a file")
    return path, file


def _path(name: str | Path) -> Path:
    try:
        path = Path(name).expanduser()
        path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise NotFoundError(f"{str(name)[:200]!r} cannot be looked up: {error!s:.80}") from None
    return path


def _matching(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith(suffixes) and path.is_file())


def _only(folder: Path, *suffixes: str) -> Path:
    found = _matching(folder, *suffixes)
    usual = {OPTIONS, WEIGHTS} & {path.name for path in found}
    if usual:
        return folder / usual.pop()
    if not found:
        raise NotFoundError(f"{folder} has no file …{suffixes[0]}; ELMo is a folder with {OPTIONS} and {WEIGHTS}")
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:MOST_NAMED])
        raise NotFoundError(f"{folder} has several files …{suffixes[0]}: {names}; pass options and weights by name")
    return found[0]
