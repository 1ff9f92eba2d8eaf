"""Derive a model's spec from config.json and the checkpoint's tensor names: what to build, where each tensor goes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bertie.checkpoints.config_keys import MOST_LABELS, ConfigKeys
from bertie.checkpoints.convert import TensorRule, TiedTensor, WeightMap, resolve_ties
from bertie.checkpoints.families import (
    albert,
    bert,
    big_bird,
    deberta,
    deberta_v2,
    distilbert,
    electra,
    ernie,
    eurobert,
    gemma3_text,
    llama,
    longformer,
    modernbert,
    mpnet,
    nomic_bert,
    roberta,
    t5,
)
from bertie.checkpoints.families.family import Family, HeadTable
from bertie.config import PAIR_LABELS, PROBLEMS, EncoderConfig, HeadConfig, HeadName
from bertie.errors import ConfigError
from bertie.text.legacy import LegacyTokenizer

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        albert.FAMILY,
        bert.FAMILY,
        big_bird.FAMILY,
        roberta.CAMEMBERT,
        deberta.FAMILY,
        deberta_v2.FAMILY,
        distilbert.FAMILY,
        electra.FAMILY,
        ernie.FAMILY,
        eurobert.FAMILY,
        gemma3_text.FAMILY,
        llama.LLAMA,
        longformer.FAMILY,
        llama.MISTRAL,
        modernbert.FAMILY,
        mpnet.FAMILY,
        nomic_bert.FAMILY,
        llama.QWEN2,
        llama.QWEN3,
        roberta.ROBERTA,
        t5.FAMILY,
        roberta.XLM_ROBERTA,
    )
}

# Class names that do not tell the kind of tokenizer.
_GENERIC_TOKENIZERS = (None, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")

# Heads with one output per label; the others have a fixed number of outputs.
LABELLED: tuple[HeadName, ...] = ("classify", "tag")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything needed to build a model and load its weights."""

    family: Family
    encoder: EncoderConfig
    heads: dict[HeadName, HeadConfig]
    labels: dict[int, str]
    problem: str | None  # the problem type of a classifier, if config.json names it
    weight_map: WeightMap
    ignored: list[str]  # config keys

    def labels_of(self, head: HeadName) -> dict[int, str]:
        """The class names of a head; empty for one without classes."""
        return self.labels if head in LABELLED else PAIR_LABELS.get(head, {})

    def layout(self, head: HeadName) -> HeadTable:
        """The layout of this head's tensors."""
        alternative = self.family.alternatives.get(head)
        names = {theirs for rule in self.weight_map.rules for theirs in rule.theirs}
        if alternative is not None and all(
            names.issuperset(rule.theirs)
            for rule in alternative.weights(self.heads[head])
            if isinstance(rule, TensorRule)
        ):
            return alternative
        return self.family.heads[head]

    def saved_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """config.json for the tensors that are saved: a decoder whose output layer was not loaded is a bare one."""
        if not self.family.decoder or all(name.endswith("inv_freq") for name in self.weight_map.dropped):
            return dict(config)
        return dict(config) | {"architectures": [next(iter(self.family.architectures))]}

    def __reduce__(self) -> tuple[Any, ...]:
        # A family is a table of functions: a copy or a pickle refers to it by name.
        fields = (self.encoder, self.heads, self.labels, self.problem, self.weight_map, self.ignored)
        return _restore_spec, (self.family.model_type, *fields)


def _restore_spec(model_type: str, *fields: Any) -> ModelSpec:
    return ModelSpec(FAMILIES[model_type], *fields)


