"""Write a model with smaller weights, and a receipt of what that cost.

fp16 halves the weights, for every tool to load. int8 quarters them, for Bertie alone: each matrix in bytes, with one
scale a row. The receipt compares both models on texts, a few built-in ones unless you give your own; it is printed, and
kept in the new folder as receipt.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie._version import __version__
from bertie.cli.common import UsageError, add_column, verb
from bertie.cli.train import short_name
from bertie.data.progress import Progress
from bertie.data.readers import open_table, text_of
from bertie.errors import ExistsError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from bertie.cli.common import Verbs
    from bertie.hub import Checkpoint
    from bertie.nn.heads import Head
    from bertie.text.batch import Batch

EXAMPLE = """  bertie shrink ./my-model -o my-small-model --to int8
  bertie shrink ./my-model -o my-small-model --to int8 --texts reviews.jsonl --json | jq .hidden.least_cosine
"""
RECEIPT = "receipt.json"
TOKENS = 512  # a batch: the scores of a vocabulary take much memory
MASKED = 7  # one in so many tokens is masked, where a head fills masks
PAIRED = ("answer", "nsp", "sop", "choice")  # heads that read two texts
TEXTS = """The old bridge was closed for repairs after the flood in March.
Can you tell me when the next train to Vienna leaves?
She bought three kilos of apples, two lemons and a loaf of bread.
Researchers found that the drug lowered blood pressure in most patients.
I have never been so disappointed by a film in my whole life.
The committee will publish its report on the first of June 2021.
Please restart the router and wait until the green light stops blinking.
A small dog is chasing a red ball across the wet grass.
Prices rose by 4.5 percent last year, the fastest pace since 1991.
He studied law in Edinburgh before he became a journalist.
Water boils at a lower temperature on top of a mountain.
The goalkeeper saved a penalty in the last minute of the match.
Nobody knows who wrote the letter that was found in the attic.
What a wonderful evening, thank you all for coming!
The function returns an empty list if no file matches the pattern.
Our flight was delayed twice, and then they lost our luggage.
Mozart wrote his first symphony when he was eight years old.
The court ruled that the contract had been broken by both sides.
Add the flour slowly, stirring all the time, so that no lumps form.
Bees find their way home by the position of the sun.
The company, founded in Osaka in 1933, employs 12,000 people worldwide.
If it rains tomorrow, the concert will be held in the town hall.
My grandmother's house stood between the river and the railway.
"I did not say that," the minister replied, "and I never will.\""""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "shrink", "write a model with smaller weights, and what that cost", __doc__, EXAMPLE)
    parser.add_argument("model", metavar="MODEL", help="a folder, a built-in name or a hub id")
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the new folder")
    parser.add_argument("--to", choices=("int8", "fp16"), required=True, help="how weights are kept")
    parser.add_argument("--texts", metavar="FILE", help="what to compare both on: .txt, .csv, .tsv, .jsonl, .parquet")
    add_column(parser)
    parser.add_argument("--revision", help="of a hub id: a branch, tag or commit")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it is there")
    parser.add_argument("--json", action="store_true", help="print the receipt as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    out = Path(os.path.abspath(args.output))
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not args.overwrite)):
        raise ExistsError(f"{args.output} is there already; pass --overwrite to replace a folder, or another name")
    if args.column and not args.texts:
        raise UsageError("--column is of a file of texts; name it with --texts")
    texts = _texts(args.texts, args.column) if args.texts else TEXTS.splitlines()

    from bertie import store
    from bertie.hub import Checkpoint, resolve

    folder = resolve(args.model, args.revision)
    before, size = Checkpoint.load(folder), weight_bytes(folder)
    if before.tokenizer is None and args.texts:
        raise InputError(f"--texts {args.texts}: {args.model} has no tokenizer to read texts with; leave it out")
    out.parent.mkdir(parents=True, exist_ok=True)
    # What is compared is what was written; it gets its name once its receipt is in it.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as place:
        draft = Path(place) / out.name
        before.save(draft, weights=args.to)
        after = Checkpoint.load(draft)
        total = sum(file.stat().st_size for file in draft.rglob("*") if file.is_file())
        receipt = {
            "model": short_name(args.model),
            "to": args.to,
            "bertie": __version__,
            "bytes": {"weights_before": size, "weights_after": weight_bytes(draft), "folder_after": total},
            "weights": weight_errors(before, after),
        }
        if before.tokenizer is not None:  # else, as with some models of proteins or genes, there is nothing to read
            receipt["texts"] = Path(args.texts).name if args.texts else "built-in"
            receipt |= differences(before, after, texts)
        (draft / RECEIPT).write_bytes(store.to_json(receipt))
        store.put(draft, out)
    print(json.dumps(receipt) if args.json else "\n".join(_lines(args.output, receipt)))


