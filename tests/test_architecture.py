"""The rules of the layout: imports go one way, names are unique, and files and functions stay readable."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import bertie

SOURCE = Path(bertie.__file__).parent
# From the bottom up. A module imports from its own layer and from those below it, lazily or not.
LAYERS = (
    *(
        "errors",
        "arguments",
        "_version",
        "compiled",
        "config",
        "switches",
        "threads",
        "recipe",
        "data",
        "evaluation",
    ),  # leaves, which anybody may use
    *("text", "ops", "nn", "checkpoints", "pipeline", "tasks", "training", "recipes"),
    *("compress", "search", "client", "cluster", "bench", "integrations", "serve", "cli"),
)
LEAVES = {
    "errors": set[str](),
    "arguments": set[str](),
    "_version": set[str](),
    "compiled": set[str](),
    "config": {"errors"},
    "switches": {"errors"},
    "threads": set[str](),
    "recipe": {"errors"},
    "data": {"errors"},
    "evaluation": {"errors", "config", "data", "_version"},
}
# The only calls that go up: `fit` and what belongs to it hand over to training, in one line each, and the script that
# prepares bertie-small's data, which nothing imports, searches it.
ENTRY_POINTS = {("tasks", "training"), ("recipes", "search")}
MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 450, 60, 10
# Estimators take their hyperparameters one by one, as scikit-learn's do.
ESTIMATORS = {"Trainable", "Embedder", "MultiTask", "Recipe", "Trainer"}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text(encoding="utf-8"))


def layer_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the layer of each import of Bertie's own modules, wherever it stands."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "bertie":
            names = [f"bertie.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module]
        for name in names:
            if name.startswith("bertie."):
                yield node.lineno, name.split(".")[1]  # type: ignore[attr-defined]


def test_imports_go_one_way() -> None:
    upward = []
    for path, tree in modules():
        if (layer := layer_of(path)) in ("__init__", "__main__"):
            continue
        for line, target in imported(tree):
            assert target in LAYERS, f"{path}:{line} imports bertie.{target}, which has no place in LAYERS"
            allowed = LEAVES[layer] | {layer} if layer in LEAVES else set(LAYERS[: LAYERS.index(layer) + 1])
            if target not in allowed and (layer, target) not in ENTRY_POINTS:
                upward.append(f"{path}:{line} imports bertie.{target}")
    assert not upward, "\n".join(upward)


def test_only_entry_points_import_training_from_tasks() -> None:
    """Each is a lazy import inside a function of at most a few lines."""
    for path, tree in modules():
        if layer_of(path) != "tasks":
            continue
        inside = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None and node.end_lineno - node.lineno < 60
            for line in range(node.lineno, node.end_lineno + 1)
        }
        type_only = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        for line, target in imported(tree):
            if target == "training":
                assert line in inside or line in type_only, f"{path}:{line} imports bertie.training at the top"


def test_evaluation_needs_no_torch() -> None:
    for path, tree in modules():
        if layer_of(path) in LEAVES:
            for node in ast.walk(tree):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(name.split(".")[0] == "torch" for name in names), f"{path} imports torch"


def test_public_classes_have_different_names() -> None:
    homes = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path))
    several = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert not several, several


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    kernels = path.parent.name == "triton"  # kernels and the autograd functions that launch them
    assert text.count("\n") <= MOST_LINES
    for owner in ast.walk(ast.parse(text)):
        for node in ast.iter_child_nodes(owner):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or kernels:
                continue
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MOST_FUNCTION_LINES or _is_estimator(owner, node), node.name
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(argument.arg not in ("self", "cls") for argument in arguments)
            assert count <= MOST_PARAMETERS or _is_estimator(owner, node), f"{node.name} has {count} parameters"


def _is_estimator(owner: ast.AST, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return isinstance(owner, ast.ClassDef) and owner.name in ESTIMATORS and node.name in ("__init__", "load")
