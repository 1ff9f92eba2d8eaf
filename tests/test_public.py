"""The public API: exact names, a cheap import, and no model family named outside families/."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bertie
from bertie.checkpoints.model_spec import FAMILIES

SOURCE = Path(bertie.__file__).parent
# sentence-transformers named a file after each family it started with, as sentence_roberta_config.json.
FILE_NAMES = {"checkpoints/sentence_transformers.py": {"albert", "camembert", "distilbert", "roberta", "xlm-roberta"}}


def test_public_names() -> None:
    for name in bertie.__all__:
        assert getattr(bertie, name) is not None
    assert sorted(dir(bertie)) == sorted(bertie.__all__) == sorted(set(bertie.__all__))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = bertie.nonsense


def test_importing_costs_no_torch() -> None:
    code = (
        "import sys, bertie; print([m for m in ('torch', 'tokenizers', 'numpy', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_core_imports_no_optional_package() -> None:
    code = (
        "import sys, bertie.cli, bertie.tasks.embed; "
        "print([m for m in ('transformers', 'sentence_transformers', 'sentencepiece', 'google.protobuf') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_families_are_named_only_in_their_modules_and_their_table() -> None:
    # "t5" is also the end of "sst5", a dataset.
    names = re.compile("|".join({*FAMILIES, r"(?<![a-z])t5"} - {"bert", "t5"}), re.IGNORECASE)
    for path in SOURCE.rglob("*.py"):
        if path.parent.name == "families":
            continue
        module = path.relative_to(SOURCE).as_posix()
        # Comments and docstrings may cite a family; code may not depend on one.
        code = re.sub(r'("""|\'\'\').*?\1|#[^\n]*', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        code = code.replace("DistilBertLoss", "")  # a loss, named after the paper that introduced it
        code = re.sub("llama[_-]?index", "", code, flags=re.IGNORECASE)  # a framework
        if module == "checkpoints/model_spec.py":
            code = without_family_table(code)
        assert set(map(str.lower, names.findall(code))) == FILE_NAMES.get(module, set()), module


def without_family_table(code: str) -> str:
    """The code without `FAMILIES` and the imports of its entries."""
    tree = ast.parse(code)
    targets = [
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    assert "FAMILIES" in targets
    kept = [
        node
        for node in tree.body
        if not (isinstance(node, ast.ImportFrom) and "checkpoints.families" in str(node.module))
        and not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "FAMILIES")
    ]
    return ast.unparse(ast.Module(kept, []))
