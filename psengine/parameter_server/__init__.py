"""Servers that average or apply, and their clients; both ends meet in ``protocol`` alone.

``status_model`` is what is known of a server, and ``overview`` merges what its shards say of a job; ``shared_secret``
gives both ends their keys. May import ``tracing``, ``tensors`` and all that comes after them.
"""
