"""Uploads to the hub: what is sent, and errors; the hub itself is replaced by one that records calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest

from bertie import Embedder
from bertie.checkpoints.upload import push_folder
from bertie.cli import main
from bertie.errors import BertieError, ConfigError, NotFoundError
from tests.checkpoints.test_roundtrip import with_tokenizer

URL = "https://huggingface.co/me/model"


class RecordingHub:
    """Records what is uploaded."""

    cards: dict[str, bytes]
    uploads: list[dict[str, Any]]
    error: Exception | None

    def __init__(self, token: str | None = None) -> None:
        type(self).tokens.append(token)  # type: ignore[attr-defined]

    def create_repo(self, name: str, *, private: bool | None, exist_ok: bool) -> Any:
        huggingface_hub.utils.validate_repo_id(name)  # type: ignore[attr-defined]
        if self.error is not None:
            raise self.error
        assert exist_ok
        return huggingface_hub.RepoUrl(URL if "/" not in name else f"https://huggingface.co/{name}")

    def file_exists(self, name: str, file: str, revision: str | None) -> bool:
        return name in self.cards

    def upload_file(self, *, path_or_fileobj: bytes, path_in_repo: str, repo_id: str, revision: str | None) -> None:
        assert path_in_repo == "README.md"
        self.cards[repo_id] = path_or_fileobj

    def upload_folder(self, *, folder_path: Path, **options: Any) -> None:
        files = sorted(path.relative_to(folder_path).as_posix() for path in folder_path.rglob("*") if path.is_file())
        self.uploads.append({"files": files, **options})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[RecordingHub]:
    fields = {"cards": {}, "uploads": [], "tokens": [], "error": None}
    recording = type("RecordingHub", (RecordingHub,), fields)
    monkeypatch.setattr(huggingface_hub, "HfApi", recording)
    return recording


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory.mktemp("upload") / "m")


def test_a_folder(hub: type[RecordingHub], folder: Path) -> None:
    assert push_folder(folder, "me/model", token="secret", revision="v2", message="First") == URL
    (upload,) = hub.uploads
    assert upload["files"] == sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    assert (upload["repo_id"], upload["revision"], upload["commit_message"]) == ("me/model", "v2", "First")
    assert hub.tokens == ["secret"]  # type: ignore[attr-defined]
    assert b'bertie.load("me/model")' in hub.cards["me/model"]
    assert huggingface_hub.ModelCard(hub.cards["me/model"].decode()).data.library_name == "bertie"  # type: ignore[attr-defined]


def test_a_card_is_kept(hub: type[RecordingHub], folder: Path, tmp_path: Path) -> None:
    hub.cards["me/model"] = b"written by hand"
    push_folder(folder, "me/model")
    assert hub.cards["me/model"] == b"written by hand"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("# The report's card")
    push_folder(tmp_path, "me/other")
    assert "me/other" not in hub.cards  # the folder has one
    assert "README.md" in hub.uploads[1]["files"]


def test_a_task(hub: type[RecordingHub], folder: Path) -> None:
    assert Embedder.load(folder).push_to_hub("me/model", private=True) == URL
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub.uploads[0]["files"])


def test_errors(hub: type[RecordingHub], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        push_folder(tmp_path, "me/model")
    with pytest.raises(ConfigError, match="repository='a/b/c' must be owner/name"):
        push_folder(folder, "a/b/c")
    for error in (OSError("no network\nand more"), httpx.ConnectError("no network")):
        hub.error = error
        with pytest.raises(BertieError, match=r"could not be uploaded to me/model: no network$"):
            push_folder(folder, "me/model")
    assert hub.uploads == []


def test_the_verb(hub: type[RecordingHub], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(folder), "me/model"]) == 0
    assert capsys.readouterr().out == f"{URL}\n"
    assert main(["push", str(folder), "me/model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"url": URL}
    assert main(["push", "none", "me/model"]) == 1
    assert "none is not a model folder" in capsys.readouterr().err
