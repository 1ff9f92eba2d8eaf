"""Many machines, one line: the same work as elsewhere, as Ray Data jobs.

    embed   files ─► readers ─► shards of texts ─► workers ─► Parquet, a file a shard
    index   files ─► one reader ─► groups of documents ─► workers ─► passages and vectors ─► this process, which commits

Readers are Ray tasks, workers are Ray actors, one a device.

A shard is some rows of one file, and depends on that file alone. A worker gives a shard's file its name when all of it
is on the disk, so that it is there whole or not at all; a shard that is made twice, because a worker was lost, is the
same file. A few tens of shards are on their way at a time, however large the input is: readers wait for workers.
"""

from bertie.cluster.embed_job import embed
from bertie.cluster.index_job import index
from bertie.cluster.shard_folder import ShardedEmbeddings
from bertie.cluster.text_shards import ROWS_PER_SHARD

__all__ = ["ROWS_PER_SHARD", "ShardedEmbeddings", "embed", "index"]
