"""Print the cosine similarities of a few sentences: python examples/similarity.py [MODEL]"""

import sys
import time

import bertie

SENTENCES = [
    "A cat sat on the mat.",
    "The feline rested on the rug.",
    "Encoders are cheaper than generative models.",
    "It costs less to understand a text than to write one.",
]

embedder = bertie.Embedder.load(*sys.argv[1:2])
start = time.perf_counter()
embeddings = embedder.embed(SENTENCES)
seconds = time.perf_counter() - start

for sentence, row in zip(SENTENCES, embeddings @ embeddings.T, strict=True):
    print("  ".join(f"{score:5.2f}" for score in row), " ", sentence)
print(f"{len(SENTENCES)} sentences in {seconds * 1000:.0f} ms, {embedder.dimension} dimensions")
