"""Servers that average or apply, and their clients; both ends meet in ``protocol`` alone.

``shared_secret`` gives both ends their keys. May import ``tracing``, ``status_port`` and all that comes after them.
"""
