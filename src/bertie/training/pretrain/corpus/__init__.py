"""Raw text, cleaned and tokenized once into memory-mapped shards.

    documents ─► cleaned ─► excluded titles ─► copies ─► held out? ─► Tokenizer ─► DIR/shard-00000.bin, .idx, …

`shard-N.bin` holds token ids, without special tokens, as uint16 where the vocabulary allows it, else as uint32.
`shard-N.idx` holds each document's length in tokens (uint32), then a bit a token for where words begin, then a bit a
token for where lines begin. `corpus.json` tells the rest, and is written last: a folder with it is whole. A shard ends
with the document that fills it, and nothing in a shard depends on when the others were made. `build.json` lists the
shards that are whole while there are more to come: going on reads the sources again, which is cheap beside tokenizing,
and tokenizes what is behind the last whole shard.

Each line is tokenized for itself: line breaks are no tokens, and no token crosses one.
"""

from bertie.training.pretrain.corpus.building import Settings, build
from bertie.training.pretrain.corpus.documents import read_titles
from bertie.training.pretrain.corpus.shards import HELD_OUT, MANIFEST, Bits, Corpus, Numbers

__all__ = ["Bits", "Corpus", "HELD_OUT", "MANIFEST", "Numbers", "Settings", "build", "read_titles"]
