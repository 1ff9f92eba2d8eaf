"""`bertie inspect [MODEL]`: what a checkpoint is, checked down to every name and shape, without reading its weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bertie.cli.common import model_name, verb

if TYPE_CHECKING:
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie inspect
  bertie inspect ./my-model --json | jq .parameters.total
"""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    what = "what a checkpoint is: family, shape, heads, tokenizer, max_length, memory, what was ignored"
    parser = verb(verbs, "inspect", what, __doc__, EXAMPLE)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a folder or a hub id (the built-in model)")
    parser.add_argument("--revision", help="of a hub id: a branch, tag or commit")
    parser.add_argument("--head", help="what the head is, where config.json does not say")
    parser.add_argument("--ignore", action="append", default=[], metavar="KEY", help="a config key known not to matter")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    from bertie.checkpoints.checkpoint import Checkpoint

    checkpoint = Checkpoint.inspect(model_name(args), revision=args.revision, head=args.head, ignore=args.ignore)
    facts = describe(checkpoint)
    print(json.dumps(facts, indent=2, ensure_ascii=False) if args.json else "\n".join(_lines(facts)))


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts, ready for JSON."""
    cfg, plan, tokenizer = checkpoint.model.config, checkpoint.spec, checkpoint.tokenizer
    total = sum(p.numel() for p in checkpoint.model.parameters())
    embedding = sum(p.numel() for p in checkpoint.model.encoder.embeddings.parameters())
    heads = sum(p.numel() for p in checkpoint.model.heads.parameters())
    return {
        "model": checkpoint.source,
        "family": plan.family.model_type,
        "shape": {
            "layers": cfg.depth,
            "distinct_blocks": cfg.blocks,
            "width": cfg.width,
            "heads": cfg.heads,
            "key_heads": cfg.kv_heads,
            "feed_forward": cfg.ff_width,
            "activation": cfg.activation,
            "gated": cfg.gated,
            "vocabulary": cfg.vocab,
            "positions": [repr(p) for p in _runs(cfg.positions)],
            "attention": _runs([repr(p) for p in cfg.patterns]),
        },
        "parameters": {"total": total, "embeddings": embedding, "heads": heads, "blocks": total - embedding - heads},
        "heads": {
            name: {
                "kind": checkpoint.model.head(name).cfg.kind,
                "outputs": checkpoint.model.head(name).cfg.outputs,
                "task": info.task or info.kind,
                "labels": list(info.labels.values()),
            }
            for name, info in checkpoint.heads.items()
        },
        "labels": list(checkpoint.labels.values()) if {"classify", "tag"} & set(plan.heads) else None,
        "tokenizer": None
        if tokenizer is None
        else {
            "kind": tokenizer.kind,
            "vocabulary": tokenizer.vocab_size,
            "mask": tokenizer.mask_token,
        },
        "sentence": None
        if checkpoint.sentence is None
        else {
            "dimension": checkpoint.sentence.dimension,
            "pooling": list(checkpoint.sentence.pooling.modes),
            "token_weights": checkpoint.sentence.pooling.token_weights is not None,
            "prompts": dict(checkpoint.sentence.prompts),
        },
        "cross_encoder": None
        if checkpoint.cross_encoder is None
        else {"activation": checkpoint.cross_encoder.activation},
        "reach_tokens": checkpoint.max_length,
        "memory_bytes": {"fp32": 4 * total, "bf16": 2 * total, "fp16": 2 * total, "int8": total},
        "ignored": {"config_keys": plan.ignored, "weights": plan.weight_map.dropped},
    }


def _runs(items: Any) -> list[Any]:
    """Each item once, in order."""
    return list(dict.fromkeys(items))


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    """For people."""
    shape, parameters = facts["shape"], facts["parameters"]
    shared = "" if shape["layers"] == shape["distinct_blocks"] else f" over {shape['distinct_blocks']} distinct blocks"
    gate = "gated " if shape["gated"] else ""
    labelled = {name: head["labels"] for name, head in facts["heads"].items() if head["labels"]}
    memory = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in facts["memory_bytes"].items())
    rows = {
        "model": facts["model"],
        "family": facts["family"],
        "shape": f"{shape['layers']} layers{shared}, width {shape['width']}, {shape['heads']} heads, "
        f"{gate}feed-forward {shape['feed_forward']} ({shape['activation']})",
        "positions": ", ".join(shape["positions"]),
        "attention": ", ".join(shape["attention"]),
        "parameters": f"{parameters['total']:,} ({parameters['embeddings']:,} in embeddings, "
        f"{parameters['blocks']:,} in blocks, {parameters['heads']:,} in heads)",
        "heads": ", ".join(
            name + (f" ({head['outputs']})" if head["outputs"] else "") for name, head in facts["heads"].items()
        )
        or "none",
        "labels": "; ".join(
            (f"{name}: " if len(labelled) > 1 else "") + ", ".join(labels) for name, labels in labelled.items()
        ),
        "tokenizer": "none"
        if facts["tokenizer"] is None
        else f"{facts['tokenizer']['kind']}, {facts['tokenizer']['vocabulary']:,} tokens",
        "sentence": ""
        if facts["sentence"] is None
        else f"{facts['sentence']['dimension']} dimensions by {' + '.join(facts['sentence']['pooling'])} pooling"
        + (" with token weights" if facts["sentence"]["token_weights"] else ""),
        "prompts": "" if facts["sentence"] is None else ", ".join(facts["sentence"]["prompts"]),
        "cross-encoder": ""
        if facts["cross_encoder"] is None
        else f"scores through {facts['cross_encoder']['activation']}",
        "max_length": f"{facts['reach_tokens']:,} tokens",
        "memory": memory,
        "ignored": ", ".join(facts["ignored"]["config_keys"] + facts["ignored"]["weights"]) or "nothing",
    }
    width = max(map(len, rows))
    yield from (f"{name:<{width}}  {text}" for name, text in rows.items() if text)
