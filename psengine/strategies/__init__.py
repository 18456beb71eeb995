"""How replicas synchronise: the interface, its registry, and ``sync``; over parameter servers in ``servers``.

May import ``collectives``, ``parameter_server.client`` and all that comes after them.
"""
