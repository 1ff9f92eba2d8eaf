"""Where pretraining begins: a model with random weights, or an old one with rows for new words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bertie.checkpoints.checkpoint import Checkpoint, build
from bertie.checkpoints.model_spec import FAMILIES, ModelSpec, config_with_head, model_spec
from bertie.config import HeadConfig, HeadName
from bertie.errors import ConfigError
from bertie.nn.model import Model
from bertie.text.tokenizer import Tokenizer

# The heads of a model that is pretrained, by the one that sets it apart: one over pairs never comes alone.
TOGETHER: dict[HeadName, tuple[HeadName, ...]] = {
    "mlm": ("mlm",),
    "nsp": ("mlm", "nsp"),
    "sop": ("mlm", "sop"),
    "rtd": ("rtd",),
}


# --- from nothing ---


def fresh(config: Mapping[str, Any], tokenizer: Tokenizer, *, head: HeadName = "mlm", seed: int = 0) -> Checkpoint:
    """A new model with random weights, from the keys of config.json of any family.

    >>> from bertie.text.tokenizer_training import train
    >>> tokenizer = train(["the cat sat on the mat"] * 3, vocab=40)
    >>> shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    >>> checkpoint = fresh({"model_type": "bert", **shape}, tokenizer, head="nsp")
    >>> checkpoint.config["architectures"], checkpoint.config["mask_token_id"], list(checkpoint.model.heads)
    (['BertForPreTraining'], 4, ['mlm', 'nsp'])

    `vocab_size` and the ids of special tokens come from the tokenizer; a larger `vocab_size` may be given, to round it
    up. `head` is "mlm", alone; "nsp" or "sop", with "mlm" beside it; or "rtd". The same seed gives the same weights,
    whatever was drawn before, and the global generator is left as it was.

    Only ELECTRA has a head "rtd" of its own. Other families borrow its layout for as long as they are trained: what is
    saved is their bare encoder, as that of DeBERTa-v3 was published.
    """
    if head not in TOGETHER:
        raise ConfigError(f"head={head!r} must be one of {', '.join(TOGETHER)}; with_head makes others of the model")
    made = config_with_head(config, "mlm") | _from_tokenizer(config, tokenizer)
    family = FAMILIES[made["model_type"]]
    classes = {heads: name for name, heads in family.architectures.items()}
    borrowed = head == "rtd" and TOGETHER[head] not in classes
    wanted = () if borrowed else TOGETHER[head]
    if wanted not in classes:
        having = [name for name, other in FAMILIES.items() if wanted in other.architectures.values()]
        raise ConfigError(f"head={head!r} cannot be made for {family.model_type}, only for {', '.join(having)}")
    made["architectures"] = [classes[wanted]]
    spec = model_spec(made, None)
    _check_segments(spec, tokenizer)
    heads = dict(spec.heads)
    if borrowed:
        cfg = spec.encoder
        heads["rtd"] = HeadConfig(kind="token", outputs=1, dense=cfg.width, activation=cfg.activation)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would set the generators of other devices, too
        try:
            model = Model(spec.encoder, heads).eval()
        except RuntimeError as error:
            raise ConfigError(f"config.json describes a model that this machine cannot hold: {error}") from None
    return Checkpoint(model, made, spec, tokenizer, source="a fresh model")


def _from_tokenizer(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The keys that the tokenizer settles. Those that config.json has already must agree."""
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    ids = {"pad": tokenizer.pad_id, "cls": cls, "sep": sep, "mask": tokenizer.mask_id, "bos": cls, "eos": sep}
    # Without a padding token the key says so: where it is left out, families take an id of their own vocabulary.
    found = {f"{role}_token_id": id for role, id in ids.items() if id is not None or role == "pad"}
    for key, id in found.items():
        if config.get(key, id) != id:
            raise ConfigError(f"config.json: {key}={config[key]!r:.80} must be {id}, as in the tokenizer, or left out")
    least = _size(tokenizer.vocabulary)
    size = config.get("vocab_size", least)
    if isinstance(size, int) and size < least:
        raise ConfigError(f"config.json: vocab_size={size} must be at least {least}, as many as the tokenizer needs")
    return found | {"vocab_size": size}


