"""One HTTP port for people and Prometheus, of a server and of a training process: who may ask, TLS, limits.

What it serves is given to it. May import ``protocol``, ``environment`` and ``errors``.
"""
