"""List the recipes that come with Bertie, or copy them with their example data to a folder.

`bertie train --recipe NAME` and `bertie pretrain NAME` use a recipe by its name. `example` and `tiny` need only the
data that -o copies; the others specify the files that they need.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tomllib
from typing import TYPE_CHECKING, Any

from bertie.cli.parser import UsageError, verb
from bertie.recipes import FINE_TUNING, FOLDER, PRETRAINING, find, names

if TYPE_CHECKING:
    from bertie.cli.parser import Verbs

EXAMPLE = """  bertie recipes
  bertie recipes sst2                                                    # print one
  bertie recipes -o recipes                                              # copy all, with the example data
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "recipes", "list, print or copy the recipes that come with Bertie", __doc__, EXAMPLE)
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this recipe")
    parser.add_argument("-o", "--output", metavar="DIR", help="copy all recipes and the example data to this folder")
    parser.add_argument("--overwrite", action="store_true", help="replace files in that folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object per recipe")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.name is not None and args.output is not None:
        raise UsageError("-o copies all recipes; leave out the name, or -o")
    if args.name is not None:
        sys.stdout.write(find(args.name, (*FINE_TUNING, *PRETRAINING)).read_text("utf-8"))
    elif args.output is not None:
        _copy(args)
    else:
        _list(as_json=args.json)


def _copy(args: argparse.Namespace) -> None:
    from bertie.cli.common import check_output_folder

    folder = check_output_folder(args.output, overwrite=args.overwrite)
    ignored = shutil.ignore_patterns("__pycache__", "__init__.py")
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True, ignore=ignored)
    print(f"{args.output}: {len(names())} recipes, and example data in {args.output}/examples")


def _list(*, as_json: bool) -> None:
    for kind, folders, use in (
        ("fine-tuning", FINE_TUNING, "bertie train --recipe NAME --data FOLDER -o OUT"),
        ("pretraining", PRETRAINING, "bertie pretrain NAME --data FOLDER -o OUT"),
    ):
        rows = [describe(name, folders) for name in names(folders)]
        if as_json:
            for row in rows:
                print(json.dumps({"kind": kind, **row}))
            continue
        print(f"{kind}: {use}")
        width = max(len(row["name"]) for row in rows)
        for row in rows:
            print(f"  {row['name']:<{width}}  {row['title']}" + (f" ({', '.join(row['data'])})" if row["data"] else ""))


def describe(name: str, folders: tuple[str, ...]) -> dict[str, Any]:
    """The name of a recipe, what it is for, and the data that it reads."""
    text = find(name, folders).read_text("utf-8")
    recipe = tomllib.loads(text)
    # The title of a pretraining recipe is in its first comment, with the source.
    comment = text.removeprefix("# ").partition("\n")[0] if text.startswith("#") else ""
    data = recipe.get("data", {})
    train = data.get("train", [])
    return {
        "name": name,
        "title": recipe.get("title") or comment.partition(". ")[0].rstrip("."),
        "data": [train] if isinstance(train, str) else list(train),
    }
