"""Texts to train tokenizers on."""

from __future__ import annotations

import random
from typing import get_args

from bertie.text.tokenizer_training import (
    Kind,
)

ALL = get_args(Kind)
STRANGE = " \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2003\u3000\u200babAB.,'#é́̈中ﬁ½1²¨"


def corpus(seed: int = 0, texts: int = 200) -> list[str]:
    """Words of a few stems and endings, some of them more frequent, with names, numbers and signs."""
    rng = random.Random(seed)
    stems = ["".join(rng.choices("abcdefghilmnoprstu", k=rng.randint(2, 5))) for _ in range(60)]
    ends = ["", "", "s", "ed", "ing", "er", "ation"]

    def make_word() -> str:
        word = stems[min(int(rng.expovariate(0.08)), 59)] + rng.choice(ends)
        return rng.choice([word] * 8 + [word.capitalize(), f"{word},", f"{rng.randint(1, 2030)}", f"«{word}é»", "中文"])

    return [" ".join(make_word() for _ in range(rng.randint(3, 20))) + "." for _ in range(texts)]
