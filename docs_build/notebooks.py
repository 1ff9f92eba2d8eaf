"""The tutorials: notebooks that are executed by `make tutorials` and shown as pages of the site.

    python -m docs_build.notebooks docs/tutorials/*.ipynb          # execute, and store the outputs
    python -m docs_build.notebooks --smoke docs/tutorials/a.ipynb  # execute a reduced form, and store nothing

Jupyter runs them too; this executor needs nothing but Python, so that the tests can use it. A cell may have a smaller
form for tests in its metadata (`{"smoke": "STEPS = 5"}`). Each stored notebook has a hash of its cells, by which a test
notices a notebook that was edited and not executed again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

LONGEST_OUTPUT = 6000  # characters
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r"/[\w.-]+/")


class CellError(Exception):
    """A cell that failed, with its traceback."""


def read(path: Path) -> dict[str, Any]:
    """A notebook."""
    notebook: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return notebook


def source(cell: dict[str, Any]) -> str:
    """The text of a cell."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def source_hash(notebook: dict[str, Any]) -> str:
    """A hash of all code of a notebook."""
    code = [source(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def execute(notebook: dict[str, Any], *, smoke: bool = False) -> float:
    """Execute all code cells in the current folder, store their outputs, and return the CPU time in seconds."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    start, count = _cpu_seconds(), 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        code = cell["metadata"].get("smoke", source(cell)) if smoke else source(cell)
        cell["outputs"], cell["execution_count"] = _run(code, scope, count), count
    return _cpu_seconds() - start


def _cpu_seconds() -> float:
    """CPU time of this process and of the commands that it has run; it hardly depends on what else the machine does."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _run(code: str, scope: dict[str, Any], count: int) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            value = _evaluate(code, scope)
    except Exception as error:
        raise CellError(f"cell {count}:\n{code}\n{printed.getvalue()}\n{traceback.format_exc()}") from error
    if text := tidy(printed.getvalue()):
        outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if html := getattr(value, "_repr_html_", lambda: None)():
            data["text/html"] = html.splitlines(keepends=True)
        if svg := getattr(value, "_repr_svg_", lambda: None)():
            data["image/svg+xml"] = svg.splitlines(keepends=True)
        outputs.append({"output_type": "execute_result", "execution_count": count, "data": data, "metadata": {}})
    return outputs


def _evaluate(code: str, scope: dict[str, Any]) -> Any:
    """Run a cell: shell commands after an exclamation mark, statements, and the value of a last expression."""
    lines = [f"_shell({line[1:].strip()!r})" if line.startswith("!") else line for line in code.splitlines()]
    scope["_shell"] = _shell
    tree = ast.parse("\n".join(lines))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), scope)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope)  # type: ignore[attr-defined]


def _shell(command: str) -> None:
    """Run a command, with `bertie` of this Python, and print its output."""
    command = re.sub(r"(^|&& )bertie\b", rf"\1{sys.executable} -m bertie", command)
    result = subprocess.run(
        command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    print(result.stdout, end="")
    if result.returncode:
        raise CellError(f"{command}: exit status {result.returncode}")


def tidy(text: str) -> str:
    """Output as a reader needs it: progress bars by their last state, no escape sequences, bounded in length."""
    lines = [line.rpartition("\r")[2] for line in _ESCAPES.sub("", text).replace("\r\n", "\n").split("\n")]
    text = _TEMPORARY.sub("", "\n".join(lines)).strip("\n")
    text = text if len(text) <= LONGEST_OUTPUT else f"{text[:LONGEST_OUTPUT]}\n…"
    return f"{text}\n" if text else ""


def render(notebook: dict[str, Any], name: str) -> str:
    """Markdown of a notebook with its outputs."""
    parts = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source(cell))
            continue
        code = source(cell)
        language = "sh" if code.startswith("!") and "\n" not in code else "python"
        parts.append(f"```{language}\n{code.removeprefix('!') if language == 'sh' else code}\n```")
        parts += [_output(output) for output in cell["outputs"]]
    seconds = notebook["metadata"].get("bertie", {}).get("seconds", 0)
    note = f"*This page is a notebook: [{name}]({name}). It takes {seconds} seconds of CPU time.*"
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```{{.text .output}}\n{''.join(output['text']).rstrip()}\n```"
    data = output["data"]
    if "image/svg+xml" in data:
        return "".join(data["image/svg+xml"]).replace("\n", " ")
    if "text/html" in data:
        return f'<div class="output">{" ".join("".join(data["text/html"]).split())}</div>'
    return f"```{{.text .output}}\n{''.join(data['text/plain']).rstrip()}\n```"


@contextmanager
def temporary_folder() -> Iterator[None]:
    """Work in an empty folder."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def main() -> None:
    """Execute notebooks."""
    parser = argparse.ArgumentParser(description="Execute notebooks, and store their outputs.")
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--smoke", action="store_true", help="the reduced form of each; stores nothing")
    args = parser.parse_args()
    for path in (path.resolve() for path in args.notebooks):
        notebook = read(path)
        with temporary_folder():
            seconds = execute(notebook, smoke=args.smoke)
        print(f"{path.name}: {seconds:.0f} s of CPU time", flush=True)
        if not args.smoke:
            notebook["metadata"]["bertie"] = {"executed": source_hash(notebook), "seconds": round(seconds)}
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
