"""Natural-language inference: SNLI, and hypotheses about the topic, intent or emotion of a text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from preparation.emotions import GROUP
from preparation.files import SEED, Named, Row, key, read, unseen
from preparation.queries import plain_title
from preparation.text import shorten
from preparation.topics import unrelated
from preparation.wikipedia import WikiPassage

SNLI = {"train": "train_subset", "dev": "dev", "test": "test"}
TOPIC_TEXTS, TITLE_TEXTS = 9_000, 2_500  # each with one true and one false hypothesis
INTENT_TEXTS, EMOTION_TEXTS = 6_000, 3_500
ABOUT = (
    "This example is {}.", "This text is about {}.", "This text is about {}.", "The topic is {}.", "This is about {}.",
    "It is about {}.", "The subject of this text is {}.", "This is a text on {}.",
)  # fmt: skip
REQUEST = (
    "This example is {}.", "This text is about {}.", "The request is about {}.", "The user asks about {}.",
    "It is about {}.",
)  # fmt: skip
FEELS = ("The author feels {}.", "This text expresses {}.", "This example is {}.", "The emotion is {}.")
MOOD = ("This text is {}.", "The sentiment is {}.", "This example is {}.", "The author is {}.")
EMOTIONS = sorted(set(GROUP) - {"neutral", "caring", "realization", "approval", "disapproval"})
DOMAINS = {  # of the intents of CLINC150; those of the others overlap
    "banking": "freeze_account routing pin_change account_blocked interest_rate transfer order_checks balance "
    "spending_history transactions report_fraud",
    "credit cards": "replacement_card_duration expiration_date damaged_card improve_credit_score report_lost_card "
    "card_declined credit_limit_change apr credit_limit credit_score new_card",
    "food and restaurants": "food_last how_busy ingredients_list calories nutrition_info recipe restaurant_reviews "
    "restaurant_reservation meal_suggestion restaurant_suggestion ingredient_substitution cook_time "
    "accept_reservations",
    "cars": "oil_change_when oil_change_how tire_pressure schedule_maintenance gas mpg last_maintenance gas_type "
    "tire_change jump_start",
    "travel": "flight_status international_visa travel_suggestion travel_alert vaccines lost_luggage book_flight "
    "book_hotel carry_on plug_type travel_notification",
    "work": "pto_request_status meeting_schedule payday income rollover_401k pto_balance pto_request w2 "
    "schedule_meeting direct_deposit pto_used",
    "music": "what_song play_music update_playlist next_song",
}
DOMAIN = {intent: domain for domain, intents in DOMAINS.items() for intent in intents.split()}
WORDING = {  # of whole names; "" leaves the intent out
    "apr": "interest rates", "w2": "tax forms", "mpg": "fuel economy", "oos": "", "yes": "", "no": "", "maybe": "",
    "cancel": "", "repeat": "", "text": "sending a text message", "order": "ordering something", "date": "the date",
    "time": "the time", "balance": "account balance", "how busy": "how busy a restaurant is",
    "what song": "the name of a song", "oil change how": "how to change the oil",
    "oil change when": "when to change the oil", "food last": "how long food lasts", "routing": "routing numbers",
    "carry on": "carry-on luggage", "cook time": "cooking times", "gas": "gas in the car",
    "atm support": "cash machines", "fiat currency support": "supported currencies",
    "directions": "directions to a place",
}  # fmt: skip
WORDS = {"pto": "time off", "401k": "401(k)", "ai": "AI", "min": "minimum", "info": "information", "todo": "to-do"}


def inference(data: Path, passages: Sequence[WikiPassage], seen: set[str]) -> Named:
    """SNLI; its training split with hypotheses about labels besides."""
    splits = {name: list(_pairs(data / f"snli/{file}.jsonl.gz")) for name, file in SNLI.items()}
    held = {key(f"{row['text_a']} {row['text_b']}") for name in ("dev", "test") for row in splits[name]}
    draw = random.Random(SEED)
    made = [
        *topics(passages, draw),
        *titles(passages, draw),
        *intents(data, draw),
        *emotions(data, draw),
    ]
    kept = (row for row in made if key(row["text_a"]) not in seen)
    yield "nli.train", [*unseen(splits["train"], held, "text_a", "text_b"), *unseen(kept, set(), "text_a", "text_b")]
    yield "nli.dev", splits["dev"]
    yield "nli.test", splits["test"]


def _pairs(file: Path) -> Iterator[Row]:
    return ({name: row[name] for name in ("text_a", "text_b", "label")} for row in read(file))


def _both(text: str, templates: Sequence[str], right: str, wrong: str, draw: random.Random) -> Iterator[Row]:
    """A true and a false hypothesis about a text."""
    for label, word in (("entailment", right), ("contradiction", wrong)):
        yield {"text_a": text, "text_b": draw.choice(templates).format(word), "label": label}


def _excerpt(passage: WikiPassage, draw: random.Random) -> str:
    """One sentence, or a few, of a passage."""
    return shorten(passage.text, draw.choice((15, 30, 60, 90)))


def topics(passages: Sequence[WikiPassage], draw: random.Random) -> Iterator[Row]:
    """Passages with the topic of their article, which is also told by a word of theirs, and with unrelated ones.

    The topics are drawn equally often, as far as there are enough passages.
    """
    by_topic: dict[str, list[WikiPassage]] = {}
    for passage in draw.sample(passages, len(passages)):
        if passage.topic and passage.first:
            by_topic.setdefault(passage.topic, []).append(passage)
    for passage in draw.sample(passages, len(passages)):
        if passage.topic and not passage.first:
            by_topic.setdefault(passage.topic, []).append(passage)
    share = -(-TOPIC_TEXTS // max(len(by_topic), 1))
    for topic, own in sorted(by_topic.items()):
        others = unrelated(topic)
        for passage in own[:share]:
            yield from _both(_excerpt(passage, draw), ABOUT, topic, draw.choice(others), draw)


def titles(passages: Sequence[WikiPassage], draw: random.Random) -> Iterator[Row]:
    """First paragraphs with their title, and with another that they do not mention."""
    firsts = [passage for passage in passages if passage.first]
    names = [plain_title(passage.title) for passage in firsts]
    for passage in draw.sample(firsts, min(TITLE_TEXTS, len(firsts))):
        text, own = _excerpt(passage, draw), plain_title(passage.title)
        wrong = next(
            (name for name in draw.sample(names, min(5, len(names))) if not _overlap(name, f"{own} {text}")), ""
        )
        if wrong:
            yield from _both(text, ABOUT[1:], own, wrong, draw)


def _overlap(one: str, other: str) -> set[str]:
    """The words that two texts share."""
    first, second = (set(re.findall(r"\w{3,}", text.casefold())) for text in (one, other))
    return first & second


def intents(data: Path, draw: random.Random) -> Iterator[Row]:
    """Requests of Banking77 and CLINC150 with their intent or its domain, and with one that shares no word with it."""
    for name, domain in (("banking77", _no_domain), ("clinc150", DOMAIN.get)):
        rows = [row for row in read(data / f"{name}/train.jsonl.gz") if verbalize(row["label"])]
        labels = sorted({row["label"] for row in rows})
        for row in draw.sample(rows, min(INTENT_TEXTS // 2, len(rows))):
            own = domain(row["label"])
            if own and draw.random() < 0.5:
                wrong = draw.choice(
                    [other for other in DOMAINS if other != own and {own, other} != {"banking", "credit cards"}]
                )
                yield from _both(row["text"], REQUEST, own, wrong, draw)
                continue
            right = verbalize(row["label"])
            others = [verbalize(label) for label in labels if not _overlap(verbalize(label), f"{right} {row['text']}")]
            if others:
                yield from _both(row["text"], REQUEST, right, draw.choice(others), draw)


def _no_domain(_: str) -> str | None:
    return None


def verbalize(label: str) -> str:
    """An intent's name in words.

    >>> verbalize("pto_balance"), verbalize("reverted_card_payment?")
    ('time off balance', 'reverted card payment')
    """
    name = re.sub(r"\W+", " ", label.replace("_", " ")).strip().lower()
    return WORDING[name] if name in WORDING else " ".join(WORDS.get(word, word) for word in name.split())


def emotions(data: Path, draw: random.Random) -> Iterator[Row]:
    """Comments of GoEmotions with one emotion, and with one of the opposite sentiment."""
    rows = [row for row in read(data / "go_emotions/train.jsonl.gz") if len(row["labels"]) == 1]
    rows = [row for row in rows if GROUP[row["labels"][0]] in ("positive", "negative") and row["labels"][0] in EMOTIONS]
    opposite: Mapping[str, str] = {"positive": "negative", "negative": "positive"}
    of_group: Callable[[str], list[str]] = lambda group: [one for one in EMOTIONS if GROUP[one] == group]  # noqa: E731
    for row in draw.sample(rows, min(EMOTION_TEXTS, len(rows))):
        emotion, group = row["labels"][0], GROUP[row["labels"][0]]
        if draw.random() < 0.3:
            yield from _both(row["text"], MOOD, group, opposite[group], draw)
        else:
            yield from _both(row["text"], FEELS, emotion, draw.choice(of_group(opposite[group])), draw)
