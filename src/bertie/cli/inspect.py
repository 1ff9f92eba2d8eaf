"""Describe a checkpoint without reading its weights: family, shape, heads, tokenizer, memory, and the backends in use.

Every weight's name and shape and every config key is checked. "dispatch" lists the implementation of each operation
on this device; BERTIE_DISABLE=NAME,... disables backends.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bertie.cli import elmo
from bertie.cli.common import add_device, add_model_argument, add_precision, model_name, select_device, verb

if TYPE_CHECKING:
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie inspect
  bertie inspect ./my-model --json | jq .parameters.total
  bertie inspect ./my-model --precision bf16 --device cuda
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    what = "describe a checkpoint: architecture, heads, tokenizer, memory, backends"
    parser = verb(verbs, "inspect", what, __doc__, EXAMPLE)
    add_model_argument(parser)
    parser.add_argument("--head", help="kind of the head, if config.json does not specify it")
    parser.add_argument("--ignore", action="append", default=[], metavar="KEY", help="config key to ignore")
    add_device(parser)
    add_precision(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the description."""
    if elmo.uses_elmo(args):
        facts = elmo.description(args)
        print(json.dumps(facts, indent=2, ensure_ascii=False) if args.json else "\n".join(elmo.lines(facts)))
        return

    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.ops.dispatch import report

    checkpoint = Checkpoint.inspect(model_name(args), revision=args.revision, head=args.head, ignore=args.ignore)
    facts = describe(checkpoint)
    facts["dispatch"] = report(checkpoint.model.config, select_device(args.device), args.precision)
    print(json.dumps(facts, indent=2, ensure_ascii=False) if args.json else "\n".join(_lines(facts)))


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The description of a checkpoint, as a dictionary for JSON."""
    cfg, spec, tokenizer = checkpoint.model.config, checkpoint.spec, checkpoint.tokenizer
    total = sum(p.numel() for p in checkpoint.model.parameters())
    embedding = sum(p.numel() for p in checkpoint.model.encoder.embeddings.parameters())
    heads = sum(p.numel() for p in checkpoint.model.heads.parameters())
    return {
        "model": checkpoint.source,
        "family": spec.family.model_type,
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
            "positions": [repr(p) for p in _distinct(cfg.positions)],
            "attention": _distinct([repr(p) for p in cfg.patterns]),
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
        "labels": list(checkpoint.labels.values()) if {"classify", "tag"} & set(spec.heads) else None,
        "tokenizer": None
        if tokenizer is None
        else {
            "kind": tokenizer.kind,
            "vocabulary": tokenizer.vocab_size,
            "mask": tokenizer.mask_token,
        },
        **_uses(checkpoint),
        "max_length": checkpoint.max_length,
        "memory_bytes": {"fp32": 4 * total, "bf16": 2 * total, "fp16": 2 * total, "int8": total},
        "ignored": {"config_keys": spec.ignored, "weights": spec.weight_map.dropped},
    }


def _uses(checkpoint: Checkpoint) -> dict[str, Any]:
    """The uses that the folder declares for its model, such as sentence embeddings; None for others."""
    return {
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
        "sparse": None
        if checkpoint.splade is None
        else {"terms": checkpoint.model.config.vocab, "prompts": dict(checkpoint.splade.prompts)},
        "late_interaction": None
        if checkpoint.late_interaction is None
        else {"dimension": checkpoint.late_interaction.dimension, **asdict(checkpoint.late_interaction.settings)},
        "zero_shot_entities": _spans(checkpoint),
    }


def _spans(checkpoint: Checkpoint) -> dict[str, int] | None:
    """The span head of a GLiNER model."""
    if checkpoint.gliner is None:
        return None
    head = checkpoint.gliner.head
    return {"max_width": head.max_width, "width": head.width, "lstm_layers": head.rnn_layers}


def _distinct(items: Any) -> list[Any]:
    """Each item once, in order."""
    return list(dict.fromkeys(items))


def _span_line(spans: dict[str, int] | None) -> str:
    return "" if spans is None else f"spans of up to {spans['max_width']} words, with the labels of each call (GLiNER)"


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    """The description as lines of text."""
    from bertie.ops.dispatch import summarize

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
        "sparse": ""
        if facts["sparse"] is None
        else f"SPLADE: weights of {facts['sparse']['terms']:,} terms (bertie.SparseEmbedder)",
        "late interaction": "" if facts["late_interaction"] is None else _late_interaction(facts["late_interaction"]),
        "zero-shot entities": _span_line(facts["zero_shot_entities"]),
        "max_length": f"{facts['max_length']:,} tokens",
        "memory": memory,
        "ignored": ", ".join(facts["ignored"]["config_keys"] + facts["ignored"]["weights"]) or "nothing",
    }
    rows |= {f"dispatch: {name}": text for name, text in summarize(facts["dispatch"]).items()}
    width = max(map(len, rows))
    yield from (f"{name:<{width}}  {text}" for name, text in rows.items() if text)


def _late_interaction(facts: dict[str, Any]) -> str:
    """A line about a late-interaction model."""
    expanded = f"queries expanded to {facts['query_length']} tokens" if facts["query_expansion"] else "plain queries"
    return f"ColBERT: {facts['dimension']} dimensions per token, {expanded} (bertie.LateInteraction)"
