"""The compiled libraries, the platform in the wheel's name, absolute links; everything else is in pyproject.toml."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))  # the build backend does not

import build_libraries


class BuildLibraries(build_ext):
    """Compile shared libraries that do not depend on the version of Python, instead of extension modules."""

    def get_ext_filename(self, fullname: str) -> str:
        """`bertie.text._wordpiece` -> `bertie/text/_wordpiece.so`."""
        return str(Path(*fullname.split("."))) + build_libraries.suffix()

    def run(self) -> None:
        """Compile into the build folder, or into src/ for an editable installation."""
        build_libraries.build(build_libraries.SOURCES if self.inplace or self.editable_mode else Path(self.build_lib))


class PlatformWheel(bdist_wheel):
    """One wheel per platform for all versions of Python; without a compiled library, one for all platforms."""

    def get_tag(self) -> tuple[str, str, str]:
        """Interpreter, ABI, platform."""
        platform = build_libraries.target_platform() or super().get_tag()[2]
        folder = Path(self.get_finalized_command("build").build_lib)
        built = any((folder / f"{name}{build_libraries.suffix()}").exists() for name in build_libraries.LIBRARIES)
        return "py3", "none", platform if built else "any"


def extension(name: str, source: str) -> Extension:
    """A library, as setuptools lists it: for source distributions, and so that the wheel counts as compiled."""
    headers = sorted(str(path) for path in Path("src", source).parent.glob("*.h"))
    return Extension(name.replace("/", "."), [f"src/{source}"], depends=headers, optional=True)


def readme() -> str:
    """README.md with absolute links, to the files of this version: a package registry has no others."""
    root = build_libraries.ROOT
    (version,) = re.findall(r'"(.+)"', (root / "src/bertie/_version.py").read_text(encoding="utf-8").split("=")[1])
    url = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    parts = re.split(
        r"(^```.*?^```$)", (root / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for i in range(0, len(parts), 2):  # not in code
        parts[i] = re.sub(r"(!\[[^\]]*\])\((?![a-z]+:|#)", rf"\1({url}/raw/v{version}/", parts[i])
        parts[i] = re.sub(r"\]\((?![a-z]+:|#)", f"]({url}/blob/v{version}/", parts[i])
    return "".join(parts)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[extension(*item) for item in build_libraries.LIBRARIES.items()],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
