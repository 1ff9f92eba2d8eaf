"""docs/, the README of bertie-small's recipes and its model card: code runs, commands parse, links resolve."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from huggingface_hub import ModelCard

import bertie
from bertie import recipes
from bertie.checkpoints import hub, storage
from bertie.cli import settings
from bertie.cli.main import build_parser
from bertie.training.pretrain.corpus import read_titles
from bertie.training.pretrain.pretrain_recipe import PretrainRecipe
from bertie.training.recipe_file import read_recipe
from tests.test_readme import blocks, has_built_in, run

ROOT = Path(__file__).parents[1]
SMALL = recipes.FOLDER / "bertie-small"
CARD = Path(bertie.__file__).parent / "models" / hub.DEFAULT / "README.md"
PRETRAIN, MODEL = ROOT / "docs" / "pretrain.md", ROOT / "docs" / "bertie-small.md"
SEARCH, EMBEDDINGS, SCALE = (ROOT / "docs" / f"{name}.md" for name in ("search", "embeddings", "scale"))
SERVE, PLAYGROUND, SPEED = (ROOT / "docs" / f"{name}.md" for name in ("serve", "playground", "speed"))
SECURITY = ROOT / "docs" / "security.md"
FILES, LABELLING, TRAIN = (ROOT / "docs" / f"{name}.md" for name in ("files", "labelling", "train"))
GROUPS, INTEGRATIONS = ROOT / "docs" / "groups.md", ROOT / "docs" / "integrations.md"
DECODERS, ELMO = ROOT / "docs" / "decoders.md", ROOT / "docs" / "elmo.md"
EXPORT, HEADS = ROOT / "docs" / "export.md", ROOT / "docs" / "heads.md"
SPARSE, ENTITIES = ROOT / "docs" / "sparse.md", ROOT / "docs" / "zero-shot-entities.md"
COMMAND_LINE, PYTHON = (ROOT / "docs" / f"{name}.md" for name in ("command-line", "python"))
PAGES = [
    ROOT / "docs" / "first-hour.md",
    PYTHON,
    TRAIN,
    ROOT / "docs" / "reports.md",
    LABELLING,
    GROUPS,
    ELMO,
    EXPORT,
    HEADS,
    ENTITIES,
    FILES,
    COMMAND_LINE,
    PRETRAIN,
    SEARCH,
    EMBEDDINGS,
    DECODERS,
    SPARSE,
    SCALE,
    SERVE,
    ROOT / "docs" / "clients.md",
    INTEGRATIONS,
    PLAYGROUND,
    SPEED,
    SECURITY,
    SMALL / "README.md",
    MODEL,
]
PAGES += [CARD] if CARD.exists() else []  # the card comes with the model
OTHER_PROGRAMS = ("hf", "tensorboard", "pip", "ray")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """The commands of the shell blocks, each split into arguments."""
    lines = [line for block in fenced(text, "sh") for line in block.replace("\\\n", " ").splitlines()]
    # A redirection is the shell's.
    return [words for line in lines if (words := shlex.split(line.partition(" > ")[0], comments=True))]


def recipe_file(name: str) -> Path:
    """The file of a recipe: of the folder that bertie recipes -o recipes copies, or by its name."""
    if name.startswith("recipes/"):
        return recipes.FOLDER.parent / name
    return recipes.find(name, (*recipes.FINE_TUNING, *recipes.PRETRAINING))


def check(words: list[str]) -> None:
    """Check that a command of Bertie parses, and that the files it names in the repository exist."""
    while "=" in words[0]:  # an environment variable
        words = words[1:]
    program, *rest = words
    if program == "torchrun":
        assert rest[0] == "--no-python", words  # `-m bertie` would import modules of the current folder
        at = rest.index("bertie")
        program, rest = "bertie", rest[at + 1 :]
    assert program in ("bertie", "python", *OTHER_PROGRAMS), words
    for name in rest:
        if name.startswith("recipes/"):  # as bertie recipes -o recipes copies them
            assert (recipes.FOLDER.parent / name).exists(), words
    if program == "bertie":
        args = build_parser().parse_args(rest)
        if args.verb == "pretrain" and args.recipe is not None:
            PretrainRecipe.read(recipe_file(args.recipe), tokens=args.tokens, steps=args.steps)
        if args.verb == "train" and args.recipe is not None:
            read_recipe(recipe_file(args.recipe))


def test_check_rejects_wrong_commands() -> None:
    text = "```sh\n# a note\nbertie pretrain x.toml \\\n  -o y # why\n\nhf download z\n```\n```python\nbertie no\n```\n"
    assert commands(text) == [["bertie", "pretrain", "x.toml", "-o", "y"], ["hf", "download", "z"]]
    check(["torchrun", "--no-python", "--nproc-per-node", "8", "bertie", "pretrain", "-m", "x", "-o", "y"])
    for wrong in (
        "rm -rf DATA",
        "python recipes/bertie-small/nothing.py DATA",
        "torchrun -m other",
        "bertie pretrain recipes/nothing.toml -o y",
    ):
        with pytest.raises(AssertionError):
            check(wrong.split())
    for wrong in ("bertie pretrain x.toml -o y --fast", "bertie corpus x -o y"):
        with pytest.raises(bertie.BertieError):
            check(wrong.split())


@each_page
def test_commands(page: Path) -> None:
    text = page.read_text("utf-8")
    page_commands = commands(text)
    if page.stem == "first-hour":  # with the output of each command
        page_commands = [shlex.split(line) for line in re.findall(r"^    \$ (bertie .*?)(?: &)?$", text, re.MULTILINE)]
    assert page_commands
    for words in page_commands:
        check(words)


@each_page
def test_links(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize(
    "page",
    [
        *(PRETRAIN, SPEED, DECODERS, ELMO),
        *([MODEL, SEARCH, EMBEDDINGS, LABELLING, GROUPS, PYTHON, CARD] if CARD.exists() else []),
        *([HEADS, SPARSE, EXPORT, INTEGRATIONS] if CARD.exists() else []),
    ],
    ids=lambda page: page.stem,
)
def test_python(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code_blocks = blocks(page.read_text("utf-8"))
    assert code_blocks
    scope: dict[str, object] = {}
    for block in code_blocks:
        run(block, scope, capsys)


def test_recipes_on_the_page() -> None:
    text = PRETRAIN.read_text("utf-8")
    (block,) = fenced(text, "toml")
    assert PretrainRecipe.from_mapping(tomllib.loads(block)).steps == 7630
    listed = set(re.findall(r"\.\./src/bertie/recipes/pretrain/([\w-]+)\.toml", text))
    assert listed == {file.stem for file in (recipes.FOLDER / "pretrain").glob("*.toml")}


def test_objectives_on_the_page() -> None:
    """The table lists every kind of objective and all its keys."""
    from bertie.training.pretrain.pretrain_recipe import MASKING_KEYS, objective_keys

    rows = re.findall(r"^\| (`.*?) \| .* \| (.*) \|$", PRETRAIN.read_text("utf-8"), flags=re.MULTILINE)
    documented: dict[str, set[str]] = {}
    for kinds, keys in rows:
        names = set(re.findall(r"`(\w+)`", keys))
        names |= set(MASKING_KEYS) if "masking" in keys else set()
        for kind in re.findall(r"`(\w+)`", kinds):
            documented[kind] = documented.get(kind, set()) | names
    for kind, keys in ((kind, keys.allowed) for kind, keys in objective_keys().items()):
        assert documented[kind] >= set(keys) - {"static"}, kind
        assert documented[kind] <= {*keys, "pairs"}, kind


def test_every_page_is_checked() -> None:
    assert {page for page in (ROOT / "docs").glob("*.md") if "```sh" in page.read_text("utf-8")} <= set(PAGES)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_commands_with_output(page: Path) -> None:
    """Commands after a dollar sign, whose output follows; those that show an error are no commands that parse."""
    lines = page.read_text("utf-8").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("    $ bertie ") and not lines[number + 1].startswith("    bertie: "):
            command = re.split(" [|>] ", line.removeprefix("    $ "))[0].removesuffix("…")
            check(shlex.split(command, comments=True))


def test_settings_on_the_page() -> None:
    """The configuration file of the page is valid, and has every key."""
    (block,) = fenced(COMMAND_LINE.read_text("utf-8"), "toml")
    assert set(tomllib.loads(block)) == set(settings.KEYS)
    for name in settings.ENVIRONMENT.values():
        assert f"`{name}`" in COMMAND_LINE.read_text("utf-8")


# --- the training of bertie-small ---


def sequence(page: Path) -> list[list[str]]:
    """The commands that train the model, without those that use it."""
    (block,) = (block for block in fenced(page.read_text("utf-8"), "sh") if "prepare.py" in block)
    return commands(f"```sh\n{block}```")


def test_both_pages_have_the_same_commands() -> None:
    assert sequence(MODEL) == sequence(SMALL / "README.md")


def test_the_commands_are_complete() -> None:
    """Every input is the output of an earlier command; both corpora of a text are built with the same settings."""
    outputs: list[str] = []
    corpora: dict[str, dict[str, Any]] = {}
    for program, *rest in sequence(SMALL / "README.md"):
        if program == "python":
            outputs.append(rest[2])
            continue
        if program == "hf":
            outputs.append(rest[rest.index("--local-dir") + 1])
            continue
        args = build_parser().parse_args(rest)
        fields = {"corpus": "sources", "quantize": "model", "weight-tokens": "files", "calibrate": "file"}
        inputs = getattr(args, fields[args.verb]) if args.verb in fields else []
        inputs = [inputs] if isinstance(inputs, str) else [*inputs]
        if args.verb in ("weight-tokens", "calibrate"):
            inputs.append(args.model)
        if args.verb == "corpus":
            inputs.append(args.tokenizer)
            settings = {name: value for name, value in vars(args).items() if name not in ("tokenizer", "output")}
            corpora[args.output] = settings
        if args.verb == "pretrain":
            inputs += [
                f"{args.data}/{name}"
                for name in named_paths(tomllib.loads(recipe_file(args.recipe).read_text("utf-8")))
            ]
        for name in inputs:
            assert name.startswith("DATA/") or any(f"{name}/".startswith(f"{output}/") for output in outputs), (
                name,
                outputs,
            )
        outputs.append(args.output)
    names = [name for name in corpora if name.startswith("WORK/corpus-teacher/")]
    assert len(names) == 3
    for name in (name.replace("corpus-teacher/", "corpus/") for name in names):
        assert corpora[name] == corpora[name.replace("corpus/", "corpus-teacher/")], name


def named_paths(recipe: dict[str, Any]) -> list[str]:
    """The files and folders that a recipe names."""
    paths: list[str] = []
    for table in (recipe, recipe.get("data", {}), *recipe.get("objective", [])):
        for key in ("model", "tokenizer", "corpus", "teacher", "teacher_corpus", "train", "dev"):
            value = table.get(key, [])
            if not isinstance(value, dict):
                paths += [value] if isinstance(value, str) else value
    return paths


def test_the_numbers_are_those_of_the_recipes() -> None:
    for file in sorted(SMALL.glob("*.toml")):
        recipe = PretrainRecipe.read(file)
        pages = [MODEL, CARD] if CARD.exists() else [MODEL]
        for page in pages:
            assert f"| {recipe.steps:,} |" in page.read_text("utf-8"), (file, page)
    titles = read_titles(str(SMALL / "exclude.tsv"))
    assert f"exclude.tsv), {len(titles)} of them" in (SMALL / "README.md").read_text("utf-8")


def test_pictures() -> None:
    names = re.findall(r"!\[.+\]\((bertie-small-[\w-]+\.svg)\)", MODEL.read_text("utf-8"))
    assert len(names) == 1
    for name in names:
        picture = ElementTree.parse(MODEL.parent / name).getroot()
        assert picture.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(picture.findall("{*}polyline")) == 2


@has_built_in
def test_the_card() -> None:
    """huggingface_hub parses the card, and the model folder still matches its checksums."""
    card = ModelCard.load(CARD)
    assert card.data.language == "en"
    assert card.data.license == "apache-2.0"
    assert card.data.eval_results[0].metric_value > 0
    storage.verify(CARD.parent)
    assert f"{sum(p.numel() for p in bertie.Checkpoint.load(CARD.parent).model.parameters()):,}" in card.text
