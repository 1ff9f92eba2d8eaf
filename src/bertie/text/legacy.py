"""Tokenizers of folders that hold no tokenizer.json: old vocabulary files become a `tokenizers.Tokenizer`.

Three kinds of files are read: `vocab.txt` (WordPiece), `vocab.json` with `merges.txt` (byte-level BPE) and a
SentencePiece model. What a file does not say (special tokens, template, id layout, text rules) is the checkpoint
family's knowledge and comes in as a `LegacyTokenizer`, a recipe of plain facts. No family is named here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
from bertie.text.tokenizer_files import parse_json, read_bytes, read_text, rust_errors, typed

ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in the order in which transformers adds what is missing
LOW_LINE = "▁"  # SentencePiece's visible space


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyTokenizer:
    """What a family knows about its tokenizer and its old vocabulary files do not say.

    >>> recipe = LegacyTokenizer(kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]")
    >>> recipe.pair
    '{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1'
    """

    kind: Literal["wordpiece", "byte_bpe", "sentencepiece"]
    files: tuple[str, ...]  # byte_bpe: both are needed; else the first that is there
    cls: str
    sep: str
    unk: str
    pad: str | None = None
    mask: str | None = None
    bos: str | None = None
    eos: str | None = None
    extra: tuple[str, ...] = ()  # more special tokens, taken where the vocabulary has them
    mask_takes_space: bool = False  # the mask token swallows the space before it
    appended: tuple[str, ...] = ()  # special tokens that get the ids after the vocabulary where it lacks them
    single: str = "{cls}:0 $A:0 {sep}:0"
    pair: str = "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1"
    segments: bool = True  # whether the template's segment ids reach the model; else it is fed zeros
    faithful: bool = True  # transformers' class of this kind keeps the rules of a tokenizer.json

    # Text rules. None: tokenizer_config.json is not asked.
    lowercase: bool | None = None
    strip_accents: bool | None = None  # None: as `lowercase` (wordpiece); sentencepiece reads `keep_accents` instead
    prefix_space: bool | None = None
    trim_offsets: bool = False  # a token's offsets leave its leading space out

    # SentencePiece only. Ids: `head`, then the model's pieces without the first `skip`, then `tail`.
    head: tuple[tuple[str, float], ...] = ()
    skip: int = 0
    tail: tuple[str, ...] = ()
    plain_quotes: bool = False  # `` and '' become "
    split_digit_comma: bool = False  # "1999," is never one piece
    strip: Literal["none", "right", "both"] = "none"
    collapse: str | None = None  # what a run of spaces becomes
    split_whitespace: bool = False  # words are cut at whitespace before pieces are found
    ignore_byte_fallback: bool = False  # unknown characters are `unk` even where the model has byte pieces


# ── settings: the three little JSON files beside a vocabulary ─────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Settings:
    """What tokenizer_config.json, special_tokens_map.json and added_tokens.json say, merged as transformers merges."""

    options: dict[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    named: dict[str, AddedToken] = field(default_factory=dict)  # by role: "cls", "mask", …
    bare: frozenset[str] = frozenset()  # roles whose token is a mere string, which says nothing about its flags
    extra: tuple[AddedToken, ...] = ()
    declared: dict[int, AddedToken] = field(default_factory=dict)  # tokens whose id is written down
    raw: dict[str, bytes] = field(default_factory=dict)  # the files as they are

    def flag(self, key: str) -> bool | None:
        """An option that is true, false or not said.

        >>> Settings({"do_lower_case": False}).flag("do_lower_case")
        False
        """
        value = self.options.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"tokenizer_config.json: {key}={value!r} must be true, false or null")
        return value


def read_settings(folder: Path) -> Settings:
    """Read the small JSON files beside a vocabulary; those that are not there say nothing.

    >>> read_settings(Path("no/such/folder")).options
    {}
    """
    raw = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            raw[name] = read_bytes(folder / name)
    options = parse_json(raw.get("tokenizer_config.json", b"{}"), "tokenizer_config.json")
    values: dict[str, Any] = dict(options)
    declared: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in options:
        # The newer form: it holds everything, and transformers reads neither of the other two files beside it.
        table = typed(options["added_tokens_decoder"], dict, "tokenizer_config.json: added_tokens_decoder")
        for key, value in table.items():
            if not key.isascii() or not key.isdigit() or len(key) > 9:
                raise CheckpointError(f"tokenizer_config.json: added_tokens_decoder has the key {key!r}, not an id")
            declared[int(key)] = _added(value, "tokenizer_config.json: added_tokens_decoder")
    else:
        values.update(parse_json(raw.get("special_tokens_map.json", b"{}"), "special_tokens_map.json"))
    named: dict[str, AddedToken] = {}
    bare: set[str] = set()
    extra: list[AddedToken] = []
    for key, value in values.items():
        role = key.removesuffix("_token")
        if role != key and isinstance(value, str | dict):
            token = _added(value, key, special=True)
            if role in ROLES:
                named[role] = token
                bare.update([role] if isinstance(value, str) else [])
            else:
                extra.append(token)  # a model's own token, such as "image_token"
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = values.get(key) or []
        for value in more.values() if isinstance(more, dict) else typed(more, list, key):
            extra.append(_added(value, key, special=True))
    if "added_tokens_decoder" not in options:
        specials = {t.content for t in (*named.values(), *extra)}
        for text, index in parse_json(raw.get("added_tokens.json", b"{}"), "added_tokens.json").items():
            if not isinstance(index, int) or isinstance(index, bool) or index < 0:
                raise CheckpointError(f"added_tokens.json: {text!r} has the id {index!r}, which is no id")
            special = text in specials
            declared[index] = AddedToken(text, normalized=not special, special=special)
    by_text = {t.content: t for t in declared.values()}
    if "added_tokens_decoder" in options:  # there the flags of a token stand beside its id
        bare = {role for role in bare if named[role].content not in by_text}
        named = {role: by_text.get(t.content, t) for role, t in named.items()}
        extra = [by_text.get(t.content, t) for t in extra]
    return Settings(options, named, frozenset(bare), tuple(extra), declared, raw)


def _added(value: Any, where: str, special: bool | None = None) -> AddedToken:
    """An AddedToken from its two JSON forms: a string, or an object of flags."""
    if isinstance(value, str):
        value = {"content": value}
    flags = {k: v for k, v in typed(value, dict, where).items() if k not in ("content", "__type", "id")}
    content = value.get("content")
    known = {"lstrip", "rstrip", "single_word", "normalized", "special"}
    if not isinstance(content, str) or not content or not _encodable(content):
        raise CheckpointError(f"{where}: a token's content must be a text, not {content!r}")
    for key, flag in flags.items():
        if key not in known or not isinstance(flag, bool):
            raise CheckpointError(f"{where}: token {content!r} has {key}={flag!r}; known flags: {sorted(known)}")
    if special is not None:
        flags["special"] = special
    return AddedToken(content, **flags)


# ── building ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def build(folder: str | Path, recipe: LegacyTokenizer) -> Tokenizer:
    """Build the tokenizer of a folder that holds old vocabulary files.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "vocab.txt").write_text("[PAD]\\n[UNK]\\n[CLS]\\n[SEP]\\n[MASK]\\nhello\\n")
    >>> recipe = LegacyTokenizer(kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]")
    >>> build(folder, recipe).encode("hello").tokens
    ['[CLS]', 'hello', '[SEP]']
    """
    folder = Path(folder)
    settings = read_settings(folder)
    named = specials(recipe, settings)
    paths = [folder / name for name in recipe.files if (folder / name).is_file()]
    needed = len(recipe.files) if recipe.kind == "byte_bpe" else 1
    if len(paths) < needed:
        wanted = (" and " if needed > 1 else " or ").join(recipe.files)
        raise CheckpointError(f"{folder} holds no tokenizer: neither tokenizer.json nor {wanted} is there")
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


def specials(recipe: LegacyTokenizer, settings: Settings) -> dict[str, AddedToken]:
    """The special tokens by role: what the files say, else what the recipe says.

    >>> recipe = LegacyTokenizer(kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]")
    >>> specials(recipe, Settings())["cls"].content
    '[CLS]'
    """
    named = {}
    for role in ROLES:
        token = settings.named.get(role)
        text = getattr(recipe, role) if token is None else token.content
        if text is not None and (token is None or role in settings.bare):
            lstrip = role == "mask" and recipe.mask_takes_space
            token = AddedToken(text, lstrip=lstrip, normalized=False, special=True)
        if token is not None:
            named[role] = token
    return named


def _wordpiece(path: Path, recipe: LegacyTokenizer, settings: Settings, named: Mapping[str, AddedToken]) -> Tokenizer:
    lines = read_text(path).split("\n")
    if lines[-1] == "":
        lines.pop()  # the newline after the last token
    vocab = {line.removesuffix("\r"): index for index, line in enumerate(lines)}
    unk = named["unk"].content
    if unk not in vocab:
        raise CheckpointError(f"{path} has no {unk!r}: it is cut off, or no WordPiece vocabulary")
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unk, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizer(recipe, settings, b"")
    tokenizer.pre_tokenizer = pre_tokenizer(recipe, settings)
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _byte_bpe(vocab_path: Path, merges_path: Path, recipe: LegacyTokenizer, settings: Settings) -> Tokenizer:
    vocab = parse_json(read_bytes(vocab_path), vocab_path.name)
    for token, index in vocab.items():
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 1 << 31 or not _encodable(token):
            raise CheckpointError(f"{vocab_path}: {token!r} has the id {index!r}, which is no id")
    if not vocab:
        raise CheckpointError(f"{vocab_path} is empty")
    merges = []
    for number, line in enumerate(read_text(merges_path).split("\n"), 1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(f"{merges_path}, line {number}: {line[:80]!r} must be two tokens and a space")
        merges.append((left, right))
    made = {left + right for left, right in merges}
    lost = sum(len(token) > 1 and token not in made for token in vocab)
    if lost > 64 + len(vocab) // 100:  # special tokens and fillers are made by no merge, but they are few
        raise CheckpointError(f"{merges_path} makes all but {lost} of {len(vocab)} tokens: it is cut off")
    tokenizer = Tokenizer(models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    tokenizer.pre_tokenizer = pre_tokenizer(recipe, settings)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    path: Path, recipe: LegacyTokenizer, settings: Settings, named: Mapping[str, AddedToken]
) -> Tokenizer:
    model = read_sentencepiece(path)
    if model.byte_fallback and not recipe.ignore_byte_fallback:
        raise ConfigError(f"{path}: byte fallback is not supported; save a tokenizer.json beside it")
    if not model.trims_spaces and recipe.split_whitespace:
        raise ConfigError(f"{path}: remove_extra_whitespaces=false contradicts a family that splits at whitespace")
    pieces = list(recipe.head)
    for text, score, _ in model.pieces[recipe.skip :]:
        # "1999," was cut into "1999" and "," before training saw it; a score this low keeps it from being chosen.
        low = recipe.split_digit_comma and len(text) > 1 and text[-1] == "," and text[-2].isdigit()
        pieces.append((text, score - 100 if low else score))
    pieces += [(text, 0.0) for text in recipe.tail]
    vocab = {text: index for index, (text, _) in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise CheckpointError(f"{path} holds a piece twice")
    unk = named["unk"].content if recipe.head else model.pieces[model.unk_id][0]
    if unk not in vocab:
        raise CheckpointError(f"{path} has no piece {unk!r}")
    if model.kind == "unigram":
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=vocab[unk], byte_fallback=False))
    else:
        outside = {text for text, _, kind in model.pieces if kind not in (NORMAL, USER)}
        merges = _merges([(text, score) for text, score in pieces if text not in outside])
        tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unk, fuse_unk=True))
    rules = normalizer(recipe, settings, model.charsmap, model.trims_spaces)
    if rules is not None:
        tokenizer.normalizer = rules
    tokenizer.pre_tokenizer = pre_tokenizer(recipe, settings, model.prefix_space)
    scheme = _scheme(recipe, settings, model.prefix_space)
    tokenizer.decoder = decoders.Metaspace(replacement=LOW_LINE, prepend_scheme=scheme)
    odd = []
    for text, _, kind in model.pieces[recipe.skip :]:
        # SentencePiece finds user-defined symbols as it finds pieces, and so does the model here. Only one that the
        # normalizer would change must be taken out of the text before it.
        changed = kind == USER and rules is not None and rules.normalize_str(text) != text
        if kind == CONTROL or changed or (kind == USER and any(c.isspace() for c in text)):
            odd.append(AddedToken(text, normalized=False, special=kind == CONTROL))
    roles = {t.content for t in named.values()}  # these come later, with their own flags
    tokenizer.add_tokens([t for t in odd if t.content not in roles])
    return tokenizer


def _merges(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """SentencePiece's BPE joins the pair whose joint piece scores best: best piece first, each with all its halves."""
    known = {text for text, _ in pieces}
    merges = []
    for text, _ in sorted(pieces, key=lambda p: -p[1]):
        merges += [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in known and text[i:] in known]
    return merges


