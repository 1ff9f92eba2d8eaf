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
OPPOSITE_OF = {"positive": "negative", "negative": "positive"}
GROUP = {emotion: group for group, emotions in SENTIMENT.items() for emotion in emotions.split()}

NEUTRAL = 0.4  # fraction of the neutral comments to keep: more of them, and most opinions become neutral elsewhere
DOCUMENTS = 0.15  # fraction of rows made of several comments
COMMENTS = (3, 30)  # in one of them
POLAR = (0.15, 1.0)  # fraction of them with the text's sentiment or the opposite one, where it is not neutral
OPPOSITE = (0.0, 0.0, 0.2, 0.35)  # fraction of those with the opposite one
DOCUMENT_LABELS = ("positive", "negative") * 8 + ("neutral",)


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
            draw = random.Random(SEED)
            rows = [row for row in rows if row["label"] != "neutral" or draw.random() < NEUTRAL]
            rows += documents(rows, round(len(rows) * DOCUMENTS / (1 - DOCUMENTS)))
        yield f"sentiment.{split}", rows


def documents(rows: Sequence[Row], count: int) -> Iterator[Row]:
    """Texts of several comments: neutral ones, or positive or negative ones among neutral and a few opposite ones."""
    draw = random.Random(SEED)
    texts = {
        label: [row["text"] for row in rows if row["label"] == label] for label in SENTIMENT if label != "ambiguous"
    }
    if not all(texts.values()):
        return
    for _ in range(count):
        label = draw.choice(DOCUMENT_LABELS)
        size = round(COMMENTS[0] * (COMMENTS[1] / COMMENTS[0]) ** draw.random())
        polar = 0 if label == "neutral" else max(1, round(size * draw.uniform(*POLAR)))
        against = int(polar * draw.choice(OPPOSITE))
        counts = dict.fromkeys(texts, 0) | {"neutral": size - polar}
        if polar:
            counts |= {label: polar - against, OPPOSITE_OF[label]: against}
        chosen = [text for kind, number in counts.items() for text in draw.choices(texts[kind], k=number)]
        draw.shuffle(chosen)
        yield {"text": " ".join(sentence_of(text) for text in chosen), "label": label}


def sentence_of(text: str) -> str:
    """A comment that ends as a sentence does.

    >>> sentence_of("so good ")
    'so good.'
    """
    text = text.strip()
    return text if text[-1:] in ".!?…)\"'" else f"{text}."
