"""Pure: a shard, its jobs, their workers, and the answer to every message. No sockets, no clock.

May import ``rules``, ``snapshots``, ``parameter_server.overview``, ``tracing.logging_format``, ``protocol`` and
``errors``.
"""
