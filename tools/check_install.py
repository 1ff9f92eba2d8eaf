"""Check that an installed Bertie uses its compiled libraries: what `bertie doctor` and `bertie inspect` say.

    python tools/check_install.py            # with the Python that Bertie is installed for

Reads nothing from this repository, so that it can run in the environment of a wheel, for example that of cibuildwheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any


def ask(*arguments: str) -> Any:
    """The JSON output of a command, run in a folder without the package's sources."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "bertie", *arguments, "--json"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    return json.loads(done.stdout)


def problems() -> list[str]:
    """What is not as it should be."""
    checks = ask("doctor")["checks"]
    parts = {check["name"]: check for check in checks if check["section"] == "compiled extensions"}
    found = [f"{name}: {part['text']}" for name, part in parts.items() if part["status"] != "ok"]
    found += [f"{check['name']}: {check['text']}" for check in checks if check["status"] == "error"]
    if len(parts) < 3:
        found.append(f"bertie doctor lists {len(parts)} compiled extensions, not 3")
    dispatch = json.dumps(ask("inspect"))
    if "native.encoder" not in dispatch:
        found.append("the dispatch table does not choose native.encoder")
    for name, part in parts.items():
        print(f"{name}: {part['text']}")
    return found


if __name__ == "__main__":
    if lines := problems():
        raise SystemExit("\n".join(lines))
    print("the compiled libraries are in use")
