"""A pretraining corpus: raw text, cleaned and tokenized once into memory-mapped shards.

    documents ─► clean ─► exclude titles ─► deduplicate ─► held-out split ─► tokenize ─► shard-00000.bin, .idx, …

`shard-N.bin` holds token ids without special tokens, as uint16 if the vocabulary allows it, else uint32.
`shard-N.idx` holds each document's length in tokens (uint32), then one bit per token for the start of
words, then one bit per token for the start of lines. `corpus.json`, the manifest, is written last: a
folder that has it is complete. A shard ends with the document that fills it, and does not depend on when
other shards were written. `build.json` lists the complete shards of an unfinished build: resuming reads
the sources again, which is cheap compared with tokenization, and tokenizes from the last complete shard.

Each line is tokenized by itself: line breaks are not tokens, and no token crosses one.
"""

from bertie.training.pretrain.corpus.building import CorpusSettings, build_corpus
from bertie.training.pretrain.corpus.documents import read_titles
from bertie.training.pretrain.corpus.shards import HELD_OUT, MANIFEST, BoolArray, Corpus, IntArray

__all__ = ["HELD_OUT", "MANIFEST", "BoolArray", "Corpus", "CorpusSettings", "IntArray", "build_corpus", "read_titles"]
