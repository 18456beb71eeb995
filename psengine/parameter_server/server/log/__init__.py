"""The write-ahead log of each shard, and the disk under it: commands in, bytes out, commands back. No threads.

May import ``errors``.
"""
