"""What the playground shows and no other endpoint gives: what is served, and windows on a map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import NotFoundError
from bertie.tasks import Classifier, MaskedLM, Reader, Reranker, Tagger
from bertie.tasks.base import Task
from bertie.tasks.classify import entailing
from bertie.text.windows import windows

PAGE = Path(__file__).parent / "page"
# The page's files by the last part of their address: where they lie, and their type. The book is that of the tour.
FILES = {
    "index.html": (PAGE / "index.html", "text/html; charset=utf-8"),
    "app.js": (PAGE / "app.js", "text/javascript; charset=utf-8"),
    "style.css": (PAGE / "style.css", "text/css; charset=utf-8"),
    "book.txt": (PAGE.parents[1] / "cli" / "tour.txt", "text/plain; charset=utf-8"),
}

_TASKS: dict[str, type[Task[Any, Any, Any]]] = {
    "fill": MaskedLM,
    "classify": Classifier,
    "tag": Tagger,
    "answer": Reader,
    "rerank": Reranker,
}


def about(name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """What a served model is and can do: its heads by task, with their labels and calibration.

    >>> about("bertie-small", Checkpoint.load("bertie-small"))["tasks"]["tag"][0]["head"]             # doctest: +SKIP
    'ner'
    """
    cfg, tokenizer = checkpoint.model.config, checkpoint.tokenizer
    tasks: dict[str, list[dict[str, Any]]] = {}
    for task, kind in _TASKS.items():
        for head, info in checkpoint.heads.items():
            if kind._fits(info):
                calibration = info.calibration
                tasks.setdefault(task, []).append(
                    {
                        "head": head,
                        "labels": list(info.labels.values()),
                        "temperature": calibration.temperature,
                        "abstain_below": calibration.abstain_below,
                        "precision": calibration.precision,
                        "pairs": entailing(info) is not None,  # classes of two texts
                    }
                )
    return {
        "name": name,
        "layers": cfg.depth,
        "heads": cfg.heads,
        "width": cfg.width,
        "max_length": checkpoint.max_length,
        "parameters": sum(one.numel() for one in checkpoint.model.parameters()),
        "mask_token": None if tokenizer is None else tokenizer.mask_token,
        "tasks": tasks,
    }


def window_map(checkpoint: Checkpoint, texts: tuple[str, ...]) -> dict[str, Any]:
    """Where the windows of a text lie, in characters; of a pair, those of the second text.

    `start` to `end` is what a window reads, and `owns` the stretch that it answers for.
    """
    if checkpoint.tokenizer is None:
        raise NotFoundError(f"{checkpoint.source} has no tokenizer, and reading texts needs one")
    item = (texts[0], texts[1]) if len(texts) == 2 else texts[0]
    whole = checkpoint.tokenizer.encode_batch([item])[0]
    found, read = [], 0
    for window in windows(whole, texts, checkpoint.max_length):
        inside = window.encoding.sources == len(texts) - 1
        spans = [window.encoding.offsets[one] for one in (inside, inside & window.owned)]
        (start, end), owns = ((int(one[0, 0]), int(one[-1, 1])) if len(one) else (0, 0) for one in spans)
        found.append({"start": start, "end": end, "owns": list(owns), "tokens": len(window)})
        read += window.tokens_read
    return {"windows": found, "tokens_total": int((whole.sources >= 0).sum()), "tokens_read": read}
