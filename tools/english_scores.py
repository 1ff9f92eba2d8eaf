"""Make `src/bertie/text/english.npz`: how much more frequent each token is in other languages than in English.

    python -m tools.english_scores --words wordfreq/data --wikipedia TEXT.zst --code site-packages TOKENIZER …

`--words` is the folder of word frequencies of the package wordfreq (CC BY-SA 4.0), `--wikipedia` a text with one
paragraph per line, `--code` a folder with Python files. Each TOKENIZER is a folder with the vocabulary of English
models. Needs the packages msgpack and zstandard.
"""

from __future__ import annotations

import argparse
import gzip
import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertie.text import english
from bertie.text.scripts import OTHER_SCRIPT
from bertie.text.tokenizer import Tokenizer

FloatArray = NDArray[np.float64]

LANGUAGES = (  # in Latin script
    *("ca", "cs", "da", "de", "es", "fi", "fil", "fr", "hu", "id", "is", "it", "lt"),
    *("lv", "ms", "nb", "nl", "pl", "pt", "ro", "sh", "sk", "sl", "sv", "tr", "vi"),
)
WORDS, CAPITALIZED = 60_000, 0.15  # words per language, and the share that begins with a capital letter
PARAGRAPHS, FILES, CHARACTERS = 40_000, 4_000, 4_000  # of Wikipedia; Python files and characters of each
ENGLISH = {"wikipedia": 0.4, "words": 0.4, "code": 0.2}
UNSEEN = 1e-6  # frequency
FREQUENT = 1e-3  # in one language
CITED = {"et", "al"}  # et al.
LOWEST, HIGHEST = -4.0, 3.0  # scores


def word_frequencies(folder: Path, language: str) -> Iterator[tuple[str, float]]:
    """The most frequent words of a language: of the larger list, if there are two."""
    import msgpack

    path = folder / f"large_{language}.msgpack.gz"
    path = path if path.exists() else folder / f"small_{language}.msgpack.gz"
    with gzip.open(path) as file:
        _, *levels = msgpack.unpackb(file.read(), raw=False)
    words = ((word, 10 ** (-level / 100)) for level, words in enumerate(levels) for word in words)
    return islice(words, WORDS)


def token_frequencies(tokenizer: Tokenizer, texts: Iterable[tuple[str, float]]) -> FloatArray:
    """(vocabulary size,) of texts and their weights, summing to 1."""
    counts = np.zeros(tokenizer.vocab_size)
    texts = iter(texts)
    while part := list(islice(texts, 4096)):
        encodings = tokenizer.encode_flat([text for text, _ in part])
        np.add.at(counts, encodings.ids, np.repeat([weight for _, weight in part], encodings.lengths))
    counts[tokenizer.encode("").ids] = 0  # special tokens
    frequencies: FloatArray = counts / counts.sum()
    return frequencies


def spellings(words: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """Words as inside a sentence, and at its beginning."""
    for word, frequency in words:
        yield f" {word}", (1 - CAPITALIZED) * frequency
        yield f" {word.capitalize()}", CAPITALIZED * frequency


def wikipedia(path: Path) -> Iterator[tuple[str, float]]:
    """Paragraphs."""
    import zstandard

    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(file)
        text = reader.read(32 << 20).decode("utf-8", "ignore")
    return ((line, 1.0) for line in islice((line for line in text.split("\n") if len(line) > 50), PARAGRAPHS))


def code(folder: Path) -> Iterator[tuple[str, float]]:
    """The beginnings of Python files, chosen at random."""
    files = sorted(folder.rglob("*.py"))
    random.Random(0).shuffle(files)
    return ((path.read_text("utf-8", "ignore")[:CHARACTERS], 1.0) for path in files[:FILES])


def scores(tokenizer: Tokenizer, args: argparse.Namespace) -> dict[str, NDArray[np.int8]]:
    """The table of one vocabulary, by its key."""
    english_frequencies = (
        ENGLISH["wikipedia"] * token_frequencies(tokenizer, wikipedia(args.wikipedia))
        + ENGLISH["words"] * token_frequencies(tokenizer, spellings(word_frequencies(args.words, "en")))
        + ENGLISH["code"] * token_frequencies(tokenizer, code(args.code))
    )
    languages = np.stack(
        [token_frequencies(tokenizer, spellings(word_frequencies(args.words, name))) for name in LANGUAGES]
    )
    values = np.log((languages.mean(0) + UNSEEN) / (english_frequencies + UNSEEN)).clip(LOWEST, HIGHEST)
    frequent = languages.max(0) >= FREQUENT
    ids: dict[str, int] = {token: id for id, token in tokenizer.vocabulary.items()}
    tokens, prefix = english.regular_tokens(ids), english.word_prefix(ids)
    table = np.zeros(len(tokens))
    for i, token in enumerate(tokens):
        letters = token.removeprefix("##").lstrip("Ġ▁")
        value = values[ids[token]]
        if OTHER_SCRIPT.match(letters):
            table[i] = english.PART
        elif any(map(str.isalpha, letters)):
            telling = frequent[ids[token]] and english.begins_word(token, prefix) and letters.lower() not in CITED
            table[i] = value if telling else min(value, english.PART)
    return {english.hash_tokens(tokens): np.round(table * english.SCALE).astype(np.int8)}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizers", nargs="+", type=Path)
    parser.add_argument("--words", type=Path, required=True)
    parser.add_argument("--wikipedia", type=Path, required=True)
    parser.add_argument("--code", type=Path, required=True)
    args = parser.parse_args()
    tables: dict[str, Any] = {}
    for folder in args.tokenizers:
        tables |= scores(Tokenizer.from_folder(folder), args)
        print(folder.name, list(tables)[-1], flush=True)
    np.savez_compressed(english.PATH, **tables)
    print(f"{english.PATH}: {english.PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
