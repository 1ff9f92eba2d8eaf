"""Initialization for pretraining: a new model with random weights, or one with an extended vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.meta_model import build
from bertie.checkpoints.model_spec import FAMILIES, ModelSpec, config_with_head, model_spec
from bertie.config import HeadConfig, HeadName
from bertie.errors import ConfigError
from bertie.nn.model import Model
from bertie.text.tokenizer import Tokenizer

# The heads of a pretraining model, by its main head: heads over sentence pairs come with `mlm`.
PRETRAINING_HEADS: dict[HeadName, tuple[HeadName, ...]] = {
    "mlm": ("mlm",),
    "nsp": ("mlm", "nsp"),
    "sop": ("mlm", "sop"),
    "rtd": ("rtd",),
}


# --- new models ---


def new_model(config: Mapping[str, Any], tokenizer: Tokenizer, *, head: HeadName = "mlm", seed: int = 0) -> Checkpoint:
    """Create a model with random weights from the keys of config.json, of any family.

    >>> from bertie.text.tokenizer_training import train
    >>> tokenizer = train(["the cat sat on the mat"] * 3, vocab_size=40)
    >>> shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    >>> checkpoint = new_model({"model_type": "bert", **shape}, tokenizer, head="nsp")
    >>> checkpoint.config["architectures"], checkpoint.config["mask_token_id"], list(checkpoint.model.heads)
    (['BertForPreTraining'], 4, ['mlm', 'nsp'])

    `vocab_size` and the ids of special tokens come from the tokenizer; `vocab_size` may be larger,
    such as a rounded number. `head` is "mlm"; "nsp" or "sop", which add "mlm"; or "rtd". The same
    seed gives the same weights; the global random generator is not changed.

    Only ELECTRA and DeBERTa-v2 (as DeBERTa-v3 was published) checkpoints have an "rtd" head. Other families use
    ELECTRA's layout during training, and are saved as an encoder without head.
    """
    if head not in PRETRAINING_HEADS:
        raise ConfigError(f"head={head!r} must be one of {', '.join(PRETRAINING_HEADS)}")
    values = config_with_head(config, "mlm") | _from_tokenizer(config, tokenizer)
    family = FAMILIES[values["model_type"]]
    classes = {heads: name for name, heads in family.architectures.items()}
    borrowed = head == "rtd" and PRETRAINING_HEADS[head] not in classes
    heads_key = () if borrowed else PRETRAINING_HEADS[head]
    if heads_key not in classes:
        supported = [name for name, other in FAMILIES.items() if heads_key in other.architectures.values()]
        raise ConfigError(f"head={head!r} is not available for {family.model_type}, only for {', '.join(supported)}")
    values["architectures"] = [classes[heads_key]]
    spec = model_spec(values, None, head="rtd" if borrowed and "rtd" in family.heads else None)
    _check_segments(spec, tokenizer)
    heads = dict(spec.heads)
    if borrowed and "rtd" not in heads:
        cfg = spec.encoder
        heads["rtd"] = HeadConfig(kind="token", outputs=1, dense=cfg.width, activation=cfg.activation)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed other devices too
        try:
            model = Model(spec.encoder, heads).eval()
        except RuntimeError as error:
            raise ConfigError(f"config.json describes a model that does not fit in memory: {error}") from None
    # The length in a new tokenizer is a guess: it was trained before the model was known.
    tokenizer = tokenizer.with_max_length(spec.encoder.max_length)
    return Checkpoint(model, values, spec, tokenizer, source="a new model")


def _from_tokenizer(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The config keys that the tokenizer determines; those that config.json has must agree."""
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    ids = {"pad": tokenizer.pad_id, "cls": cls, "sep": sep, "mask": tokenizer.mask_id, "bos": cls, "eos": sep}
    # null without a padding token: families default to an id of their own vocabulary where the key
    # is missing.
    ids_by_key = {f"{role}_token_id": id for role, id in ids.items() if id is not None or role == "pad"}
    for key, id in ids_by_key.items():
        if config.get(key, id) != id:
            raise ConfigError(f"config.json: {key}={config[key]!r:.80} must be {id}, as in the tokenizer, or absent")
    least = _table_size(tokenizer.vocabulary)
    size = config.get("vocab_size", least)
    if isinstance(size, int) and size < least:
        raise ConfigError(f"config.json: vocab_size={size} must be at least {least}, for the tokenizer's ids")
    return ids_by_key | {"vocab_size": size}


