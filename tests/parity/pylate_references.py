"""Write tests/parity/pylate: a tiny random ColBERT model as PyLate saves it, and what PyLate computes with it.

PyLate pins other versions of its dependencies than Bertie's tests, so it needs an environment of its own:

    python -m venv .venv-peer
    .venv-peer/bin/pip install torch==2.13.0
    .venv-peer/bin/pip install pylate==1.6.0
    .venv-peer/bin/python tests/parity/pylate_references.py

`python tests/parity/pylate_references.py FOLDER TEXTS.json OUT.npz` encodes texts with the model in FOLDER instead.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent / "pylate"
WORDS = "the a cat dog mat sat eats fish meat what do does river city london old long text about nothing".split()
QUERIES = ["what do cats eat", "london", "Which river is the longest one about nothing, does it matter?", ""]
DOCUMENTS = [
    "The cat sat on the mat.",
    "Cats eat fish, meat; and nothing else!",
    "London",
    "",
    " ".join(["The old river, about the city."] * 12),  # longer than the document length: PyLate truncates it
]
VARIANTS: dict[str, dict[str, Any]] = {
    "expanded": {},
    "attended": {"attend_to_expansion_tokens": True},
    "plain": {"do_query_expansion": False, "skiplist_words": ["the"]},
}


def base_model(folder: Path) -> None:
    """A tiny BERT with a vocabulary of letters, punctuation and a few words."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*special, *letters, *(f"##{letter}" for letter in letters), *".,;!?", *WORDS[2:]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizerFast.from_pretrained(str(folder), model_max_length=64)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
    )
    model = BertModel(config, add_pooling_layer=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm" not in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def encode(folder: Path, queries: list[str], documents: list[str], **options: Any) -> dict[str, np.ndarray]:
    """The token embeddings of texts, by "query 0", "document 0", …"""
    from pylate import models

    model = models.ColBERT(str(folder), device="cpu", **options)
    found = {}
    for kind, texts in (("query", queries), ("document", documents)):
        vectors = model.encode(texts, is_query=kind == "query", batch_size=2, show_progress_bar=False)
        found |= {f"{kind} {i}": np.asarray(rows, dtype=np.float32) for i, rows in enumerate(vectors)}
    return found


def main() -> None:
    from pylate import models

    if len(sys.argv) == 4:
        texts = json.loads(Path(sys.argv[2]).read_text())
        np.savez(sys.argv[3], **encode(Path(sys.argv[1]), texts["queries"], texts["documents"]))  # type: ignore[arg-type]
        return
    shutil.rmtree(HERE, ignore_errors=True)
    base_model(HERE / "base")
    torch.manual_seed(1)
    lengths = {"query_length": 12, "document_length": 24}
    model = models.ColBERT(str(HERE / "base"), device="cpu", embedding_size=8, **lengths)
    model.save(str(HERE / "model"), create_model_card=False)
    shutil.rmtree(HERE / "base")
    found = {}
    for name, options in VARIANTS.items():
        arrays = encode(HERE / "model", QUERIES, DOCUMENTS, **options)
        found |= {f"{name} {key}": rows for key, rows in arrays.items()}
    np.savez_compressed(HERE / "expected.npz", **found)
    texts = {"queries": QUERIES, "documents": DOCUMENTS, "variants": VARIANTS}
    (HERE / "texts.json").write_text(json.dumps(texts, indent=1) + "\n")


if __name__ == "__main__":
    main()
