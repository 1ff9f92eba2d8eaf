"""Every task on one long document, in a process of its own: `python -m tests.tasks.long FOLDER TOKENS`.

Prints the most memory that was held, in bytes, and each task's tokens_total and tokens_read.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

import bertie
from bertie import Classifier, Embedder, MaskedLM, Reader, Reranker, Tagger, ZeroShot

HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "")
SCORED = 20_000  # scoring is a pass a token, so that a longer document would take minutes and show nothing more


def read(folder: Path, tokens: int) -> dict[str, Any]:
    """`folder` holds a checkpoint a head, named after it."""
    filler = MaskedLM.load(folder / "ForMaskedLM")
    sentence = "Jane returned to the [MASK] of London. "
    text = sentence * (tokens // (len(filler.tokenizer.encode(sentence)) - 2) + 1)
    classifier = Classifier.load(folder / "ForSequenceClassification")
    pairs = [("who", text)]
    embedder = Embedder.load(folder / "encoder")
    results: dict[str, Any] = {
        "fill": filler.fill([text])[0],
        "embed": next(embedder.embed_each([text])),
        "classify": classifier.classify([text])[0],
        "pair": classifier.classify(pairs)[0],
        "zero-shot": ZeroShot(classifier.checkpoint).classify([text], ["London", "history"])[0],
        "tag": Tagger.load(folder / "ForTokenClassification").tag([text])[0],
        "answer": Reader.load(folder / "ForQuestionAnswering").answer(pairs)[0],
        "rerank": Reranker.load(folder / "relevance").rerank("who", [text])[0],
    }
    if tokens <= SCORED:
        results["score"] = filler.pseudo_log_likelihood([text])[0]
    assert len(results["fill"].masks) == text.count("[MASK]")
    return {name: [one.tokens_total, one.tokens_read] for name, one in results.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert bertie.__version__
    found = read(Path(sys.argv[1]), int(sys.argv[2]))
    # Not getrusage: what it says of a process includes the one that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"peak": int(peak.split()[1]) * 1024, "tokens": found}))
