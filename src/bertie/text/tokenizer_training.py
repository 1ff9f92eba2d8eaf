"""Train tokenizers: WordPiece, byte-level BPE and Unigram, reproducibly.

The trainers of the `tokenizers` library keep words in hash tables of random order: two runs give
different WordPiece vocabularies and different Unigram scores. Here words are counted and sorted
first, and every tie is broken by the tokens themselves. Byte-level BPE equals the library's, merge
for merge.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from bertie.data.draft_folder import draft_folder
from bertie.errors import ConfigError, ExistsError
from bertie.text.bpe_training import merge_pairs
from bertie.text.tokenizer import Tokenizer
from bertie.text.tokenizer_settings import TokenizerSettings
from bertie.text.unigram_training import train_unigram
from bertie.text.word_counts import count_words, frequent_characters

Kind = Literal["wordpiece", "bpe", "unigram"]
Style = Literal["brackets", "angles"]
KINDS, STYLES = ("wordpiece", "bpe", "unigram"), ("brackets", "angles")

# The special tokens in the order of their ids.
BRACKETS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ANGLES = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
PREFIX = "##"  # of WordPiece tokens inside a word


def train(
    texts: Iterable[str],
    kind: Kind = "wordpiece",
    vocab_size: int = 30_000,
    *,
    style: Style = "brackets",
    lowercase: bool | None = None,
    min_frequency: int = 2,
    special_tokens: Sequence[str] = (),
    limit_alphabet: int = 1000,
    max_length: int | None = 512,
) -> Tokenizer:
    """Train a tokenizer with `vocab_size` tokens, or fewer if the texts do not contain enough.

    `kind`: BERT's WordPiece, the byte-level BPE of RoBERTa and ModernBERT, or the Unigram model of
    ALBERT and DeBERTa-v3. `style` selects the special tokens: [CLS] A [SEP] B [SEP], or
    <s> A </s></s> B </s>; `special_tokens` adds others. `lowercase` is by default True for WordPiece
    and False otherwise. Tokens that occur less than `min_frequency` times are not learned, nor
    characters beyond the `limit_alphabet` most frequent ones.

    >>> tokenizer = train(["the cat sat on the mat", "the cat"] * 3, vocab_size=30)
    >>> [tokenizer.token(i) for i in tokenizer.encode("The cat, sat").ids]
    ['[CLS]', 'the', 'cat', '[UNK]', 'sat', '[SEP]']
    """
    roles = _check_options(kind, style, vocab_size, min_frequency, special_tokens, limit_alphabet)
    backend = pre_tokenizing_backend(kind, kind == "wordpiece" if lowercase is None else lowercase)
    words = count_words(texts, backend)
    tokens = [*roles.values(), *special_tokens]
    if kind == "unigram":
        characters = frequent_characters(words, min_frequency, limit_alphabet)
        size = vocab_size - len(tokens)
        _check_size(size, len(characters), "characters")
        pieces = train_unigram(words, characters, tokens, size, min_frequency)
        backend.model = models.Unigram([(token, 0.0) for token in tokens] + pieces, tokens.index(roles["unk"]))
    elif kind == "bpe":
        tokens += sorted(pre_tokenizers.ByteLevel.alphabet())
        _check_size(vocab_size, len(tokens), "special tokens and single characters")
        merges = merge_pairs(words, tokens, "", vocab_size, min_frequency)
        backend.model = models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    else:
        characters = frequent_characters(words, min_frequency, limit_alphabet)
        words = {word: n for word, n in words.items() if characters.issuperset(word)}
        inside = {c for word in words for c in word[1:]}
        tokens += [*sorted(characters), *(PREFIX + c for c in sorted(inside))]
        _check_size(vocab_size, len(tokens), "special tokens and single characters")
        merge_pairs(words, tokens, PREFIX, vocab_size, min_frequency)
        backend.model = models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token=roles["unk"])
    return _add_special_tokens(backend, kind, style, roles, special_tokens, max_length)


def extend(folder: str | Path, texts: Iterable[str], new_tokens: int = 1000, *, min_frequency: int = 5) -> Tokenizer:
    """Extend the WordPiece vocabulary of a folder by up to `new_tokens` words of texts; existing ids are kept.

    The new words are those that save the most tokens in total. The model's embeddings must be extended
    to the new `vocab_size` (`bertie.training.pretrain.initialization.extend_vocabulary`).
    """
    if new_tokens < 1:
        raise ConfigError(f"new_tokens={new_tokens} must be at least 1")
    old = Tokenizer.from_folder(folder)
    if old.kind != "WordPiece":
        raise ConfigError(f"{folder} holds a {old.kind} vocabulary; only WordPiece can be extended by whole words")
    files = old.files()
    state = json.loads(files["tokenizer.json"])
    backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    words = count_words(texts, backend)
    max_characters = state["model"]["max_input_chars_per_word"]
    savings = {}
    for word, count in words.items():
        if count >= min_frequency and len(word) <= max_characters:
            pieces = backend.model.tokenize(word)
            savings[word] = count * (len(pieces) - 1 or pieces[0].value == state["model"]["unk_token"])
    added = sorted((word for word in savings if savings[word]), key=lambda word: (-savings[word], word))[:new_tokens]
    # Added tokens may have any ids, so the number of tokens does not determine which ids are free.
    free = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    state["model"]["vocab"] |= {word: free + i for i, word in enumerate(added)}
    raw = {name: data for name, data in files.items() if name != "tokenizer.json"}
    options = json.loads(raw["tokenizer_config.json"])
    extended = tokenizers.Tokenizer.from_str(json.dumps(state, ensure_ascii=False))
    return Tokenizer(extended, settings=TokenizerSettings(options=options, raw=raw))


def save(tokenizer: Tokenizer, folder: str | Path, *, overwrite: bool = False) -> None:
    """Save a tokenizer atomically: write a temporary folder, then rename it."""
    target = Path(os.path.abspath(folder))
    check_free(target, overwrite=overwrite)
    with draft_folder(target) as draft:
        tokenizer.save(draft)


def check_free(folder: str | Path, *, overwrite: bool = False) -> None:
    """Raise ExistsError if a tokenizer must not be saved there: `overwrite` replaces only a tokenizer."""
    target = Path(folder)
    if not target.exists():
        return
    if not target.is_dir():
        raise ExistsError(f"{folder} is a file; a tokenizer is saved as a folder")
    names = {file.name for file in target.iterdir()}
    others = names - {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    if others:
        raise ExistsError(
            f"{folder} contains files that do not belong to a tokenizer ({min(others)}); choose another folder"
        )
    if names and not overwrite:
        raise ExistsError(f"{folder} already exists; pass overwrite to replace it, or choose another folder")


def _check_options(
    kind: str, style: str, vocab_size: int, min_frequency: int, special_tokens: Sequence[str], limit_alphabet: int
) -> dict[str, str]:
    """Check the options of `train`; return the special tokens by role."""
    for name, value, allowed in (("kind", kind, KINDS), ("style", style, STYLES)):
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(allowed)}")
    numbers = {"vocab_size": vocab_size, "min_frequency": min_frequency, "limit_alphabet": limit_alphabet}
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    roles = BRACKETS if style == "brackets" else ANGLES
    every = [*roles.values(), *special_tokens]
    if len(set(every)) < len(every) or any(len(text) < 2 or text.isalnum() for text in special_tokens):
        raise ConfigError(
            f"special_tokens={list(special_tokens)!r} must not be plain words (write '[NAME]'), and must differ from "
            f"each other and from {', '.join(every[:5])}"
        )
    return roles


def _check_size(size: int, needed: int, what: str) -> None:
    if needed > size:
        raise ConfigError(
            f"vocab_size leaves room for {size} tokens, but there are {needed} {what}; increase vocab_size or decrease "
            "limit_alphabet"
        )


def pre_tokenizing_backend(kind: Kind, lowercase: bool) -> tokenizers.Tokenizer:
    """A tokenizer with normalizer, pre-tokenizer and decoder, but no vocabulary."""
    lower = [normalizers.Lowercase()] if lowercase else []
    if kind == "wordpiece":
        backend = tokenizers.Tokenizer(models.WordPiece())
        backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece(prefix=PREFIX)
    elif kind == "bpe":
        backend = tokenizers.Tokenizer(models.BPE())
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), *lower])
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend = tokenizers.Tokenizer(models.Unigram())
        spaces = normalizers.Replace(Regex(r"\s+"), " ")
        backend.normalizer = normalizers.Sequence([normalizers.NFKC(), spaces, normalizers.Strip(), *lower])
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    return backend


def _add_special_tokens(
    backend: tokenizers.Tokenizer,
    kind: Kind,
    style: Style,
    roles: dict[str, str],
    special_tokens: Sequence[str],
    max_length: int | None,
) -> Tokenizer:
    """Add the special tokens and the post-processing template."""
    # If a space belongs to the following word, the space before a mask belongs to the masked word.
    mask_lstrip = kind != "wordpiece"
    named = {
        role: AddedToken(text, special=True, normalized=False, lstrip=mask_lstrip and role == "mask")
        for role, text in roles.items()
    }
    others = [AddedToken(text, special=True, normalized=False) for text in special_tokens]
    backend.add_special_tokens([*named.values(), *others])
    cls, sep = roles["cls"], roles["sep"]
    ids = [(text, backend.token_to_id(text)) for text in (cls, sep)]
    pair = f"{cls} $A {sep} $B:1 {sep}:1" if style == "brackets" else f"{cls} $A {sep} {sep} $B {sep}"
    template = processors.TemplateProcessing(f"{cls} $A {sep}", pair, ids)
    # Offsets of byte-level tokens exclude the space before a word, like those of the other kinds.
    trim = [processors.ByteLevel(trim_offsets=True)] if kind == "bpe" else []
    backend.post_processor = processors.Sequence([*trim, template]) if trim else template
    inputs = ["input_ids", *["token_type_ids"][: style == "brackets" and kind != "bpe"], "attention_mask"]
    options: dict[str, Any] = {"model_input_names": inputs}
    if special_tokens:
        options["additional_special_tokens"] = list(special_tokens)
    if max_length is not None:
        options["model_max_length"] = max_length
    return Tokenizer(backend, settings=TokenizerSettings(options=options, named=named))
