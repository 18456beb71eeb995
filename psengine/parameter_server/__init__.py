"""Servers that average or apply, and their clients; both ends meet in ``protocol`` alone.

``overview`` is a job as all its shards see it; ``shared_secret`` gives both ends their keys. May import ``tracing``,
``tensors`` and all that comes after them.
"""
