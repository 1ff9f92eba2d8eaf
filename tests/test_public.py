"""The public face: exact names, a cheap import, and no family's name outside families/."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import bertie
from bertie.checkpoints.model_spec import FAMILIES

SOURCE = Path(bertie.__file__).parent


def test_every_public_name_is_there_and_no_other() -> None:
    for name in bertie.__all__:
        assert getattr(bertie, name) is not None
    assert sorted(dir(bertie)) == sorted(bertie.__all__)
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


def test_no_family_is_named_outside_families() -> None:
    names = re.compile("|".join(FAMILIES), re.IGNORECASE)
    for file in SOURCE.rglob("*.py"):
        if file.parent.name == "families":
            continue
        # Comments and docstrings may say where something comes from; code may not depend on it.
        code = re.sub(r'("""|\'\'\').*?\1|#[^\n]*', "", file.read_text(), flags=re.DOTALL)
        found = {hit for hit in names.findall(code) if hit.lower() not in ("bert",)} - _FILE_NAMES
        assert not found, f"{file.relative_to(SOURCE)} names {found}"


# File names that sentence-transformers chose.
_FILE_NAMES = {"roberta", "distilbert", "xlm-roberta", "camembert", "albert"}
