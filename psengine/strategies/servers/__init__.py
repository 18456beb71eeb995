"""How replicas synchronise over parameter servers: ``sync-server``, ``async``, and what both share.

May import ``strategies.base``, ``collectives``, ``parameter_server.client`` and all that comes after them.
"""
