"""Which of these sentences mean the same? python examples/similarity.py [MODEL]"""

import sys
import time

import bertie

SENTENCES = [
    "A cat sat on the mat.",
    "The feline rested on the rug.",
    "Encoders are cheaper than generating models.",
    "It costs less to understand a text than to write one.",
]

embedder = bertie.Embedder.load(*sys.argv[1:2])
start = time.perf_counter()
vectors = embedder.embed(SENTENCES)
took = time.perf_counter() - start

for sentence, row in zip(SENTENCES, vectors @ vectors.T, strict=True):
    print("  ".join(f"{score:5.2f}" for score in row), " ", sentence)
print(f"{len(SENTENCES)} sentences read whole in {took * 1000:.0f} ms, {embedder.dimension} dimensions each")
