"""Upload a model folder to the Hugging Face hub.

The whole folder is uploaded: weights, tokenizer, model card (README.md) and report. The repository is
created if it does not exist. The access token is that of `hf auth login`, or the environment
variable HF_TOKEN.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from bertie.cli.common import verb

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie push ./my-model my-name/my-model
  bertie push ./my-model my-name/my-model --private --message "Trained on tickets of October"
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "push", "upload a model folder to the Hugging Face hub", __doc__, EXAMPLE)
    parser.add_argument("folder", metavar="FOLDER", help="model folder, as written by bertie train")
    parser.add_argument("repository", metavar="OWNER/NAME", help="repository on the hub")
    parser.add_argument("--private", action="store_true", default=None, help="create a private repository")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to upload to (default: main)")
    parser.add_argument("--message", metavar="TEXT", default="Upload model", help="commit message")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    from bertie.checkpoints.upload import push_folder

    address = push_folder(
        args.folder, args.repository, private=args.private, revision=args.revision, message=args.message
    )
    print(json.dumps({"url": address}) if args.json else address)
