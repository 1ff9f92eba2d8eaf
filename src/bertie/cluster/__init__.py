"""Embedding and indexing on a cluster, as Ray Data jobs with the results of a single machine.

    embed   files ─► read tasks ─► shards of texts ─► actors ─► Parquet, one file per shard
    index   files ─► one read task ─► groups of documents ─► actors ─► embedded passages ─► the driver, which commits

Files are read by Ray tasks, and models run in Ray actors, one per device.

A shard is a range of rows of one file, and depends on that file alone. An actor renames the file of
a shard once it is on disk, so that it is complete or absent; a shard that is computed twice,
because an actor was lost, yields the same file. Only a few dozen shards are in flight, however
large the input is: backpressure makes readers wait for actors.
"""

from bertie.cluster.embed_job import embed
from bertie.cluster.index_job import index
from bertie.cluster.shard_folder import ShardedEmbeddings
from bertie.cluster.text_shards import ROWS_PER_SHARD

__all__ = ["ROWS_PER_SHARD", "ShardedEmbeddings", "embed", "index"]