def _table_size(vocabulary: Mapping[int, str]) -> int:
    """The rows of an embedding table; ids may have gaps."""
    return max(vocabulary) + 1


def _check_segments(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Raise if the model has too few segment embeddings for the tokenizer's pairs."""
    rows, needed = spec.encoder.embeddings.segments, int(tokenizer.encode("", "").segments.max(initial=0)) + 1
    if rows and needed > rows:
        raise ConfigError(f"config.json: type_vocab_size={rows} must be at least {needed}, for the tokenizer's pairs")


# --- extended vocabularies ---


@torch.no_grad()
def extend_vocabulary(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Checkpoint:
    """Copy a model with embeddings for the additional tokens of a longer tokenizer.

    >>> checkpoint = Checkpoint.load("path/to/folder")                                          # doctest: +SKIP
    >>> tokenizer = extend("path/to/folder", texts, new_tokens=1000)                            # doctest: +SKIP
    >>> checkpoint = extend_vocabulary(checkpoint, tokenizer)                                   # doctest: +SKIP

    Each new row, of the word embeddings and of the output layer, is the mean of the rows of the
    tokens that the old tokenizer splits the new token into. Results for texts without new tokens
    are bit-identical.
    """
    old = checkpoint.tokenizer
    if old is None:
        raise ConfigError(f"{checkpoint.source} has no tokenizer, which is needed to find the new tokens")
    before, after = old.vocabulary, tokenizer.vocabulary
    for id, token in before.items():
        if after.get(id) != token:
            raise ConfigError(
                f"id {id} is {token!r:.80} in the model's tokenizer and {after.get(id)!r:.80} in the new one; the old "
                "tokens must keep their ids, as `bertie tokenizer extend` does"
            )
    size = max(checkpoint.model.config.vocab, _table_size(after))
    spec = checkpoint.spec
    spec = replace(
        spec, encoder=replace(spec.encoder, vocab=size), heads={n: _resize(size, c) for n, c in spec.heads.items()}
    )
    all_heads: dict[Any, HeadConfig] = {n: _resize(size, checkpoint.model.head(n).cfg) for n in checkpoint.model.heads}
    model = build(replace(spec, heads=all_heads)).to(checkpoint.model.dtype).to_empty(device=checkpoint.model.device)

    new = [id for id in after if id not in before]
    texts = [tokenizer.decode([id], skip_special=False) for id in new]
    pieces = [encoding.ids.tolist() or list(before) for encoding in old.encode_batch(texts, special=False)]
    tables = {"encoder.embeddings.words.weight"}
    for name, cfg in all_heads.items():
        if cfg.kind == "vocabulary":
            tables |= {f"heads.{name}.{part}" for part in ("bias", "out.weight", "out.bias")}
    _copy_weights(checkpoint.model, model, tables, dict(zip(new, pieces, strict=True)))
    config = checkpoint.config | {"vocab_size": size}
    sentence = checkpoint.sentence
    if sentence is not None and (words := sentence.pooling.token_weights) is not None:
        weights = torch.cat([words, words.new_ones(max(0, size - len(words)))])
        for id, parts in zip(new, pieces, strict=True):
            weights[id] = words[parts].mean()
        sentence = sentence.with_token_weights(weights, [after.get(id, "") for id in range(len(weights))])
    return replace(
        checkpoint,
        sentence=sentence,
        model=model.train(checkpoint.model.training),
        config=config,
        spec=spec,
        tokenizer=tokenizer,
        heads=dict(checkpoint.heads),
    )


def _copy_weights(old: Model, new: Model, tables: set[str], pieces: Mapping[int, list[int]]) -> None:
    """Copy all weights; the row of a new id in the tables is the mean of the rows of its pieces."""
    old_weights = dict(old.named_parameters())
    for name, weight in new.named_parameters():
        if name not in tables:
            weight.copy_(old_weights[name])
            continue
        rows = old_weights[name].float()  # a mean in half precision would lose digits
        weight[: len(rows)] = old_weights[name]
        weight[len(rows) :] = rows.mean(0)  # ids may have gaps, which would otherwise be uninitialized
        for id, parts in pieces.items():
            weight[id] = rows[parts].mean(0)


def _resize(size: int, cfg: HeadConfig) -> HeadConfig:
    """Resize the output layer of a head over the vocabulary."""
    return replace(cfg, outputs=size) if cfg.kind == "vocabulary" else cfg