def _texts(name: str, column: str | None) -> list[str]:
    table = open_table(name)
    asked = table.column(["text"], column, "--column", only=True)
    found = [text_of(table, number, row, asked) for number, row in enumerate(table.rows([asked]), 1)]
    texts = [text for text in found if text.strip()]
    if not texts:
        raise InputError(f"{table.name}: column {asked!r} holds no text to compare the models on")
    return texts


def weight_bytes(folder: Path) -> int:
    """The size of a folder's weights, those of named heads included."""
    from bertie import heads, store
    from bertie.sentence import SentenceModules

    at = folder / SentenceModules.transformer_folder(folder)
    packed = heads.is_packed(store.read_json(at / "config.json").get(heads.KEY))
    files = [*store.weight_files(at, packed=packed), at / heads.FILE]
    return sum(file.stat().st_size for file in files if file.is_file())


# --- the weights ---


def weight_errors(before: Checkpoint, after: Checkpoint) -> dict[str, Any]:
    """How far all weights have moved, by their length, and which tensors moved furthest."""
    old, new = _tensors(before), _tensors(after)
    moved, length = 0.0, 0.0
    each: dict[str, float] = {}
    for name, x in old.items():
        one, all_ = float((new[name].double() - x.double()).square().sum()), float(x.double().square().sum())
        moved, length = moved + one, length + all_
        each[name] = (one / all_) ** 0.5 if all_ else 0.0
    coarsest = sorted(each, key=lambda name: -each[name])[:5]
    return {
        "parameters": sum(x.numel() for x in old.values()),
        "relative_error": (moved / length) ** 0.5,
        "coarsest": {name: each[name] for name in coarsest},
    }


def _tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """By the names in the files."""
    from bertie import heads

    named = [name for name in checkpoint.heads if name not in checkpoint.blueprint.heads]
    return checkpoint.blueprint.plan.store(checkpoint.model) | heads.tensors(checkpoint.model, named)


# --- what comes out ---


def differences(before: Checkpoint, after: Checkpoint, texts: list[str]) -> dict[str, Any]:
    """What the models say of the texts: hidden states, sentence vectors and each head."""
    import torch

    singles = [(text,) for text in texts]
    pairs = list(zip(texts, [*texts[1:], texts[0]], strict=True))
    with torch.inference_mode(), Progress("compare", lambda: None) as progress:
        states = []
        for batch, _ in _batches(before, singles):
            states.append(_cosine(before.model.hidden(batch), after.model.hidden(batch)))
            progress.update(len(batch))
        heads: dict[str, Any] = {}
        for name, info in before.heads.items():
            paired = info.kind in PAIRED or info.task == "rerank" or before.cross_encoder is not None
            found = []
            for batch, some in _batches(before, pairs if paired else singles):
                found.append(_head(before, after, name, batch, some))
                progress.update(len(batch))
            heads[name] = _summary(found[0][0], [values for _, values in found])
        vectors = None if before.sentence is None else _vectors(before, after, texts)
    return {"hidden": _summary("cosine", states), "sentence": vectors, "heads": heads}


def _batches(checkpoint: Checkpoint, things: Sequence[tuple[str, ...]]) -> Iterator[tuple[Batch, Tensor]]:
    """The texts or pairs, whole, with the places (n,) in the batch of every MASKED-th token of each."""
    import numpy as np
    import torch

    from bertie.text.batch import Batch, pack
    from bertie.text.windows import windows

    assert checkpoint.tokenizer is not None
    encoded = checkpoint.tokenizer.encode_batch([(one[0], one[1]) if len(one) > 1 else one[0] for one in things])
    cut = (windows(encoding, one, checkpoint.reach) for encoding, one in zip(encoded, things, strict=True))
    read = [window.encoding for found in cut for window in found]
    for group in pack([len(one) for one in read], TOKENS):
        members = [read[i] for i in group]
        starts = np.cumsum([0, *map(len, members[:-1])])
        some = [start + np.flatnonzero(one.sources >= 0)[::MASKED] for start, one in zip(starts, members, strict=True)]
        yield Batch.from_encodings(members), torch.from_numpy(np.concatenate(some))


