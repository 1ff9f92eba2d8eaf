"""Print a script that completes verbs, flags and their values in a shell.

bash: bertie completion bash > ~/.local/share/bash-completion/completions/bertie
zsh:  bertie completion zsh > ~/.zfunc/_bertie        (a folder of $fpath, before compinit)
fish: bertie completion fish > ~/.config/fish/completions/bertie.fish

The script contains all names, so that completion does not start Python. Generate it again after an update.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bertie.cli.parser import subparsers, verb
from bertie.recipes import FINE_TUNING, PRETRAINING, names
from bertie.tasks import registry

if TYPE_CHECKING:
    from bertie.cli.parser import Verbs

EXAMPLE = """  bertie completion bash > ~/.local/share/bash-completion/completions/bertie
  bertie completion fish > ~/.config/fish/completions/bertie.fish
"""
SHELLS = ("bash", "zsh", "fish")
MODELS = Path(__file__).parents[1] / "models"  # the built-in ones; bertie.checkpoints would import torch


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "completion", "print a completion script for bash, zsh or fish", __doc__, EXAMPLE)
    parser.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    from bertie.cli.main import build_parser

    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](build_parser()), end="")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag as a shell completes it."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]
    files: bool  # whether paths are completed as well


@dataclass(frozen=True, slots=True)
class Command:
    """A verb, or a subcommand of one."""

    path: tuple[str, ...]
    help: str
    flags: tuple[Flag, ...]
    values: tuple[str, ...]  # of its arguments; files are completed as well


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), help: str = "") -> Iterator[Command]:
    """All verbs and subcommands of a parser, the parser itself first."""
    children = subparsers(parser)
    flags = [
        Flag(
            tuple(action.option_strings), action.help or "", action.nargs != 0, _values(action), action.choices is None
        )
        for action in parser._actions
        if action.option_strings
    ]
    arguments = [action for action in parser._actions if not action.option_strings]
    values = tuple(children) or tuple(value for action in arguments for value in _values(action))
    if path == ("train",):
        values = tuple(registry.trainable())
    yield Command(path, help, tuple(flags), values)
    helps = {
        choice.dest: choice.help or ""
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for choice in action._choices_actions
    }
    for name, child in children.items():
        yield from commands(child, (*path, name), helps[name])


def _values(action: argparse.Action) -> tuple[str, ...]:
    """The known values of an argument or a flag."""
    if action.choices is not None:
        return tuple(map(str, action.choices))
    if action.dest in ("model", "models"):
        return tuple(sorted(path.parent.name for path in MODELS.glob("*/config.json")))
    if action.dest == "recipe":
        return tuple(names(FINE_TUNING if action.option_strings else PRETRAINING))
    return ("cpu", "cuda") if action.dest == "device" else ()


def _quote(text: str) -> str:
    """Quote a text for any of the shells."""
    return "'" + text.replace("'", "'\\''") + "'"


# --- bash ---


def bash(parser: argparse.ArgumentParser) -> str:
    """The script for bash."""
    listed = list(commands(parser))
    nested = [_quote(" ".join(command.path)) for command in listed if len(command.path) > 1]
    cases = "\n".join(_bash_case(command) for command in listed if command.path)
    return f"""# bash completion of bertie, printed by bertie completion bash
_bertie() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" path="${{COMP_WORDS[1]}}"
    COMPREPLY=()
    if [[ $cur == "=" ]]; then  # --flag=value is three words
        cur=""
    elif [[ $prev == "=" ]]; then
        prev="${{COMP_WORDS[COMP_CWORD-2]}}"
    fi
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W {_quote(" ".join((*listed[0].values, *_names(listed[0]))))} -- "$cur"))
        return
    fi
    if [[ $COMP_CWORD -gt 2 ]]; then
        case "$path ${{COMP_WORDS[2]}}" in
            {"|".join(nested) or "-"}) path+=" ${{COMP_WORDS[2]}}" ;;
        esac
    fi
    local flags="" values=""
    case "$path" in
{cases}
    esac
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$cur"))
    elif [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$cur"))
    fi  # nothing: file names, by -o default
}}
complete -o bashdefault -o default -F _bertie bertie
"""


def _names(command: Command) -> list[str]:
    return [name for flag in command.flags for name in flag.names]


def _bash_case(command: Command) -> str:
    lines = [f"        {_quote(' '.join(command.path))})", f"            flags={_quote(' '.join(_names(command)))}"]
    lines += [f"            values={_quote(' '.join(command.values))}"] if command.values else []
    taking = [flag for flag in command.flags if flag.takes_value]
    if taking:
        lines.append('            case "$prev" in')
        for flag in taking:
            reply = f'COMPREPLY=($(compgen -W {_quote(" ".join(flag.values))} -- "$cur")); ' if flag.values else ""
            lines.append(f"                {'|'.join(flag.names)}) {reply}return ;;")
        lines.append("            esac")
    return "\n".join([*lines, "            ;;"])


# --- zsh ---


def zsh(parser: argparse.ArgumentParser) -> str:
    """The script for zsh."""
    listed = list(commands(parser))
    functions = "\n\n".join(_zsh_function(command, listed) for command in listed)
    return f"""#compdef bertie
