"""The Python code and the commands of the pages run, and print what the pages say; those of other libraries too."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from docs_build import links

from bertie.cli import main
from tests.docs import local_models
from tests.docs.pages import OWN
from tests.test_readme import assert_alike, has_built_in, run
from tests.test_readme import commands as commands_with_output

BLOCK = re.compile(r"(?:<!-- needs: (\w+) -->\n)?```python\n(.*?)```", re.DOTALL)


def blocks(text: str) -> list[str]:
    """The blocks of Python whose packages are installed, and that need nothing from those that are left out."""
    found: list[str] = []
    absent: set[str] = set()
    for package, code in BLOCK.findall(text):
        tree = ast.parse(code)
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        imports = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imports |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported = {name.split(".")[0] for name in imports} | ({package} if package else set())
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        if any(find_spec(name) is None for name in imported) or used & absent - made:
            absent |= made
        else:
            found.append(code)
            absent -= made
    return found


def test_blocks_of_absent_packages_are_left_out() -> None:
    text = "```python\nimport nothing_like_it\na = 1\n```\n```python\nb = a\n```\n```python\nc = 2\n```\n"
    assert blocks(text) == ["c = 2\n"]
    assert blocks(f"<!-- needs: nothing_like_it -->\n{text}") == ["c = 2\n"]


def without_logs(block: str) -> str:
    """Trainers of transformers print their logs: only what follows `train()` counts."""
    before, train, after = block.partition("trainer.train()\n")
    if not train:
        return block
    call = "\nwith __import__('contextlib').redirect_stdout(None):\n    trainer.train()\n"
    return before + call + after


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stand-ins for the hub ids of the pages."""
    folder = tmp_path_factory.mktemp("models")
    local_models.write(folder)
    return folder


def with_code() -> list[str]:
    return [page for page in OWN if "```python\n" in (links.ROOT / page).read_text("utf-8")]


@has_built_in
@pytest.mark.parametrize("page", with_code(), ids=lambda page: page.removeprefix("docs/"))
def test_python(
    page: str,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in models.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    text = (links.ROOT / page).read_text("utf-8")
    if "http://127.0.0.1:8080" in "".join(code for _, code in BLOCK.findall(text)):
        text = text.replace("http://127.0.0.1:8080", request.getfixturevalue("address"))
    code_blocks = blocks(text)
    assert code_blocks
    scope: dict[str, object] = {}
    for block in code_blocks:
        run(without_logs(block), scope, capsys)


@has_built_in
def test_commands_print_what_pages_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tested = 0
    for page in OWN:
        for argv, wanted in commands_with_output((links.ROOT / page).read_text("utf-8")):
            assert main(argv) == 0
            assert_alike(capsys.readouterr().out.splitlines(), wanted)
            tested += 1
    assert tested >= 7
