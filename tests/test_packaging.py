"""Builds, wheels and releases: libraries are compiled or left out, tags are right, and files agree on the version."""

from __future__ import annotations

import ctypes
import re
import runpy
import shlex
import shutil
import sys
import tomllib
import zipfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

import build_libraries
import pytest
import yaml
from tools import check_install, release, wheels

from bertie import _version, compiled
from bertie.cli import doctor_checks
from bertie.ops.native import encoder, training
from bertie.text import wordpiece

ROOT = Path(__file__).parents[1]
SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return %s; }\n'
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build_libraries.COMPILERS)), reason="there is no C++ compiler"
)


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one function instead of the package's; the folder that it is built into."""
    (tmp_path / "src" / "cpp").mkdir(parents=True)
    (tmp_path / "src" / "cpp" / "answer.cpp").write_text(SOURCE % 41)
    monkeypatch.setattr(build_libraries, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(build_libraries, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(build_libraries, "LIBRARIES", {"bertie/_answer": "cpp/answer.cpp"})
    for name in ("CXX", "CXXFLAGS", "BERTIE_PLATFORM", "BERTIE_REQUIRE_COMPILED"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "out"


# --- compiling ---


@needs_compiler
def test_a_library_is_compiled_once_and_again_when_its_source_changes(small_library: Path) -> None:
    file = small_library / f"bertie/_answer{build_libraries.suffix()}"
    assert build_libraries.build(small_library) == {"bertie/_answer": ""}
    assert ctypes.CDLL(str(file)).answer() == 41
    (cached,) = build_libraries.CACHE.rglob("_answer*")
    cached.write_bytes(b"from the cache")  # what is read if nothing has changed
    build_libraries.build(small_library)
    assert file.read_bytes() == b"from the cache"
    (build_libraries.SOURCES / "cpp" / "answer.cpp").write_text(SOURCE % 42)
    build_libraries.build(small_library)
    assert len(list(build_libraries.CACHE.rglob("_answer*"))) == 2
    assert file.read_bytes() != b"from the cache"


@needs_compiler
def test_a_compiler_that_fails(small_library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_libraries.build(small_library)
    (build_libraries.SOURCES / "cpp" / "answer.cpp").write_text("#error these vector types are missing\n")
    errors = build_libraries.build(small_library)
    assert "these vector types are missing" in errors["bertie/_answer"]
    assert "these vector types are missing" in capsys.readouterr().err
    assert not list(small_library.rglob("_answer*"))  # the old one is not kept


def test_without_a_compiler(
    small_library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The build succeeds, says what it left out, and records it for `bertie doctor`."""
    monkeypatch.setenv("PATH", str(small_library))
    errors = build_libraries.build(small_library)
    assert "no C++ compiler was found" in errors["bertie/_answer"]
    message = capsys.readouterr().err
    assert "WITHOUT these compiled libraries" in message
    assert "--no-cache-dir" in message
    monkeypatch.setattr(compiled, "PACKAGE", small_library / "bertie")
    monkeypatch.setattr(compiled, "RECORD", small_library / build_libraries.RECORD)
    assert compiled.build_error(str(small_library / "bertie" / "module.py"), "_answer") == errors["bertie/_answer"]
    assert compiled.build_error(str(small_library / "elsewhere.py"), "_answer") == ""
    monkeypatch.setenv("BERTIE_REQUIRE_COMPILED", "1")
    with pytest.raises(SystemExit, match="not all libraries"):
        build_libraries.build(small_library)
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert "CXX='no-such-compiler -O1' is not installed" in _error_of(build_libraries.compiler)


def _error_of(function: Any) -> str:
    with pytest.raises(FileNotFoundError) as caught:
        function()
    return str(caught.value)


def test_the_record_reaches_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "build_error", lambda module, name: "g++ failed:\nvector types are missing")
    monkeypatch.setattr(wordpiece, "__file__", str(tmp_path / "wordpiece.py"))
    check = next(check for check in doctor_checks.compiled_parts() if check.name == "tokenizer")
    assert check.status == "warning"
    assert check.text == "not built, slower code runs instead: vector types are missing"
    assert f"then {doctor_checks.reinstall_command()} " in check.fix


class _Installed:
    """A distribution with a direct_url.json (PEP 610), or without one if it came from a registry."""

    def __init__(self, origin: str | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        return self.origin if name == "direct_url.json" else None


def test_the_doctor_reinstalls_from_where_bertie_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "pip install --force-reinstall --no-deps --no-cache-dir"
    spaces = shlex.quote(url2pathname("/home/a b/bertie"))
    for origin, expected in [
        (None, build_libraries.REINSTALL),
        ('{"archive_info": {}, "url": "file:///tmp/bertie.whl"}', build_libraries.REINSTALL),
        ('{"dir_info": {}, "url": "file:///home/a%20b/bertie"}', f"{command} {spaces}"),
        (
            '{"dir_info": {"editable": true}, "url": "file:///bertie"}',
            f"{command} --editable {url2pathname('/bertie')}",
        ),
    ]:
        monkeypatch.setattr(metadata, "distribution", lambda name, origin=origin: _Installed(origin))
        assert doctor_checks.reinstall_command() == expected

    def absent(name: str) -> _Installed:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert doctor_checks.reinstall_command().endswith("build_libraries.py")


def test_a_library_for_another_platform_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordpiece, "__file__", str(tmp_path / "wordpiece.py"))
    compiled.library_path(wordpiece.__file__, "_wordpiece").write_bytes(b"MZ of another platform")
    assert wordpiece.library.__wrapped__() is None


def test_both_sides_have_the_same_interface_version() -> None:
    modules = {"encoder": encoder, "training": training, "wordpiece": wordpiece}
    for name, module in modules.items():
        (source,) = (ROOT / "src").rglob(f"{name}.cpp")
        assert f"void bertie_{name}_abi_{module.ABI_VERSION}()" in source.read_text(encoding="utf-8")
    assert {f"{Path(name).name}.cpp" for name in build_libraries.LIBRARIES} == {f"_{name}.cpp" for name in modules}
    assert tuple(build_libraries.LIBRARIES) == wheels.LIBRARIES


# --- wheels ---


@pytest.fixture
def setup_arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py hands to setuptools."""
    setuptools = pytest.importorskip("setuptools", minversion="77")
    arguments: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: arguments.update(given))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))  # setup.py inserts its folder
    runpy.run_path(str(ROOT / "setup.py"))
    return arguments


@pytest.mark.parametrize(
    ("given", "suffix"),
    [("", ""), ("manylinux_2_17_aarch64", ".so"), ("macosx_11_0_arm64", ".so"), ("win_amd64", ".dll")],
)
def test_one_wheel_for_all_versions_of_python(
    given: str, suffix: str, setup_arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from setuptools import Distribution

    monkeypatch.setenv("BERTIE_PLATFORM", given)
    dist = Distribution({"name": "bertie", "version": "1", **setup_arguments})
    dist.get_command_obj("build").build_lib = str(tmp_path)
    wheel = dist.get_command_obj("bdist_wheel")
    wheel.ensure_finalized()
    assert wheel.get_tag() == ("py3", "none", "any")  # nothing was compiled
    file = tmp_path / dist.get_command_obj("build_ext").get_ext_filename("bertie.text._wordpiece")
    assert file.name == f"_wordpiece{suffix or build_libraries.suffix()}"
    file.parent.mkdir(parents=True)
    file.touch()
    interpreter, abi, platform = wheel.get_tag()
    assert (interpreter, abi) == ("py3", "none")
    assert platform == given if given else platform != "any"


def test_the_registry_gets_absolute_links(setup_arguments: dict[str, Any]) -> None:
    text, original = setup_arguments["long_description"], (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", original)
    assert any(link.startswith("docs/") for link in links)
    assert f"]({_repository()}/blob/v{_version.__version__}/docs/" in text
    code = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    assert code.findall(text) == code.findall(original)
    assert all(link.startswith(("https://", "#")) for link in re.findall(r"\]\(([^)]+)\)", code.sub("", text)))


def _wheel(path: Path, libraries: dict[str, bytes], platform: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in libraries.items():
            archive.writestr(name, content)
        archive.writestr("bertie-1.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: py3-none-{platform}\n")
    return path


def test_wheels_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "bertie-1-py3-none-manylinux_2_17_x86_64.whl"
    linux = {f"{name}.so": b"\x7fELF" for name in wheels.LIBRARIES}
    assert wheels.problems(_wheel(path, linux, "manylinux_2_17_x86_64")) == []
    assert "another tag" in wheels.problems(_wheel(path, linux, "any"))[0]
    windows = {f"{name}.dll": b"MZ" for name in wheels.LIBRARIES}
    assert len(wheels.problems(_wheel(path, windows, "manylinux_2_17_x86_64"))) == 6  # missing, and not expected
    wrong = linux | {"bertie/text/_wordpiece.so": b"MZ"}
    assert wheels.problems(_wheel(path, wrong, "manylinux_2_17_x86_64")) == [
        "bertie/text/_wordpiece.so is not a library for manylinux_2_17_x86_64"
    ]


def test_the_check_of_an_installation_finds_the_compiled_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that tools/check_install.py looks for are those that `bertie doctor` prints."""
    extensions = [asdict(check) for check in doctor_checks.compiled_parts()]
    missing = [{**check, "status": "warning", "text": "not built"} for check in extensions]
    answers = {"doctor": {"checks": [{**check, "status": "ok"} for check in extensions]}, "inspect": "native.encoder"}
    monkeypatch.setattr(check_install, "ask", answers.__getitem__)
    assert check_install.problems() == []
    answers["doctor"] = {"checks": missing}
    assert check_install.problems() == ["encoder: not built", "training: not built", "tokenizer: not built"]
    answers["doctor"] = {"checks": []}
    assert check_install.problems() == ["bertie doctor lists 0 compiled extensions, not 3"]


# --- releases ---


def _urls() -> dict[str, str]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"])


def _repository() -> str:
    return _urls()["Repository"]


def test_one_version_and_one_address() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == _version.__version__ == release.version()
    assert citation["repository-code"] == _repository()
    assert all(url.startswith(_repository()) for url in _urls().values())
    assert release.notes(_version.__version__, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) is not None


def test_notes_of_a_release() -> None:
    changelog = "# Changelog\n\n## [1.2.0] - 2026-11-17\n\n- Fixed.\n\n## [1.1.0] - unreleased\n\n- Added.\n"
    assert release.notes("1.2.0", changelog) == "- Fixed."
    assert release.notes("1.1.0", changelog) == ""
    assert release.notes("1.0.0", changelog) is None


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", text)) <= targets
