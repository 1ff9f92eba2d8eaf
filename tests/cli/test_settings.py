"""Defaults from the environment and the configuration file: a flag first, then a variable, then the file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bertie.cli import main
from bertie.cli.common import apply_settings
from bertie.cli.main import build_parser
from bertie.cli.settings import ENVIRONMENT, config_path, read_settings
from bertie.data import terminal
from bertie.errors import ConfigError


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*ENVIRONMENT.values(), "BERTIE_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "bertie" / "config.toml"
    path.parent.mkdir()
    return path


def parse(*argv: str) -> argparse.Namespace:
    args = build_parser().parse_args(argv)
    apply_settings(args)
    return args


def test_the_place_of_the_file() -> None:
    assert config_path({"XDG_CONFIG_HOME": "/etc/xdg"}) == Path("/etc/xdg/bertie/config.toml")
    assert config_path({}) == Path("~/.config/bertie/config.toml").expanduser()
    assert config_path({"BERTIE_CONFIG": "~/b.toml", "XDG_CONFIG_HOME": "/etc"}) == Path("~/b.toml").expanduser()


def test_precedence(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parse("embed", "x").model, parse("embed", "x").device, parse("embed", "x").precision) == (
        None,
        None,
        "fp32",
    )
    config.write_text('model = "of/file"\ndevice = "cuda:1"\nprecision = "bf16"\n')
    args = parse("embed", "x")
    assert (args.model, args.device, args.precision) == ("of/file", "cuda:1", "bf16")
    monkeypatch.setenv("BERTIE_MODEL", "of/environment")
    monkeypatch.setenv("BERTIE_DEVICE", "cpu")
    args = parse("embed", "x")
    assert (args.model, args.device, args.precision) == ("of/environment", "cpu", "bf16")
    assert read_settings().sources == {"model": "BERTIE_MODEL", "device": "BERTIE_DEVICE", "precision": str(config)}
    args = parse("embed", "x", "-m", "of/flag", "--device", "cuda", "--precision", "fp16")
    assert (args.model, args.device, args.precision) == ("of/flag", "cuda", "fp16")


def test_the_model_is_set_only_where_it_is_the_one_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTIE_MODEL", "of/environment")
    assert parse("inspect").model == "of/environment"
    assert parse("search", "my-index", "x").model is None  # that of the index
    assert parse("pretrain", "recipe.toml", "-o", "x").model is None  # -m continues from a model
    assert "model_from_settings" not in vars(parse("embed", "x"))


def test_quiet(config: Path) -> None:
    config.write_text("quiet = true\n")
    assert parse("embed", "x").quiet
    assert not parse("embed", "x", "-v").quiet


def test_folders_are_relative_to_the_file(config: Path) -> None:
    config.write_text('model = "./mine"\n')
    assert read_settings().model == str(config.parent / "mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('modle = "x"', "has no field 'modle'; did you mean 'model'?"),
        ("model = 3", "model=3 must be a string"),
        ('precision = "fp31"', "precision='fp31' must be one of fp32"),
        ('color = "red"', "color='red' must be one of auto, always, never"),
        ('quiet = "yes"', "quiet='yes' must be true or false"),
        ("model", "is not TOML"),
    ],
)
def test_mistakes(config: Path, text: str, message: str) -> None:
    config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_settings()
    assert message in str(caught.value)
    assert str(config) in str(caught.value)


def test_mistakes_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTIE_PRECISION", "half")
    with pytest.raises(ConfigError, match="BERTIE_PRECISION='half' must be one of"):
        read_settings()
    monkeypatch.delenv("BERTIE_PRECISION")
    monkeypatch.setenv("BERTIE_CONFIG", "/nowhere/config.toml")
    with pytest.raises(ConfigError, match=r"BERTIE_CONFIG=/nowhere/config\.toml: no such file"):
        read_settings()


def test_a_command_uses_them(
    models: dict[str, str], config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text('device = "cpu"\ncolor = "never"\n')
    monkeypatch.setenv("BERTIE_MODEL", models["embed"])
    assert main(["inspect", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == models["embed"]
    assert terminal._mode == "never"
    terminal.set_color_mode("auto")
    assert main(["embed", "the cat", "-v", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["row"] == 1
    assert f"Embedder {models['embed']} " in output.err
    config.write_text('modle = "x"')
    assert main(["embed", "the cat"]) == 1
    assert "did you mean 'model'" in capsys.readouterr().err


def test_quiet_prints_results_and_errors_only(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "x.csv").write_text("text;id\nthe cat;1\n")  # with a warning about the separator
    for flags, warned in (([], True), (["-q"], False)):
        assert main(["embed", "x.csv", "--json", "-m", models["embed"], *flags]) == 0
        output = capsys.readouterr()
        assert ("semicolons" in output.err) == warned
        assert json.loads(output.out)["id"] == "1"
    assert main(["embed", "none.csv", "-q"]) == 1
    assert "no such file" in capsys.readouterr().err


def test_verbose_prints_a_stack_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "none.csv", "-v"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.splitlines()[-1].startswith("bertie: no such file")
