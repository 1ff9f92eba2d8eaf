"""Show the attention weights of a text: which tokens each token attends to.

The weights are those of one layer (default: the last) and one head (default: the mean over all heads). --json prints
the whole matrix.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from bertie.cli.common import UsageError, add_device, add_model, add_top_k, model_name, select_device, verb

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie attend "The cat sat on the mat because it was tired."
  bertie attend "The cat sat on the mat." --layer 2 --head 5 -k 1
  bertie attend "The cat sat on the mat." --layer 0 --json
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "attend", "show the attention weights of a text", __doc__, EXAMPLE)
    parser.add_argument("text", metavar="TEXT", help="a text no longer than the model's maximum length")
    parser.add_argument("--layer", type=int, metavar="N", help="layer, counted from 0 (default: the last)")
    parser.add_argument("--head", type=int, metavar="N", help="head, counted from 0 (default: the mean over heads)")
    add_top_k(parser, 3, "number of most-attended tokens to show for each token")
    add_model(parser, overflow=False)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print tokens and weights as a JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.top_k < 1:
        raise UsageError(f"-k {args.top_k} must be at least 1")

    import numpy as np

    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.data.writers import TableWriter
    from bertie.tasks.attention import attention_weights

    checkpoint = Checkpoint.load(model_name(args), revision=args.revision, device=select_device(args.device))
    result = attention_weights(checkpoint, args.text, layer=args.layer, head=args.head)
    if args.json:
        fields = {name: getattr(result, name) for name in ("layers", "heads", "layer", "head")}
        fields["tokens"] = [
            {"text": token.text, "start": token.start, "end": token.end, "special": token.special}
            for token in result.tokens
        ]
        print(json.dumps(fields | {"weights": result.weights.round(5).astype(float).tolist()}, ensure_ascii=False))
        return
    which = "mean over heads" if result.head is None else f"head {result.head} of 0 to {result.heads - 1}"
    print(f"layer {result.layer} of 0 to {result.layers - 1}, {which}")
    rows = []
    for number, (token, weights) in enumerate(zip(result.tokens, result.weights, strict=True)):
        best = np.argsort(-weights, kind="stable")[: args.top_k].tolist()
        attended = "  ".join(f"{weights[i]:.2f} {i}:{result.tokens[i].text}" for i in best)
        rows.append((number, token.text, "" if token.special else f"{token.start}-{token.end}", attended))
    print(TableWriter(("token", "text", "characters", "attends to")).text(rows), end="")
