"""Write deploy/requirements.txt: what `bertie serve` needs, each file by its SHA-256.

    python deploy/lock.py                 # with pip as it is configured; versions from constraints.txt

Run it again after a change of constraints.txt or of the dependencies in pyproject.toml. torch is not
in the file: the container takes its CPU build from an index of its own, see deploy/Containerfile.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "deploy" / "requirements.txt"
PYTHON = "3.13"  # of the container
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = (28, 27, 26, 24, 17)  # of the wheels: 2.28 and older; Debian 13 has 2.41
# What torch's CPU build depends on, and setuptools, which also builds Bertie itself.
TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "setuptools>=77", "sympy", "typing-extensions")


def requirements() -> list[str]:
    """The dependencies of `bertie[serve]`, without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    names = [line.partition(";")[0].strip() for line in listed]
    return [name for name in names if not name.startswith("torch")] + list(TORCH_NEEDS)


def resolve(architecture: str) -> dict[str, tuple[str, str]]:
    """The version and the hash of every package for an architecture, by name."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--only-binary", ":all:", "--python-version", PYTHON, "--implementation", "cp"]
    command += ["--constraint", str(ROOT / "constraints.txt")]
    for minor in GLIBC:
        command += ["--platform", f"manylinux_2_{minor}_{architecture}"]
    command += ["--platform", f"manylinux2014_{architecture}"]
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command += ["--target", str(Path(folder, "target")), "--report", str(report)]
        subprocess.run([*command, *requirements()], check=True)
        packages = json.loads(report.read_text())["install"]
    found = {}
    for package in packages:
        name = re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()
        found[name] = package["metadata"]["version"], package["download_info"]["archive_info"]["hashes"]["sha256"]
    return found


def main() -> None:
    """Resolve all architectures and write the file."""
    resolved = [resolve(architecture) for architecture in ARCHITECTURES]
    lines = ["# Written by `python deploy/lock.py`; pip install --require-hashes --no-deps -r requirements.txt"]
    for name in sorted({name for packages in resolved for name in packages}):
        versions = {packages[name][0] for packages in resolved if name in packages}
        if len(versions) > 1:
            raise SystemExit(f"{name} has different versions for {', '.join(ARCHITECTURES)}: {versions}")
        hashes = sorted({packages[name][1] for packages in resolved if name in packages})
        lines.append(" \\\n    ".join([f"{name}=={versions.pop()}", *(f"--hash=sha256:{digest}" for digest in hashes)]))
    OUTPUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
