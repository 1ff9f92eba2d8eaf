"""Queries as users type them, made from titles, sections, passages and docstrings."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from preparation.functions import Function
from preparation.text import KeywordQueries
from preparation.wikipedia import WikiPassage

ABOUT = (
    "what is {}", "{} meaning", "{} definition", "tell me about {}", "{} facts", "information on {}", "{} explained",
    "{} overview", "what do we know about {}?", "{} wiki", "articles about {}", "introduction to {}",
)  # fmt: skip
ABOUT_PERSON = (
    "who is {}", "who was {}?", "{} biography", "{} life", "what is {} known for", "{} born", "{} age",
    "tell me about {}",
)  # fmt: skip
VERBS = (
    "add apply build calculate change check clear close combine compare compute connect convert copy count create "
    "decode define delete determine display download draw encode estimate evaluate execute expand extract fetch "
    "filter find flatten format generate get insert iterate join list load make merge move normalize open parse "
    "plot predict print read remove rename render replace reset resize return reverse rotate round run sample "
    "save scale search select send serialize set show sort split start stop store strip sum swap test transform "
    "truncate update upload validate verify wait wrap write"
).split()
UNINFORMATIVE = {"see also", "references", "external links", "notes", "further reading", "bibliography", "sources"}


def plain_title(title: str) -> str:
    """A title without its qualifier in brackets.

    >>> plain_title("Mercury (planet)")
    'Mercury'
    """
    return re.sub(r"\s*\([^)]*\)$", "", title)


def title_query(passage: WikiPassage, draw: random.Random) -> str:
    """A question about an article, for whose first paragraph it is."""
    name = plain_title(passage.title)
    person = re.search(r"\((?:[^)]*\b)?born\b|\d{4}\s?[–-]\s?[^)]{0,20}\d{4}\)", passage.text[:200])
    query = draw.choice(ABOUT_PERSON if person else ABOUT).format(name)
    return query if draw.random() < 0.3 else query.lower()


def section_query(passage: WikiPassage, draw: random.Random) -> str:
    """The title and section of a passage; "" if it has none."""
    if not passage.section or passage.section.lower() in UNINFORMATIVE:
        return ""
    form = draw.choice(("{title} {section}", "{section} of {title}", "{title}: {section}", "{title} {section}"))
    query = form.format(title=plain_title(passage.title), section=passage.section[:1].lower() + passage.section[1:])
    return query if draw.random() < 0.3 else query.lower()


def function_query(function: Function, draw: random.Random) -> str:
    """A query for a function: its summary, or as one asks a search engine.

    >>> function = Function("numpy", "mean", "Computes the mean of values.", "def mean(values): ...")
    >>> sorted({function_query(function, random.Random(seed)) for seed in range(20)})[:2]
    ['Computes the mean of values.', 'compute the mean of values python']
    """
    summary = function.summary.rstrip(". ")
    first, _, rest = summary.partition(" ")
    verb = first.lower() if first.lower() in VERBS else first.lower().removesuffix("s")
    chance = draw.random()
    if chance < 0.35:
        return function.summary
    if verb in VERBS and chance < 0.7:
        return draw.choice(("how to {} {} in python", "python {} {}", "{} {} python", "python how to {} {}")).format(
            verb, rest
        )
    if chance < 0.85 or len(name := function.name.strip("_").split("_")) < 2:
        return f"python {summary[0].lower()}{summary[1:]}"
    return f"python {' '.join(name)}"


def queries(
    passages: Sequence[WikiPassage], functions: Sequence[Function], keywords: int, draw: random.Random
) -> Iterator[str]:
    """Queries of all kinds, without their passages."""
    yield from (title_query(passage, draw) for passage in passages if passage.first)
    yield from filter(None, (section_query(passage, draw) for passage in passages))
    made = KeywordQueries((passage.text for passage in passages), draw)
    yield from filter(
        None, (made.of(passages[place % len(passages)].text) for place in range(min(keywords, 5 * len(passages))))
    )
    yield from (function_query(function, draw) for function in functions)
