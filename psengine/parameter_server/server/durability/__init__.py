"""When a snapshot is written and what is restored: the thread, and who waits for one.

May import ``transport``, ``core``, ``rules``, ``snapshots`` and ``errors``.
"""
