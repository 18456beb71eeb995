"""When a log and snapshots are written, and what is restored from them: the threads, and who waits for them.

May import ``transport``, ``coordinator``, ``shard``, ``snapshots``, ``log`` and ``errors``.
"""
