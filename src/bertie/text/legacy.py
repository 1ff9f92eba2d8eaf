"""Build a `tokenizers.Tokenizer` from the vocabulary files of folders without a tokenizer.json.

Three formats are read: `vocab.txt` (WordPiece), `vocab.json` with `merges.txt` (byte-level BPE), and
SentencePiece models. What these files do not contain (special tokens, template, id layout,
normalization) depends on the model family and is described by a `LegacyTokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from bertie.errors import CheckpointError, ConfigError
from bertie.text.sentencepiece import CONTROL, NORMAL, USER, read_sentencepiece
from bertie.text.tokenizer_files import parse_json, read_bytes, read_text, rust_errors
from bertie.text.tokenizer_settings import (
    ROLES,
    TokenizerSettings,
    add_missing,
    add_with_ids,
    is_encodable,
    read_settings,
)

METASPACE = "▁"  # how SentencePiece writes a space


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyTokenizer:
    """The properties of a family's tokenizer that its vocabulary files do not contain.

    >>> recipe = LegacyTokenizer(kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]")
    >>> recipe.pair
    '{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1'
    """

    kind: Literal["wordpiece", "byte_bpe", "sentencepiece"]
    files: tuple[str, ...]  # byte_bpe: both are required; otherwise the first that exists
    cls: str
    sep: str
    unk: str
    pad: str | None = None
    mask: str | None = None
    bos: str | None = None
    eos: str | None = None
    extra: tuple[str, ...] = ()  # other special tokens, if the vocabulary has them
    mask_lstrip: bool = False  # the mask token includes the preceding space
    appended: tuple[str, ...] = ()  # special tokens to append if the vocabulary lacks them
    single: str = "{cls}:0 $A:0 {sep}:0"
    pair: str = "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1"
    segments: bool = True  # False: the model gets zeros instead of the template's segment ids
    class_keeps_rules: bool = True  # transformers' tokenizer class keeps the rules of a tokenizer.json

    # Normalization. None: not configurable in tokenizer_config.json.
    lowercase: bool | None = None
    strip_accents: bool | None = None  # None: as `lowercase` (wordpiece); sentencepiece uses `keep_accents`
    add_prefix_space: bool | None = None
    trim_offsets: bool = False  # a token's offsets exclude its leading space

    # SentencePiece only. Ids: `leading_pieces`, the model's pieces without the first `skip_pieces`,
    # `trailing_pieces`.
    leading_pieces: tuple[tuple[str, float], ...] = ()
    skip_pieces: int = 0
    trailing_pieces: tuple[str, ...] = ()
    replace_quotes: bool = False  # `` and '' become "
    split_digit_comma: bool = False  # "1999," is never a single piece
    strip: Literal["none", "right", "both"] = "none"
    collapse_spaces: str | None = None  # the replacement of several spaces
    split_whitespace: bool = False  # split at whitespace before segmentation
    ignore_byte_fallback: bool = False  # unknown characters are `unk` even if the model has byte pieces


def build(folder: str | Path, recipe: LegacyTokenizer) -> Tokenizer:
    """Build the tokenizer of a folder from its vocabulary files.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "vocab.txt").write_text("[PAD]\\n[UNK]\\n[CLS]\\n[SEP]\\n[MASK]\\nhello\\n")
    >>> recipe = LegacyTokenizer(kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]")
    >>> build(folder, recipe).encode("hello").tokens
    ['[CLS]', 'hello', '[SEP]']
    """
    folder = Path(folder)
    settings = read_settings(folder)
    named = special_tokens(recipe, settings)
    paths = [folder / name for name in recipe.files if (folder / name).is_file()]
    needed = len(recipe.files) if recipe.kind == "byte_bpe" else 1
    if len(paths) < needed:
        names = (" and " if needed > 1 else " or ").join(recipe.files)
        raise CheckpointError(f"{folder} has no tokenizer: there is neither tokenizer.json nor {names}")
    with rust_errors(f"the vocabulary in {folder}"):
        if recipe.kind == "wordpiece":
            tokenizer = _wordpiece(paths[0], recipe, settings, named)
        elif recipe.kind == "byte_bpe":
            tokenizer = _byte_bpe(paths[0], paths[1], recipe, settings)
        else:
            tokenizer = _sentencepiece(paths[0], recipe, settings, named)
        _add_tokens(tokenizer, recipe, settings, named)
        tokenizer.post_processor = _template(tokenizer, recipe, settings, named, folder)
    return tokenizer


def special_tokens(recipe: LegacyTokenizer, settings: TokenizerSettings) -> dict[str, AddedToken]:
    """The special tokens by role: those of the files, else those of the recipe.

    >>> recipe = LegacyTokenizer(kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]")
    >>> special_tokens(recipe, TokenizerSettings())["cls"].content
    '[CLS]'
    """
    named = {}
    for role in ROLES:
        token = settings.named.get(role)
        text = getattr(recipe, role) if token is None else token.content
        if text is not None and (token is None or role in settings.without_flags):
            lstrip = role == "mask" and recipe.mask_lstrip
            token = AddedToken(text, lstrip=lstrip, normalized=False, special=True)
        if token is not None:
            named[role] = token
    return named


def _wordpiece(
    path: Path, recipe: LegacyTokenizer, settings: TokenizerSettings, named: Mapping[str, AddedToken]
) -> Tokenizer:
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()  # the newline after the last token
    vocab = {line.removesuffix("\r"): index for index, line in enumerate(lines)}
    unk = named["unk"].content
    if unk not in vocab:
        raise CheckpointError(f"{path} has no {unk!r}: it is truncated, or not a WordPiece vocabulary")
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unk, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizer(recipe, settings, b"")
    tokenizer.pre_tokenizer = pre_tokenizer(recipe, settings)
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _byte_bpe(vocab_path: Path, merges_path: Path, recipe: LegacyTokenizer, settings: TokenizerSettings) -> Tokenizer:
    vocab = parse_json(read_bytes(vocab_path), vocab_path.name)
    for token, index in vocab.items():
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 1 << 31 or not is_encodable(token):
            raise CheckpointError(f"{vocab_path}: {token!r} has the id {index!r}, which is not a token id")
    if not vocab:
        raise CheckpointError(f"{vocab_path} is empty")
    merges = []
    for number, line in enumerate(read_text(merges_path).split("\n"), 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(
                f"{merges_path}, line {number}: {line[:80]!r} must be two tokens separated by a space"
            )
        merges.append((left, right))
    merged = {left + right for left, right in merges}
    unreachable = sum(len(token) > 1 and token not in merged for token in vocab)
    if unreachable > 64 + len(vocab) // 100:  # special and unused tokens result from no merge, but they are few
        raise CheckpointError(
            f"{merges_path} lacks the merges of {unreachable} of {len(vocab)} tokens: it is truncated"
        )
    tokenizer = Tokenizer(models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.pre_tokenizer = pre_tokenizer(recipe, settings)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    path: Path, recipe: LegacyTokenizer, settings: TokenizerSettings, named: Mapping[str, AddedToken]
) -> Tokenizer:
    model = read_sentencepiece(path)
    if model.byte_fallback and not recipe.ignore_byte_fallback:
        raise ConfigError(f"{path}: byte fallback is not supported; save a tokenizer.json in the same folder")
    if not model.remove_extra_whitespaces and recipe.split_whitespace:
        raise ConfigError(f"{path}: remove_extra_whitespaces=false contradicts a family that splits at whitespace")
    pieces = list(recipe.leading_pieces)
    for text, score, _ in model.pieces[recipe.skip_pieces :]:
        # These models split "1999," into "1999" and ",": a score this low keeps the piece from being chosen.
        low = recipe.split_digit_comma and len(text) > 1 and text[-1] == "," and text[-2].isdigit()
        pieces.append((text, score - 100 if low else score))
    pieces += [(text, 0.0) for text in recipe.trailing_pieces]
    vocab = {text: index for index, (text, _) in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise CheckpointError(f"{path} has a duplicate piece")
    unk = named["unk"].content if recipe.leading_pieces else model.pieces[model.unk_id][0]
    if unk not in vocab:
        raise CheckpointError(f"{path} has no piece {unk!r}")
    if model.kind == "unigram":
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=vocab[unk], byte_fallback=False))
    else:
        excluded = {text for text, _, kind in model.pieces if kind not in (NORMAL, USER)}
        merges = _merges([(text, score) for text, score in pieces if text not in excluded])
        tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unk, fuse_unk=True))
    rules = normalizer(recipe, settings, model.precompiled_charsmap, model.remove_extra_whitespaces)
    if rules is not None:
        tokenizer.normalizer = rules
    tokenizer.pre_tokenizer = pre_tokenizer(recipe, settings, model.add_dummy_prefix)
    scheme = _prepend_scheme(recipe, settings, model.add_dummy_prefix)
    tokenizer.decoder = decoders.Metaspace(replacement=METASPACE, prepend_scheme=scheme)
    added = []
    for text, _, kind in model.pieces[recipe.skip_pieces :]:
        # User-defined symbols are segmented like other pieces, as in SentencePiece. Only those that the
        # normalizer would change must be matched before it.
        changed = kind == USER and rules is not None and rules.normalize_str(text) != text
        if kind == CONTROL or changed or (kind == USER and any(c.isspace() for c in text)):
            added.append(AddedToken(text, normalized=False, special=kind == CONTROL))
    roles = {token.content for token in named.values()}  # added later, with their own flags
    tokenizer.add_tokens([token for token in added if token.content not in roles])
    return tokenizer


def _merges(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE model: it merges the pair whose result scores best."""
    known = {text for text, _ in pieces}
    merges = []
    for text, _ in sorted(pieces, key=lambda p: -p[1]):
        merges += [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in known and text[i:] in known]
    return merges


