"""The server process: start-up, main loop, shutdown, settings; its rooms are in the order below.

``durability``, ``transport``, ``replication``, ``shard`` and ``coordinator``, ``rules``, ``snapshots``, ``log``. May
import these, ``tracing`` and all that comes after it; nothing of the client.
"""
