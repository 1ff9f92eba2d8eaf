"""Python functions with docstrings, of installed packages under permissive licences."""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

from preparation.files import SEED, key
from preparation.text import split

PERMISSIVE = re.compile(r"\b(?:MIT|BSD|Apache|ISC|PSF|Python Software Foundation|0BSD|Unlicense|HPND)\b", re.IGNORECASE)
RESTRICTED = re.compile(r"\bA?L?GPL|\bGNU\b|\bMPL|Mozilla|Proprietary|LicenseRef|CC-BY", re.IGNORECASE)
PER_PACKAGE, FILES = 3_000, 500  # at most so many functions and files of a package, so that none dominates
SOURCE_WORDS, SOURCE_CHARACTERS = 150, 900  # of a function
POINTER = re.compile(
    r"(?:see|deprecated|same as|alias|synchronous version|\w+ \([\w.]+)\b", re.IGNORECASE
)  # no summary
PYTHON = "python"  # the standard library


class Function(NamedTuple):
    """A function of a package: the first sentence of its docstring, and its source."""

    package: str
    name: str
    summary: str
    source: str


def functions(folders: Sequence[str], seen: set[str]) -> list[Function]:
    """Functions with a docstring, distinct by summary and by source; at most `PER_PACKAGE` of each package."""
    draw, found, own = random.Random(SEED), list[Function](), set[str]()
    for package, licence, files in sorted(packages(folders)):
        of_package = []
        for file in sorted(draw.sample(files, min(FILES, len(files)))):
            for function in functions_of(package, file):
                keys = {key(function.summary), key(function.source)}
                if not keys & own and not keys & seen:
                    own |= keys
                    of_package.append(function)
        if of_package:
            print(f"{package} ({licence}): {len(of_package):,} functions", flush=True)
        found += draw.sample(of_package, min(PER_PACKAGE, len(of_package)))
    return found


def packages(folders: Sequence[str]) -> Iterator[tuple[str, str, list[Path]]]:
    """Name, licence and Python files of the packages in folders such as site-packages, or Python's own library."""
    for folder in folders:
        if not Path(folder).is_dir():
            print(f"skipped: there is no folder {folder}")
        licence = Path(folder) / "LICENSE.txt"
        if licence.exists() and "PYTHON SOFTWARE FOUNDATION LICENSE" in licence.read_text("utf-8"):
            yield (
                PYTHON,
                "PSF",
                sorted(file for file in Path(folder).rglob("*.py") if "site-packages" not in file.parts),
            )
        for distribution in distributions(path=[folder]):
            found = permissive_licence(distribution)
            files = [Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".py"]
            if found and files:
                yield distribution.metadata["Name"].lower(), found, sorted(files)


def permissive_licence(distribution: Distribution) -> str:
    """The licence that a package declares if it is permissive, else ""."""
    fields = distribution.metadata
    declared = fields.get("License-Expression") or ""
    if not declared:
        names = [
            name.rpartition(" :: ")[2] for name in fields.get_all("Classifier", []) if name.startswith("License ::")
        ]
        declared = ", ".join(names) or (fields.get("License") or "").strip().partition("\n")[0]
    if RESTRICTED.search(declared) or not PERMISSIVE.search(declared):
        return ""
    return declared[:80]


def functions_of(package: str, file: Path) -> Iterator[Function]:
    """The functions of a file that have a docstring in English, without tests."""
    if {"test", "tests", "testing", "idlelib", "lib2to3", "_vendor"} & set(file.parts):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in others' code
            text = file.read_text("utf-8")
            tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
            summary = summarize(ast.get_docstring(node) or "")
            if summary and len(node.body) > 1:
                yield Function(package, node.name, summary, _source(lines, node))


def summarize(docstring: str) -> str:
    """The first sentence of a docstring; "" unless it has 3 to 30 words, mostly letters.

    >>> summarize("Return the mean\\n    of *values*. Slow.\\n\\n    Parameters")
    'Return the mean of values.'
    """
    paragraph = re.split(r"\n\s*\n|\n\s*(?::|@|>>>|-|Args|Parameters|Returns|Example)", docstring.strip())[0]
    text = re.sub(r":\w+:(?=`)", "", " ".join(paragraph.split()))
    text = re.sub(r"[`*]+", "", text).replace(r"\_", "_")
    sentence = next(split(text), "")
    letters = sum(char.isascii() and (char.isalpha() or char == " ") for char in sentence)
    if POINTER.match(sentence) or re.search(r"\w{30}|[|<>{}=]", sentence) or letters < 0.85 * len(sentence):
        return ""
    return sentence if 3 <= len(sentence.split()) <= 30 else ""


def _source(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The source of a function, dedented, cut to some words; half of the functions without the docstring."""
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    document = node.body[0]
    head = lines[first : document.lineno - 1]
    body = lines[(document.end_lineno or document.lineno) : last]
    if sum(map(ord, node.name)) % 2:  # any rule that gives the same result each time
        (text, *_) = split(" ".join(str(ast.get_docstring(node)).split()))
        head.append(f'{" " * document.col_offset}"""{text[:200]}"""')
    source = "\n".join(line[node.col_offset :].rstrip() for line in [*head, *body] if line.strip())
    words = list(re.finditer(r"\S+", source))
    end = words[SOURCE_WORDS - 1].end() if len(words) > SOURCE_WORDS else len(source)
    return source[: min(end, SOURCE_CHARACTERS)].rstrip()