def _size(vocabulary: Mapping[int, str]) -> int:
    """How many rows it needs: ids may have gaps, so that the number of tokens does not tell."""
    return max(vocabulary) + 1


def _check_segments(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Refuse a model that could not read the tokenizer's pairs."""
    rows, asked = spec.encoder.embeddings.segments, int(tokenizer.encode("", "").segments.max(initial=0)) + 1
    if rows and asked > rows:
        raise ConfigError(f"config.json: type_vocab_size={rows} must be at least {asked}, for the tokenizer's pairs")


# --- from an old model ---


@torch.no_grad()
def extend_vocabulary(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Checkpoint:
    """The same model with rows for the tokens that a tokenizer has beyond the model's own.

    >>> checkpoint = Checkpoint.load("path/to/folder")                                          # doctest: +SKIP
    >>> checkpoint = extend_vocabulary(checkpoint, extend("path/to/folder", texts, more=1000))         # doctest: +SKIP

    Each new row, of the word embeddings and of the outputs over the vocabulary, is the mean of the rows of those
    tokens that the old tokenizer cuts the new one into. Texts without new tokens are read as before, to the bit. All
    weights are copied.
    """
    old = checkpoint.tokenizer
    if old is None:
        raise ConfigError(f"{checkpoint.source} has no tokenizer: nobody knows which tokens are new to it")
    before, after = old.vocabulary, tokenizer.vocabulary
    for id, token in before.items():
        if after.get(id) != token:
            raise ConfigError(
                f"id {id} is {token!r:.80} in the model's tokenizer and {after.get(id)!r:.80} in the new one; the old "
                "tokens must keep their ids, as `bertie tokenizer extend` has it"
            )
    size = max(checkpoint.model.config.vocab, _size(after))
    spec = checkpoint.spec
    spec = replace(
        spec, encoder=replace(spec.encoder, vocab=size), heads={n: _over(size, c) for n, c in spec.heads.items()}
    )
    all_heads: dict[Any, HeadConfig] = {n: _over(size, checkpoint.model.head(n).cfg) for n in checkpoint.model.heads}
    model = build(replace(spec, heads=all_heads)).to(checkpoint.model.dtype).to_empty(device=checkpoint.model.device)

    new = [id for id in after if id not in before]
    texts = [tokenizer.decode([id], skip_special=False) for id in new]
    pieces = [one.ids.tolist() or list(before) for one in old.encode_batch(texts, special=False)]
    tables = {"encoder.embeddings.words.weight"}
    for name, cfg in all_heads.items():
        if cfg.kind == "vocabulary":
            tables |= {f"heads.{name}.{part}" for part in ("bias", "out.weight", "out.bias")}
    given = dict(checkpoint.model.named_parameters())
    for name, weight in model.named_parameters():
        if name not in tables:
            weight.copy_(given[name])
            continue
        weight[: len(given[name])] = given[name]
        rows = given[name].float()  # half of the precision would not do for a mean
        weight[len(rows) :] = rows.mean(0)  # ids may leave gaps, which must not hold whatever lay in memory
        for id, cut in zip(new, pieces, strict=True):
            weight[id] = rows[cut].mean(0)
    config = checkpoint.config | {"vocab_size": size}
    sentence = checkpoint.sentence
    if sentence is not None and (words := sentence.pooling.token_weights) is not None:
        weights = torch.cat([words, words.new_ones(max(0, size - len(words)))])
        for id, cut in zip(new, pieces, strict=True):
            weights[id] = words[cut].mean()
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


def _over(size: int, cfg: HeadConfig) -> HeadConfig:
    """The head over a vocabulary of this size, if that is what it is over."""
    return replace(cfg, outputs=size) if cfg.kind == "vocabulary" else cfg