def normalizer(
    recipe: LegacyTokenizer, settings: TokenizerSettings, precompiled_charsmap: bytes, trim: bool = True
) -> normalizers.Normalizer | None:
    """The normalizer of a family's tokenizer.

    >>> recipe = LegacyTokenizer(
    ...     kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]", lowercase=True)
    >>> normalizer(recipe, TokenizerSettings(), b"").normalize_str("Hé")
    'he'
    """
    lowercase = False
    if recipe.lowercase is not None:
        configured = settings.flag("do_lower_case")
        lowercase = recipe.lowercase if configured is None else configured
    if recipe.kind == "wordpiece":
        if settings.flag("do_basic_tokenize") is False:
            raise ConfigError("tokenizer_config.json: do_basic_tokenize=false is not supported; save a tokenizer.json")
        accents, chinese = settings.flag("strip_accents"), settings.flag("tokenize_chinese_chars")
        return normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=chinese is not False,
            strip_accents=recipe.strip_accents if accents is None else accents,
            lowercase=lowercase,
        )
    if recipe.kind == "byte_bpe":
        return None
    steps: list[normalizers.Normalizer] = []
    if recipe.replace_quotes:
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    keep_accents = settings.flag("keep_accents")
    if recipe.strip_accents is not None and (recipe.strip_accents if keep_accents is None else not keep_accents):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if lowercase:
        steps.append(normalizers.Lowercase())
    if recipe.strip == "both" and trim:
        steps.append(normalizers.Strip())
    if precompiled_charsmap:
        steps.append(normalizers.Precompiled(precompiled_charsmap))
    if recipe.strip == "right" and trim:
        steps.append(normalizers.Strip(left=False, right=True))
    if recipe.collapse_spaces is not None and trim:
        steps.append(normalizers.Replace(Regex(" {2,}"), recipe.collapse_spaces))
    if len(steps) < 2:
        return steps[0] if steps else None
    return normalizers.Sequence(steps)


