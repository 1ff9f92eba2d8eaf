"""The doctor: what is wrong is named with a fix, and the exit status says whether something is broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bertie.checkpoints import hub
from bertie.cli import doctor_checks, main
from bertie.cli.doctor import worst
from bertie.cli.doctor_checks import Check
from bertie.ops.native import encoder


def report(capsys: pytest.CaptureFixture[str], status: int, *flags: str) -> dict[str, Check]:
    assert main(["doctor", "--json", *flags]) == status
    result = json.loads(capsys.readouterr().out)
    checks = [Check(**check) for check in result["checks"]]
    assert result["status"] == worst(checks)
    return {check.name: check for check in checks}


def test_this_installation(capsys: pytest.CaptureFixture[str]) -> None:
    checks = report(capsys, 0)
    assert {"bertie", "python", "torch", "CPU", "threads", "encoder", "tokenizer", "current folder"} <= set(checks)
    assert checks["torch"].status == "ok"
    assert "hub" not in checks  # the network is asked on request only
    assert not [name for name, check in checks.items() if check.status == "error"]
    assert all(check.fix for check in checks.values() if check.status == "warning")


def test_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def checks(network: bool) -> Iterator[Check]:
        yield Check("machine", "CPU", "ok", "fast")
        yield Check("machine", "load", "warning", "high", "run top")
        yield Check("disk", "cache", "error", "full", "delete files")

    monkeypatch.setattr("bertie.cli.doctor.all_checks", checks)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "machine",
        "  ✓ CPU                fast",
        "  ! load               high",
        "    fix: run top",
        "disk",
        "  ✗ cache              full",
        "    fix: delete files",
        "",
        "1 error and 1 warning",
    ]


def test_settings_are_shown_with_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('device = "cpu"\n')
    monkeypatch.setenv("BERTIE_CONFIG", str(config))
    monkeypatch.setenv("BERTIE_MODEL", "./none")
    checks = {check.text: check for check in doctor_checks.user_settings()}
    assert checks[f"cpu (from {config})"].status == "ok"
    assert checks["./none (from BERTIE_MODEL)"].status == "ok"
    assert checks["./none is not a folder"].fix == "change BERTIE_MODEL"
    config.write_text("devise = 1\n")  # it stops other commands, not this one
    monkeypatch.setattr(doctor_checks, "built_in", lambda: iter(()))
    assert "did you mean 'device'" in report(capsys, 1)["configuration"].text


def test_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_checks, "REQUIRED", {"numpy": (99, 0), "no-such-package": (1, 0)})
    checks = {check.name: check for check in doctor_checks.versions()}
    assert checks["numpy"].fix == "pip install --upgrade 'numpy>=99.0'"
    assert (checks["no-such-package"].status, checks["no-such-package"].text) == ("error", "not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    monkeypatch.delenv("BERTIE_DEFAULT_THREADS", raising=False)
    assert "unset OMP_NUM_THREADS" in next(doctor_checks.thread_counts()).fix
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5}))
    assert {check.status for check in doctor_checks.disk()} == {"warning"}
    monkeypatch.setattr(encoder, "__file__", str(tmp_path / "encoder.py"))
    missing = next(doctor_checks.compiled_parts())
    assert "no C++ compiler" in missing.text
    assert "--no-cache-dir" in missing.fix  # pip keeps a wheel that it built without a compiler


def test_a_check_that_raises_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Check]:
        raise ImportError("libgomp.so.1: no such file")
        yield

    broken.__name__ = "compiled_parts"
    monkeypatch.setattr(doctor_checks, "compiled_parts", broken)
    monkeypatch.setattr(doctor_checks, "built_in", lambda: iter(()))
    checks = {check.name: check for check in doctor_checks.all_checks()}
    assert checks["compiled parts"].text == "ImportError: libgomp.so.1: no such file"
    assert "config.toml" in checks


def test_a_damaged_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_folder: Path) -> None:
    monkeypatch.setattr(hub, "BUILT_IN", tmp_path)
    assert next(doctor_checks.built_in()).status == "warning"  # there is none
    copy = tmp_path / hub.DEFAULT
    copy.mkdir()
    for file in (small_folder / hub.DEFAULT).iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    (copy / "model.safetensors").write_bytes(b"damaged")
    check = next(doctor_checks.built_in())
    assert check.status == "error"
    assert "the files are damaged" in check.text


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (check,) = doctor_checks.hub()
    assert check.status == "warning"
    assert "http://127.0.0.1:9 cannot be reached" in check.text
