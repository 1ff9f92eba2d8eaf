"""Completion: what a shell offers, by sourcing the script in bash; the others where they are installed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bertie.cli.completion import SHELLS, commands
from bertie.cli.main import build_parser

COMPLETE = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_bertie
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def script(shell: str) -> str:
    code = (
        "import sys; from bertie.cli import main; main(['completion', sys.argv[1]]); "
        "sys.exit(bool({'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, shell], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stderr, "or slow imports")
    return done.stdout


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "bertie.sh"
    path.write_text(script("bash"))
    return path


def offered(path: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    line = COMPLETE.format(script=path, words=" ".join(f"'{word}'" for word in ("bertie", *words)))
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash(bash_script: Path) -> None:
    assert offered(bash_script, "em") == ["embed"]
    assert {"embed", "train", "doctor", "--version"} <= set(offered(bash_script, ""))
    assert offered(bash_script, "embed", "--prec") == ["--precision"]
    assert offered(bash_script, "embed", "x", "--precision", "b") == ["bf16"]
    assert offered(bash_script, "embed", "--precision", "=", "i") == ["int8"]
    assert offered(bash_script, "embed", "--overflow", "=") == ["window", "error", "truncate"]
    assert offered(bash_script, "train", "cl") == ["classify"]
    assert offered(bash_script, "embed", "revi") == []  # file names, by bash itself
    assert offered(bash_script, "embed", "-o", "revi") == []
    assert offered(bash_script, "tokenizer", "") == ["train", "extend"]
    assert offered(bash_script, "tokenizer", "train", "--kind", "w") == ["wordpiece"]
    assert "--vocab-size" in offered(bash_script, "tokenizer", "train", "--v")
    assert "--vocab-size" not in offered(bash_script, "train", "--v")
    assert offered(bash_script, "completion", "") == list(SHELLS)
    assert offered(bash_script, "nonsense", "--m") == []


def test_bash_registers_the_function(bash_script: Path) -> None:
    line = f"source {bash_script}; complete -p bertie"
    assert "-F _bertie bertie" in subprocess.run(["bash", "-c", line], capture_output=True, text=True).stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_every_flag_is_in_the_script(shell: str) -> None:
    text = script(shell)
    for command in commands(build_parser()):
        for flag in command.flags:
            for name in flag.names:
                assert (f"-l {name[2:]} " if shell == "fish" and name.startswith("--") else name[1:]) in text, name


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_syntax(shell: str, tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(script(shell))
    # Quotes, braces and parentheses of zsh are those of bash.
    program = shell if shutil.which(shell) else "bash" if shell == "zsh" else None
    if program is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([program, "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish(tmp_path: Path) -> None:
    path = tmp_path / "bertie.fish"
    path.write_text(script("fish"))

    def offers(line: str) -> list[str]:
        command = ["fish", "--no-config", "-c", f"source {path}; complete -C '{line}'"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stderr == ""
        return [offer.split("\t")[0] for offer in done.stdout.splitlines()]

    assert offers("bertie emb") == ["embed"]
    assert offers("bertie embed --prec") == ["--precision"]
    assert offers("bertie embed --precision b") == ["bf16"]
    assert offers("bertie tokenizer ") == ["extend", "train"]
    assert offers("bertie tokenizer train --kind w") == ["wordpiece"]
    assert "--vocab-size" not in offers("bertie train --v")
    assert "classify" in offers("bertie train cl")
    assert {*SHELLS} <= {*offers("bertie completion ")}


ZSH = {  # what is typed, and the line after pressing tab
    "bertie emb": "bertie embed ",
    "bertie embed --prec": "bertie embed --precision ",
    "bertie embed --precision b": "bertie embed --precision bf16 ",
    "bertie tokenizer ex": "bertie tokenizer extend ",
    "bertie tokenizer train --kind w": "bertie tokenizer train --kind wordpiece ",
    "bertie train cl": "bertie train classify ",
    "bertie completion z": "bertie completion zsh ",
}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh(tmp_path: Path) -> None:
    """Press tab in a pseudo-terminal, and then a key that prints and clears the line."""
    (tmp_path / "_bertie").write_text(script("zsh"))
    (tmp_path / ".zshrc").write_text(ZSHRC)
    process, terminal = pty.fork()
    if process == 0:  # the shell
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-i", "+o", "globalrcs"], {**os.environ, "ZDOTDIR": str(tmp_path), "TERM": "dumb"})
    try:
        read_until(terminal, b"READY")
        for typed, completed in ZSH.items():
            os.write(terminal, typed.encode() + b"\t\x07")
            assert f"<<{completed}>>" in read_until(terminal, b">>").decode()
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


ZSHRC = """unsetopt global_rcs
fpath=($ZDOTDIR $fpath)
autoload -Uz compinit && compinit -u -d $ZDOTDIR/dump
bindkey -e
show() { print -r -- "<<$BUFFER>>"; BUFFER= }
zle -N show
bindkey '^G' show
PS1=READY
"""


def read_until(terminal: int, end: bytes, seconds: float = 60) -> bytes:
    """What a terminal shows up to some output."""
    output = b""
    while end not in output:
        assert select.select([terminal], [], [], seconds)[0], output
        output += os.read(terminal, 4096)
    return output