def pre_tokenizer(
    recipe: LegacyTokenizer, settings: TokenizerSettings, add_dummy_prefix: bool = True
) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of a family's tokenizer.

    >>> recipe = LegacyTokenizer(kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]")
    >>> [word for word, _ in pre_tokenizer(recipe, TokenizerSettings()).pre_tokenize_str("a, b")]
    ['a', ',', 'b']
    """
    if recipe.kind == "wordpiece":
        return pre_tokenizers.BertPreTokenizer()
    if recipe.kind == "byte_bpe":
        return pre_tokenizers.ByteLevel(add_prefix_space=_add_prefix_space(recipe, settings))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if recipe.split_whitespace:
        steps.append(pre_tokenizers.WhitespaceSplit())
    if settings.flag("split_by_punct"):
        steps.append(pre_tokenizers.Punctuation(behavior="isolated"))
    scheme = _prepend_scheme(recipe, settings, add_dummy_prefix)
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.Metaspace(replacement=METASPACE, prepend_scheme=scheme)])


def _add_prefix_space(recipe: LegacyTokenizer, settings: TokenizerSettings) -> bool:
    configured = settings.flag("add_prefix_space") if recipe.add_prefix_space is not None else None
    return bool(recipe.add_prefix_space) if configured is None else configured


def _prepend_scheme(
    recipe: LegacyTokenizer, settings: TokenizerSettings, add_dummy_prefix: bool
) -> Literal["always", "never"]:
    return "always" if _add_prefix_space(recipe, settings) and add_dummy_prefix else "never"


def _add_tokens(
    tokenizer: Tokenizer, recipe: LegacyTokenizer, settings: TokenizerSettings, named: Mapping[str, AddedToken]
) -> None:
    """Add special and added tokens, so that they are matched in a text and never split."""
    add_with_ids(tokenizer, settings)
    required = {token.content for token in settings.named.values()} | set(recipe.appended)
    special = [token for token in named.values() if token.content in required or _has(tokenizer, token)]
    optional = [AddedToken(text, normalized=False, special=True) for text in recipe.extra]
    extra = [token for token in optional if _has(tokenizer, token)]
    add_missing(tokenizer, [*special, *extra, *settings.extra])


def _has(tokenizer: Tokenizer, token: AddedToken) -> bool:
    return tokenizer.token_to_id(token.content) is not None


def _template(
    tokenizer: Tokenizer,
    recipe: LegacyTokenizer,
    settings: TokenizerSettings,
    named: Mapping[str, AddedToken],
    folder: Path,
) -> processors.PostProcessor:
    ids: list[tuple[str, int]] = []
    for role in ("cls", "sep"):
        index = tokenizer.token_to_id(named[role].content)
        if index is None:
            text = named[role].content
            raise CheckpointError(
                f"{folder}: the vocabulary lacks {role}={text!r}: it is truncated, or belongs to another model"
            )
        ids.append((named[role].content, index))

    def fill(template: str) -> list[str]:
        return [part.format(cls=ids[0][0], sep=ids[1][0]) for part in template.split()]

    template = processors.TemplateProcessing(fill(recipe.single), fill(recipe.pair), ids)
    if not recipe.trim_offsets:
        return template
    trim = processors.ByteLevel(trim_offsets=True, add_prefix_space=_add_prefix_space(recipe, settings))
    return processors.Sequence([trim, template])
