"""A checkpoint family: one table that gives the meaning of every config key and every tensor name."""

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
    """A head of a family: how its config is read, and the names of its tensors in the checkpoint."""

    config: Callable[[ConfigKeys, EncoderConfig], HeadConfig]
    weights: Callable[[HeadConfig], Iterable[TensorRule | TiedTensor]]
    config_entries: Mapping[str, Any] = field(default_factory=dict)  # entries of config.json that select this layout


@dataclass(frozen=True, slots=True)
class Family:
    """Everything specific to a family. See CONTRIBUTING: a new family is one file with one of these."""

    model_type: str
    # Heads by the original's class name: {"BertForMaskedLM": ("mlm",), "BertModel": ()}.
    architectures: Mapping[str, tuple[HeadName, ...]]
    prefix: str  # of the encoder's tensor names in a checkpoint with heads; a bare encoder has none
    read: Callable[[ConfigKeys], EncoderConfig]
    weights: Callable[[EncoderConfig], Iterable[TensorRule]]  # names without the prefix
    heads: Mapping[HeadName, HeadTable]
    # Another layout of a head, used if the checkpoint has its tensors.
    alternatives: Mapping[HeadName, HeadTable] = field(default_factory=dict)
    # Heads that may accompany others, recognized by their tensors.
    companions: tuple[HeadName, ...] = ()
    dropped: tuple[str, ...] = ()  # patterns of tensor names that are not loaded
    tokenizer: LegacyTokenizer | None = None  # how to read vocabulary files older than tokenizer.json
    tokenizer_classes: tuple[str, ...] = ()  # the original's tokenizer classes, without the suffix "Fast"
    renamed: Mapping[str, str] = field(default_factory=dict)  # from old suffixes of tensor names to the current ones
    # The original's defaults for missing config keys, where they differ from those in `read`.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    decoder: bool = False  # its models generate text elsewhere; here only their hidden states are used

    @property
    def heads_in_words(self) -> str:
        """The names of the heads, for messages; for a decoder, what it can be used for."""
        if self.decoder:
            return f"none, as {self.model_type} is used for embeddings only (text generation is not implemented)"
        return ", ".join(self.heads)
