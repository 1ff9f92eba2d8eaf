"""What a checkpoint family is: one table that says what every config key and every tensor name means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, TiedTensor
from bertie.config import EncoderConfig, HeadConfig, HeadName
from bertie.text.legacy import LegacyTokenizer


@dataclass(frozen=True, slots=True)
class HeadTable:
    """A head of a family: its shape from the config, and its tensors. Names of tensors are the checkpoint's."""

    config: Callable[[ConfigKeys, EncoderConfig], HeadConfig]
    weights: Callable[[HeadConfig], Iterable[TensorRule | TiedTensor]]
    says: Mapping[str, Any] = field(default_factory=dict)  # what config.json holds where the original has this layout


@dataclass(frozen=True, slots=True)
class Family:
    """All that sets a family apart. See CONTRIBUTING: a new family is one file with one of these."""

    model_type: str
    # Heads by the name of the original's class: {"BertForMaskedLM": ("mlm",), "BertModel": ()}.
    architectures: Mapping[str, tuple[HeadName, ...]]
    prefix: str  # of the encoder's tensors in a checkpoint with heads; absent where there is only the encoder
    read: Callable[[ConfigKeys], EncoderConfig]
    weights: Callable[[EncoderConfig], Iterable[TensorRule]]  # names without the prefix
    heads: Mapping[HeadName, HeadTable]
    # Another layout of a head, taken where the checkpoint holds its tensors.
    alternatives: Mapping[HeadName, HeadTable] = field(default_factory=dict)
    # Heads that may come along with others, recognized by their tensors alone.
    companions: tuple[HeadName, ...] = ()
    dropped: tuple[str, ...] = ()  # patterns of tensors that are not needed
    tokenizer: LegacyTokenizer | None = None  # how to read vocabulary files older than tokenizer.json
    tokenizer_classes: tuple[str, ...] = ()  # the original's names for it, without the ending "Fast"
    renamed: Mapping[str, str] = field(default_factory=dict)  # endings of old spellings, and the present ones
    # What the original takes for a config key that is not there, where that is not what `read` would take.
    defaults: Mapping[str, Any] = field(default_factory=dict)
