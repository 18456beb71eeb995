"""The write-ahead log of each shard, and the disk under it: records in, bytes out, records back. No threads.

May import ``errors``.
"""