# zsh completion of bertie, printed by bertie completion zsh

{functions}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _bertie "$@"
else
    compdef _bertie bertie
fi
"""


def _zsh_function(command: Command, listed: Sequence[Command]) -> str:
    name = "_".join(["_bertie", *(word.replace("-", "_") for word in command.path)])
    specs = [_zsh_flag(flag) for flag in command.flags]
    children = [other for other in listed if other.path and other.path[:-1] == command.path]
    if not children:
        specs.append("'*:value:->values'" if command.values else "'*:file:_files'")
        body = " \\\n        ".join(["_arguments -s", *specs])
        values = f"    [[ $state == values ]] && {{ compadd -- {' '.join(command.values)}; _files; }}\n"
        start = f"{name}() {{\n    local context state state_descr line\n    typeset -A opt_args"
        return f"{start}\n    {body}\n{values if command.values else ''}}}"
    described = " ".join(_quote(f"{child.path[-1]}:{child.help}") for child in children)
    cases = "\n".join(
        f"            {child.path[-1]}) {name}_{child.path[-1].replace('-', '_')} ;;" for child in children
    )
    body = " \\\n        ".join(["_arguments -C", *specs, "'1:command:->command'", "'*::argument:->argument'"])
    return f"""{name}() {{
    local curcontext="$curcontext" context state state_descr line
    typeset -A opt_args
    {body}
    case $state in
        command) local -a names; names=({described}); _describe command names ;;
        argument) case $line[1] in
{cases}
        esac ;;
    esac
}}"""


def _zsh_flag(flag: Flag) -> str:
    """A flag as `_arguments` takes it: '(-m --model)'{-m,--model}'[help]:value:_files'."""
    escaped = flag.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    action = ""
    if flag.takes_value:
        names = " ".join(flag.values)
        action = f":value:{{compadd -- {names}; _files}}" if names and flag.files else f":value:({names})"
        action = action if names else ":value:_files"
    text = _quote(f"[{escaped}]{action}")
    if len(flag.names) == 1:
        return _quote(flag.names[0]) + text
    return f"{_quote('(' + ' '.join(flag.names) + ')')}{{{','.join(flag.names)}}}{text}"


# --- fish ---


FISH_FUNCTION = """function __bertie_at  # whether the command line starts with these words
    set -l words (commandline -opc)
    set -l last (math (count $argv) + 1)
    test (count $words) -ge $last; and test "$words[2..$last]" = "$argv"
end"""


def fish(parser: argparse.ArgumentParser) -> str:
    """The script for fish."""
    lines = ["# fish completion of bertie, printed by bertie completion fish", FISH_FUNCTION]
    listed = list(commands(parser))
    for command in listed:
        when = _fish_condition(command.path, listed)
        children = [other for other in listed if other.path and other.path[:-1] == command.path]
        for child in children:
            lines.append(f"complete -c bertie -f -n {when} -a {child.path[-1]} -d {_fish_quote(child.help)}")
        if command.values and not children:
            lines.append(f"complete -c bertie -n {when} -a {_fish_quote(' '.join(command.values))}")
        lines += [f"complete -c bertie -n {when} {_fish_flag(flag)}" for flag in command.flags]
    return "\n".join([*lines, ""])


def _fish_condition(path: Sequence[str], listed: Sequence[Command]) -> str:
    if not path:
        return "__fish_use_subcommand"
    children = [other.path for other in listed if len(other.path) > 1 and other.path[:-1] == tuple(path)]
    tests = [f"__bertie_at {' '.join(path)}", *(f"not __bertie_at {' '.join(child)}" for child in children)]
    return _fish_quote("; and ".join(tests))


def _fish_flag(flag: Flag) -> str:
    words = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names]
    words += ["-r"] if flag.takes_value else []
    words += [f"-a {_fish_quote(' '.join(flag.values))}"] if flag.values else []
    words += [] if flag.files or not flag.takes_value else ["-f"]
    return " ".join([*words, f"-d {_fish_quote(flag.help)}"])


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
