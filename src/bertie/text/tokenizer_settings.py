"""The JSON files of a tokenizer other than tokenizer.json: options, special tokens and added tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from bertie.errors import CheckpointError, ConfigError
from bertie.text.tokenizer_files import check_json_type, json_bytes, parse_json, read_bytes

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in the order in which transformers adds missing ones
# The classes of transformers that use a tokenizer.json unchanged; others may rebuild it by their own rules.
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """tokenizer_config.json, special_tokens_map.json and added_tokens.json, merged as transformers does."""

    options: dict[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    named: dict[str, AddedToken] = field(default_factory=dict)  # by role: "cls", "mask", …
    without_flags: frozenset[str] = frozenset()  # roles whose token is a plain string
    extra: tuple[AddedToken, ...] = ()
    added: dict[int, AddedToken] = field(default_factory=dict)  # tokens with an explicit id
    raw: dict[str, bytes] = field(default_factory=dict)  # the original files

    def flag(self, key: str) -> bool | None:
        """A boolean option; None: not set.

        >>> TokenizerSettings({"do_lower_case": False}).flag("do_lower_case")
        False
        """
        value = self.options.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"tokenizer_config.json: {key}={value!r} must be true, false or null")
        return value

    def model_max_length(self) -> int | None:
        """The maximum length in tokens; None: not limited."""
        value = self.options.get("model_max_length")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"tokenizer_config.json: model_max_length={value!r} must be a positive number")
        return int(value) if value < 1e9 else None  # transformers writes 1e30 for "no limit"

    def with_max_length(self, max_length: int) -> TokenizerSettings:
        """A copy with another maximum length.

        >>> TokenizerSettings().with_max_length(512).model_max_length()
        512
        """
        change, raw = {"model_max_length": max_length}, dict(self.raw)
        if (name := "tokenizer_config.json") in raw:
            raw[name] = json_bytes(json.loads(raw[name]) | change)
        return replace(self, options=self.options | change, raw=raw)


def check_agreement(settings: TokenizerSettings, tokenizer: Tokenizer, normalizer: Any) -> None:
    """Refuse a folder whose tokenizer.json (with this normalizer) and tokenizer_config.json disagree."""
    if settings.options.get("tokenizer_class") not in GENERIC:  # such a class reads none of the options
        _check_normalizer(settings, normalizer)
        _check_template(settings, tokenizer)


def _check_normalizer(settings: TokenizerSettings, normalizer: Any) -> None:
    """Refuse disagreement about normalization.

    tokenizer.json should win, but transformers follows tokenizer_config.json. The model may have been
    trained with either, so it is unknown which one is wrong.
    """
    if not isinstance(normalizer, dict) or normalizer.get("type") != "BertNormalizer":
        return
    lowercase, strip_accents = bool(normalizer["lowercase"]), normalizer["strip_accents"]
    for key, actual in (
        ("do_lower_case", lowercase),
        ("strip_accents", lowercase if strip_accents is None else strip_accents),
        ("tokenize_chinese_chars", bool(normalizer["handle_chinese_chars"])),
    ):
        configured = settings.flag(key)
        if configured is not None and configured != actual:
            raise ConfigError(
                f"tokenizer_config.json says {key}={configured} and tokenizer.json does {key}={actual}; "
                "make the two files agree with the tokenization that the model was trained with"
            )


def _check_template(settings: TokenizerSettings, tokenizer: Tokenizer) -> None:
    """Refuse disagreement about the tokens before and after a text.

    transformers 4 follows add_bos_token and add_eos_token in the classes that have them, transformers 5 the template
    of tokenizer.json; an embedding by the last token depends on it.
    """
    ids = tokenizer.encode("a").ids  # not of an empty text, whose only token may be first and last
    for key, role, at in (("add_bos_token", "bos", slice(None, 1)), ("add_eos_token", "eos", slice(-1, None))):
        token, configured = settings.named.get(role), settings.flag(key)
        if token is None or configured is None:
            continue
        actual = tokenizer.token_to_id(token.content) in ids[at]
        if actual != configured:
            raise ConfigError(
                f"tokenizer_config.json says {key}={configured} and the template of tokenizer.json "
                f"{'adds' if actual else 'does not add'} {token.content!r}; make the two files agree with the "
                "tokenization that the model was trained with"
            )


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the settings of a tokenizer folder; all files are optional.

    >>> read_settings(Path("no/such/folder")).options
    {}
    """
    raw = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            raw[name] = read_bytes(folder / name)
    options = parse_json(raw.get("tokenizer_config.json", b"{}"), "tokenizer_config.json")
    # The newer format has everything in tokenizer_config.json; transformers then ignores the other two files.
    complete = "added_tokens_decoder" in options
    values: dict[str, Any] = dict(options)
    if not complete:
        values.update(parse_json(raw.get("special_tokens_map.json", b"{}"), "special_tokens_map.json"))
    named, without_flags, extra = _special_tokens(values)
    if complete:
        added = _added_tokens_decoder(options)
        by_text = {token.content: token for token in added.values()}
        without_flags = {role for role in without_flags if named[role].content not in by_text}
        named = {role: by_text.get(token.content, token) for role, token in named.items()}
        extra = [by_text.get(token.content, token) for token in extra]
    else:
        special = {token.content for token in (*named.values(), *extra)}
        added = _added_tokens(parse_json(raw.get("added_tokens.json", b"{}"), "added_tokens.json"), special)
    return TokenizerSettings(options, named, frozenset(without_flags), tuple(extra), added, raw)


