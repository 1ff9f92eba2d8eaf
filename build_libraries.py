"""Compile the C++ libraries. setup.py calls this; so does the Makefile, while pip downloads:

    python build_libraries.py              # compile what has changed, and copy it into src/

They are plain shared libraries that the package loads with ctypes, so that one wheel serves every version of Python.
Results are kept in build/libraries/, by a hash of the sources and of the command. Environment variables:

    CXX                      the compiler, with options: "clang++", "zig c++ -target aarch64-linux-gnu.2.17"
    CXXFLAGS                 more options
    BERTIE_PLATFORM          the platform of the wheel when cross-compiling, as manylinux_2_17_aarch64 or win_amd64
    BERTIE_REQUIRE_COMPILED  1: a library that cannot be compiled is an error; otherwise it is left out
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "src"
CACHE = ROOT / "build" / "libraries"
LIBRARIES = {  # library, without its suffix: source
    "bertie/ops/native/_encoder": "bertie/ops/native/cpp/encoder.cpp",
    "bertie/ops/native/_training": "bertie/ops/native/cpp/training.cpp",
    "bertie/text/_wordpiece": "bertie/text/cpp/wordpiece.cpp",
}
RECORD = "bertie/_compiled.json"  # of each library: the error, or nothing; `bertie doctor` reads it
OPTIMIZATION = {  # -O3 takes four times as long to compile, and makes int8 inference 7% faster, but not training
    "encoder.cpp": "-O3",
}
FLAGS = ["-g0", "-std=c++17", "-shared", "-fvisibility=hidden"]
COMPILERS = ("clang++",) if sys.platform == "win32" else ("c++", "g++", "clang++")
REINSTALL = "pip install --force-reinstall --no-deps --no-cache-dir --no-binary bertie bertie"
MESSAGE = """
{line}
WARNING: Bertie is installed WITHOUT these compiled libraries:
{failures}
Everything works, in PyTorch and more slowly. To add them, install a C++ compiler (apt install g++,
xcode-select --install, winget install LLVM.LLVM), and install Bertie again without pip's cached wheel:
    {reinstall}
or, from a checkout,
    pip install --force-reinstall --no-deps --no-cache-dir .
`bertie doctor` shows whether they are in use.
{line}
"""


def target_platform() -> str:
    """The platform of the libraries, as in the name of a wheel; "" for the one this runs on, whatever its name."""
    given = os.environ.get("BERTIE_PLATFORM", "")
    if given or sys.platform != "darwin":
        return given
    version = os.environ.get("MACOSX_DEPLOYMENT_TARGET", "11.0")  # a universal Python builds for one architecture, too
    return f"macosx_{version.replace('.', '_')}_{platform.machine()}"


def suffix() -> str:
    """The suffix of the libraries' files."""
    return ".dll" if (target_platform() or sys.platform).startswith("win") else ".so"


def compiler() -> list[str]:
    """The compiler's command. Raises FileNotFoundError."""
    if given := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(given[0]) is None:
            raise FileNotFoundError(f"the compiler CXX={os.environ['CXX']!r} is not installed")
        return given
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise FileNotFoundError(f"no C++ compiler was found (tried {', '.join(COMPILERS)})")


def command(source: Path) -> list[str]:
    """The command that compiles a source file, without the output's name."""
    target = target_platform() or sys.platform
    flags = [OPTIMIZATION.get(source.name, "-O2"), *FLAGS, *([] if target.startswith("win") else ["-fPIC"])]
    if "linux" in target:
        flags.append("-s")  # without symbols; other linkers do not know it
    elif target.startswith("macosx") and sys.platform == "darwin":
        _, major, minor, architecture = target.split("_", 3)
        flags += [f"-mmacosx-version-min={major}.{minor}", "-arch", architecture]
    return [*compiler(), *flags, *shlex.split(os.environ.get("CXXFLAGS", "")), str(source)]


def compile_library(name: str) -> Path:
    """The compiled library, from the cache if it was compiled before. Raises OSError or RuntimeError."""
    source = SOURCES / LIBRARIES[name]
    arguments = command(source)
    digest = hashlib.sha256(repr(arguments).encode())
    for path in sorted(source.parent.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    output = CACHE / digest.hexdigest()[:16] / f"{Path(name).name}{suffix()}"
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        draft = output.with_name(f"{os.getpid()}-{output.name}")
        done = subprocess.run([*arguments, "-o", str(draft)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(arguments)} failed:\n{done.stderr.strip()}")
        os.replace(draft, output)
    return output


def build(folder: Path) -> dict[str, str]:
    """Compile all libraries into a folder that has or gets the package. The error of each, "" for none."""

    def attempt(name: str) -> str:
        target = folder / f"{name}{suffix()}"
        try:
            library = compile_library(name)
        except (OSError, RuntimeError) as error:
            target.unlink(missing_ok=True)  # compiled from other sources
            return str(error)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f"{os.getpid()}-{target.name}")
        shutil.copyfile(library, draft)
        os.replace(draft, target)  # not over a library that is in use
        return ""

    with ThreadPoolExecutor() as pool:
        errors = dict(zip(LIBRARIES, pool.map(attempt, LIBRARIES), strict=True))
    (folder / RECORD).parent.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).write_text(json.dumps(errors, indent=1) + "\n", encoding="utf-8")
    failures = [f"  {name}: {error}" for name, error in errors.items() if error]
    if failures:
        print(MESSAGE.format(line="*" * 100, failures="\n".join(failures), reinstall=REINSTALL), file=sys.stderr)
        if os.environ.get("BERTIE_REQUIRE_COMPILED") == "1":
            raise SystemExit("BERTIE_REQUIRE_COMPILED=1: not all libraries could be compiled")
    return errors


if __name__ == "__main__":
    build(SOURCES)
