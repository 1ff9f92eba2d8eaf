"""Upload a model folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from bertie.errors import BertieError, ConfigError, NotFoundError

LOCAL_FILES = ("*.lock", "*.tmp", ".*")  # of this machine
CARD = """---
library_name: "bertie"
tags:
- "bertie"
---

# {name}

Saved with Bertie; load it with `bertie.load("{repository}")`. Which data it was trained on, and how well it works,
is not documented.
"""


def push_folder(
    folder: str | Path,
    repository: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    message: str = "Upload model",
) -> str:
    """Upload a model folder to a repository (owner/name), which is created if needed; return its address.

    A folder without a model card (README.md) gets a minimal one. `token`: by default that of `hf auth login`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    folder = Path(folder)
    if not any(folder.glob("**/config.json")):
        raise NotFoundError(f"{folder} is not a model folder: it has no config.json")
    api = HfApi(token=token)
    try:
        created = api.create_repo(repository, private=private, exist_ok=True)
        name: str = created.repo_id
        if not (folder / "README.md").exists() and not api.file_exists(name, "README.md", revision=revision):
            card = CARD.format(name=name.rpartition("/")[2], repository=name).encode()
            api.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id=name, revision=revision)
        api.upload_folder(
            folder_path=folder,
            repo_id=name,
            revision=revision,
            commit_message=message,
            ignore_patterns=list(LOCAL_FILES),
        )
    except HFValidationError as error:
        raise ConfigError(f"repository={repository!r} must be owner/name: {error}") from None
    except Exception as error:  # no token, no permission, no network: many unrelated classes
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BertieError(f"{folder} could not be uploaded to {repository}: {lines[0]}") from None
    return str(created)
