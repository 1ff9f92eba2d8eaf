"""Install a wheel into a new environment in which no compiler can be found, and check that its libraries are used.

python -m tools.check_wheel dist/bertie-….whl
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang", "zig", "cl")


def check(wheel: Path) -> None:
    """Install and run. Raises SystemExit or CalledProcessError where something is wrong."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        programs = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
        python, path = str(programs / "python"), str(programs)
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CXX", "CC")}
        environment["PATH"] = path
        if found := [name for name in COMPILERS if shutil.which(name, path=path)]:
            raise SystemExit(f"{', '.join(found)} in {path}")
        start = time.perf_counter()
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary", ":all:"]
        # torch first and by its exact version, so that no other package chooses a build for us
        subprocess.run([*install, "--constraint", "constraints.txt", "torch"], cwd=ROOT, env=environment, check=True)
        subprocess.run([*install, "--constraint", "constraints.txt", wheel], cwd=ROOT, env=environment, check=True)
        print(f"{wheel.name} installed without a compiler in {time.perf_counter() - start:.0f} s", flush=True)
        subprocess.run([python, str(ROOT / "tools" / "check_install.py")], env=environment, check=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        check(Path(argument).absolute())
