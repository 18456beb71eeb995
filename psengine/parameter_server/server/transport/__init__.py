"""Sockets and threads of shards, who may connect, how much memory messages take.

May import ``core``, ``rules``, ``snapshots``, and ``parameter_server.shared_secret`` and what comes after it. At the
server only this room and the daemon know ZeroMQ.
"""