def model_spec(
    raw: Mapping[str, Any],
    tensors: Collection[str] | None,
    *,
    head: HeadName | Literal["none"] | None = None,
    ignore: Iterable[str] = (),
) -> ModelSpec:
    """Derive the spec, accounting for every key of config.json.

    `tensors` are the checkpoint's tensor names; None if there is none yet. `head` says which head the checkpoint
    has where config.json does not, or is wrong; "none": only the encoder, and heads that its tensors reveal.
    """
    family = _family(raw)
    keys = ConfigKeys({**family.defaults, **raw}, ignore)
    labels = keys.labels()
    problem = keys.choice("problem_type", PROBLEMS) if raw.get("problem_type") is not None else None
    keys.used.add("problem_type")
    try:
        encoder = family.read(keys)
        # Every head is read, present or not, so that every key is accounted for.
        configs = {name: table.config(keys, encoder) for name, table in family.heads.items()}
    except ConfigError as error:
        raise ConfigError(_with_config_key(str(error))) from None
    named = _named_heads(family, raw, head)
    keys.finish()

    names = set(tensors or ())
    bare = not any(name.startswith(family.prefix) for name in names) and (bool(names) or not named)
    rename = _Rename(family, bare, names)
    heads: dict[HeadName, HeadConfig] = {}
    rules: list[TensorRule | TiedTensor] = [_prefixed(rule, family.prefix) for rule in family.weights(encoder)]
    for name in (*named, *(c for c in family.companions if c not in named)):
        table, config = family.heads[name], configs[name]
        alternative = family.alternatives.get(name)
        if alternative is not None and (
            _is_present(name, alternative, config, rules, rename)
            if tensors is not None
            else alternative.config_entries.items() <= keys.raw.items()
        ):
            table, config = alternative, alternative.config(keys, encoder)
        if name in named or _is_present(name, table, config, rules, rename):
            heads[name] = config
            rules += table.weights(config)
    if head is None and raw.get("architectures") is None:
        _refuse_unnamed(family, configs, heads, rules, rename)
    weight_map = WeightMap(resolve_ties(rules), rename)
    return ModelSpec(family, encoder, heads, labels, problem, weight_map, sorted(keys.ignored))


def config_with_head(
    raw: Mapping[str, Any], head: HeadName, labels: Sequence[str] | None = None, problem: str | None = None
) -> dict[str, Any]:
    """config.json as transformers writes it for the class with this head only, over the encoder of `raw`.

    >>> config = config_with_head({"model_type": "bert"}, "classify", ["bad", "good"], "single_label_classification")
    >>> config["architectures"], config["id2label"]
    (['BertForSequenceClassification'], {'0': 'bad', '1': 'good'})
    """
    family = _family(raw)
    classes = {heads[0]: name for name, heads in family.architectures.items() if len(heads) == 1}
    if head not in classes:
        has = family.heads_in_words if family.decoder else ", ".join(classes)
        raise ConfigError(f"head={head!r} is not available for {family.model_type}; it has: {has}")
    if problem is not None and (head != "classify" or problem not in PROBLEMS):
        allowed = "None" if head != "classify" else f"one of {', '.join(PROBLEMS)}, or None"
        raise ConfigError(f"problem={problem!r} of head={head!r} must be {allowed}")
    dropped = ("id2label", "label2id", "num_labels", "_num_labels", "problem_type")
    config = {key: value for key, value in raw.items() if key not in dropped} | {"architectures": [classes[head]]}
    if head in LABELLED:
        names = _label_names(labels, head, least=2 if problem == "single_label_classification" else 1)
        config["id2label"] = {str(i): name for i, name in enumerate(names)}
        config["label2id"] = {name: i for i, name in enumerate(names)}
    elif labels and list(labels) != list(PAIR_LABELS.get(head, {}).values()):
        raise ConfigError(f"labels={labels!r:.80} were given for head={head!r}, which has none")
    if problem is not None:
        config["problem_type"] = problem
    return config


def bare_architecture(raw: Mapping[str, Any]) -> list[str]:
    """`architectures` of config.json for the encoder of `raw` without a head.

    >>> bare_architecture({"model_type": "bert"})
    ['BertModel']
    """
    return [name for name, heads in _family(raw).architectures.items() if not heads][:1]


def _label_names(labels: Sequence[str] | None, head: HeadName, least: int) -> list[str]:
    """Check label names."""
    names = [] if labels is None or isinstance(labels, str) else list(labels)
    valid = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    if not valid or not least <= len(names) <= MOST_LABELS:
        raise ConfigError(f"labels={labels!r:.80} of head={head!r} must be {least} or more names, all different")
    return names


