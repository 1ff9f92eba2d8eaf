"""The parser: one set of flags for all verbs, and errors that name what was probably meant."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bertie.cli import main
from bertie.cli.main import build_parser
from bertie.cli.parser import UsageError, leaves, subparsers

SHARED = {  # flags that mean the same wherever they are
    "-m": "--model",
    "-o": "--output",
    "-k": "--top-k",
    "-q": "--quiet",
    "-v": "--verbose",
}


def test_every_verb_has_the_same_flags() -> None:
    for parser in leaves(build_parser()):
        options = {option: action for action in parser._actions for option in action.option_strings}
        assert {"-q", "-v", "--help"} <= set(options), parser.prog
        for short, long in SHARED.items():
            assert (short in options) == (long in options), (parser.prog, long)
            assert options.get(short) is options.get(long), (parser.prog, short)
        assert {option for option in options if len(option) == 2} <= {*SHARED, "-h"}, parser.prog
        assert ("--rerank" in options) == ("--reranker" in options), parser.prog
        for option, action in options.items():
            assert action.help, (parser.prog, option)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["emebd", "x"], "bertie has no verb 'emebd'; did you mean embed? (see bertie --help)"),
        (["encode", "x"], "bertie has no verb 'encode'; did you mean embed?"),
        (["xyzzy"], "bertie has no verb 'xyzzy' (see bertie --help)"),
        (["tokenizer", "trian"], "bertie tokenizer has no command 'trian'; did you mean train?"),
        (["embed", "x", "--outptu", "y"], "bertie embed has no flag --outptu; did you mean --output?"),
        (["embed", "x", "--out=y"], "bertie embed has no flag --out; did you mean --output?"),
        (["embed", "x", "--batch-size", "8"], "bertie embed has no flag --batch-size; batches are sized by a token"),
        (["search", "--top_k", "3"], "bertie search has no flag --top_k; did you mean --top-k?"),
        (["train", "classify", "x", "--outptu", "y"], "has no flag --outptu"),  # rather than a missing -o
        (["train", "--learning-rate", "1"], "bertie train has no flag --learning-rate; did you mean --lr?"),
        (["-q", "embed", "x"], "bertie has no flag -q; flags follow the verb, as in bertie VERB -q"),
        (["embed", "x", "--precision", "fp31"], "'fp31' must be one of fp32, bf16, fp16, int8, fp8; did you mean"),
        (["tour", "hello"], "unexpected argument 'hello' (see bertie tour --help)"),
        (["embed"], "required: TEXT|FILE|-; - reads standard input (see bertie embed --help)"),
    ],
)
def test_errors_name_what_was_meant(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_parser().parse_args(argv)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_and_short_flags_are_not_unknown() -> None:
    args = build_parser().parse_args(["rerank", "-k3", "a query", "- a text", "-1", "--", "--outptu"])
    assert args.top_k == 3
    assert args.items == ["a query", "- a text", "-1", "--outptu"]


def test_the_model_is_an_argument_or_a_flag() -> None:
    for argv in (["inspect", "x"], ["inspect", "-m", "x"], ["inspect", "--json", "--model", "x"]):
        assert build_parser().parse_args(argv).model == "x", argv
    assert build_parser().parse_args(["inspect"]).model is None


def test_help_groups_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.index("use a model\n") < text.index("  embed ") < text.index("\ntrain\n") < text.index("  train ")
    for name in subparsers(build_parser()):
        assert text.count(f"\n  {name} ") == 1, name
    assert max(map(len, text.splitlines())) <= 100


def test_no_verb_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "use a model" in output.err


def test_the_parser_needs_no_torch() -> None:
    code = (
        "import sys, bertie.cli.main; sys.modules['bertie.cli.main'].build_parser().format_help(); "
        "sys.exit(bool({'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
