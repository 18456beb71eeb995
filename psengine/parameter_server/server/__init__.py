"""The server process: start-up, main loop, shutdown, settings; its rooms are in the order below.

``status``, ``durability``, ``transport``, ``core``, ``rules``, ``snapshots``. May import these, ``tracing`` and all
that comes after it; nothing of the client.
"""
