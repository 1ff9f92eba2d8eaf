"""Check the compiled libraries on CPUs that this machine does not have, in QEMU's user mode: make test-emulated.

    python -m tools.emulated                                          # libraries compiled now
    python -m tools.emulated --wheel dist/bertie-…-aarch64.whl        # those of a wheel

tests/ops/native/portable.cpp compares every instruction level with a plain computation. Each CPU below must choose the
level beside it. Needs, on Debian: apt install g++ g++-aarch64-linux-gnu qemu-user-static
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import build_libraries

HARNESS = build_libraries.ROOT / "tests" / "ops" / "native" / "portable.cpp"
LIBRARIES = ("bertie/ops/native/_encoder", "bertie/ops/native/_training")
COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}
PREFIXES = {"x86_64": "/", "aarch64": "/usr/aarch64-linux-gnu"}  # of the C library
CPUS = {  # by architecture: QEMU's name of a CPU, and its highest instruction level
    "x86_64": {"Nehalem": 0, "Haswell": 1},
    "aarch64": {"cortex-a53": 1, "max": 2},
}


def libraries(architecture: str, wheel: Path | None, folder: Path) -> list[Path]:
    """The two libraries of kernels, compiled for an architecture or taken from a wheel."""
    if wheel is not None:
        with zipfile.ZipFile(wheel) as archive:
            return [Path(archive.extract(f"{name}.so", folder)) for name in LIBRARIES]
    os.environ |= {"CXX": COMPILERS[architecture], "BERTIE_PLATFORM": f"linux_{architecture}"}
    return [build_libraries.compile_library(name) for name in LIBRARIES]


def check(architecture: str, wheel: Path | None = None) -> None:
    """Run the harness on each CPU of an architecture. Raises SystemExit where a check fails."""
    emulator = next((path for name in ("-static", "") if (path := shutil.which(f"qemu-{architecture}{name}"))), None)
    if emulator is None or shutil.which(COMPILERS[architecture]) is None:
        raise SystemExit(f"{COMPILERS[architecture]} or qemu-{architecture} is not installed: {__doc__}")
    with TemporaryDirectory() as name:
        folder = Path(name)
        harness, found = folder / "harness", libraries(architecture, wheel, folder)
        options = ["-O2", "-std=c++17", *(f"-Wl,-rpath,{path.parent}" for path in found), "-lpthread"]
        command = [COMPILERS[architecture], str(HARNESS), *map(str, found), *options, "-o", str(harness)]
        subprocess.run(command, check=True)
        for cpu, level in CPUS[architecture].items():
            command = [emulator, "-L", PREFIXES[architecture], "-cpu", cpu, str(harness)]
            done = subprocess.run(command, capture_output=True, text=True)  # QEMU warns of features that it lacks
            lines = done.stdout.splitlines()
            wrong = [line for line in lines if line.endswith("WRONG")]
            if done.returncode or wrong or not any(line.startswith(f"level {level} ") for line in lines):
                raise SystemExit("\n".join([f"{architecture}, {cpu}: failed", *(wrong or lines[-3:])]))
            if any(line.startswith(f"level {level + 1} ") for line in lines):
                raise SystemExit(f"{architecture}, {cpu}: a higher level than {level} was chosen")
            print(f"{architecture}, {cpu}: {len(lines) - 1} checks passed, levels 0 to {level}", flush=True)


def main() -> None:
    """Check all architectures, or that of a wheel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="a Linux wheel whose libraries to check")
    args = parser.parse_args()
    architectures = [name for name in CPUS if args.wheel is None or args.wheel.stem.endswith(name)]
    if not architectures:
        parser.error(f"--wheel={args.wheel} must be a Linux wheel for {' or '.join(CPUS)}")
    for architecture in architectures:
        check(architecture, args.wheel)


if __name__ == "__main__":
    main()
