"""ELMo models in the verbs that support them: `embed --tokens`, `tag` and `inspect`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, model_name, select_device
from bertie.cli.settings import read_settings
from bertie.cli.stream import READ_SCHEMA, Stream

if TYPE_CHECKING:
    from bertie.tasks.elmo_tag import ElmoTagger

MEAN = "mean"
# Flags of `embed` and `tag` that do not apply to ELMo, with their defaults.
OTHER_FLAGS = {
    "pooling": None,
    "normalize": None,
    "dimension": None,
    "prompt": None,
    "prompt_name": None,
    "head": None,
    "precision": "fp32",
    "revision": None,
    "aggregation_strategy": "average",
}


def uses_elmo(args: argparse.Namespace) -> bool:
    """Whether the model given by the arguments is an ELMo folder."""
    from bertie.checkpoints.elmo_folder import is_elmo_folder

    name = args.model if args.model is not None else read_settings().model
    return name is not None and is_elmo_folder(name)


def check_flags(args: argparse.Namespace) -> None:
    """Reject flags that do not apply to ELMo."""
    for name, default in OTHER_FLAGS.items():
        if getattr(args, name, default) != default:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} is not for ELMo: {model_name(args)} computes word embeddings in fp32")


def add_layer(parser: argparse.ArgumentParser) -> None:
    """Add --layer."""
    parser.add_argument(
        "--layer",
        metavar="N",
        help="with --tokens and an ELMo model: layer, where 0 is the character CNN (default: the mean of all layers)",
    )


def embed_words(args: argparse.Namespace, stream: Stream) -> None:
    """Write the words of each text with their embeddings."""
    import numpy as np

    from bertie.tasks.elmo import Elmo

    check_flags(args)
    model = Elmo.load(model_name(args), device=select_device(args.device))
    layer = _layer(args.layer, model.config.layers)

    def work(texts: list[str]) -> Iterator[dict[str, Any]]:
        for result in model.embed_each(texts):
            yield {
                "tokens": list(result.words),
                "offsets": [list(span) for span in result.offsets],
                "vectors": list(result.mean if layer is None else result.layers[layer]),
                "words_cut": result.words_cut,
                **{name: getattr(result, name, 0) for name in READ_SCHEMA},
            }

    stream.write(
        stream.results(work),
        {"tokens": [str], "offsets": [[int]], "vectors": [[np.float32]], "words_cut": int, **READ_SCHEMA},
        ("row", "word", "characters", "vector", "dimension"),
        lambda record, text: [
            (
                record["row"],
                word,
                f"{start}-{end}",
                " ".join(f"{x:+.4f}" for x in vector[:5]) + " …",
                len(vector),
            )
            for word, (start, end), vector in zip(record["tokens"], record["offsets"], record["vectors"], strict=True)
        ],
    )


def _layer(value: str | None, last: int) -> int | None:
    if value is None or value == MEAN:
        return None
    if not value.isdecimal() or int(value) > last:
        raise UsageError(f"--layer {value} must be {MEAN} or a number from 0 to {last}")
    return int(value)


def load_tagger(args: argparse.Namespace) -> ElmoTagger:
    """Load a trained tagger."""
    from bertie.tasks.elmo_tag import ElmoTagger, is_tagger_folder

    check_flags(args)
    name = model_name(args)
    if not is_tagger_folder(name):
        raise UsageError(f"{name} is an ELMo model without a tagger; train one with bertie.ElmoTagger({name!r}).fit()")
    return ElmoTagger.load(name, device=select_device(args.device))


def description(args: argparse.Namespace) -> dict[str, Any]:
    """The description of a model, as a dictionary for JSON."""
    from bertie.checkpoints.elmo import describe
    from bertie.tasks.elmo_tag import is_tagger_folder, read_tagger_settings

    name = model_name(args)
    labels = list(read_tagger_settings(name)[0]) if is_tagger_folder(name) else None
    return {**describe(name), "labels": labels}


def lines(facts: dict[str, Any]) -> Iterator[str]:
    """The description as lines of text."""
    shape, parameters = facts["shape"], facts["parameters"]
    filters = ", ".join(f"{count} of size {size}" for size, count in shape["filters"])
    clipped = f"cells clipped at {shape['cell_clip']:g}, projections at {shape['projection_clip']:g}"
    rows = {
        "model": facts["model"],
        "family": facts["family"],
        "characters": f"up to {shape['max_characters']} per word; filters: {filters}; highway layers: "
        f"{shape['highways']}",
        "lstm": f"{shape['layers']} layers in both directions, cell {shape['cell_width']}, projected to "
        f"{shape['width']}, {'with' if shape['skip_connections'] else 'without'} skip connections, {clipped}",
        "vectors": f"{shape['layers'] + 1} layers of {shape['dimension']} dimensions",
        "parameters": f"{parameters['total']:,} ({parameters['characters']:,} in the character CNN, "
        f"{parameters['layers']:,} in the LSTM)",
        "tagger": "" if facts["labels"] is None else ", ".join(facts["labels"]),
        "max_length": "none: texts of any length are read whole",
        "memory": f"fp32 {facts['memory_bytes']['fp32'] / 2**20:,.0f} MiB",
    }
    width = max(map(len, rows))
    yield from (f"{name:<{width}}  {text}" for name, text in rows.items() if text)
