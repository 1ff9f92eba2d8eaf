"""Sentences made from WordNet: definitions, examples and opposites."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = {"noun": "{word} is {text}", "verb": "to {word} is to {text}", "adj": "{word} means {text}", "adv": ""}
OPPOSITES = ("{} is the opposite of {}.", "{} and {} are opposites.", "It is not {} but {}.")


@dataclass(frozen=True, slots=True)
class Synset:
    """A set of synonyms, from a line of WordNet's data files (wndb(5WN))."""

    kind: str
    offset: str
    words: tuple[str, ...]
    antonyms: tuple[tuple[str, str, int, int], ...]  # kind and offset of the other synset, and the words' numbers
    gloss: str


def dictionary(folder: Path) -> Iterator[str]:
    """Sentences from WordNet's data files, in their order."""
    synsets = {(synset.kind, synset.offset): synset for kind in KINDS for synset in read(folder / f"data.{kind}", kind)}
    for number, synset in enumerate(synsets.values()):
        parts = [part.strip() for part in re.split(r"; *(?=\")|(?<=\");", synset.gloss)]
        definition = re.sub(r"\([^)]*\)", "", parts[0].partition(";")[0]).strip(' :"')
        if KINDS[synset.kind] and definition:
            yield sentence(KINDS[synset.kind].format(word=_with_article(synset), text=definition))
        for part in parts:
            if part.startswith('"') and len(part.split()) > 2:
                yield sentence(part.strip('" ').partition('"')[0])
        for kind, offset, own, other in synset.antonyms:
            words = synsets[kind, offset].words
            if own and own <= len(synset.words) and other <= len(words):
                yield sentence(OPPOSITES[number % len(OPPOSITES)].format(synset.words[own - 1], words[other - 1]))


def read(file: Path, kind: str) -> Iterator[Synset]:
    """Read the synsets of a data file."""
    kinds = {"n": "noun", "v": "verb", "a": "adj", "s": "adj", "r": "adv"}
    for line in file.read_text("utf-8", errors="replace").splitlines():
        if line.startswith(" "):  # the licence
            continue
        data, _, gloss = line.partition(" | ")
        fields = data.split()
        end = 4 + 2 * int(fields[3], 16)
        words = tuple(re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in fields[4:end:2])
        pointers = [fields[at : at + 4] for at in range(end + 1, end + 1 + 4 * int(fields[end]), 4)]
        antonyms = tuple(
            (kinds[pos], offset, int(places[:2], 16), int(places[2:], 16))
            for symbol, offset, pos, places in pointers
            if symbol == "!"
        )
        yield Synset(kind, fields[0], words, antonyms, gloss.strip())


def _with_article(synset: Synset) -> str:
    """The first word; a noun in lower case with an article if its definition has one.

    >>> _with_article(Synset("noun", "", ("dog",), (), "an animal that barks"))
    'a dog'
    """
    word = synset.words[0]
    if synset.kind != "noun" or word[:1].isupper() or not re.match(r"(a|an|any|one|someone|the) ", synset.gloss):
        return word
    return f"{'an' if word[:1] in 'aeiou' else 'a'} {word}"


def sentence(text: str) -> str:
    """The text as a sentence.

    >>> sentence("the dog barked all night")
    'The dog barked all night.'
    """
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