def _head(before: Checkpoint, after: Checkpoint, name: str, batch: Batch, some: Tensor) -> tuple[str, Tensor]:
    """How much a head's outputs have in common on a batch, and by which measure; `some` (n,) are places to mask."""
    assert before.tokenizer is not None
    head, mask = before.model.head(name), before.tokenizer.mask_id
    if head.cfg.kind == "vocabulary" and mask is not None:  # asked where it has to guess: what it can see is easy
        batch = replace(batch, ids=batch.ids.index_fill(0, some, mask))
        a, b = (one.model(batch, name)[some] for one in (before, after))
    else:
        a, b = (one.model(batch, name) for one in (before, after))
    return _measure(head, before.heads[name].kind, batch, a, b)


def _measure(head: Head, kind: str, batch: Batch, a: Tensor, b: Tensor) -> tuple[str, Tensor]:
    """`a` and `b` (N, n): a row a token or a row a text."""
    import torch

    if head.cfg.outputs is None and not head.cfg.tied:  # a state, of which no number is an answer
        return "cosine", _cosine(a, b)
    if a.shape[1] == 1:
        return "difference", (a - b).abs()[:, 0]
    if kind == "answer":  # which token of a text is the first, and which is the last
        rows = zip(*(torch.split(one, list(batch.lengths)) for one in (a, b)), strict=True)
        return "top1", torch.cat([x.argmax(0) == y.argmax(0) for x, y in rows])
    return "top1", a.argmax(1) == b.argmax(1)


def _vectors(before: Checkpoint, after: Checkpoint, texts: list[str]) -> dict[str, Any]:
    import torch

    from bertie.tasks import Embedder

    a, b = (torch.from_numpy(Embedder(one).embed(texts)) for one in (before, after))
    return _summary("cosine", [_cosine(a, b)])


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """(N, D), (N, D) -> (N,)."""
    import torch

    return torch.cosine_similarity(a.double(), b.double(), dim=-1)


def _summary(measure: str, found: Sequence[Tensor]) -> dict[str, Any]:
    import torch

    values = torch.cat(list(found)).double()
    if measure == "cosine":
        facts = {"mean_cosine": float(values.mean()), "least_cosine": float(values.min())}
    elif measure == "top1":
        facts = {"equal_top1": float(values.mean())}
    else:
        facts = {"largest_difference": float(values.max())}
    return facts | {"of": len(values)}


def _lines(output: str, receipt: dict[str, Any]) -> Iterator[str]:
    """For people."""
    old, new, folder = (f"{size / 1e6:,.1f} MB" for size in receipt["bytes"].values())
    weights = receipt["weights"]
    worst, error = next(iter(weights["coarsest"].items()))
    rows = {
        "weights": f"{old} -> {new} in {receipt['to']}; {weights['parameters']:,} parameters; whole folder: {folder}",
        "error": f"{weights['relative_error']:.3%} of all weights' length; most in {worst}: {error:.3%}",
        "hidden": _said(receipt.get("hidden"), "tokens"),
        "sentence": _said(receipt.get("sentence"), "texts"),
    } | {f"head {name}": _said(facts, "outputs") for name, facts in receipt.get("heads", {}).items()}
    rows["receipt"] = str(Path(output) / RECEIPT)
    width = max(map(len, rows))
    yield from (f"{name:<{width}}  {text}" for name, text in rows.items() if text)


def _said(facts: dict[str, Any] | None, what: str) -> str:
    if facts is None:
        return ""
    of = f"of {facts['of']:,} {what}"
    if "mean_cosine" in facts:
        return f"cosine {facts['mean_cosine']:.5f} in the mean, {facts['least_cosine']:.5f} at least, {of}"
    if "equal_top1" in facts:
        return f"the same first choice in {facts['equal_top1']:.2%} {of}"
    return f"a difference of at most {facts['largest_difference']:.2g} {of}"