def _family(raw: Mapping[str, Any]) -> Family:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type={model_type!r:.80} is not supported; allowed: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def _named_heads(
    family: Family, raw: Mapping[str, Any], head: HeadName | Literal["none"] | None
) -> tuple[HeadName, ...]:
    """The heads named in config.json, or by the caller."""
    if head == "none":
        return ()
    if head is not None:
        if head not in family.heads:
            raise ConfigError(f"head={head!r} is not one of {family.model_type}'s: {family.heads_in_words}")
        return (head,)
    named = raw.get("architectures")
    if named is None:
        return ()
    if not isinstance(named, list) or len(named) != 1 or named[0] not in list(family.architectures):
        raise ConfigError(
            f"config.json: architectures={named!r:.80} is not supported; allowed: one of "
            f"{', '.join(family.architectures)}, or pass head= with one of {family.heads_in_words}"
        )
    return family.architectures[named[0]]


# Config fields that may raise an error, and the keys of config.json that they come from.
_CONFIG_KEYS = {
    "pad_id": "pad_token_id",
    "Learned.skip_id": "pad_token_id",
    "Disentangled.buckets": "position_buckets",
    "Convolution.kernel": "conv_kernel_size",
    "conv.groups": "conv_groups",
    "head_width": "head_dim",
}


def _with_config_key(message: str) -> str:
    """Add the key of config.json to an error about one of our fields."""
    if message.startswith("config.json"):
        return message
    key = next((theirs for ours, theirs in _CONFIG_KEYS.items() if message.startswith(ours)), None)
    return f"config.json: {message}" + (f" (it comes from {key})" if key else "")


def _refuse_unnamed(
    family: Family,
    configs: Mapping[HeadName, HeadConfig],
    heads: Collection[HeadName],
    rules: list[TensorRule | TiedTensor],
    rename: _Rename,
) -> None:
    """Without a class name, several heads may fit the same tensors: raise an error that lists them."""
    others = [n for n in family.heads if n not in heads and _is_present(n, family.heads[n], configs[n], rules, rename)]
    if others:
        raise ConfigError(
            "config.json: architectures is missing, and the weights hold more than the encoder; pass head= with one "
            f"of {', '.join(others)}"
        )


class _Rename:
    """Maps a family's full tensor name to that of this checkpoint."""

    def __init__(self, family: Family, bare: bool, names: set[str]) -> None:
        self.prefix, self.bare, self.names, self.renamed = family.prefix, bare, names, family.renamed

    def __call__(self, name: str) -> str:
        if self.bare:
            name = name.removeprefix(self.prefix)
        if name not in self.names:
            for old, new in self.renamed.items():
                if name.endswith(new) and (old_name := name.removesuffix(new) + old) in self.names:
                    return old_name
        return name


def _prefixed(rule: TensorRule, prefix: str) -> TensorRule:
    return replace(rule, theirs=tuple(prefix + name for name in rule.theirs))


def _is_present(
    name: HeadName, table: HeadTable, config: HeadConfig, rules: list[TensorRule | TiedTensor], rename: _Rename
) -> bool:
    """Whether the checkpoint has a tensor that only this head has: that of its output layer, if it has one."""
    claimed = {theirs for rule in rules if isinstance(rule, TensorRule) for theirs in rule.theirs}
    own = [rule for rule in table.weights(config) if isinstance(rule, TensorRule)]
    own = [rule for rule in own if rule.ours.startswith(f"heads.{name}.out.")] or own
    return any(rename(theirs) in rename.names for rule in own for theirs in rule.theirs if theirs not in claimed)


def legacy_tokenizer(model_type: str, tokenizer_class: str | None = None) -> LegacyTokenizer | None:
    """How to read vocabulary files older than tokenizer.json.

    The class named in tokenizer_config.json decides, which may be that of another family; else the model type. None for
    an unknown class.

    >>> legacy_tokenizer("bert", "XLMRobertaTokenizer").files
    ('sentencepiece.bpe.model',)
    >>> legacy_tokenizer("bert", "HerbertTokenizer") is None
    True
    """
    if tokenizer_class in _GENERIC_TOKENIZERS:
        legacy = FAMILIES[model_type].tokenizer
        # Only transformers 5 has this class. It gives no segment ids unless model_input_names says so.
        if legacy is not None and tokenizer_class == "TokenizersBackend":
            return replace(legacy, segments=False)
        return legacy
    stem = tokenizer_class.removesuffix("Fast")
    return next((family.tokenizer for family in FAMILIES.values() if stem in family.tokenizer_classes), None)
