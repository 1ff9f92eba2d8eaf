"""Resolve a model name: a built-in model, a local folder or a Hugging Face hub id.

A hub id without an owner, such as all-MiniLM-L6-v2, is also looked for among the models of sentence-transformers, as
there.
The bare name of a built-in model always means that model. A folder of the same name is written
./bertie-small, or passed as a `Path`.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from bertie.checkpoints import named_heads, weight_files
from bertie.checkpoints.elmo_folder import is_elmo_folder
from bertie.errors import BertieWarning, NotFoundError

BUILT_IN = Path(__file__).parents[1] / "models"
OWNER = "sentence-transformers"  # on the hub, of names without one
DEFAULT = "bertie-small"  # the built-in model that is used where no model is named
# The files of a checkpoint. A repository may also hold training states, and the same weights in formats of other
# tools. sentence-transformers keeps its modules in numbered folders (1_Pooling, 2_Dense).
_NAMES = (
    *(
        "config.json",
        "gliner_config.json",
        "model.safetensors",
        "model-*-of-*.safetensors",
        "*model.*.index.json",
        "checksums.json",
    ),
    *(weight_files.INT8, named_heads.FILE),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spm.model", "spiece.model", "sentencepiece.bpe.model"),
    *("modules.json", "config_sentence_transformers.json", "sentence_*_config.json"),
)
_PATTERNS = [*_NAMES, *(f"[0-9]*_*/{name}" for name in _NAMES)]
_PICKLES = "pytorch_model*.bin"  # downloaded only if there are no safetensors


def resolve(name: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a model, downloading it if `name` is a hub id."""
    text = str(name)
    if is_built_in(name):
        if Path(text).is_dir():
            warnings.warn(
                f"{text} is the built-in model; the folder of that name here is written ./{text}",
                BertieWarning,
                stacklevel=2,
            )
        if revision is not None:
            raise NotFoundError(f"revision={revision!r}: {name} is a built-in model; only hub ids have revisions")
        return BUILT_IN / text
    try:
        folder = Path(name).expanduser()
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError) as error:  # no permission, name too long, unknown home directory
        reason = getattr(error, "strerror", None) or str(error)
        raise NotFoundError(f"{text[:200]!r} cannot be looked up: {reason}") from None
    if not text.strip():
        raise NotFoundError(f"name={name!r} is empty; pass a folder, a built-in model ({_known()}) or a hub id")
    if is_folder:
        if revision is not None:
            raise NotFoundError(f"revision={revision!r}: {name} is a folder; only hub ids have revisions")
        if is_elmo_folder(folder):
            raise NotFoundError(
                f"{name} is an ELMo model: use bertie.Elmo or bertie.ElmoTagger, bertie embed --tokens, bertie tag or "
                "bertie inspect"
            )
        return folder.absolute() if str(folder) in built_in() else folder  # a path drops ./
    if is_file:
        raise NotFoundError(f"{name} is a file; a model is a folder")
    return _download(text, revision)


def is_built_in(name: str | Path) -> bool:
    """Whether a name means a built-in model: a bare string, or a path where there is no such folder."""
    return str(name) in built_in() and not (isinstance(name, Path) and name.is_dir())


def is_local_folder(name: str | Path) -> bool:
    """Whether a name means a folder of this machine."""
    return not is_built_in(name) and os.path.isdir(os.path.expanduser(name))


def to_string(name: str | Path) -> str:
    """A name as a string that means the same: `str` alone would turn a folder's path into a built-in name."""
    return f"./{name}" if str(name) in built_in() and not is_built_in(name) else str(name)


def absolute_name(name: str | Path) -> str:
    """A name that means the same in every working directory: the whole path, if it is a folder."""
    return str(Path(name).expanduser().resolve()) if is_local_folder(name) else str(name)


def built_in() -> list[str]:
    """List the models that come with the package."""
    return sorted(path.parent.name for path in BUILT_IN.glob("*/config.json"))


def default_model() -> str:
    """Return the name of the built-in model that is used where no model is named."""
    if DEFAULT not in built_in():
        raise NotFoundError("this installation has no built-in model; name a folder or a hub id")
    return DEFAULT


def _known() -> str:
    return ", ".join(built_in()) or "none"


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub.errors import HFValidationError

    reasons = []
    for candidate in [name] if "/" in name else [name, f"{OWNER}/{name}"]:
        try:
            return _download_files(candidate, revision)
        except HFValidationError:
            raise NotFoundError(
                f"{name[:200]!r} is not a folder, a built-in model ({_known()}) or a hub id (owner/name)"
            ) from None
        except Exception as error:  # hub, network and disk errors have many unrelated classes
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reasons.append((candidate, lines[0]))
    at = "" if revision is None else f" at revision {revision!r}"
    tried = reasons[0][1] if len(reasons) == 1 else "; ".join(f"{candidate}: {why}" for candidate, why in reasons)
    raise NotFoundError(
        f"{name[:200]!r} is not a folder or a built-in model ({_known()}), and could not be downloaded from the "
        f"hub{at}: {tried}"
    )


def _download_files(name: str, revision: str | None) -> Path:
    """Download the files of a checkpoint that are not in the cache, and return their folder."""
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    parents = [path.parent for name in ("config.json", "gliner_config.json") for path in folder.rglob(name)]
    without_safetensors = [parent for parent in parents if not any(parent.glob("model*.safetensors"))]
    if without_safetensors:
        pickles = [(parent.relative_to(folder) / _PICKLES).as_posix() for parent in without_safetensors]
        snapshot_download(name, revision=revision, allow_patterns=pickles)
    return folder
