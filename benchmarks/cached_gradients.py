"""Memory of a contrastive training step by batch size: with gradient caching it hardly grows.

    python benchmarks/cached_gradients.py

Each line is one step of InfoNCE in a fresh process, over pairs of 16 tokens each, with a random encoder of 4 layers and
width 128. "tokens" is the largest number of tokens in one autograd graph; "memory" is the peak memory of the process
minus its memory before the step. glibc is told to return freed memory to the system: by default it keeps fragmented
memory, twice as much after 64 micro-batches.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

PAIRS, TOKENS = (256, 2048, 16384), 8  # tokens per text
MICRO = 256 * 2 * TOKENS
UNCACHED = (2048,)


def measure(pairs: int, micro: int) -> dict[str, Any]:
    """Measure one step in this process."""
    import torch

    from bertie.checkpoints.sentence_modules import SentenceModules
    from bertie.config import EmbeddingConfig, EncoderConfig, Full, Learned
    from bertie.nn.model import Model
    from bertie.recipe import Recipe
    from bertie.training.embedding.losses import InfoNCELoss
    from bertie.training.embedding.objective import EmbeddingObjective, make_row
    from bertie.training.embedding.row_sampler import RowSampler
    from bertie.training.loop import Trainer
    from bertie.training.objectives import TrainingWindow
    from bertie.training.sampling import TrainingTask

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = 128
    shape = EncoderConfig(
        vocab=1000,
        width=width,
        layer_map=(0, 1, 2, 3),
        heads=2,
        head_width=64,
        kv_heads=2,
        ff_width=4 * width,
        activation="gelu",
        embeddings=EmbeddingConfig(width=width),
        positions=(Learned(TOKENS),),
        patterns=(Full(),) * 4,
        max_length=TOKENS,
        dropout=0.1,
        attention_dropout=0.1,
    )
    model = Model(shape, {})
    rng, graph_tokens = np.random.default_rng(0), []
    texts = rng.integers(0, 1000, (pairs, 2, TOKENS))
    zeros = np.zeros(TOKENS, dtype=np.int64)
    items = [make_row([[TrainingWindow(text, zeros)] for text in pair]) for pair in texts]

    class Counted(EmbeddingObjective):
        def embed(self, model: Any, mini: Any, head: str) -> Any:
            graph_tokens.append(len(mini.batch.ids) if torch.is_grad_enabled() else 0)
            return super().embed(model, mini, head)

    objective = Counted(InfoNCELoss())
    objective.attach(model, SentenceModules.create(width))
    recipe = Recipe(epochs=1, batch_size=pairs, micro_tokens=micro)
    trainer = Trainer(model, RowSampler(TrainingTask("", objective, items), recipe), recipe, progress=False)
    before, start = _peak(), time.monotonic()
    history = trainer.run()
    return {
        "pairs": pairs,
        "cached": micro < pairs * 2 * TOKENS,
        "tokens": max(graph_tokens),
        "memory_mib": round(_peak() - before),
        "seconds": round(time.monotonic() - start, 1),
        "loss": history.curve[-1]["loss"],
    }


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure all sizes, each in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", metavar="PAIRS:MICRO", help="measure this case only, and print it as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(*map(int, args.one.split(":")))))
        return
    cases = [*((pairs, MICRO) for pairs in PAIRS), *((pairs, 1 << 30) for pairs in UNCACHED)]
    if not args.json:
        print(f"{'pairs':>8}{'':>12}{'tokens':>10}{'memory':>12}{'seconds':>10}")
    for pairs, micro in cases:
        process = subprocess.run(
            [sys.executable, __file__, "--one", f"{pairs}:{micro}"],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        )
        result = json.loads(process.stdout)
        how = "cached" if result["cached"] else "one graph"
        line = f"{pairs:>8,}{how:>12}{result['tokens']:>10,}{result['memory_mib']:>8,} MiB{result['seconds']:>10}"
        print(json.dumps(result) if args.json else line, flush=True)


if __name__ == "__main__":
    main()