def normalizer(
    recipe: LegacyTokenizer, settings: Settings, charsmap: bytes, trims_spaces: bool = True
) -> normalizers.Normalizer | None:
    """The rules that change a text before it is cut.

    >>> recipe = LegacyTokenizer(
    ...     kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]", lowercase=True)
    >>> normalizer(recipe, Settings(), b"").normalize_str("Hé")
    'he'
    """
    lowercase = False
    if recipe.lowercase is not None:
        said = settings.flag("do_lower_case")
        lowercase = recipe.lowercase if said is None else said
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
    if recipe.plain_quotes:
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    keeps = settings.flag("keep_accents")
    if recipe.strip_accents is not None and (recipe.strip_accents if keeps is None else not keeps):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if lowercase:
        steps.append(normalizers.Lowercase())
    if recipe.strip == "both" and trims_spaces:
        steps.append(normalizers.Strip())
    if charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    if recipe.strip == "right" and trims_spaces:
        steps.append(normalizers.Strip(left=False, right=True))
    if recipe.collapse is not None and trims_spaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), recipe.collapse))
    if len(steps) < 2:
        return steps[0] if steps else None
    return normalizers.Sequence(steps)


def pre_tokenizer(
    recipe: LegacyTokenizer, settings: Settings, prefix_space: bool = True
) -> pre_tokenizers.PreTokenizer:
    """The rules that cut a text into words.

    >>> recipe = LegacyTokenizer(kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]")
    >>> [word for word, _ in pre_tokenizer(recipe, Settings()).pre_tokenize_str("a, b")]
    ['a', ',', 'b']
    """
    if recipe.kind == "wordpiece":
        return pre_tokenizers.BertPreTokenizer()
    if recipe.kind == "byte_bpe":
        return pre_tokenizers.ByteLevel(add_prefix_space=_prefix_space(recipe, settings))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if recipe.split_whitespace:
        steps.append(pre_tokenizers.WhitespaceSplit())
    if settings.flag("split_by_punct"):
        steps.append(pre_tokenizers.Punctuation(behavior="isolated"))
    scheme = _scheme(recipe, settings, prefix_space)
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.Metaspace(replacement=LOW_LINE, prepend_scheme=scheme)])


