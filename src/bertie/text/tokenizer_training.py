"""Learns a tokenizer from texts: WordPiece, byte-level BPE or Unigram, the same one from the same texts each time.

The trainers of the library `tokenizers` keep words in tables of random order, so that two runs give two WordPiece
vocabularies, and two Unigrams with other scores. Here words are counted and sorted first, and every tie is broken by
the tokens themselves. The byte-level BPE is the library's to the last merge.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import shutil
import tempfile
import unicodedata
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from bertie.errors import ConfigError, ExistsError, InputError
from bertie.text.legacy import LOW_LINE, Settings
from bertie.text.tokenizer import Tokenizer, checked_text

Kind = Literal["wordpiece", "bpe", "unigram"]
Style = Literal["brackets", "angles"]
KINDS, STYLES = ("wordpiece", "bpe", "unigram"), ("brackets", "angles")

# The special tokens in the order of their ids.
BRACKETS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ANGLES = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
PREFIX = "##"  # what marks a piece inside a word
LONGEST = 16  # characters of a Unigram piece, as in SentencePiece

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


def train(
    texts: Iterable[str],
    kind: Kind = "wordpiece",
    vocab: int = 30_000,
    *,
    style: Style = "brackets",
    lowercase: bool | None = None,
    min_count: int = 2,
    special: Sequence[str] = (),
    alphabet: int = 1000,
    max_length: int | None = 512,
) -> Tokenizer:
    """Learn a tokenizer of `vocab` tokens, or of as many as the texts have.

    `wordpiece` is BERT's, `bpe` the byte-level one of RoBERTa and ModernBERT, `unigram` that of ALBERT and DeBERTa-v3.
    `style` names the special tokens: [CLS] A [SEP] B [SEP], or <s> A </s></s> B </s>; `special` are more of them.
    `lowercase` is what the models of the kind mostly do, if it is not said: WordPiece does, the others do not. Pieces
    seen less than `min_count` times are not taken, nor characters beyond the `alphabet` most frequent ones.

    >>> tokenizer = train(["the cat sat on the mat", "the cat"] * 3, vocab=30)
    >>> [tokenizer.token(i) for i in tokenizer.encode("The cat, sat").ids]
    ['[CLS]', 'the', 'cat', '[UNK]', 'sat', '[SEP]']
    """
    named = _checked(kind, style, vocab, min_count, special, alphabet)
    backend = _rules(kind, kind == "wordpiece" if lowercase is None else lowercase)
    words = count_words(texts, backend)
    tokens = [*named.values(), *special]
    if kind == "unigram":
        pieces = _unigram(words, tokens, vocab - len(tokens), min_count, alphabet)
        backend.model = models.Unigram([(token, 0.0) for token in tokens] + pieces, tokens.index(named["unk"]))
    elif kind == "bpe":
        tokens += sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = _merge(words, tokens, "", vocab, min_count)
        backend.model = models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    else:
        known = _alphabet(words, min_count, alphabet)
        words = {word: n for word, n in words.items() if known.issuperset(word)}
        inside = {c for word in words for c in word[1:]}
        tokens += [*sorted(known), *(PREFIX + c for c in sorted(inside))]
        _merge(words, tokens, PREFIX, vocab, min_count)
        backend.model = models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token=named["unk"])
    return _finish(backend, kind, style, named, special, max_length)


def extend(folder: str | Path, texts: Iterable[str], more: int = 1000, *, min_count: int = 5) -> Tokenizer:
    """Append the words of some texts to the WordPiece vocabulary of a folder, the old ids staying as they are.

    Those words are taken of which the old vocabulary makes the most pieces in total. The model's embeddings must be
    extend_vocabulary to the new `vocab_size` before it reads them.
    """
    if more < 1:
        raise ConfigError(f"more={more} must be at least 1")
    old = Tokenizer.from_folder(folder)
    if old.kind != "WordPiece":
        raise ConfigError(f"{folder} holds a {old.kind} vocabulary; only WordPiece can be extended by whole words")
    files = old.files()
    state = json.loads(files["tokenizer.json"])
    backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    words = count_words(texts, backend)
    longest = state["model"]["max_input_chars_per_word"]
    asked = [word for word, n in words.items() if n >= min_count and len(word) <= longest]
    gains = {
        word: words[word] * (len(pieces) - 1 or pieces[0].value == state["model"]["unk_token"])
        for word, pieces in ((word, backend.model.tokenize(word)) for word in asked)
    }
    taken = sorted((word for word in asked if gains[word]), key=lambda word: (-gains[word], word))[:more]
    # Added tokens may lie anywhere, so that the count of tokens does not say which ids are free.
    free = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    state["model"]["vocab"] |= {word: free + i for i, word in enumerate(taken)}
    raw = {name: data for name, data in files.items() if name != "tokenizer.json"}
    options = json.loads(raw["tokenizer_config.json"])
    longer = tokenizers.Tokenizer.from_str(json.dumps(state, ensure_ascii=False))
    return Tokenizer(longer, settings=Settings(options=options, raw=raw))


def save(tokenizer: Tokenizer, folder: str | Path, *, overwrite: bool = False) -> None:
    """Write a tokenizer's folder under a temporary name, then rename it: it is there whole, or not at all."""
    target = Path(os.path.abspath(folder))
    check_free(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        tokenizer.save(draft / "new")
        if target.exists():
            os.rename(target, draft / "old")
        try:
            os.rename(draft / "new", target)
        except BaseException:
            if (draft / "old").exists():
                os.rename(draft / "old", target)
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_free(folder: str | Path, *, overwrite: bool = False) -> None:
    """Raise if a tokenizer may not be written there: `overwrite` replaces a tokenizer, and never anything else."""
    target = Path(folder)
    if not target.exists():
        return
    if not target.is_dir():
        raise ExistsError(f"{folder} is a file; a tokenizer is saved as a folder")
    names = {file.name for file in target.iterdir()}
    others = names - {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    if others:
        raise ExistsError(f"{folder} holds more than a tokenizer ({min(others)}); name another folder")
    if names and not overwrite:
        raise ExistsError(f"{folder} is there already; allow it to be replaced (overwrite), or name another folder")


# ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

# Words never max_length over whitespace, whichever rules make them. To cut there first and count before the rules are
# applied means that they are applied once to each different chunk. BERT takes some of what Python calls whitespace for
# control characters, and deletes it: no cut is made there.
_CHUNK = re.compile(r"[^\S\x0b\x0c\x1c-\x1f\x85]*[\S\x0b\x0c\x1c-\x1f\x85]+")
_CHUNKS = 1 << 19  # different chunks held at a time


def count_words(texts: Iterable[str], backend: tokenizers.Tokenizer) -> dict[str, int]:
    """How often each word occurs, sorted by the word. Memory grows with the different words, not with the texts.

    >>> backend = tokenizers.Tokenizer(models.WordPiece())
    >>> backend.normalizer, backend.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    >>> count_words(["A cat.", "a dog"], backend)
    {'.': 1, 'a': 2, 'cat': 1, 'dog': 1}
    """
    words: Counter[str] = Counter()
    chunks: Counter[str] = Counter()
    for number, text in enumerate(texts):
        checked_text(text, f"text {number + 1}")
        chunks.update(_CHUNK.findall(text))
        if len(chunks) > _CHUNKS:
            _apply_rules(chunks, backend, words)
            chunks.clear()
    _apply_rules(chunks, backend, words)
    if not words:
        raise InputError("the texts hold no words: there is nothing to learn from")
    return dict(sorted(words.items()))


def _apply_rules(chunks: Counter[str], backend: tokenizers.Tokenizer, words: Counter[str]) -> None:
    normalize = backend.normalizer.normalize_str if backend.normalizer is not None else str
    cut: Any = backend.pre_tokenizer
    for chunk, count in chunks.items():
        for word, _ in cut.pre_tokenize_str(normalize(chunk)):
            words[word] += count


def _alphabet(words: dict[str, int], min_count: int, most: int) -> set[str]:
    """The most frequent characters; of those as frequent, the first by their code."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for c in word:
            counts[c] += count
    common = [c for c, count in counts.items() if count >= min_count]
    return set(sorted(common, key=lambda c: (-counts[c], c))[:most])


# ── merging pairs: WordPiece and BPE ──────────────────────────────────────────────────────────────────────────────────


def _merge(words: dict[str, int], tokens: list[str], prefix: str, size: int, min_count: int) -> list[tuple[str, str]]:
    """Merge the most frequent pair of neighbours again and again, the one of lower ids if two are as frequent.

    The new tokens go to the end of `tokens`, until there are `size`. `prefix` marks those inside a word.
    """
    if len(tokens) > size:
        raise _too_small(size, len(tokens), "special tokens and single characters")
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = [[ids[(prefix if i else "") + c] for i, c in enumerate(word)] for word in words]
    counts = list(words.values())
    # A pair of ids is one number, of which the order is that of the pair.
    pairs: defaultdict[int, int] = defaultdict(int)
    where: defaultdict[int, list[int]] = defaultdict(list)  # words that had the pair once, some of them twice
    for w, word in enumerate(symbols):
        for i in range(len(word) - 1):
            pair = word[i] << 32 | word[i + 1]
            pairs[pair] += counts[w]
            where[pair].append(w)
    heap = [(-count, pair) for pair, count in pairs.items() if count >= min_count]
    heapq.heapify(heap)
    merges = []
    while len(tokens) < size and heap:
        count, pair = heapq.heappop(heap)
        if -count != pairs[pair]:  # it has become rarer since it was put there
            if pairs[pair] >= min_count:
                heapq.heappush(heap, (-pairs[pair], pair))
            continue
        left, right = pair >> 32, pair & 0xFFFFFFFF
        text = tokens[left] + tokens[right].removeprefix(prefix)
        new = ids.setdefault(text, len(tokens))  # two pairs may spell one token
        if new == len(tokens):
            tokens.append(text)
        merges.append((tokens[left], tokens[right]))
        changes: defaultdict[int, int] = defaultdict(int)
        for w in where.pop(pair):
            word, count = symbols[w], counts[w]
            at = 0
            while at < len(word) - 1:
                if word[at] == left and word[at + 1] == right:
                    if at:
                        changes[word[at - 1] << 32 | left] -= count
                        changes[made := word[at - 1] << 32 | new] += count
                        where[made].append(w)
                    if at + 2 < len(word):
                        changes[right << 32 | word[at + 2]] -= count
                        changes[made := new << 32 | word[at + 2]] += count
                        where[made].append(w)
                    word[at : at + 2] = [new]
                at += 1
        for other, change in changes.items():
            pairs[other] += change
            if change > 0 and pairs[other] >= min_count:
                heapq.heappush(heap, (-pairs[other], other))
        pairs[pair] = 0
    return merges


# ── Unigram ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_WORDS = 200_000  # the most frequent words that a Unigram is learnt from
_SPAN = 24  # characters read at a time: so few that no product of probabilities underflows
_LIFT = 2.5  # about what a character of text costs, in nats: taken off, products stay near 1
_SHRINK = 0.75  # what is left of the pieces after each round, as in SentencePiece


def _unigram(
    words: dict[str, int], taken: Sequence[str], size: int, min_count: int, alphabet: int
) -> list[tuple[str, float]]:
    """Pieces, none of them `taken`, with the logarithms of their probabilities, by SentencePiece's method.

    It begins with the frequent substrings. Each round fits their probabilities by two steps of EM, then drops those
    pieces without which the texts lose least.
    """
    known = _alphabet(words, min_count, alphabet)
    if len(known) > size:
        raise _too_small(size, len(known), "characters")
    spans = _spans(words, known)
    pieces, scores = _seeds(spans, known, taken, 10 * size, min_count)
    counts = np.array(list(spans.values()), np.float64)
    ids = {piece: i for i, piece in enumerate(pieces)}
    forth = _Lattice.of(list(spans), ids)
    back = forth.mirror()
    others = _Lattice.of(list(pieces), ids, whole=False)  # how each piece could be spelled by others
    step = 0
    while True:
        lengths = np.array([len(piece) for piece in pieces])
        expected = _expect(forth, back, counts, np.exp(scores + _LIFT * lengths))
        scores = _log_share(np.maximum(expected, 0.5))
        single = lengths == 1
        keep = (expected >= 0.5) | single  # characters always stay
        step += 1
        if step % 2 == 0:
            if keep.sum() <= 1.1 * size:
                break
            best = others.max_length(scores, np.maximum, np.add, 0.0, -np.inf)[others.last]
            loss = np.where(keep, expected, 0) * (scores - np.where(single, 0, best))
            loss[single] = np.inf
            left = max(int(1.1 * size), int(_SHRINK * keep.sum()))
            keep[np.argsort(-loss, kind="stable")[left:]] = False
        pieces, scores = pieces[keep], scores[keep]
        forth, back, others = forth.only(keep), back.only(keep), others.only(keep, strings=keep)
    order = sorted(np.flatnonzero(keep), key=lambda i: (len(pieces[i]) > 1, -scores[i], pieces[i]))[:size]
    # By score, as SentencePiece has them. The last digits may be another processor's.
    return sorted(((pieces[i], round(float(scores[i]), 6)) for i in order), key=lambda one: (-one[1], one[0]))


def _seeds(
    spans: dict[str, int], known: set[str], taken: Sequence[str], most: int, min_count: int
) -> tuple[NDArray[np.object_], Floats]:
    """The characters and the substrings that cover most of the texts, with their first scores."""
    found: Counter[str] = Counter()
    for span, count in spans.items():
        for i in range(len(span)):
            for j in range(i + 1, min(i + LONGEST, len(span)) + 1):
                found[span[i:j]] += count
    frequent = [piece for piece, n in found.items() if n >= min_count and len(piece) > 1 and piece not in taken]
    frequent.sort(key=lambda piece: (-found[piece] * len(piece), piece))
    pieces = np.array([*sorted(known), *frequent[:most]], dtype=object)
    # 0: a character that only rarer words have
    return pieces, _log_share(np.array([found[piece] or 0.5 for piece in pieces], np.float64))


def _spans(words: dict[str, int], known: set[str]) -> dict[str, int]:
    """The most frequent words, cut into runs of letters, of digits and of signs, and where they are too long.

    No piece is learnt that mixes them, as "end.", nor one with a character that is not known.
    """
    sorts = {c: unicodedata.category(c)[0].replace("M", "L") for c in known}  # marks belong to their letters
    sorts = {c: sort if sort in "LN" else "S" for c, sort in sorts.items()}
    spans: Counter[str] = Counter()
    for word in sorted(words, key=lambda word: (-words[word], word))[:_WORDS]:
        head = LOW_LINE if word[0] == LOW_LINE and LOW_LINE in known else ""
        runs = groupby(word.removeprefix(head), sorts.get)
        parts = ["".join(run) if sort else "" for sort, run in runs] or [""]
        parts[0] = head + parts[0]
        for part in parts:
            for i in range(0, len(part), _SPAN):
                spans[part[i : i + _SPAN]] += words[word]
    return spans


@dataclass(frozen=True, slots=True)
class _Lattice:
    """All ways to spell some strings. Nodes are the gaps between characters, and edges are pieces.

    An edge's depth is how far from its string's begin it ends. Edges are in the order of their depths.
    """

    starts: Ints  # (E,)
    ends: Ints  # (E,)
    pieces: Ints  # (E,)
    depths: Ints  # (E,)
    first: Ints  # (N,) node of each string
    last: Ints  # (N,)

    @classmethod
    def of(cls, strings: Sequence[str], ids: dict[str, int], *, whole: bool = True) -> _Lattice:
        """Of these strings; without `whole`, none is spelled by the piece that is the same."""
        first = np.cumsum([0, *(len(string) + 1 for string in strings)], dtype=np.int32)
        starts, pieces, lengths = array("i"), array("i"), array("b")
        for base, string in zip(first[:-1].tolist(), strings, strict=True):
            size = len(string)
            for i in range(size):
                for j in range(i + 1, min(i + LONGEST, size) + 1):
                    piece = ids.get(string[i:j])
                    if piece is not None and (whole or j - i < size):
                        starts.append(base + i)
                        pieces.append(piece)
                        lengths.append(j - i)
        begins = np.array(starts, np.int32)
        ends = begins + np.array(lengths, np.int32)
        owner = np.searchsorted(first, begins, side="right") - 1
        return cls._sorted(begins, ends, np.array(pieces, np.int32), ends - first[owner], first[:-1], first[1:] - 1)

    @classmethod
    def _sorted(cls, starts: Ints, ends: Ints, pieces: Ints, depths: Ints, first: Ints, last: Ints) -> _Lattice:
        order = np.lexsort((ends, depths))
        return cls(starts[order], ends[order], pieces[order], depths[order], first, last)

    def mirror(self) -> _Lattice:
        """The same lattice, read from the end."""
        owner = np.searchsorted(self.first, self.starts, side="right") - 1
        return self._sorted(self.ends, self.starts, self.pieces, self.last[owner] - self.starts, self.last, self.first)

    def only(self, keep: NDArray[np.bool_], strings: NDArray[np.bool_] | None = None) -> _Lattice:
        """Without the other pieces, which changes the numbers of those that stay, and without the other strings."""
        edges = keep[self.pieces]
        first, last = self.first, self.last
        if strings is not None:
            edges &= strings[np.searchsorted(first, self.starts, side="right") - 1]
            first, last = first[strings], last[strings]
        number = np.cumsum(keep, dtype=np.int32) - 1
        pieces = number[self.pieces[edges]]
        return _Lattice(self.starts[edges], self.ends[edges], pieces, self.depths[edges], first, last)

    def max_length(self, scores: Floats, reduce: np.ufunc, join: np.ufunc, begin: float, never: float) -> Floats:
        """All ways to each node, reduced to one score: (nodes,)."""
        found = np.full(max(self.first.max(), self.last.max()) + 1, never)
        found[self.first] = begin
        if not len(self.ends):
            return found
        # (E,) -> one group of edges for each node, and one run of groups for each depth
        groups = np.flatnonzero(np.r_[True, np.diff(self.ends) != 0])
        runs = np.flatnonzero(np.r_[True, np.diff(self.depths[groups]) != 0]).tolist()
        for a, b in pairwise([*runs, len(groups)]):
            low, high = groups[a], groups[b] if b < len(groups) else len(self.ends)
            ways = join(found[self.starts[low:high]], scores[self.pieces[low:high]])
            found[self.ends[groups[a:b]]] = reduce.reduceat(ways, groups[a:b] - low)
        return found


def _expect(forth: _Lattice, back: _Lattice, counts: Floats, chances: Floats) -> Floats:
    """How often each piece is expected in the texts, over all ways to spell them: (P,)."""
    before = forth.max_length(chances, np.add, np.multiply, 1.0, 0.0)
    after = back.max_length(chances, np.add, np.multiply, 1.0, 0.0)
    share = np.repeat(counts / before[forth.last], forth.last - forth.first + 1)  # (nodes,)
    ways = before[forth.starts] * after[forth.ends] * share[forth.starts] * chances[forth.pieces]
    return np.bincount(forth.pieces, ways, len(chances)).astype(np.float64)


def _log_share(counts: Floats) -> Floats:
    """Logarithms of shares, a little lower for rare pieces: SentencePiece's sparse prior."""
    return _digamma(counts) - float(_digamma(counts.sum(keepdims=True))[0])


def _digamma(x: Floats) -> Floats:
    shift = sum(1 / (x + i) for i in range(7))  # the series below needs x >= 7
    x = x + 7
    return np.asarray(np.log(x) - 1 / (2 * x) - x**-2 / 12 + x**-4 / 120 - x**-6 / 252 - shift)


# ── the tokenizer around a vocabulary ─────────────────────────────────────────────────────────────────────────────────


def _checked(
    kind: str, style: str, vocab: int, min_count: int, special: Sequence[str], alphabet: int
) -> dict[str, str]:
    """The special tokens by role, if the options make sense."""
    for name, value, allowed in (("kind", kind, KINDS), ("style", style, STYLES)):
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(allowed)}")
    for field, number in (("vocab", vocab), ("min_count", min_count), ("alphabet", alphabet)):
        if number < 1:
            raise ConfigError(f"{field}={number} must be at least 1")
    named = BRACKETS if style == "brackets" else ANGLES
    taken = [*named.values(), *special]
    if len(set(taken)) < len(taken) or any(len(text) < 2 or text.isalnum() for text in special):
        raise ConfigError(
            f"special={list(special)!r} must be texts that no word is, as '[NAME]', and must differ from each other "
            f"and from {', '.join(taken[:5])}"
        )
    return named


def _too_small(room: int, needed: int, what: str) -> ConfigError:
    return ConfigError(
        f"vocab has room for {room} tokens and must have {needed} {what}; allow more tokens, or fewer "
        "characters (alphabet)"
    )


def _rules(kind: Kind, lowercase: bool) -> tokenizers.Tokenizer:
    """How texts become words, without a vocabulary."""
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


def _finish(
    backend: tokenizers.Tokenizer,
    kind: Kind,
    style: Style,
    named: dict[str, str],
    special: Sequence[str],
    max_length: int | None,
) -> Tokenizer:
    """Add the special tokens and the template."""
    # Where a space belongs to the word behind it, the one before a mask belongs to the word that is masked.
    takes_space = kind != "wordpiece"
    roles = {
        role: AddedToken(text, special=True, normalized=False, lstrip=takes_space and role == "mask")
        for role, text in named.items()
    }
    backend.add_special_tokens([*roles.values(), *(AddedToken(t, special=True, normalized=False) for t in special)])
    cls, sep = named["cls"], named["sep"]
    ids = [(text, backend.token_to_id(text)) for text in (cls, sep)]
    pair = f"{cls} $A {sep} $B:1 {sep}:1" if style == "brackets" else f"{cls} $A {sep} {sep} $B {sep}"
    template = processors.TemplateProcessing(f"{cls} $A {sep}", pair, ids)
    # Offsets of byte-level tokens leave the space before a word out, as those of the other kinds do.
    trim = [processors.ByteLevel(trim_offsets=True)] if kind == "bpe" else []
    backend.post_processor = processors.Sequence([*trim, template]) if trim else template
    inputs = ["input_ids", *["token_type_ids"][: style == "brackets" and kind != "bpe"], "attention_mask"]
    options: dict[str, Any] = {"model_input_names": inputs}
    if special:
        options["additional_special_tokens"] = list(special)
    if max_length is not None:
        options["model_max_length"] = max_length
    return Tokenizer(backend, settings=Settings(options=options, named=roles))
