"""Build a corpus: clean, deduplicate and tokenize documents into shards. Interrupted builds can be resumed."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from bertie._version import __version__
from bertie.data.dedup import Dedup, Deduplicator
from bertie.data.folders import OnSkip
from bertie.data.normalize import normalize_words
from bertie.data.progress import Progress
from bertie.errors import InputError
from bertie.text.tokenizer import Tokenizer
from bertie.training.pretrain.cleaning import clean_text, is_long_enough, title_key
from bertie.training.pretrain.corpus.documents import Documents, list_sources
from bertie.training.pretrain.corpus.shards import FORMAT, HELD_OUT, tokenizer_fingerprint
from bertie.training.pretrain.corpus.writing import BuildJournal, ShardWriter

MAX_EXAMPLES = 10  # of each kind of duplicate, in corpus.json


@dataclass(frozen=True, slots=True)
class CorpusSettings:
    """How raw text is cleaned, filtered, deduplicated and split."""

    clean: tuple[str, ...] = ("nfc", "controls", "spaces")
    min_characters: int = 0  # shorter documents are dropped
    min_words: int = 0
    dedup: Dedup = "exact"
    dedup_memory: int = 4 << 30  # bytes
    held_out: float = 0.0  # fraction of documents to put in FOLDER/heldout, by a hash of their words and the seed
    seed: int = 0
    shard_tokens: int = 1 << 24
    column: str | None = None  # of tables; default: text, or the only one

    def __post_init__(self) -> None:
        clean_text("", self.clean)
        if not 0 <= self.held_out < 1:
            raise InputError(f"held_out={self.held_out} must be from 0 to below 1")
        if self.dedup not in ("exact", "near", "none"):
            raise InputError(f"dedup={self.dedup!r} must be exact, near or none")
        for name in ("min_characters", "min_words", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)} must be 0 or more")
        for name in ("shard_tokens", "dedup_memory"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be 1 or more")


@dataclass(slots=True)
class DocumentCounts:
    """How many documents were kept, and why others were dropped."""

    read: int = 0
    short: int = 0  # or empty
    excluded: int = 0  # by title
    exact_duplicates: int = 0
    near_duplicates: int = 0
    kept: int = 0
    held_out: int = 0
    excluded_titles: list[str] = field(default_factory=list)
    examples: list[dict[str, Any]] = field(default_factory=list)  # of duplicates


def build_corpus(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    folder: str | Path,
    settings: CorpusSettings | None = None,
    *,
    exclude: Sequence[str] = (),
    resume: bool = False,
    progress: bool = False,
    follow_symlinks: bool = False,
    on_skip: OnSkip | None = None,
) -> dict[str, Any]:
    """Build a corpus from files and folders; return the contents of its corpus.json.

    Documents whose first line is one of the titles in `exclude` are left out. `resume` continues an
    interrupted build, if there is one; the result is byte-identical. Symbolic links inside
    folders are skipped unless `follow_symlinks` is true; `on_skip` is called with each and the reason.
    """
    settings = settings or CorpusSettings()
    files = list_sources(sources, follow_symlinks=follow_symlinks, on_skip=on_skip)
    documents = Documents(files, settings.column)
    titles = {title_key(title) for title in exclude}
    inputs = {
        "format": FORMAT,
        "bertie": __version__,
        "tokenizers": tokenizers.__version__,
        "tokenizer": _describe_tokenizer(tokenizer),
        "sources": [{"name": name, "bytes": size} for name, size in zip(documents.files, documents.sizes, strict=True)],
        "settings": json.loads(json.dumps(asdict(settings))),
        "titles": hashlib.sha256("\n".join(sorted(titles)).encode()).hexdigest() if titles else None,
    }
    with closing(BuildJournal(Path(folder), inputs, resume)) as journal:
        return _build(journal, tokenizer, settings, documents, titles, progress)


def _build(
    journal: BuildJournal,
    tokenizer: Tokenizer,
    settings: CorpusSettings,
    documents: Documents,
    titles: set[str],
    progress: bool,
) -> dict[str, Any]:
    main = ShardWriter(journal, "", tokenizer, settings.shard_tokens)
    held = ShardWriter(journal, HELD_OUT, tokenizer, settings.shard_tokens)
    counts = DocumentCounts()
    try:
        with Progress("corpus", documents.fraction, file=None if progress else io.StringIO()) as bar:
            for held_out, text in _filter(documents, settings, titles, counts, bar):
                (held if held_out else main).add(text)
            if not counts.kept:
                raise InputError(f"nothing is left of {counts.read:,} documents: all were dropped or held out")
            if settings.held_out:
                held.finish({})
            manifest = main.finish({"counts": asdict(counts)})
    except BaseException as error:
        journal.on_error(error)
        raise
    journal.file.unlink(missing_ok=True)
    return manifest


def _filter(
    documents: Documents, settings: CorpusSettings, titles: set[str], counts: DocumentCounts, progress: Progress
) -> Iterator[tuple[bool, str]]:
    """Yield (held out, text) of each document that is kept."""
    deduplicator = Deduplicator(settings.dedup, settings.dedup_memory)
    examples: Counter[str] = Counter()
    for place, raw in documents:
        counts.read += 1
        progress.update(1)
        text = clean_text(raw, settings.clean)
        if not text or not is_long_enough(text, settings.min_characters, settings.min_words):
            counts.short += 1
            continue
        title = text.split("\n", 1)[0]
        if titles and title_key(title) in titles:
            counts.excluded += 1
            counts.excluded_titles.append(title)
            continue
        words = normalize_words(text)
        try:
            fraction = _hash_fraction(words, settings.seed)
        except UnicodeEncodeError:
            raise InputError(f"{place}: a lone UTF-16 surrogate; clean with 'controls'") from None
        duplicate = deduplicator.check(words, counts.read)
        if duplicate is not None:
            counts.exact_duplicates += duplicate.kind == "exact"
            counts.near_duplicates += duplicate.kind == "near"
            examples[duplicate.kind] += 1
            if examples[duplicate.kind] <= MAX_EXAMPLES:
                example = {"document": counts.read, "place": place, "title": title[:80]}
                counts.examples.append(example | asdict(duplicate))
            continue
        held_out = fraction < settings.held_out
        counts.held_out += held_out
        counts.kept += not held_out
        yield held_out, text


def _hash_fraction(words: str, seed: int) -> float:
    """A hash in [0, 1): duplicates of a text always land in the same split."""
    digest = hashlib.blake2b(words.encode("utf-8"), digest_size=8, salt=seed.to_bytes(16, "little")).digest()
    return int.from_bytes(digest, "little") / (1 << 64)


def _describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    roles = (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.mask_id, tokenizer.unk_id)
    return {
        "fingerprint": tokenizer_fingerprint(tokenizer),
        "kind": tokenizer.kind,
        "vocab": tokenizer.vocab_size,
        "cls": tokenizer.cls_id,
        "sep": tokenizer.sep_id,
        "special": sorted({id for id in roles if id is not None}),
    }