def _prefix_space(recipe: LegacyTokenizer, settings: Settings) -> bool:
    said = settings.flag("add_prefix_space") if recipe.prefix_space is not None else None
    return bool(recipe.prefix_space) if said is None else said


def _scheme(recipe: LegacyTokenizer, settings: Settings, model_says: bool) -> Literal["always", "never"]:
    return "always" if _prefix_space(recipe, settings) and model_says else "never"


def _add_tokens(
    tokenizer: Tokenizer, recipe: LegacyTokenizer, settings: Settings, named: Mapping[str, AddedToken]
) -> None:
    """Make special and added tokens known, so that they are found in a text and never cut."""
    add_declared(tokenizer, settings)
    stated = {t.content for t in settings.named.values()} | set(recipe.appended)
    wanted = [t for t in named.values() if t.content in stated or _has(tokenizer, t)]
    extras = [AddedToken(text, normalized=False, special=True) for text in recipe.extra]
    add_missing(tokenizer, [*wanted, *[t for t in extras if _has(tokenizer, t)], *settings.extra])


def add_missing(tokenizer: Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add special tokens, but none that is there: adding it again would overwrite its flags.

    >>> tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    >>> add_missing(tokenizer, [AddedToken("<a>", lstrip=True), AddedToken("<a>")])
    >>> tokenizer.get_added_tokens_decoder()[1].lstrip
    True
    """
    present = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    for token in tokens:
        if token.content not in present:
            tokenizer.add_special_tokens([token])
            present.add(token.content)


def add_declared(tokenizer: Tokenizer, settings: Settings) -> None:
    """Add the tokens whose ids are written down, and see that each gets the id that is written.

    >>> tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    >>> add_declared(tokenizer, Settings(declared={1: AddedToken("<new>")}))
    >>> tokenizer.token_to_id("<new>")
    1
    """
    present = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    for index, token in sorted(settings.declared.items()):
        if token.content in present:
            continue
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        got = tokenizer.token_to_id(token.content)
        if got != index:
            raise CheckpointError(
                f"token {token.content!r} should have the id {index} but gets {got}: "
                "the vocabulary and tokenizer_config.json or added_tokens.json do not belong together"
            )


def _has(tokenizer: Tokenizer, token: AddedToken) -> bool:
    return tokenizer.token_to_id(token.content) is not None


def _template(
    tokenizer: Tokenizer,
    recipe: LegacyTokenizer,
    settings: Settings,
    named: Mapping[str, AddedToken],
    folder: Path,
) -> processors.PostProcessor:
    ids: list[tuple[str, int]] = []
    for role in ("cls", "sep"):
        index = tokenizer.token_to_id(named[role].content)
        if index is None:
            text = named[role].content
            raise CheckpointError(f"{folder}: the vocabulary lacks {role}={text!r}: it is cut off, or another model's")
        ids.append((named[role].content, index))

    def fill(template: str) -> list[str]:
        return [part.format(cls=ids[0][0], sep=ids[1][0]) for part in template.split()]

    template = processors.TemplateProcessing(fill(recipe.single), fill(recipe.pair), ids)
    if not recipe.trim_offsets:
        return template
    trim = processors.ByteLevel(trim_offsets=True, add_prefix_space=_prefix_space(recipe, settings))
    return processors.Sequence([trim, template])


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")  # "\\ud800" is legal JSON and no text
    except UnicodeEncodeError:
        return False
    return True