def _special_tokens(values: Mapping[str, Any]) -> tuple[dict[str, AddedToken], set[str], list[AddedToken]]:
    """The special tokens by role, the roles whose token is a plain string, and other special tokens."""
    named: dict[str, AddedToken] = {}
    without_flags: set[str] = set()
    extra: list[AddedToken] = []
    for key, value in values.items():
        role = key.removesuffix("_token")
        if role != key and isinstance(value, str | dict):
            token = _parse_token(value, key, special=True)
            if role in ROLES:
                named[role] = token
                without_flags.update([role] if isinstance(value, str) else [])
            else:
                extra.append(token)  # specific to the model, such as "image_token"
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = values.get(key) or []
        for value in tokens.values() if isinstance(tokens, dict) else check_json_type(tokens, list, key):
            extra.append(_parse_token(value, key, special=True))
    return named, without_flags, extra


def _added_tokens_decoder(options: Mapping[str, Any]) -> dict[int, AddedToken]:
    where = "tokenizer_config.json: added_tokens_decoder"
    added = {}
    for key, value in check_json_type(options["added_tokens_decoder"], dict, where).items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise CheckpointError(f"{where} has the key {key!r}, which is not a token id")
        added[int(key)] = _parse_token(value, where)
    return added


def _added_tokens(ids: Mapping[str, Any], special: set[str]) -> dict[int, AddedToken]:
    added = {}
    for text, index in ids.items():
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise CheckpointError(f"added_tokens.json: {text!r} has the id {index!r}, which is not a token id")
        added[index] = AddedToken(text, normalized=text not in special, special=text in special)
    return added


def _parse_token(value: Any, where: str, special: bool | None = None) -> AddedToken:
    """Parse an AddedToken from either of its JSON forms: a string, or an object with flags."""
    if isinstance(value, str):
        value = {"content": value}
    flags = {k: v for k, v in check_json_type(value, dict, where).items() if k not in ("content", "__type", "id")}
    content = value.get("content")
    known = {"lstrip", "rstrip", "single_word", "normalized", "special"}
    if not isinstance(content, str) or not content or not is_encodable(content):
        raise CheckpointError(f"{where}: a token's content must be a non-empty string, not {content!r}")
    for key, flag in flags.items():
        if key not in known or not isinstance(flag, bool):
            raise CheckpointError(f"{where}: token {content!r} has {key}={flag!r}; known flags: {sorted(known)}")
    if special is not None:
        flags["special"] = special
    return AddedToken(content, **flags)


def is_encodable(text: str) -> bool:
    """Whether a string from JSON is valid Unicode: "\\\\ud800" is legal JSON, but a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def add_missing(tokenizer: Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add the special tokens that the tokenizer lacks: adding one again would overwrite its flags.

    >>> from tokenizers import models
    >>> tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    >>> add_missing(tokenizer, [AddedToken("<a>", lstrip=True), AddedToken("<a>")])
    >>> tokenizer.get_added_tokens_decoder()[1].lstrip
    True
    """
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in tokens:
        if token.content not in present:
            tokenizer.add_special_tokens([token])
            present.add(token.content)


def add_with_ids(tokenizer: Tokenizer, settings: TokenizerSettings) -> None:
    """Add the tokens with explicit ids, and check that each gets its id.

    >>> from tokenizers import models
    >>> tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    >>> add_with_ids(tokenizer, TokenizerSettings(added={1: AddedToken("<new>")}))
    >>> tokenizer.token_to_id("<new>")
    1
    """
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for index, token in sorted(settings.added.items()):
        if token.content in present:
            continue
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        actual = tokenizer.token_to_id(token.content)
        if actual != index:
            raise CheckpointError(
                f"token {token.content!r} should have the id {index} but gets {actual}: the vocabulary does not match "
                "tokenizer_config.json or added_tokens.json"
            )


def has_one_segment(rules: Any) -> bool:
    """Whether a template gives every token of a single text the segment id 0."""
    kind = None if rules is None else rules["type"]
    if kind == "Sequence":
        return all(map(has_one_segment, rules["processors"]))
    if kind == "TemplateProcessing":
        return all(part["type_id"] == 0 for item in rules["single"] for part in item.values())
    return kind in (None, "ByteLevel") or {"cls", "sep"} <= set(rules)  # BertProcessing and RobertaProcessing
