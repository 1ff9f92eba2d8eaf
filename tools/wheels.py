"""Build wheels for several platforms on one machine, with the cross compiler of PyPI's `ziglang`: make wheels.

    python -m tools.wheels                                   # for Linux on x86-64
    python -m tools.wheels manylinux_2_17_aarch64 win_amd64  # for others, cross-compiled
    python -m tools.wheels all

Needs the packages of tools/requirements.txt. A wheel is an error if one of its libraries could not be compiled, if a
library is not for its platform, or if auditwheel finds it to need a newer glibc than its name says.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib import util
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = {  # platform in the wheel's name: target of the compiler
    "manylinux_2_17_x86_64": "x86_64-linux-gnu.2.17",
    "manylinux_2_17_aarch64": "aarch64-linux-gnu.2.17",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
    "win_amd64": "x86_64-windows-gnu",
}
LIBRARIES = ("bertie/ops/native/_encoder", "bertie/ops/native/_training", "bertie/text/_wordpiece")
MAGIC = {"manylinux": b"\x7fELF", "macosx": b"\xcf\xfa\xed\xfe", "win": b"MZ"}  # first bytes of a library's file


def compiler() -> Path:
    """The program in the package `ziglang`: pip's build environment hides the package itself."""
    spec = util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise SystemExit("ziglang is not installed: pip install -r tools/requirements.txt")
    return Path(spec.origin).with_name("zig.exe" if sys.platform == "win32" else "zig")


def build(platform: str, output: Path) -> Path:
    """Build the wheel of a platform."""
    zig = shlex.join([str(compiler()), "c++", "-target", TARGETS[platform]])
    environment = {**os.environ, "CXX": zig, "BERTIE_PLATFORM": platform, "BERTIE_REQUIRE_COMPILED": "1"}
    for folder in (*(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist*")):
        if folder.name != "libraries":  # that one is the cache of build_libraries.py
            shutil.rmtree(folder)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(output), str(ROOT)]
    subprocess.run(command, env=environment, check=True)
    (wheel,) = output.glob(f"bertie-*-py3-none-{platform}.whl")
    return wheel


def problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel: libraries that are missing, of another platform, or not recorded."""
    platform = wheel.stem.rpartition("-")[2]
    suffix = ".dll" if platform.startswith("win") else ".so"
    magic = next(value for name, value in MAGIC.items() if platform.startswith(name))
    found = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for library in LIBRARIES:
            name = f"{library}{suffix}"
            if name not in names:
                found.append(f"{name} is missing")
            elif not archive.read(name).startswith(magic):
                found.append(f"{name} is not a library for {platform}")
        expected = {f"{library}{suffix}" for library in LIBRARIES}
        found += [f"{name} does not belong there" for name in names if _is_library(name) and name not in expected]
        (metadata,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        if f"Tag: py3-none-{platform}\n" not in archive.read(metadata).decode().replace("\r\n", "\n"):
            found.append(f"{metadata} has another tag than the file's name")
    return found


def _is_library(name: str) -> bool:
    return name.endswith((".so", ".dll", ".dylib", ".pyd"))


def audit(wheel: Path) -> list[str]:
    """What `auditwheel` says against the platform in a Linux wheel's name."""
    platform = wheel.stem.rpartition("-")[2]
    if not platform.startswith("manylinux"):
        return []
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout.strip() or done.stderr.strip())
    consistent = f'"{platform}"' in done.stdout.replace("\n", " ")
    return [] if consistent else [f"auditwheel does not accept {platform}"]


def main() -> None:
    """Build, check and list the wheels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platforms", nargs="*", help=f"all, or some of {', '.join(TARGETS)}; the first by default")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist", help="folder of the wheels (dist)")
    args = parser.parse_args()
    platforms = list(TARGETS) if args.platforms == ["all"] else args.platforms or list(TARGETS)[:1]
    if unknown := set(platforms) - set(TARGETS):
        parser.error(f"platform {', '.join(sorted(unknown))} must be one of {', '.join(TARGETS)}")
    for platform in platforms:
        wheel = build(platform, args.output)
        if found := [*problems(wheel), *audit(wheel)]:
            raise SystemExit(f"{wheel.name}: " + "; ".join(found))
        print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)", flush=True)


if __name__ == "__main__":
    main()
