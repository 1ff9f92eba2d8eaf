"""The README's Python and its commands run, and print what it says.

Those with the built-in model run wherever it is. Those that name another model, and what is built on them, are slow.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from benchmarks.real_models import fetch

import bertie
from bertie.checkpoints import hub
from bertie.cli import main

README = Path(__file__).parents[1] / "README.md"
NAME = "all-MiniLM-L6-v2"
HUB_ID = f"sentence-transformers/{NAME}"
NUMBER = re.compile(r"-?\d+\.\d+")
has_built_in = pytest.mark.skipif(
    not (Path(bertie.__file__).parent / "models" / hub.DEFAULT).is_dir(),
    reason="the built-in model is not in this tree",
)


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def of_the_built_in(text: str) -> list[str]:
    """The blocks that name no other model, and need nothing from those that do."""
    found, missing = [], set[str]()
    for block in blocks(text):
        names = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Name)]
        made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        if HUB_ID in block or used & missing - made:
            missing |= made
        else:
            found.append(block)
            missing -= made
    return found


def commands(text: str) -> list[tuple[list[str], list[str]]]:
    """Commands that name no model and no file, with what they are said to print; `…` stands for any lines after it."""
    found = []
    for said in re.findall(r"^    \$ bertie .*\n(?:    (?!\$).*\n)*", text, flags=re.MULTILINE):
        command, *lines = (line.removeprefix("    ") for line in said.splitlines())
        argv = shlex.split(command.removeprefix("$ bertie "), comments=True)
        if argv[0] in VERBS and not {"-m", "-o"} & set(argv):
            found.append((argv, lines))
    return found


VERBS = ("fill", "embed", "classify", "tag", "answer", "rerank", "similarity", "tokenize")


def run(block: str, scope: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    exec(block, scope)
    said = re.findall(r"^print\(.*\)\s+# (.*)$", block, flags=re.MULTILINE)
    assert_alike(capsys.readouterr().out.splitlines(), said)
    for name, shape in re.findall(r"^(\w+) = .*# (\(\d+, \d+\))", block, flags=re.MULTILINE):
        assert str(tuple(getattr(scope[name], "shape", ()))) == shape


def assert_alike(found: list[str], wanted: list[str]) -> None:
    """The same words, and numbers that differ by rounding at most."""
    if wanted and wanted[-1] == "…":
        wanted = wanted[:-1]
        found = found[: len(wanted)]
    # Columns are as wide as their widest number.
    plain = [[NUMBER.sub("#", " ".join(line.split())) for line in lines] for lines in (found, wanted)]
    assert plain[0] == plain[1]
    numbers = [[float(one) for line in lines for one in NUMBER.findall(line)] for lines in (found, wanted)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.02)


def test_what_is_run() -> None:
    text = """
```python
import bertie
a = bertie.Embedder.load()
```
```python
b = bertie.Embedder.load("sentence-transformers/all-MiniLM-L6-v2")
```
```python
c = b.embed([])
```
```python
b = a
d = b
```

    $ bertie fill "a [MASK]" --top-k 1
    row  token
    1    cat
    $ bertie fill "a [MASK]" -m ./my-model
    $ bertie tag "Ada"  # names

    $ bertie train classify train.jsonl
"""
    first, second = of_the_built_in(text)
    assert ("a =" in first, "d =" in second) == (True, True)
    wanted = [(["fill", "a [MASK]", "--top-k", "1"], ["row  token", "1    cat"]), (["tag", "Ada"], [])]
    assert commands(text) == wanted
    assert_alike(["a  0.517", "b  1/2", "c"], ["a   0.52", "b   1/2", "…"])
    for wrong in (["a  0.60", "b  1/2"], ["a  0.52", "b  1/3"], ["a  0.52"], ["a  0.52", "b  1/2", "c"]):
        with pytest.raises(AssertionError):
            assert_alike(wrong, ["a  0.52", "b  1/2"])


@has_built_in
def test_python_of_the_built_in_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"bertie": bertie}
    found = of_the_built_in(README.read_text(encoding="utf-8"))
    assert found
    for block in found:
        run(block, scope, capsys)


@has_built_in
def test_commands_of_the_built_in_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = commands(README.read_text(encoding="utf-8"))
    assert found
    for argv, wanted in found:
        assert main(argv) == 0
        assert_alike(capsys.readouterr().out.splitlines(), wanted)


@pytest.mark.slow
def test_all_python(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch(NAME)  # what the hub id in the README stands for
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    found = blocks(README.read_text(encoding="utf-8"))
    assert len(found) >= 3
    for block in found:
        run(block.replace(HUB_ID, str(folder)), scope, capsys)
