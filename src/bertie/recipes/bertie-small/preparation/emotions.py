"""Sentiment: GoEmotions as negative, neutral and positive comments, and longer texts made of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from preparation.files import SEED, Named, Row, read, unseen

# The grouping of the GoEmotions paper (Demszky et al. 2020, figure 2); ambiguous emotions carry no label.
SENTIMENT = {
    "positive": "admiration amusement approval caring desire excitement gratitude joy love optimism pride relief",
    "negative": "anger annoyance disappointment disapproval disgust embarrassment fear grief nervousness remorse "
    "sadness",
    "neutral": "neutral",
    "ambiguous": "confusion curiosity realization surprise",
}
GROUP = {emotion: group for group, emotions in SENTIMENT.items() for emotion in emotions.split()}

DOCUMENTS = 0.15  # fraction of rows made of several comments
COMMENTS = (3, 25)  # in one of them
NEUTRAL = 0.6  # at most so many of them neutral, where the others are not


def sentiment(data: Path, seen: set[str]) -> Named:
    """GoEmotions; ambiguous rows are left out, and longer texts are added to the training split."""
    for split in ("train", "dev", "test"):
        rows: list[Row] = []
        for row in read(data / f"go_emotions/{split}.jsonl.gz"):
            groups = {GROUP[label] for label in row["labels"]} - {"ambiguous"}
            if len(groups) == 1:
                rows.append({"text": row["text"], "label": groups.pop()})
        if split == "train":
            rows = list(unseen(rows, seen, "text"))
            rows += documents(rows, round(len(rows) * DOCUMENTS / (1 - DOCUMENTS)))
        yield f"sentiment.{split}", rows


def documents(rows: Sequence[Row], count: int) -> Iterator[Row]:
    """Texts of several comments: of one label, or of positive or negative ones among neutral ones.

    Two of five are positive, two negative, one neutral.
    """
    draw = random.Random(SEED)
    texts = {
        label: [row["text"] for row in rows if row["label"] == label] for label in SENTIMENT if label != "ambiguous"
    }
    if not all(texts.values()):
        return
    for _ in range(count):
        label = draw.choice(("positive", "positive", "negative", "negative", "neutral"))
        size = round(COMMENTS[0] * (COMMENTS[1] / COMMENTS[0]) ** draw.random())
        others = 0 if label == "neutral" or draw.random() < 0.4 else int(size * draw.uniform(0, NEUTRAL))
        chosen = [*draw.choices(texts[label], k=size - others), *draw.choices(texts["neutral"], k=others)]
        draw.shuffle(chosen)
        yield {"text": " ".join(sentence_of(text) for text in chosen), "label": label}


def sentence_of(text: str) -> str:
    """A comment that ends as a sentence does.

    >>> sentence_of("so good ")
    'so good.'
    """
    text = text.strip()
    return text if text[-1:] in ".!?…)\"'" else f"{text}."
